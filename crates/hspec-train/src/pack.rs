//! Documents packed into one row, anchors drawn from it, and the blocks that follow from them.

use crate::{logits::Logits, loss::Slots};
use burn::{
    module::Module,
    tensor::{
        Int, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use hspec_attn::{Anchor, Position, Prefix};
use hspec_core::TokenId;
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
    /// At most `draw.anchors` of the supervised tokens that leave room for a block, without replacement. The
    /// token at index 0 has no seed.
    pub fn draw(loss_mask: &[bool], block: usize, draw: &Draw) -> Self {
        let end = loss_mask.len().saturating_sub(block);
        let candidates: Vec<usize> = (1..end).filter(|&i| loss_mask[i]).collect();
        let mut rng = ChaCha12Rng::seed_from_u64(draw.seed);
        // Streams from 2^32 on: the order of documents uses those below.
        rng.set_stream((1 << 32) + draw.row);
        let picks = index::sample(&mut rng, candidates.len(), draw.anchors.min(candidates.len()));
        let mut index: Vec<usize> = picks.into_iter().map(|i| candidates[i]).collect();
        index.sort_unstable();
        let valid = vec![true; index.len()];
        Self { index, valid }
    }
}

/// How a drafter trains at a row: what it draws at random, and how far the run is.
#[derive(Debug, Clone, Copy)]
pub struct Draw {
    /// Of everything random.
    pub seed: u64,
    /// Number of the row in the run.
    pub row: u64,
    /// Most anchors.
    pub anchors: usize,
    /// Share of the run that is done, from 0 to 1.
    pub progress: f64,
}

/// What a drafter is judged by: the target's final norm, and the rows of its head that the draft vocabulary
/// keeps.
#[derive(Debug, Clone)]
pub struct Judge<B: Backend> {
    /// Final norm.
    pub norm: RmsNorm<B>,
    /// `[Vd, H]`.
    pub head: Linear<B>,
}

impl<B: Backend> Judge<B> {
    /// The same on another device.
    pub fn on_device(self, device: &B::Device) -> Self {
        Self { norm: self.norm.to_device(device), head: self.head.to_device(device) }
    }
}

/// A forward pass over a row and what the loss compares. `n` blocks of `K` slots; where pairs are drafted
/// from, a block is the steps of a pair.
#[derive(Debug)]
pub struct Forward<B: AutodiffBackend> {
    /// Corrected logits, `[n, K, Vd]`.
    pub logits: Logits<B>,
    /// Confidence logits, `[n, K]`.
    pub confidence: Option<Tensor<B, 2>>,
    /// Logits before the correction, where they have a share of their own in the objective.
    pub base: Option<Base<B>>,
    /// The target's logits over the draft vocabulary, once per packed position that is needed:
    /// `[U, Vd]`. Blocks overlap, so that U is far below `n * K`.
    pub table: Tensor<B::InnerBackend, 2>,
    /// The packed index of each block's anchor, `n`.
    pub anchors: Vec<usize>,
    /// The row of `table` for each slot, `n * K`.
    pub rows: Vec<usize>,
    /// Which slot each is.
    pub slots: Slots,
    /// 1 where a slot counts, `[n, K]`.
    pub mask: Tensor<B, 2>,
}

/// Logits before a correction.
#[derive(Debug)]
pub struct Base<B: AutodiffBackend> {
    /// `[n, K, Vd]`.
    pub logits: Tensor<B, 3>,
    /// Their weight in the objective.
    pub share: f64,
    /// The weight of the corrected logits beside it.
    pub corrected: f64,
}

impl<B: AutodiffBackend> Forward<B> {
    /// The target's logits for each slot, `[n, K, Vd]`.
    pub fn targets(&self) -> Tensor<B::InnerBackend, 3> {
        let [n, k, width] = self.logits.dims();
        self.table.clone().select(0, indices(&self.rows, &self.table.device())).reshape([n, k, width])
    }

    /// Positions of the target that some counted slot was held against.
    pub fn judged(&self) -> usize {
        let mask: Vec<f32> = self.mask.clone().into_data().iter::<f32>().collect();
        let counted = self.rows.iter().zip(&mask).filter(|(_, m)| **m > 0.0);
        counted.map(|(row, _)| row).collect::<std::collections::HashSet<_>>().len()
    }
}

/// Row numbers as a tensor.
pub(crate) fn indices<B: Backend>(rows: &[usize], device: &B::Device) -> Tensor<B, 1, Int> {
    let rows: Vec<i64> = rows.iter().map(|&i| i as i64).collect();
    let len = rows.len();
    Tensor::from_data(TensorData::new(rows, [len]), device)
}

/// The target's logits behind the packed positions `wanted`, each once, and the row of each. `last` is
/// [`Packed::last`].
pub(crate) fn judged<B: Backend>(
    last: Tensor<B, 2>,
    wanted: &[usize],
    judge: &Judge<B>,
) -> (Tensor<B, 2>, Vec<usize>) {
    let mut needed = wanted.to_vec();
    needed.sort_unstable();
    needed.dedup();
    let device = last.device();
    let table = judge.head.forward(judge.norm.forward(last.select(0, indices(&needed, &device))));
    let place = |i: &usize| needed.binary_search(i).expect("collected above");
    (table, wanted.iter().map(place).collect())
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

    /// Whether token `index` is supervised and of the document that `of` belongs to.
    pub(crate) fn supervised(&self, index: usize, of: usize) -> bool {
        self.loss_mask.get(index) == Some(&true)
            && self.positions[index].checked_sub(self.positions[of]) == Some(index - of)
    }

    /// The row on another device.
    pub fn on_device(self, device: &B::Device) -> Self {
        let prefix =
            |p: Prefix<B>| Prefix { keys: p.keys.to_device(device), values: p.values.to_device(device) };
        Self {
            fused: self.fused.to_device(device),
            last: self.last.to_device(device),
            prefixes: self.prefixes.into_iter().map(prefix).collect(),
            ..self
        }
    }

    /// Flags as a mask `[n, k]`.
    pub(crate) fn flags(&self, flags: impl Iterator<Item = bool>, n: usize, k: usize) -> Tensor<B, 2> {
        let values: Vec<f32> = flags.map(|f| f32::from(u8::from(f))).collect();
        Tensor::from_data(TensorData::new(values, [n, k]), &self.fused.device())
    }
}

impl<B: AutodiffBackend> Packed<B> {
    /// What blocks are held against: slot `t` of an anchor `a` at the token `label(a, t)`. Slots count whose
    /// token is supervised and of the anchor's document; a block never crosses into the next one.
    pub(crate) fn blocks(
        &self,
        anchors: &Anchors,
        k: usize,
        first: usize,
        label: impl Fn(usize, usize) -> usize,
        judge: &Judge<B::InnerBackend>,
    ) -> Blocked<B> {
        let (n, total) = (anchors.index.len(), self.ids.len());
        let slots = || anchors.index.iter().flat_map(|&a| (0..k).map(move |t| (a, t)));
        let wanted: Vec<usize> = slots().map(|(a, t)| (label(a, t) + total - 1) % total).collect();
        let (table, rows) = judged(self.last.clone().inner(), &wanted, judge);
        let valid = anchors.valid.iter().flat_map(|&valid| (0..k).map(move |_| valid));
        let counts = slots()
            .zip(valid)
            .map(|((a, t), valid)| t >= first && valid && a > 0 && self.supervised(label(a, t), a));
        Blocked { table, rows, slots: Slots::blocks(n, k, first), mask: self.flags(counts, n, k) }
    }
}

/// What blocks are held against; see [`Forward`].
pub(crate) struct Blocked<B: AutodiffBackend> {
    pub table: Tensor<B::InnerBackend, 2>,
    pub rows: Vec<usize>,
    pub slots: Slots,
    pub mask: Tensor<B, 2>,
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
            let draw = Draw { seed: 1, row: step, anchors: max, progress: 0.0 };
            let anchors = Anchors::draw(&mask, 8, &draw);
            prop_assert!(anchors.index.windows(2).all(|w| w[0] < w[1]));
            prop_assert!(anchors.index.iter().all(|&a| mask[a] && a > 0 && a + 8 < mask.len()));
            let candidates = (1..mask.len().saturating_sub(8)).filter(|&i| mask[i]).count();
            prop_assert_eq!(anchors.index.len(), max.min(candidates));
            prop_assert_eq!(&anchors, &Anchors::draw(&mask, 8, &draw));
        }

        #[test]
        fn an_epoch_visits_every_document_once(n in 0usize..40, epoch in 0u64..4) {
            let mut order = shuffled(n, 3, epoch);
            order.sort_unstable();
            prop_assert_eq!(order, (0..n).collect::<Vec<_>>());
        }
    }
}
