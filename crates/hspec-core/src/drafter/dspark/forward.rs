//! One forward pass for all slots of blocks (DSpark section 2).

use super::{DSparkConfig, DSparkModel, DSparkShape};
use crate::{
    Result, TokenId,
    drafter::{DraftVocab, correction::Correction, walk::ids},
};
use burn::tensor::{Int, Tensor, backend::Backend};
use hspec_attn::{Anchor, BlockRope, Position, Prefix};
use hspec_heads::{CausalCorrection, DominoHead};
use std::path::Path;

/// A loaded or freshly initialised DFlash or DSpark drafter.
#[derive(Debug, Clone)]
pub struct DSpark<B: Backend> {
    /// Its parameters.
    pub model: DSparkModel<B>,
    pub(super) config: DSparkConfig,
    pub(super) shape: DSparkShape,
    pub(super) vocab: DraftVocab,
}

impl<B: Backend> DSpark<B> {
    /// Assembles a drafter; `file` names its configuration in errors.
    ///
    /// # Errors
    /// A configuration that cannot be right.
    pub fn new(config: DSparkConfig, model: DSparkModel<B>, vocab: DraftVocab, file: &Path) -> Result<Self> {
        let shape = config.shape(file)?;
        Ok(Self { model, config, shape, vocab })
    }

    /// Its configuration as the file states it.
    pub fn config(&self) -> &DSparkConfig {
        &self.config
    }

    /// Its sizes and rules.
    pub fn shape(&self) -> &DSparkShape {
        &self.shape
    }

    /// Its vocabulary.
    pub fn vocab(&self) -> &DraftVocab {
        &self.vocab
    }

    /// Context vectors from the target's hidden states: `[T, F * H] -> [T, H]`.
    pub fn fuse(&self, features: Tensor<B, 2>) -> Tensor<B, 2> {
        self.model.hidden_norm.forward(self.model.fc.forward(features))
    }

    /// Each layer's keys and values of context vectors `[T, H]` at their positions: twice
    /// `[T, kv_heads, head_dim]`.
    pub fn context(&self, fused: &Tensor<B, 2>, positions: &[usize]) -> Vec<(Tensor<B, 3>, Tensor<B, 3>)> {
        let positions: Vec<Position> = positions.iter().copied().map(Position).collect();
        let rope = self.shape.rope.tables(&positions, self.shape.num_key_value_heads, &fused.device());
        self.model.layers.iter().map(|layer| layer.self_attn.context(fused.clone(), &rope)).collect()
    }

    /// Runs the blocks that start with `tokens` at `anchors`, each layer over its prefix:
    /// `[n, block_size, H]`, after the final norm.
    pub fn forward(&self, anchors: &[Anchor], tokens: &[TokenId], prefixes: &[Prefix<B>]) -> Tensor<B, 3> {
        let slots = self.shape.block_size;
        let mut h = self.embed(tokens);
        let device = h.device();
        let positions: Vec<Position> =
            anchors.iter().flat_map(|a| (0..slots).map(move |t| a.position + t)).collect();
        let tables = |heads| self.shape.rope.tables(&positions, heads, &device);
        let rope = BlockRope {
            q: tables(self.shape.num_attention_heads),
            k: tables(self.shape.num_key_value_heads),
        };
        for ((layer, prefix), rule) in self.model.layers.iter().zip(prefixes).zip(&self.shape.rules) {
            h = layer.forward(h, anchors, &rope, prefix, rule);
        }
        self.model.norm.forward(h)
    }

    /// Logits over the draft vocabulary before any correction: `[n, K, H] -> [n, K, Vd]`.
    pub fn base_logits(&self, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        let mut logits = self.model.lm_head.forward(hidden);
        if self.shape.output_multiplier != 1.0 {
            logits = logits.mul_scalar(self.shape.output_multiplier);
        }
        match self.shape.softcap {
            Some(cap) => logits.div_scalar(cap).tanh().mul_scalar(cap),
            None => logits,
        }
    }

    /// `base` with the correction for known previous tokens `[n, K]` (target ids), for all slots of the
    /// blocks. With a candidate selector, the logits of tokens that are no candidates stay as they are; when
    /// drafting they cannot be drawn.
    pub fn corrected_logits(
        &self,
        base: Tensor<B, 3>,
        hidden: Tensor<B, 3>,
        previous: Tensor<B, 2, Int>,
    ) -> Tensor<B, 3> {
        let domino = self.model.domino(&self.shape);
        match self.correction(domino.as_ref()) {
            Some(correction) => correction.block(base, previous, hidden),
            None => base,
        }
    }

    /// What restores the order inside a block; `domino` is [`DSparkModel::domino`]'s.
    pub(super) fn correction<'a>(&'a self, domino: Option<&'a DominoHead<B>>) -> Option<Correction<'a, B>> {
        if let Some(head) = domino {
            Some(Correction::Domino(head.over(self.model.embed_tokens.weight.val())))
        } else if let Some(head) = &self.model.markov_head {
            Some(Correction::Markov(head))
        } else {
            self.model.candidate_selector.as_ref().map(Correction::Selector)
        }
    }

    /// Confidence logits `[n, K]` for known previous tokens; none without a confidence head. Gradients
    /// reach the backbone and the Markov features, as the reference implementation lets them.
    pub fn confidence_logits(
        &self,
        hidden: Tensor<B, 3>,
        previous: Tensor<B, 2, Int>,
    ) -> Option<Tensor<B, 2>> {
        let head = self.model.confidence_head.as_ref()?;
        let markov = self.model.markov_head.as_ref().filter(|_| self.shape.confidence_with_markov);
        Some(head.forward(hidden, markov.map(|markov| markov.features(previous))))
    }

    /// An anchor and mask tokens per block: `[n, block_size, H]`.
    fn embed(&self, anchors: &[TokenId]) -> Tensor<B, 3> {
        let (k, mask) = (self.shape.block_size, self.shape.mask_token);
        let tokens: Vec<TokenId> = anchors
            .iter()
            .flat_map(|&anchor| std::iter::once(anchor).chain(std::iter::repeat_n(mask, k - 1)))
            .collect();
        let device = self.model.embed_tokens.weight.device();
        let x = self.model.embed_tokens.forward(ids(&tokens, &device));
        let x = x.reshape([anchors.len(), k, self.shape.hidden_size]);
        if self.shape.embedding_scale == 1.0 { x } else { x.mul_scalar(self.shape.embedding_scale) }
    }
}
