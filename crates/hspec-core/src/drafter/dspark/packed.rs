//! Blocks over documents packed into one row: what training runs, through the code that drafts.

use super::DSpark;
use crate::{TokenId, drafter::walk::ids};
use burn::tensor::{Int, Tensor, backend::Backend};
use hspec_attn::{Anchor, Position, Prefix};

/// Documents side by side with what the target computed for them.
#[derive(Debug, Clone)]
pub struct PackedRow<'a, B: Backend> {
    /// `[T]`.
    pub ids: &'a [TokenId],
    /// Position of each token in its document, `[T]`.
    pub positions: &'a [usize],
    /// Index of the first token of each token's document, `[T]`.
    pub documents: &'a [usize],
    /// The target's hidden states of the feature layers: `[T, F * H]`.
    pub features: Tensor<B, 2>,
}

/// What a drafter computes for `n` blocks of K slots.
#[derive(Debug, Clone)]
pub struct BlockOutput<B: Backend> {
    /// After the final norm, `[n, K, H]`.
    pub hidden: Tensor<B, 3>,
    /// Logits before the correction, `[n, K, Vd]`.
    pub base: Tensor<B, 3>,
    /// Logits, `[n, K, Vd]`.
    pub logits: Tensor<B, 3>,
    /// Confidence logits, `[n, K]`.
    pub confidence: Option<Tensor<B, 2>>,
}

impl<B: Backend> DSpark<B> {
    /// Runs a block at each anchor, an index into the row. A block sees its own document before its anchor;
    /// its heads see the row's own tokens as the previous ones.
    pub fn blocks(&self, row: &PackedRow<'_, B>, anchors: &[usize]) -> BlockOutput<B> {
        let context = self.context(&self.fuse(row.features.clone()), row.positions);
        let prefixes: Vec<Prefix<B>> = context
            .into_iter()
            .map(|(keys, values)| Prefix { keys: keys.swap_dims(0, 1), values: values.swap_dims(0, 1) })
            .collect();
        let place = |&index: &usize| {
            let position = Position(row.positions[index]);
            Anchor { index, document: row.documents[index], position }
        };
        let places: Vec<Anchor> = anchors.iter().map(place).collect();
        let tokens: Vec<TokenId> = anchors.iter().map(|&a| row.ids[a]).collect();
        let hidden = self.forward(&places, &tokens, &prefixes);
        let previous = self.previous(row.ids, anchors, &hidden.device());
        let base = self.base_logits(hidden.clone());
        let logits = self.corrected_logits(base.clone(), hidden.clone(), previous.clone());
        let confidence = self.confidence_logits(hidden.clone(), previous);
        BlockOutput { hidden, base, logits, confidence }
    }

    /// The tokens before the ones that the slots predict, `[n, K]`; the row's last where it ends.
    fn previous(&self, row: &[TokenId], anchors: &[usize], device: &B::Device) -> Tensor<B, 2, Int> {
        let (layout, slots) = (self.shape.layout, self.shape.block_size);
        let tokens: Vec<TokenId> = anchors
            .iter()
            .flat_map(|&a| (0..slots).map(move |k| layout.previous(a, k)))
            .map(|index| row[index.min(row.len() - 1)])
            .collect();
        ids(&tokens, device).reshape([anchors.len(), slots])
    }
}
