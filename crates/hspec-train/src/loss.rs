//! The training objective (H-Spec section 3.4; term by term as released).
//!
//! With `p` the drafter's softmax after correction and `q` the target's over the draft vocabulary:
//!
//! ```text
//! ce   = -log p[argmax q]            tv = 1 - sum_v min(p, q)
//! conf = BCE(confidence, c*)         c* = sum_v min(p, q), no gradient
//! term = sum(e * m * w) / (sum(m) + 1e-5),   w(t) = exp(-(t - 1) / gamma), w(0) = 0
//! loss = ce_weight * ce + tv_weight * tv + confidence_weight * conf
//! ```

use burn::tensor::{DType, Int, Tensor, TensorData, activation::log_softmax, backend::Backend};

/// Weights of the terms and of the slots.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossConfig {
    /// Weight of the cross-entropy.
    pub ce: f64,
    /// Weight of the total variation distance.
    pub tv: f64,
    /// Weight of the confidence loss.
    pub confidence: f64,
    /// How slots are weighted.
    pub weighting: Weighting,
}

/// Weights of the slots.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Weighting {
    /// `exp(-(t - 1) / gamma)`.
    Decay {
        /// Decay length.
        gamma: f64,
    },
    /// By the drafter's own probability of getting that far: the sum over later slots of the product
    /// of smoothed label probabilities; without gradient.
    Dpace {
        /// Smoothing towards 1.
        alpha: f64,
    },
}

/// Per-element values, before masks and weights: `[n, K]` each.
#[derive(Debug, Clone)]
pub struct Elements<B: Backend> {
    /// Cross-entropy against the target's best kept token.
    pub ce: Tensor<B, 2>,
    /// Total variation distance.
    pub tv: Tensor<B, 2>,
    /// `sum min(p, q)`, cut off from gradients: the probability of acceptance.
    pub acceptance: Tensor<B, 2>,
    /// Binary cross-entropy of the confidence head, if there is one.
    pub confidence: Option<Tensor<B, 2>>,
}

/// The objective and its parts.
#[derive(Debug, Clone)]
pub struct Loss<B: Backend> {
    /// What is minimised, `[1]`.
    pub total: Tensor<B, 1>,
    /// Cross-entropy term.
    pub ce: Tensor<B, 1>,
    /// Total variation term.
    pub tv: Tensor<B, 1>,
    /// Confidence term, zero without the head.
    pub confidence: Tensor<B, 1>,
    /// Mask times weight, `[n, K]`.
    pub weights: Tensor<B, 2>,
    /// The elementwise values.
    pub elements: Elements<B>,
}

/// Elementwise terms. `logits` and `targets`: `[n, K, Vd]` (corrected draft logits; the target's logits
/// for the same positions); `confidence`: `[n, K]` logits.
pub fn elements<B: Backend>(
    logits: Tensor<B, 3>,
    targets: Tensor<B, 3>,
    confidence: Option<Tensor<B, 2>>,
) -> Elements<B> {
    let [n, k, v] = logits.dims();
    let log_p = log_softmax(logits.reshape([n * k, v]).cast(DType::F32), 1);
    let targets = targets.reshape([n * k, v]).cast(DType::F32).detach();
    let label = targets.clone().argmax(1);
    let q = log_softmax(targets, 1).exp();
    let ce = log_p.clone().gather(1, label).neg().reshape([n, k]);
    let overlap = log_p.exp().min_pair(q).sum_dim(1).reshape([n, k]);
    let acceptance = overlap.clone().detach();
    let confidence = confidence.map(|z| confidence_bce(z, acceptance.clone()));
    Elements { ce, tv: overlap.neg().add_scalar(1.0), acceptance, confidence }
}

/// Binary cross-entropy of confidence logits against acceptance probabilities, `[n, K]` each, in the form
/// that does not overflow: `max(z, 0) - z c + log(1 + exp(-|z|))`.
pub(crate) fn confidence_bce<B: Backend>(z: Tensor<B, 2>, acceptance: Tensor<B, 2>) -> Tensor<B, 2> {
    z.clone().clamp_min(0.0) - z.clone() * acceptance + z.abs().neg().exp().add_scalar(1.0).log()
}

/// The objective over elements under the mask `[n, K]` (1 = counted, slot 0 never is).
pub fn loss<B: Backend>(elements: Elements<B>, mask: Tensor<B, 2>, config: &LossConfig) -> Loss<B> {
    let weights = match config.weighting {
        Weighting::Decay { gamma } => mask.clone() * decay(mask.dims()[1], gamma, &mask.device()),
        Weighting::Dpace { alpha } => dpace(&elements.ce, &mask, alpha),
    };
    let count = mask.sum().add_scalar(1e-5);
    let term = |e: &Tensor<B, 2>| (e.clone() * weights.clone()).sum() / count.clone();
    let (ce, tv) = (term(&elements.ce), term(&elements.tv));
    let confidence = elements.confidence.as_ref().map_or_else(|| Tensor::zeros([1], &ce.device()), &term);
    let total = ce.clone().mul_scalar(config.ce)
        + tv.clone().mul_scalar(config.tv)
        + confidence.clone().mul_scalar(config.confidence);
    Loss { total, ce, tv, confidence, weights, elements }
}

/// `w(t)` as a row: `[1, K]`.
pub fn decay<B: Backend>(k: usize, gamma: f64, device: &B::Device) -> Tensor<B, 2> {
    Tensor::from_data(TensorData::new(decay_weights(k, gamma), [1, k]), device)
}

/// `w(t)` for the slots of a block.
pub(crate) fn decay_weights(k: usize, gamma: f64) -> Vec<f32> {
    (0..k).map(|t| if t == 0 { 0.0 } else { (-((t - 1) as f64) / gamma).exp() as f32 }).collect()
}

fn dpace<B: Backend>(ce: &Tensor<B, 2>, mask: &Tensor<B, 2>, alpha: f64) -> Tensor<B, 2> {
    let [n, k] = ce.dims();
    let values = |t: &Tensor<B, 2>| -> Vec<f32> { t.clone().into_data().iter::<f32>().collect() };
    let (ce, m) = (values(ce), values(mask));
    let blocks = ce.chunks_exact(k).zip(m.chunks_exact(k));
    let weights: Vec<f32> = blocks.flat_map(|(ce, m)| dpace_weights(ce, m, alpha)).collect();
    Tensor::from_data(TensorData::new(weights, [n, k]), &mask.device())
}

/// D-PACE weights of one block's slots, from their cross-entropies under their mask.
pub(crate) fn dpace_weights(ce: &[f32], mask: &[f32], alpha: f64) -> Vec<f32> {
    let alpha = alpha as f32;
    let mut product = 1.0;
    let mut weights: Vec<f32> = ce
        .iter()
        .zip(mask)
        .map(|(ce, &m)| {
            product *= if m > 0.0 { (1.0 - alpha) * (-ce).exp() + alpha } else { 1.0 };
            product * m
        })
        .collect();
    let mut later = 0.0;
    for (weight, m) in weights.iter_mut().zip(mask).rev() {
        later += *weight;
        *weight = later * m;
    }
    weights
}

/// Agreement of the drafter's best token with the target's, per slot under the mask.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Agreement {
    /// Slots that agree.
    pub correct: Vec<u64>,
    /// Slots counted.
    pub total: Vec<u64>,
}

impl Agreement {
    /// Counts `[n, K, Vd]` logits against each other.
    pub fn count<B: Backend>(logits: Tensor<B, 3>, targets: Tensor<B, 3>, mask: &Tensor<B, 2>) -> Self {
        let [n, k, v] = logits.dims();
        let best = |t: Tensor<B, 3>| -> Vec<i64> {
            let ids: Tensor<B, 2, Int> = t.reshape([n * k, v]).argmax(1);
            ids.into_data().iter::<i64>().collect()
        };
        let (ours, theirs) = (best(logits), best(targets));
        let mask: Vec<f32> = mask.clone().into_data().iter::<f32>().collect();
        let mut counts = Self { correct: vec![0; k], total: vec![0; k] };
        for i in (0..n * k).filter(|&i| mask[i] > 0.0) {
            counts.total[i % k] += 1;
            counts.correct[i % k] += u64::from(ours[i] == theirs[i]);
        }
        counts
    }

    /// Accuracy of slot `t`; 0 with nothing to count.
    pub fn accuracy(&self, t: usize) -> f64 {
        if self.total[t] == 0 { 0.0 } else { self.correct[t] as f64 / self.total[t] as f64 }
    }

    /// Expected accepted length without the bonus: the sum over slots of the product of accuracies.
    pub fn expected_length(&self) -> f64 {
        let mut product = 1.0;
        (1..self.total.len())
            .map(|t| {
                product *= self.accuracy(t);
                product
            })
            .sum()
    }
}
