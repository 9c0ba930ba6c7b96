//! The H-Spec drafter: one forward pass for all slots of a block (H-Spec section 3).

mod io;
mod model;
mod session;
mod stated;

pub use model::{HSpecModel, SubLayer};
pub(super) use stated::{WORDS, state};

use super::{DraftVocab, correction::Correction};
use crate::{
    Result, TokenId,
    config::{HSpecConfig, SeedMode},
};
use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend};
use hspec_attn::{Anchor, BlockRope, BlockRule, Position, Prefix, Rope, WindowRule};
use hspec_heads::{BlockConv, CausalCorrection};
use hspec_nn::Linear;
use std::path::Path;

/// A loaded or freshly initialised H-Spec drafter.
#[derive(Debug, Clone)]
pub struct HSpec<B: Backend> {
    /// Its configuration, validated.
    pub config: HSpecConfig,
    /// Its parameters.
    pub model: HSpecModel<B>,
    /// Its pruned vocabulary.
    pub vocab: DraftVocab,
    /// Which window rule attention follows; the training rule unless changed.
    pub window_rule: WindowRule,
    fusion: Vec<usize>,
    ropes: Vec<Rope>,
    /// Per attention sub-layer, the target's heads that it reads, if not all.
    heads: Option<Vec<Vec<usize>>>,
}

/// A product `x Wᵀ`, one of those that logits are the sum of.
#[derive(Debug, Clone)]
pub struct Term<B: Backend> {
    /// `[rows, d]`.
    pub rows: Tensor<B, 2>,
    /// `[Vd, d]`.
    pub weight: Tensor<B, 2>,
}

/// A batch of draft blocks and what they read from the target.
#[derive(Debug)]
pub struct Blocks<'a, B: Backend> {
    /// Where each block starts.
    pub anchors: &'a [Anchor],
    /// The anchors' tokens.
    pub tokens: &'a [TokenId],
    /// Fused hidden states at the position before each anchor, fusion layers ascending: `[n, F * H]`.
    pub seeds: Tensor<B, 2>,
    /// Keys and values of each attention sub-layer's target layer, in pattern order, all heads of it.
    pub prefixes: &'a [Prefix<B>],
    /// Slots per block, the anchor's included.
    pub slots: usize,
}

impl<B: Backend> HSpec<B> {
    /// Assembles a drafter; `file` names its configuration in errors.
    ///
    /// # Errors
    /// A configuration that cannot be right.
    pub fn new(config: HSpecConfig, model: HSpecModel<B>, vocab: DraftVocab, file: &Path) -> Result<Self> {
        config.validate(file)?;
        let rope = |j| {
            let parameters = config.rope_parameters(j, file)?;
            parameters.rope(config.head_dim(), config.transformer_layer_config.partial_rotary_factor(), file)
        };
        let ropes = (0..config.attention_layers()).map(rope).collect::<Result<_>>()?;
        let fusion = config.fusion_layers();
        let heads = config.extensions(file)?.attn_kv_head_ids;
        Ok(Self { config, model, vocab, window_rule: WindowRule::Training, fusion, ropes, heads })
    }

    /// The same drafter for decoding, its weights in the order in which products read them.
    #[must_use]
    pub fn prepack(self) -> Self {
        Self { model: self.model.prepack(), ..self }
    }

    /// The fused and normed seed vectors: `[n, F * H] -> [n, H]`, or none without injection.
    pub fn fuse(&self, seeds: Tensor<B, 2>) -> Option<Tensor<B, 2>> {
        let (fc, norm) = (self.model.fc.as_ref()?, self.model.hidden_norm.as_ref()?);
        let seeds = if self.model.fc_norm.is_empty() {
            seeds
        } else {
            let h = self.config.transformer_layer_config.hidden_size;
            let chunks = self.model.fc_norm.iter().enumerate();
            let normed = chunks.map(|(f, norm)| norm.forward(seeds.clone().narrow(1, f * h, h)));
            Tensor::cat(normed.collect(), 1)
        };
        Some(norm.forward(fc.forward(seeds)))
    }

    /// The state that Mamba sub-layer `m` starts from: `[n, heads, P, N]`, f32; none for zeros.
    pub fn seed_state(&self, fused: Option<&Tensor<B, 2>>, m: usize) -> Option<Tensor<B, 4>> {
        let fused = fused?;
        let projection = match self.config.mamba_seed_mode {
            SeedMode::PerLayer => &self.model.seed_projs[m],
            SeedMode::Once if m > 0 => return None,
            SeedMode::Shared | SeedMode::Once => &self.model.seed_projs[0],
        };
        let c = &self.config;
        let n = fused.dims()[0];
        let state = projection.forward(fused.clone()).cast(DType::F32);
        Some(state.reshape([n, c.mamba_num_heads, c.mamba_head_dim, c.mamba_d_state]))
    }

    /// Runs the blocks: `[n, slots, H]`, after the final norm.
    pub fn forward(&self, blocks: &Blocks<'_, B>) -> Tensor<B, 3> {
        let h = self.run(blocks, &mut |_, _| {});
        self.model.norm.forward(h)
    }

    /// [`HSpec::forward`] without the final norm, showing `probe` the residual stream after each
    /// sub-layer.
    pub fn run(&self, blocks: &Blocks<'_, B>, probe: &mut dyn FnMut(usize, &Tensor<B, 3>)) -> Tensor<B, 3> {
        let device = blocks.seeds.device();
        let layer = &self.config.transformer_layer_config;
        let (n, k) = (blocks.anchors.len(), blocks.slots);
        let mut h = self.embed(blocks.tokens, k, &device);
        let fused = self.fuse(blocks.seeds.clone());
        // A shared state is projected once, whichever sub-layers start from it.
        let shared = match self.config.mamba_seed_mode {
            SeedMode::Shared => self.seed_state(fused.as_ref(), 0),
            SeedMode::PerLayer | SeedMode::Once => None,
        };
        let positions: Vec<Position> =
            blocks.anchors.iter().flat_map(|a| (0..k).map(move |t| a.position + t)).collect();
        let (mut mamba, mut attention) = (0, 0);
        let mut tables: Vec<(&Rope, BlockRope<B>)> = Vec::new();
        for (i, sub_layer) in self.model.layers.iter().enumerate() {
            h = match sub_layer {
                SubLayer::Mamba(l) => {
                    let state = shared.clone().or_else(|| self.seed_state(fused.as_ref(), mamba));
                    mamba += 1;
                    h.clone() + l.ssm.output(l.ssm_norm.forward(h), state)
                }
                SubLayer::Attention(l) => {
                    let j = attention;
                    attention += 1;
                    let rope = &self.ropes[j];
                    if !tables.iter().any(|(known, _)| *known == rope) {
                        let q = rope.tables(&positions, layer.num_attention_heads, &device);
                        let k = rope.tables(&positions, layer.num_key_value_heads, &device);
                        tables.push((rope, BlockRope { q, k }));
                    }
                    let table = tables.iter().find(|(known, _)| *known == rope).map(|(_, t)| t);
                    let table = table.expect("pushed above");
                    let lent = blocks.prefixes.get(j).filter(|_| !self.config.disable_target_kv_reuse);
                    let some = self.heads.as_ref().and_then(|heads| Some(lent?.heads(&heads[j])));
                    let prefix = some.as_ref().or(lent);
                    let x = l.input_layernorm.forward(h.clone());
                    let attend = |x| l.self_attn.forward(x, blocks.anchors, table, prefix, &self.rule(j));
                    h + convolved(l.attention_conv.as_ref(), x, attend)
                }
                SubLayer::Mlp(l) => {
                    let x = l.mlp_norm.forward(h.clone());
                    h + convolved(l.mlp_conv.as_ref(), x, |x| l.mlp.forward(x))
                }
            };
            probe(i, &h);
        }
        debug_assert_eq!(h.dims()[0], n);
        h
    }

    /// Logits over the draft vocabulary before any correction: `[n, slots, H] -> [n, slots, Vd]`.
    pub fn base_logits(&self, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        self.model.lm_head.forward(hidden)
    }

    /// Logits with the correction for known previous tokens `[n, slots]` (target ids), finite: where a
    /// selector drafts among its candidates only, the other tokens keep their base logits here.
    pub fn corrected_logits(&self, hidden: Tensor<B, 3>, previous: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let base = self.base_logits(hidden.clone());
        match self.correction() {
            Some(correction) => correction.block(base, previous, hidden),
            None => base,
        }
    }

    /// [`HSpec::corrected_logits`] as a sum of products over rows of all slots; none where a correction is no such
    /// sum.
    pub fn logit_terms(&self, hidden: Tensor<B, 3>, previous: Tensor<B, 2, Int>) -> Option<Vec<Term<B>>> {
        let term = |rows: Tensor<B, 3>, linear: &Linear<B>| {
            let [n, k, width] = rows.dims();
            Term { rows: rows.reshape([n * k, width]), weight: linear.weight.val() }
        };
        let mut terms = vec![term(hidden.clone(), &self.model.lm_head)];
        match self.correction() {
            None => {}
            Some(Correction::Markov(head)) => {
                terms.push(term(head.mixed(previous, hidden), &head.markov_w2));
            }
            Some(Correction::Domino(_) | Correction::Selector(_)) => return None,
        }
        Some(terms)
    }

    /// Confidence logits `[n, slots]` for known previous tokens, cut off from the gradients of
    /// everything but the head itself; none without a confidence head.
    pub fn confidence_logits(
        &self,
        hidden: Tensor<B, 3>,
        previous: Tensor<B, 2, Int>,
    ) -> Option<Tensor<B, 2>> {
        let head = self.model.confidence_head.as_ref()?;
        let features = match &self.model.markov_head {
            Some(markov) if self.config.confidence_head_with_markov => {
                Some(markov.features(previous).detach())
            }
            _ => None,
        };
        Some(head.forward(hidden.detach(), features))
    }

    /// Visibility in attention sub-layer `j`: windowed sub-layers are causal inside the block.
    pub fn rule(&self, j: usize) -> BlockRule {
        let window = self.config.window(j);
        let causal = window.is_some() && !self.config.sliding_window_non_causal;
        BlockRule { window, rule: self.window_rule, causal }
    }

    fn embed(&self, anchors: &[TokenId], k: usize, device: &B::Device) -> Tensor<B, 3> {
        let mask = i64::from(self.config.mask_token_id);
        let ids: Vec<i64> = anchors
            .iter()
            .flat_map(|a| std::iter::once(i64::from(a.0)).chain(std::iter::repeat_n(mask, k - 1)))
            .collect();
        let n = ids.len();
        let ids = Tensor::from_data(TensorData::new(ids, [n]), device);
        let x = self.model.embed_tokens.forward(ids);
        let h = x.dims()[1];
        x.reshape([anchors.len(), k, h])
    }
}

/// A sub-layer's output for its normed input, between the two convolutions if it has them.
pub(super) fn convolved<B: Backend>(
    conv: Option<&BlockConv<B>>,
    x: Tensor<B, 3>,
    sub_layer: impl FnOnce(Tensor<B, 3>) -> Tensor<B, 3>,
) -> Tensor<B, 3> {
    match conv {
        Some(conv) => conv.around(x, sub_layer),
        None => sub_layer(x),
    }
}
