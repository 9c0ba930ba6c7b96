//! H-Spec and its ablations.

use super::{
    Learner, Start,
    layers::{self, architecture},
    named, with_gradients,
};
use crate::{
    features::Reads,
    logits::Logits,
    pack::{Anchors, Draw, Forward, Judge, Packed, indices},
    recipe::{HSpecShape, Loop, Shape, WarmStart},
};
use burn::{
    module::AutodiffModule,
    tensor::{
        Int, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use hspec_core::{
    Error, Result, TokenId,
    checkpoint::StoreAs,
    config::{
        AttnRope, BlockPattern, Family, HSpecConfig, LayerConfig, ProposalMethod, SPECULATORS_VERSION,
        SeedMode, SpeculatorsConfig, SubLayerKind, TargetConfig, Verifier,
    },
    drafter::{Blocks, DraftVocab, HSpec, HSpecModel, SubLayer, pruned_head},
    target::Target,
};
use hspec_nn::Linear;
use serde_json::{Map, Value, json};
use std::path::Path;

impl<B: AutodiffBackend> Learner<B> for HSpec<B> {
    type Module = HSpecModel<B>;
    type Drafter = HSpec<B::InnerBackend>;

    fn fresh(start: Start<'_, B::InnerBackend>) -> Result<Self::Drafter> {
        let Start { recipe, file, target, name, vocab } = start;
        let Shape::HSpec(shape) = &recipe.drafter else {
            return Err(Error::Mismatch("the recipe is of another kind".into()));
        };
        let config = config(shape, recipe.train.anchors_per_step, target.config(), name, file)?;
        let mut model = HSpecModel::init(&config, target.device());
        model.embed_tokens.weight = model.embed_tokens.weight.map(|_| target.embedding());
        model.lm_head = pruned_head(target, &vocab);
        copy_layers(&mut model, &config, target, &recipe.train, file)?;
        HSpec::new(config, named(model, target.device())?, vocab, file)
    }

    fn load(dir: &Path, target: &Target<B::InnerBackend>) -> Result<Self::Drafter> {
        HSpec::load(dir, Some(target), target.device())
    }

    fn save(drafter: &Self::Drafter, dir: &Path, store: StoreAs) -> Result<()> {
        drafter.save(dir, store, false)
    }

    fn vocab(drafter: &Self::Drafter) -> &DraftVocab {
        &drafter.vocab
    }

    fn reads(drafter: &Self::Drafter) -> Reads {
        let config = &drafter.config;
        Reads { hidden: config.fusion_layers(), kv: config.attn_kv_layer_ids.clone() }
    }

    fn learner(drafter: &Self::Drafter, device: &B::Device, file: &Path) -> Result<Self> {
        // Norms of queries and keys are the target's and stay so, as in the released recipe.
        let trained = |name: &str| {
            let head_norm = name.ends_with("q_norm.weight") || name.ends_with("k_norm.weight");
            !HSpecModel::<B>::frozen(name) && !head_norm
        };
        let fresh = HSpecModel::<B>::init(&drafter.config, device);
        let model = with_gradients(fresh, &drafter.model, device, trained)?;
        HSpec::new(drafter.config.clone(), model, drafter.vocab.clone(), file)
    }

    fn teach(&self, drafter: &mut Self::Drafter) {
        drafter.model = self.model.valid();
    }

    fn module(&self) -> &Self::Module {
        &self.model
    }

    fn replace(&mut self, module: Self::Module) {
        self.model = module;
    }

    fn first_slot(&self) -> usize {
        1
    }

    fn forward(&self, row: &Packed<B>, draw: &Draw, judge: &Judge<B::InnerBackend>) -> Option<Forward<B>> {
        let anchors = Anchors::draw(&row.loss_mask, self.config.block_size, draw);
        (!anchors.index.is_empty()).then(|| row.forward(self, &anchors, judge))
    }
}

impl<B: AutodiffBackend> Packed<B> {
    /// Runs an H-Spec drafter at the anchors.
    pub fn forward(
        &self,
        drafter: &HSpec<B>,
        anchors: &Anchors,
        judge: &Judge<B::InnerBackend>,
    ) -> Forward<B> {
        let device = self.fused.device();
        let k = drafter.config.block_size;
        let (n, total) = (anchors.index.len(), self.ids.len());
        let places = self.anchors(anchors);
        let tokens: Vec<TokenId> = anchors.index.iter().map(|&a| self.ids[a]).collect();
        let before: Vec<usize> = anchors.index.iter().map(|&a| a.saturating_sub(1)).collect();
        let hidden = drafter.forward(&Blocks {
            anchors: &places,
            tokens: &tokens,
            seeds: self.fused.clone().select(0, indices(&before, &device)),
            prefixes: &self.prefixes,
            slots: k,
        });

        // Slot 0 repeats the anchor; later slots see the data's own token before them.
        let previous: Vec<i64> = anchors
            .index
            .iter()
            .flat_map(|&a| (0..k).map(move |t| (a + t.saturating_sub(1)).min(total - 1)))
            .map(|i| i64::from(self.ids[i].0))
            .collect();
        let previous: Tensor<B, 2, Int> = Tensor::from_data(TensorData::new(previous, [n, k]), &device);
        let logits = match drafter.logit_terms(hidden.clone(), previous.clone()) {
            Some(terms) => Logits::Sum { terms, shape: [n, k, drafter.config.draft_vocab_size] },
            None => drafter.corrected_logits(hidden.clone(), previous.clone()).into(),
        };
        let confidence = drafter.confidence_logits(hidden, previous);
        let against = self.blocks(anchors, k, 1, |a, t| a + t, judge);
        Forward {
            logits,
            confidence,
            base: None,
            table: against.table,
            anchors: anchors.index.clone(),
            rows: against.rows,
            slots: against.slots,
            mask: against.mask,
        }
    }
}

/// The configuration that a recipe gives for a target; `file` names the recipe in errors.
///
/// # Errors
/// A shape that cannot be right or does not fit the target.
pub(super) fn config(
    shape: &HSpecShape,
    anchors: usize,
    t: &TargetConfig,
    name: &str,
    file: &Path,
) -> Result<HSpecConfig> {
    let s = shape;
    let pattern: BlockPattern = serde_json::from_value(json!(s.block_pattern)).map_err(|e| {
        Error::invalid(file, "drafter.block_pattern", e.to_string(), "mamba, attention and mlp")
    })?;
    let count = |kind| pattern.0.iter().filter(|k| **k == kind).count();
    let attention = count(SubLayerKind::Attention);
    // The mixer's sizes are read and unused where there is no mixer.
    let mamba_heads = match (count(SubLayerKind::Mamba), s.mamba_heads) {
        (0, 0) => s.mamba_groups,
        (_, 0) => return Err(Error::invalid(file, "drafter.mamba_heads", "nothing", "heads of the mixers")),
        (_, heads) => heads,
    };
    let mut kv_set = s.kv_layers.clone();
    kv_set.sort_unstable();
    kv_set.dedup();
    let group = t.num_attention_heads / t.num_key_value_heads;
    let kv_heads = match &s.attn_kv_head_ids {
        Some(lists) => lists.first().map_or(0, Vec::len),
        None => t.num_key_value_heads,
    };
    let qk_norm = t.family == Family::Qwen3;
    let rope_of_target = AttnRope {
        rope_parameters: t.rope_parameters.clone(),
        sliding_window: None,
        layer_type: Some("full_attention".into()),
    };
    let mut layer_extra = layers::layer(t, "qwen3", attention, s.intermediate_size, Some(s.sliding_window));
    for stated in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "layer_types",
        "sliding_window",
    ] {
        layer_extra.remove(stated);
    }
    let more = json!({
        "attention_bias": false, "attention_dropout": 0.0, "use_sliding_window": true, "use_qk_norm": qk_norm,
    });
    layer_extra.extend(more.as_object().cloned().unwrap_or_default());
    let config = HSpecConfig {
        speculators_model_type: "mamba_attn_hybrid".into(),
        architectures: vec!["MambaAttnHybridDraftModel".into()],
        draft_vocab_size: s.draft_vocab,
        block_size: s.block_size,
        max_anchors: anchors,
        aux_hidden_state_layer_ids: kv_set,
        mask_token_id: s.mask_token,
        latent_fusion_layer_ids: s.fusion_layers.clone(),
        attn_kv_layer_ids: s.kv_layers.clone(),
        block_pattern: pattern,
        attn_rope: Some(vec![rope_of_target; attention]),
        use_qk_norm: qk_norm,
        mamba_d_state: s.mamba_state,
        mamba_num_heads: mamba_heads,
        mamba_head_dim: s.mamba_head_dim,
        mamba_n_groups: s.mamba_groups,
        mamba_conv_kernel: s.mamba_conv,
        mamba_seed_mode: SeedMode::Shared,
        fc_norm: false,
        disable_mamba_init_state_injection: s.disable_mamba_init_state_injection,
        disable_target_kv_reuse: s.disable_target_kv_reuse,
        markov_rank: s.markov_rank,
        markov_head_type: s.markov_head_type.clone(),
        enable_confidence_head: s.confidence_head,
        confidence_head_with_markov: s.confidence_head && s.confidence_head_with_markov && s.markov_rank > 0,
        sliding_window_non_causal: false,
        sliding_window_prefix: 0,
        transformer_layer_config: LayerConfig {
            vocab_size: t.vocab_size,
            hidden_size: t.hidden_size,
            intermediate_size: s.intermediate_size,
            num_hidden_layers: attention,
            num_attention_heads: group * kv_heads,
            num_key_value_heads: kv_heads,
            head_dim: Some(t.head_dim),
            rms_norm_eps: t.rms_norm_eps,
            layer_types: Some(vec!["sliding_attention".into(); attention]),
            sliding_window: Some(s.sliding_window),
            extra: layer_extra,
        },
        speculators_config: SpeculatorsConfig {
            algorithm: "mamba_attn_hybrid".into(),
            default_proposal_method: "greedy".into(),
            proposal_methods: vec![ProposalMethod {
                proposal_type: "greedy".into(),
                speculative_tokens: s.block_size.saturating_sub(1),
                verifier_accept_k: 1,
                accept_tolerance: 0.0,
            }],
            verifier: Verifier {
                name_or_path: Some(name.into()),
                architectures: vec![architecture(t.family).into()],
            },
        },
        extra: extra(s),
    };
    config.validate(file).map_err(layers::in_recipe)?;
    let count = t.num_hidden_layers;
    for (field, ids, last) in
        [("drafter.kv_layers", &s.kv_layers, count - 1), ("drafter.fusion_layers", &s.fusion_layers, count)]
    {
        if let Some(id) = ids.iter().find(|&&id| id > last) {
            let expected = format!("at most {last}: the target has {count} layers");
            return Err(Error::invalid(file, field, id.to_string(), expected));
        }
    }
    config.check_target(t)?;
    Ok(config)
}

/// Keys that only other implementations use, and those of the extensions that the recipe has.
fn extra(s: &HSpecShape) -> Map<String, Value> {
    let keys = json!({
        "speculators_version": SPECULATORS_VERSION,
        "mamba_expand": 1,
        "tie_word_embeddings": false,
        "trainable_q_proj": true,
        "trainable_kv_proj": true,
        "trainable_q_norm": false,
        "trainable_k_norm": false,
        "verifier_layer_prefix": "model.layers",
        "attn_kv_head_ids": s.attn_kv_head_ids,
        "domino": s.domino,
        "block_conv": s.block_conv,
        "candidate_selector": s.candidate_selector,
    });
    let mut keys = keys.as_object().cloned().unwrap_or_default();
    keys.retain(|_, value| !value.is_null());
    keys
}

/// Refuses feed-forward layers that are missing or unused.
pub(super) fn check_warm_start(shape: &HSpecShape, train: &Loop, file: &Path) -> Result<()> {
    let words = shape.block_pattern.split_whitespace();
    let mlps = words.filter(|word| word.eq_ignore_ascii_case("mlp")).count();
    let given = &train.mlp_layers;
    let expected = match train.warm_start {
        WarmStart::Layers if given.len() == mlps => return Ok(()),
        WarmStart::Layers => format!("{mlps} layers, one per mlp"),
        WarmStart::Attention | WarmStart::None if given.is_empty() => return Ok(()),
        WarmStart::Attention => "none, with warm_start = \"attention\"".into(),
        WarmStart::None => "none, with warm_start = \"none\"".into(),
    };
    Err(Error::invalid(file, "train.mlp_layers", format!("{given:?}"), expected))
}

fn copy_layers<B: Backend>(
    model: &mut HSpecModel<B>,
    config: &HSpecConfig,
    target: &Target<B>,
    train: &Loop,
    file: &Path,
) -> Result<()> {
    if train.warm_start == WarmStart::None {
        return Ok(());
    }
    let whole = train.warm_start == WarmStart::Layers;
    let from = |id: usize, field: &str| {
        target.layer(id).ok_or_else(|| {
            let layers = target.config().num_hidden_layers;
            Error::invalid(file, field, id.to_string(), format!("a layer of the target, below {layers}"))
        })
    };
    let heads = config.extensions(file)?.attn_kv_head_ids;
    let (mut attention, mut mlp) = (0, 0);
    for sub_layer in &mut model.layers {
        match sub_layer {
            SubLayer::Attention(layer) => {
                let source = from(config.attn_kv_layer_ids[attention], "drafter.kv_layers")?;
                let heads = heads.as_ref().map(|lists| Heads::new(&lists[attention], target.config()));
                attention += 1;
                let some = |linear: &Linear<B>, part: fn(&Heads) -> &[usize], dim: usize| match &heads {
                    Some(heads) => {
                        let weight = linear.weight.val();
                        let rows = indices(part(heads), &weight.device());
                        Linear::new(weight.select(dim, rows), None)
                    }
                    None => linear.clone(),
                };
                let attend = &mut layer.self_attn;
                let copy = |to: &mut Linear<B>, linear: Linear<B>| to.weight = linear.weight;
                copy(&mut attend.q_proj, some(&source.q_proj, |h| &h.query, 0));
                copy(&mut attend.k_proj, some(&source.k_proj, |h| &h.key_value, 0));
                copy(&mut attend.v_proj, some(&source.v_proj, |h| &h.key_value, 0));
                attend.q_norm = source.q_norm.clone().or(attend.q_norm.take());
                attend.k_norm = source.k_norm.clone().or(attend.k_norm.take());
                if whole {
                    copy(&mut attend.o_proj, some(&source.o_proj, |h| &h.query, 1));
                    layer.input_layernorm = source.input_layernorm.clone();
                }
            }
            SubLayer::Mlp(layer) if whole => {
                let Some(&id) = train.mlp_layers.get(mlp) else {
                    let found = format!("{} layers", train.mlp_layers.len());
                    return Err(Error::invalid(file, "train.mlp_layers", found, "one layer per mlp"));
                };
                mlp += 1;
                let source = from(id, "train.mlp_layers")?;
                layer.mlp = source.mlp.clone();
                layer.mlp_norm = source.post_attention_layernorm.clone();
            }
            _ => {}
        }
    }
    if whole {
        model.norm = target.norm().clone();
    }
    Ok(())
}

/// Rows of projections that belong to some of the target's key-value heads.
struct Heads {
    /// Of the query heads that read them; columns of the output projection.
    query: Vec<usize>,
    /// Of keys and of values.
    key_value: Vec<usize>,
}

impl Heads {
    fn new(ids: &[usize], target: &TargetConfig) -> Self {
        let (d, group) = (target.head_dim, target.num_attention_heads / target.num_key_value_heads);
        let rows = |width: usize| ids.iter().flat_map(|&id| id * width..(id + 1) * width).collect();
        Self { query: rows(group * d), key_value: rows(d) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Query heads are grouped over the key-value heads that a sub-layer keeps.
    #[test]
    fn kept_heads_keep_their_queries() {
        let config = json!({
            "model_type": "llama", "vocab_size": 8, "hidden_size": 12, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 2,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 16, "rope_theta": 1e4,
        });
        let config = TargetConfig::from_value(&config, Path::new("c")).unwrap();
        let heads = Heads::new(&[0, 2], &config);
        assert_eq!(heads.key_value, [0, 1, 4, 5]);
        assert_eq!(heads.query, [0, 1, 2, 3, 8, 9, 10, 11]);
    }
}
