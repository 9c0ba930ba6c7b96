//! Documents packed into one row, anchors drawn from it, and the blocks that follow from them.

use burn::tensor::{
    Int, Tensor, TensorData,
    backend::{AutodiffBackend, Backend},
};
use hspec_attn::{Anchor, Position, Prefix};
use hspec_core::{
    TokenId,
    drafter::{Blocks, HSpec},
};
use hspec_nn::{Linear, RmsNorm};
use rand::{RngExt, SeedableRng, seq::index};
use rand_chacha::ChaCha12Rng;

/// Documents side by side with what the target computed for them.
#[derive(Debug, Clone)]
pub struct Packed<B: Backend> {
    /// `[T]`.
    pub ids: Vec<TokenId>,
    /// Which tokens are supervised, `[T]`.
    pub loss_mask: Vec<bool>,
    /// Position of each token in its document, `[T]`.
    pub positions: Vec<usize>,
    /// Hidden states of the fusion layers, ascending: `[T, F * H]`.
    pub fused: Tensor<B, 2>,
    /// Output of the last layer before the final norm: `[T, H]`.
    pub last: Tensor<B, 2>,
    /// Keys and values of each attention sub-layer's target layer.
    pub prefixes: Vec<Prefix<B>>,
}

/// Anchors of a step; an invalid one is computed and then dropped by the mask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Anchors {
    /// Packed indices, ascending.
    pub index: Vec<usize>,
    /// Which of them count.
    pub valid: Vec<bool>,
}

impl Anchors {
    /// At most `max` of the supervised tokens that leave room for a block, without replacement. The
    /// token at index 0 has no seed.
    pub fn draw(loss_mask: &[bool], block: usize, max: usize, seed: u64, step: u64) -> Self {
        let end = loss_mask.len().saturating_sub(block);
        let candidates: Vec<usize> = (1..end).filter(|&i| loss_mask[i]).collect();
        let mut rng = ChaCha12Rng::seed_from_u64(seed);
        // Streams from 2^32 on: the order of documents uses those below.
        rng.set_stream((1 << 32) + step);
        let picks = index::sample(&mut rng, candidates.len(), max.min(candidates.len()));
        let mut index: Vec<usize> = picks.into_iter().map(|i| candidates[i]).collect();
        index.sort_unstable();
        let valid = vec![true; index.len()];
        Self { index, valid }
    }
}

/// A forward pass over blocks and what the loss compares.
#[derive(Debug)]
pub struct Forward<B: AutodiffBackend> {
    /// After the final norm, `[n, K, H]`.
    pub hidden: Tensor<B, 3>,
    /// Corrected logits, `[n, K, Vd]`.
    pub logits: Tensor<B, 3>,
    /// Confidence logits, `[n, K]`.
    pub confidence: Option<Tensor<B, 2>>,
    /// The target's logits over the draft vocabulary, once per packed position that is needed:
    /// `[U, Vd]`. Blocks overlap, so that U is far below `n * K`.
    pub table: Tensor<B::InnerBackend, 2>,
    /// The row of `table` for each slot, `n * K`.
    pub rows: Vec<usize>,
    /// 1 where a slot counts, `[n, K]`.
    pub mask: Tensor<B, 2>,
}

impl<B: AutodiffBackend> Forward<B> {
    /// The target's logits for each slot, `[n, K, Vd]`.
    pub fn targets(&self) -> Tensor<B::InnerBackend, 3> {
        let [n, k, width] = self.logits.dims();
        self.table.clone().select(0, indices(&self.rows, &self.table.device())).reshape([n, k, width])
    }
}

/// Row numbers as a tensor.
fn indices<B: Backend>(rows: &[usize], device: &B::Device) -> Tensor<B, 1, Int> {
    let rows: Vec<i64> = rows.iter().map(|&i| i as i64).collect();
    let len = rows.len();
    Tensor::from_data(TensorData::new(rows, [len]), device)
}

impl<B: Backend> Packed<B> {
    /// Anchors with their document's start and their position.
    pub fn anchors(&self, anchors: &Anchors) -> Vec<Anchor> {
        let place = |&index: &usize| {
            let position = self.positions[index];
            Anchor { index, document: index - position, position: Position(position) }
        };
        anchors.index.iter().map(place).collect()
    }

    fn mask(&self, anchors: &Anchors, k: usize) -> Tensor<B, 2> {
        let mut mask = Vec::with_capacity(anchors.index.len() * k);
        for (&a, &valid) in anchors.index.iter().zip(&anchors.valid) {
            let counts = |t: usize| t > 0 && valid && a > 0 && self.loss_mask.get(a + t) == Some(&true);
            mask.extend((0..k).map(|t| f32::from(u8::from(counts(t)))));
        }
        Tensor::from_data(TensorData::new(mask, [anchors.index.len(), k]), &self.fused.device())
    }
}

impl<B: AutodiffBackend> Packed<B> {
    /// Runs the drafter at the anchors. `norm` and `head` are the target's final norm and the rows of
    /// its head that the draft vocabulary keeps.
    pub fn forward(
        &self,
        drafter: &HSpec<B>,
        anchors: &Anchors,
        norm: &RmsNorm<B::InnerBackend>,
        head: &Linear<B::InnerBackend>,
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
        let previous = Tensor::from_data(TensorData::new(previous, [n, k]), &device);
        let logits = drafter.corrected_logits(hidden.clone(), previous.clone());
        let confidence = drafter.confidence_logits(hidden.clone(), previous);

        // Each packed row's target logits are computed once; blocks overlap.
        let wanted = |a: usize, t: usize| (a + total + t - 1) % total;
        let mut needed: Vec<usize> =
            anchors.index.iter().flat_map(|&a| (0..k).map(move |t| wanted(a, t))).collect();
        let order = needed.clone();
        needed.sort_unstable();
        needed.dedup();
        let last = self.last.clone().inner().select(0, indices(&needed, &device));
        let table = head.forward(norm.forward(last));
        let place = |i: &usize| needed.binary_search(i).expect("collected above");
        let rows = order.iter().map(place).collect();

        Forward { hidden, logits, confidence, table, rows, mask: self.mask(anchors, k) }
    }
}

/// The order of `n` documents in an epoch.
pub fn shuffled(n: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut rng = ChaCha12Rng::seed_from_u64(seed);
    rng.set_stream(epoch);
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i, rng.random_range(0..=i));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn anchors_are_supervised_distinct_and_leave_room(
            mask in proptest::collection::vec(any::<bool>(), 0..60), max in 0usize..20, step in 0u64..5,
        ) {
            let anchors = Anchors::draw(&mask, 8, max, 1, step);
            prop_assert!(anchors.index.windows(2).all(|w| w[0] < w[1]));
            prop_assert!(anchors.index.iter().all(|&a| mask[a] && a > 0 && a + 8 < mask.len()));
            let candidates = (1..mask.len().saturating_sub(8)).filter(|&i| mask[i]).count();
            prop_assert_eq!(anchors.index.len(), max.min(candidates));
            prop_assert_eq!(&anchors, &Anchors::draw(&mask, 8, max, 1, step));
        }

        #[test]
        fn an_epoch_visits_every_document_once(n in 0usize..40, epoch in 0u64..4) {
            let mut order = shuffled(n, 3, epoch);
            order.sort_unstable();
            prop_assert_eq!(order, (0..n).collect::<Vec<_>>());
        }
    }
}
