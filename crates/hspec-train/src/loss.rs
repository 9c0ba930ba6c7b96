//! The training objective (H-Spec section 3.4; term by term as released).
//!
//! With `p` the drafter's softmax after correction and `q` the target's over the draft vocabulary:
//!
//! ```text
//! ce   = -log p[argmax q]            tv = 1 - sum_v min(p, q)
//! conf = BCE(confidence, c*)         c* = sum_v min(p, q), no gradient
//! term = sum(e * m * w) / (sum(m) + 1e-5),   w(t) = exp(-(t - 1) / gamma), w(0) = 0
//! loss = ce_weight * ce + tv_weight * tv + kl_weight * kl + confidence_weight * conf
//! kl   = sum_v q log(q / p)          the objective of EAGLE-3 and P-EAGLE
//! ```
//!
//! Other kinds of drafter count their slots from elsewhere, which [`Slots`] says.

use burn::tensor::{DType, Int, Tensor, TensorData, activation::log_softmax, backend::Backend};

/// Weights of the terms and of the slots.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossConfig {
    /// Weight of the cross-entropy.
    pub ce: f64,
    /// Weight of the total variation distance.
    pub tv: f64,
    /// Weight of the divergence `KL(q || p)` from the target.
    pub kl: f64,
    /// Weight of the confidence loss.
    pub confidence: f64,
    /// How slots are weighted.
    pub weighting: Weighting,
}

/// Weights of the slots.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Weighting {
    /// `exp(-(t - first) / gamma)`.
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

/// Which slot each element of `[n, K]` is, where slots begin to count, and how often a supervised token does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slots {
    /// `n * K`: by these, slots are weighted and judged.
    pub number: Vec<usize>,
    /// The first one that predicts; those before it weigh nothing.
    pub first: usize,
    /// The terms' denominator is the count of the mask over this: 1, or the number of steps where each step
    /// has a mean of its own and the means are summed (EAGLE-3).
    pub means: usize,
}

impl Slots {
    /// Of `n` blocks of `k` slots.
    pub fn blocks(n: usize, k: usize, first: usize) -> Self {
        Self { number: (0..n).flat_map(|_| 0..k).collect(), first, means: 1 }
    }

    /// One more than the highest slot.
    pub fn end(&self) -> usize {
        self.number.iter().max().map_or(self.first, |&t| t + 1)
    }

    /// The decay of each element.
    pub(crate) fn decay(&self, gamma: f64) -> Vec<f32> {
        let weights: Vec<f32> = (0..self.end()).map(|t| self.decay_of(t, gamma)).collect();
        self.number.iter().map(|&t| weights[t]).collect()
    }

    fn decay_of(&self, t: usize, gamma: f64) -> f32 {
        if t < self.first { 0.0 } else { (-((t - self.first) as f64) / gamma).exp() as f32 }
    }

    /// The denominator of the terms under a mask that counts `counted` elements.
    pub(crate) fn denominator(&self, counted: f32) -> f32 {
        counted / self.means as f32 + 1e-5
    }
}

/// Per-element values, before masks and weights: `[n, K]` each.
#[derive(Debug, Clone)]
pub struct Elements<B: Backend> {
    /// Cross-entropy against the target's best kept token.
    pub ce: Tensor<B, 2>,
    /// Total variation distance.
    pub tv: Tensor<B, 2>,
    /// Divergence from the target, if asked for.
    pub kl: Option<Tensor<B, 2>>,
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
    /// Divergence, zero where not asked for.
    pub kl: Tensor<B, 1>,
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
    elements_with(logits, targets, confidence, false)
}

/// [`elements`], with the divergence if `kl` says so: it reads the logits once more.
pub fn elements_with<B: Backend>(
    logits: Tensor<B, 3>,
    targets: Tensor<B, 3>,
    confidence: Option<Tensor<B, 2>>,
    kl: bool,
) -> Elements<B> {
    let [n, k, v] = logits.dims();
    let log_p = log_softmax(logits.reshape([n * k, v]).cast(DType::F32), 1);
    let targets = targets.reshape([n * k, v]).cast(DType::F32).detach();
    let label = targets.clone().argmax(1);
    let log_q = log_softmax(targets, 1);
    let q = log_q.clone().exp();
    let ce = log_p.clone().gather(1, label).neg().reshape([n, k]);
    let kl = kl.then(|| (q.clone() * (log_q - log_p.clone())).sum_dim(1).reshape([n, k]));
    let overlap = log_p.exp().min_pair(q).sum_dim(1).reshape([n, k]);
    let acceptance = overlap.clone().detach();
    let confidence = confidence.map(|z| confidence_bce(z, acceptance.clone()));
    Elements { ce, tv: overlap.neg().add_scalar(1.0), kl, acceptance, confidence }
}

/// Binary cross-entropy of confidence logits against acceptance probabilities, `[n, K]` each, in the form
/// that does not overflow: `max(z, 0) - z c + log(1 + exp(-|z|))`.
pub(crate) fn confidence_bce<B: Backend>(z: Tensor<B, 2>, acceptance: Tensor<B, 2>) -> Tensor<B, 2> {
    z.clone().clamp_min(0.0) - z.clone() * acceptance + z.abs().neg().exp().add_scalar(1.0).log()
}

/// The objective over elements under the mask `[n, K]` (1 = counted, slot 0 never is).
pub fn loss<B: Backend>(elements: Elements<B>, mask: Tensor<B, 2>, config: &LossConfig) -> Loss<B> {
    let [n, k] = mask.dims();
    loss_of(elements, mask, &Slots::blocks(n, k, 1), config)
}

/// The objective over elements of the given slots.
pub fn loss_of<B: Backend>(
    elements: Elements<B>,
    mask: Tensor<B, 2>,
    slots: &Slots,
    config: &LossConfig,
) -> Loss<B> {
    let weights = match config.weighting {
        Weighting::Decay { gamma } => {
            mask.clone() * Tensor::from_data(TensorData::new(slots.decay(gamma), mask.dims()), &mask.device())
        }
        Weighting::Dpace { alpha } => dpace(&elements.ce, &mask, alpha),
    };
    let count = mask.sum().div_scalar(slots.means as f64).add_scalar(1e-5);
    let term = |e: &Tensor<B, 2>| (e.clone() * weights.clone()).sum() / count.clone();
    let (ce, tv) = (term(&elements.ce), term(&elements.tv));
    let optional =
        |e: &Option<Tensor<B, 2>>| e.as_ref().map_or_else(|| Tensor::zeros([1], &ce.device()), &term);
    let (kl, confidence) = (optional(&elements.kl), optional(&elements.confidence));
    let total = ce.clone().mul_scalar(config.ce)
        + tv.clone().mul_scalar(config.tv)
        + kl.clone().mul_scalar(config.kl)
        + confidence.clone().mul_scalar(config.confidence);
    Loss { total, ce, tv, kl, confidence, weights, elements }
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
    pub fn count<B: Backend>(
        logits: Tensor<B, 3>,
        targets: Tensor<B, 3>,
        mask: &Tensor<B, 2>,
        slots: &Slots,
    ) -> Self {
        let [n, k, v] = logits.dims();
        let best = |t: Tensor<B, 3>| -> Vec<i64> {
            let ids: Tensor<B, 2, Int> = t.reshape([n * k, v]).argmax(1);
            ids.into_data().iter::<i64>().collect()
        };
        let (ours, theirs) = (best(logits), best(targets));
        let mask: Vec<f32> = mask.clone().into_data().iter::<f32>().collect();
        Self::gather(slots, &mask, |i| ours[i] == theirs[i])
    }

    /// Counts the elements under a mask; `agrees` is asked for those.
    pub(crate) fn gather(slots: &Slots, mask: &[f32], agrees: impl Fn(usize) -> bool) -> Self {
        let mut counts = Self { correct: vec![0; slots.end()], total: vec![0; slots.end()] };
        for (i, &t) in slots.number.iter().enumerate().filter(|&(i, _)| mask[i] > 0.0) {
            counts.total[t] += 1;
            counts.correct[t] += u64::from(agrees(i));
        }
        counts
    }

    /// Adds the counts of another row.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in [(&mut self.correct, &other.correct), (&mut self.total, &other.total)] {
            mine.resize(mine.len().max(theirs.len()), 0);
            mine.iter_mut().zip(theirs).for_each(|(a, b)| *a += b);
        }
    }

    /// Accuracy of slot `t`; 0 with nothing to count.
    pub fn accuracy(&self, t: usize) -> f64 {
        match self.total.get(t) {
            None | Some(0) => 0.0,
            Some(&total) => self.correct[t] as f64 / total as f64,
        }
    }

    /// Expected accepted length without the bonus: the sum over slots from `first` of the product of
    /// accuracies.
    pub fn expected_length(&self, first: usize) -> f64 {
        let mut product = 1.0;
        (first..self.total.len())
            .map(|t| {
                product *= self.accuracy(t);
                product
            })
            .sum()
    }
}
