//! The objectives of DSpark and DFlash in the conventions of the two reference implementations.
//!
//! With `p` the drafter's softmax after correction, `q` the target's, `m` the mask and `w(k)` the decay:
//!
//! ```text
//! DeepSpec     ce = -log p[true token]   l1 = sum_v |p - q|         c* = clamp(1 - l1 / 2, 0, 1)
//!              term = sum(e m w) / (sum(m w) + 1e-6)
//! speculators  ce = -log p[argmax q]     tv = 1 - sum_v min(p, q)   c* = sum_v min(p, q)
//!              term = sum(e m w) / (sum(m) + 1e-5)                  1e-8 in the confidence term
//! both         conf = BCE(confidence, c*), c* without gradient      w(k) = exp(-k / gamma)
//! ```
//!
//! `tv` is half of `l1`, so a weight of 0.9 means 0.45 of the other's (DSpark section 3.3). Slots are counted
//! from the first that predicts. Which slots count differs too: [`contiguous_mask`] is DeepSpec's,
//! [`slot_mask`] that of speculators.

use crate::loss::{Elements, Loss, confidence_bce};
use burn::tensor::{DType, Int, Tensor, TensorData, activation::log_softmax, backend::Backend};
use hspec_core::drafter::dspark::Layout;

/// Weights of the terms and of the slots.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockLossConfig {
    /// Weight of the cross-entropy.
    pub ce: f64,
    /// Weight of the distance between the laws: `l1` or `tv`.
    pub distance: f64,
    /// Weight of the confidence loss.
    pub confidence: f64,
    /// Decay length; none for equal weights.
    pub gamma: Option<f64>,
}

/// What a block drafter says and what it is held against, for `n` blocks of K slots.
#[derive(Debug, Clone)]
pub struct BlockTargets<B: Backend> {
    /// Corrected draft logits, `[n, K, V]`.
    pub logits: Tensor<B, 3>,
    /// The target's logits of the same tokens, `[n, K, V]`.
    pub targets: Tensor<B, 3>,
    /// The data's tokens, `[n, K]`.
    pub labels: Tensor<B, 2, Int>,
    /// Confidence logits, `[n, K]`.
    pub confidence: Option<Tensor<B, 2>>,
    /// 1 where a slot counts, `[n, K]`.
    pub mask: Tensor<B, 2>,
}

/// DeepSpec's objective. Its terms are weighted sums over the slots, still without the denominator, which the
/// reference sums over all micro-batches of a step.
#[derive(Debug, Clone)]
pub struct DeepSpecLoss<B: Backend> {
    /// What is minimised, `[1]`.
    pub total: Tensor<B, 1>,
    /// Cross-entropy, summed.
    pub ce: Tensor<B, 1>,
    /// L1 distance of the laws, summed.
    pub l1: Tensor<B, 1>,
    /// Confidence loss, summed; zero without the head.
    pub confidence: Tensor<B, 1>,
    /// The sum of the weights: the denominator of each.
    pub weight: Tensor<B, 1>,
    /// `c*`, `[n, K]`, without gradient.
    pub acceptance: Tensor<B, 2>,
}

/// DeepSpec's objective.
pub fn deepspec<B: Backend>(
    blocks: BlockTargets<B>,
    layout: Layout,
    config: &BlockLossConfig,
) -> DeepSpecLoss<B> {
    let BlockTargets { logits, targets, labels, confidence, mask } = blocks;
    let [n, k, v] = logits.dims();
    let log = |x: Tensor<B, 3>| log_softmax(x.reshape([n * k, v]).cast(DType::F32), 1);
    let log_p = log(logits);
    let ce = log_p.clone().gather(1, labels.reshape([n * k, 1])).neg().reshape([n, k]);
    let l1 = (log_p.exp() - log(targets.detach()).exp()).abs().sum_dim(1).reshape([n, k]);
    let acceptance = l1.clone().detach().mul_scalar(-0.5).add_scalar(1.0).clamp(0.0, 1.0);
    let weights = weighted(mask, layout, config.gamma);
    let sum = |e: Tensor<B, 2>| (e * weights.clone()).sum();
    let (ce, l1, weight) = (sum(ce), sum(l1), weights.clone().sum());
    let confidence = match confidence {
        Some(z) => sum(confidence_bce(z, acceptance.clone())),
        None => Tensor::zeros([1], &ce.device()),
    };
    let total = ce.clone().mul_scalar(config.ce)
        + l1.clone().mul_scalar(config.distance)
        + confidence.clone().mul_scalar(config.confidence);
    DeepSpecLoss { total: total / weight.clone().add_scalar(1e-6), ce, l1, confidence, weight, acceptance }
}

/// The objective of speculators over [`crate::loss::elements`] under the mask `[n, K]`.
pub fn speculators<B: Backend>(
    elements: Elements<B>,
    mask: Tensor<B, 2>,
    layout: Layout,
    config: &BlockLossConfig,
) -> Loss<B> {
    let count = mask.clone().sum();
    let weights = weighted(mask, layout, config.gamma);
    let term =
        |e: &Tensor<B, 2>, eps: f64| (e.clone() * weights.clone()).sum() / count.clone().add_scalar(eps);
    let (ce, tv) = (term(&elements.ce, 1e-5), term(&elements.tv, 1e-5));
    let confidence = match &elements.confidence {
        Some(e) => term(e, 1e-8),
        None => Tensor::zeros([1], &ce.device()),
    };
    let total = ce.clone().mul_scalar(config.ce)
        + tv.clone().mul_scalar(config.distance)
        + confidence.clone().mul_scalar(config.confidence);
    Loss { total, kl: Tensor::zeros([1], &ce.device()), ce, tv, confidence, weights, elements }
}

/// The mask times the decay, `[n, K]`.
fn weighted<B: Backend>(mask: Tensor<B, 2>, layout: Layout, gamma: Option<f64>) -> Tensor<B, 2> {
    let (k, device) = (mask.dims()[1], mask.device());
    let Some(gamma) = gamma else { return mask };
    let decay = |slot: usize| (-(slot.saturating_sub(layout.first()) as f64) / gamma).exp() as f32;
    let decay: Vec<f32> = (0..k).map(decay).collect();
    mask * Tensor::from_data(TensorData::new(decay, [1, k]), &device)
}

/// Whether a block may start at each token (DeepSpec): the token and the one behind it are supervised and of
/// one document.
pub fn anchor_candidates(loss_mask: &[bool], documents: &[usize]) -> Vec<bool> {
    let next = |i: usize| loss_mask.get(i + 1) == Some(&true) && documents[i] == documents[i + 1];
    (0..loss_mask.len()).map(|i| loss_mask[i] && next(i)).collect()
}

/// Which slots count in DeepSpec, `n * block`: those whose token and all tokens between it and the anchor are
/// supervised and of the anchor's document. `anchors` are indices of the packed row, `documents` the index of
/// the first token of each token's document.
pub fn contiguous_mask(
    layout: Layout,
    block: usize,
    anchors: &[usize],
    loss_mask: &[bool],
    documents: &[usize],
) -> Vec<bool> {
    let counts = |anchor: usize, slot: usize| {
        slot >= layout.first()
            && (anchor + 1..=layout.label(anchor, slot))
                .all(|label| loss_mask.get(label) == Some(&true) && documents[label] == documents[anchor])
    };
    anchors.iter().flat_map(|&anchor| (0..block).map(move |slot| counts(anchor, slot))).collect()
}

/// Which slots count in speculators, `n * block`: those of valid anchors whose own position is supervised.
pub fn slot_mask(
    layout: Layout,
    block: usize,
    anchors: &[usize],
    valid: &[bool],
    loss_mask: &[bool],
) -> Vec<bool> {
    let counts = |anchor: usize, valid: bool, slot: usize| {
        valid && slot >= layout.first() && loss_mask.get(anchor + slot) == Some(&true)
    };
    let blocks = anchors.iter().zip(valid);
    blocks.flat_map(|(&a, &valid)| (0..block).map(move |slot| counts(a, valid, slot))).collect()
}

/// Expected accepted length of each block, the bonus included: `1 + sum_j prod_{i <= j} c*_i m_i`, from `n * K`
/// acceptance probabilities and the mask.
pub fn expected_lengths(layout: Layout, block: usize, acceptance: &[f32], mask: &[f32]) -> Vec<f64> {
    let length = |(c, m): (&[f32], &[f32])| {
        let mut survival = 1.0;
        let slots = c.iter().zip(m).skip(layout.first());
        1.0 + slots
            .map(|(c, m)| {
                survival *= f64::from(c * m);
                survival
            })
            .sum::<f64>()
    };
    acceptance.chunks_exact(block).zip(mask.chunks_exact(block)).map(length).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two documents of five tokens: no slot of the first counts a token of the second.
    #[test]
    fn a_block_ends_with_its_document() {
        let documents = [0, 0, 0, 0, 0, 5, 5, 5, 5, 5];
        let supervised = [true; 10];
        let anchored = contiguous_mask(Layout::AnchorPredicts, 3, &[2, 3, 4, 8], &supervised, &documents);
        let rows: Vec<&[bool]> = anchored.chunks(3).collect();
        assert_eq!(
            rows,
            [[true, true, false], [true, false, false], [false, false, false], [true, false, false]]
        );
        let own = contiguous_mask(Layout::SlotPredictsItself, 3, &[2, 4], &supervised, &documents);
        assert_eq!(own, [false, true, true, false, false, false]);
        let candidates = anchor_candidates(&supervised, &documents);
        assert_eq!(candidates.iter().filter(|c| **c).count(), 8);
        assert!(!candidates[4] && !candidates[9]);
    }

    /// The first gap ends a block in one convention and not in the other.
    #[test]
    fn gaps() {
        let supervised = [true, true, false, true, true];
        let documents = [0; 5];
        let mask = contiguous_mask(Layout::AnchorPredicts, 4, &[0], &supervised, &documents);
        assert_eq!(mask, [true, false, false, false]);
        let mask = slot_mask(Layout::AnchorPredicts, 4, &[0], &[true], &supervised);
        assert_eq!(mask, [true, true, false, true]);
        let mask = slot_mask(Layout::SlotPredictsItself, 4, &[1, 1], &[true, false], &supervised);
        assert_eq!(mask, [false, false, true, true, false, false, false, false]);
    }
}
