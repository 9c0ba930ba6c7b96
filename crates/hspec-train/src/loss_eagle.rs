//! Objectives of EAGLE-3 and P-EAGLE, term by term as released.
//!
//! With `p` the target's softmax over the draft vocabulary, `q` the drafter's and `m` the loss mask:
//!
//! ```text
//! DeepSpec EAGLE-3      step_i = sum_t m'[t+i] CE(p[t+1+i], q_i[t]) / (B T),   m' = m less the last token
//! speculators EAGLE-3   step_i = sum_t m[t+i] KL(p[t+i] || q_i[t]) / (sum_t m[t+i] + 1e-5)
//! both                  loss   = sum_i decay^i step_i
//! P-EAGLE               loss   = sum_s m[a+d] KL(p[a+d] || q_s) / (sum_s m[a+d] + 1e-5)
//! ```
//!
//! The two index `p` and `m` differently because the first counts them by the feature's token and the second
//! by the token that follows it, which [`Aligned`] does for a document. So the last token of a prompt, from
//! which every answer's first draft starts, is trained by the second and P-EAGLE, and masked in the first.

use burn::tensor::{DType, Int, Tensor, TensorData, activation::log_softmax, backend::Backend};
use hspec_core::{
    TokenId,
    drafter::{eagle3::TttStep, peagle::Samples},
};

/// One document as pairs: feature `t` with token `t + 1`, and the mask and the target's law of that token's
/// position. Built in one place, because a mask that was not moved along left the first pair of every
/// answer untrained.
#[derive(Debug, Clone)]
pub struct Aligned<B: Backend> {
    /// The target's features, `[n - 1, F * H]`.
    pub features: Tensor<B, 2>,
    /// The token after each feature's position.
    pub next: Vec<TokenId>,
    /// What the target's law of the token after that is made from, `[n - 1, _]`.
    pub last: Tensor<B, 2>,
    /// Whether that token is supervised.
    pub mask: Vec<bool>,
    /// Rotary positions, from 1.
    pub positions: Vec<usize>,
}

impl<B: Backend> Aligned<B> {
    /// A document of `n >= 2` tokens, with a row of `features` and of `last` and a flag of `mask` for each.
    pub fn new(tokens: &[TokenId], features: Tensor<B, 2>, last: Tensor<B, 2>, mask: &[bool]) -> Self {
        let pairs = tokens.len() - 1;
        Self {
            features: features.narrow(0, 0, pairs),
            next: tokens[1..].to_vec(),
            last: last.narrow(0, 1, pairs),
            mask: mask[1..].to_vec(),
            positions: (1..=pairs).collect(),
        }
    }
}

/// A loss over unrolled steps.
#[derive(Debug, Clone)]
pub struct TttLoss<B: Backend> {
    /// What is minimised, `[1]`.
    pub total: Tensor<B, 1>,
    /// Of each step, before its weight: `[1]`.
    pub steps: Vec<Tensor<B, 1>>,
}

impl<B: Backend> TttLoss<B> {
    fn new(steps: Vec<Tensor<B, 1>>, decay: f64) -> Self {
        let weighted = steps.iter().enumerate().map(|(i, l)| l.clone().mul_scalar(decay.powi(i as i32)));
        let total = weighted.reduce(|a, b| a + b).expect("at least one step");
        Self { total, steps }
    }
}

/// Soft cross-entropy of at least one step (DeepSpec). `targets`: the target's logits by position,
/// `[B, T, V]`; row `t` is the law of the token at `t + 1`. `mask` and `lengths`: supervised tokens
/// `[B * T]` and the length of each row. The last token of a row has no law and does not count.
pub fn ttt_cross_entropy<B: Backend>(
    steps: &[TttStep<B>],
    targets: Tensor<B, 3>,
    mask: &[bool],
    lengths: &[usize],
    decay: f64,
) -> TttLoss<B> {
    let [b, t, v] = targets.dims();
    let counts = |row: usize, at: usize| at + 1 < lengths[row] && mask[row * t + at];
    let step = |(i, step): (usize, &TttStep<B>)| {
        // Behind the end of the row any law will do: nothing there counts.
        let kept = t.saturating_sub(i + 1);
        let tail = Tensor::zeros([b, t - kept, v], &targets.device());
        let moved = Tensor::cat(vec![targets.clone().narrow(1, t - kept, kept), tail], 1);
        let elements = cross_entropy(step.logits.clone().reshape([b * t, v]), moved.reshape([b * t, v]));
        let mask: Vec<bool> = (0..b).flat_map(|row| (i..t + i).map(move |at| counts(row, at))).collect();
        (elements * weights(&mask, &targets.device())).sum().div_scalar((b * t) as f64)
    };
    TttLoss::new(steps.iter().enumerate().map(step).collect(), decay)
}

/// Divergence of at least one step (speculators) over one packed row. `targets`: the target's logits for each
/// pair, `[1, T, Vd]`; `mask`: which pairs are supervised, `[T]`. Prompts are taken to be longer than the
/// steps, so that no pair of one document is held against a supervised pair of the next.
pub fn ttt_divergence<B: Backend>(
    steps: &[TttStep<B>],
    targets: Tensor<B, 3>,
    mask: &[bool],
    decay: f64,
) -> TttLoss<B> {
    let [_, t, v] = targets.dims();
    let step = |(i, step): (usize, &TttStep<B>)| {
        let kept = t.saturating_sub(i);
        let logits = step.logits.clone().narrow(1, 0, kept).reshape([kept, v]);
        let targets = targets.clone().narrow(1, t - kept, kept).reshape([kept, v]);
        masked_mean(divergence(logits, targets), &mask[t - kept..])
    };
    TttLoss::new(steps.iter().enumerate().map(step).collect(), decay)
}

/// Divergence of sampled pairs (P-EAGLE), `[1]`. `logits`: `[n, Vd]`, one row per sample; `targets`: the
/// target's logits for each pair, `[T, Vd]`; `mask`: which pairs are supervised, `[T]`. A sample stands for
/// pair `anchor + depth`.
pub fn parallel_divergence<B: Backend>(
    logits: Tensor<B, 2>,
    targets: Tensor<B, 2>,
    mask: &[bool],
    samples: &Samples,
) -> Tensor<B, 1> {
    let pairs: Vec<usize> = samples.anchors.iter().zip(&samples.depths).map(|(a, d)| a + d).collect();
    let rows = TensorData::new(pairs.iter().map(|&p| p as i64).collect::<Vec<_>>(), [pairs.len()]);
    let targets = targets.clone().select(0, Tensor::<B, 1, Int>::from_data(rows, &targets.device()));
    let mask: Vec<bool> = pairs.iter().map(|&p| mask[p]).collect();
    masked_mean(divergence(logits, targets), &mask)
}

/// `-sum_v p log q` per row, without gradient for `p`.
fn cross_entropy<B: Backend>(logits: Tensor<B, 2>, targets: Tensor<B, 2>) -> Tensor<B, 1> {
    let log_q = log_softmax(logits.cast(DType::F32), 1);
    let p = log_softmax(targets.detach().cast(DType::F32), 1).exp();
    (p * log_q).sum_dim(1).squeeze_dim::<1>(1).neg()
}

/// `KL(p || q)` per row, without gradient for `p`.
fn divergence<B: Backend>(logits: Tensor<B, 2>, targets: Tensor<B, 2>) -> Tensor<B, 1> {
    let log_q = log_softmax(logits.cast(DType::F32), 1);
    let log_p = log_softmax(targets.detach().cast(DType::F32), 1);
    (log_p.clone().exp() * (log_p - log_q)).sum_dim(1).squeeze_dim::<1>(1)
}

/// Mean over the rows that count; 0 if none does.
fn masked_mean<B: Backend>(elements: Tensor<B, 1>, mask: &[bool]) -> Tensor<B, 1> {
    let weights = weights(mask, &elements.device());
    let count = mask.iter().filter(|&&m| m).count() as f64;
    (elements * weights).sum().div_scalar(count + 1e-5)
}

fn weights<B: Backend>(mask: &[bool], device: &B::Device) -> Tensor<B, 1> {
    let weights: Vec<f32> = mask.iter().map(|&m| f32::from(u8::from(m))).collect();
    Tensor::from_data(TensorData::new(weights, [mask.len()]), device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_abs_diff_eq;
    use proptest::prelude::*;
    type B = burn_ndarray::NdArray;

    fn rows(n: usize) -> Tensor<B, 2> {
        let data = (0..n).map(|i| i as f32).collect::<Vec<_>>();
        Tensor::from_data(TensorData::new(data, [n, 1]), &Default::default())
    }

    proptest! {
        /// The mask was once not moved along with the ids: the pair from which decoding starts, the last
        /// token of the prompt with the first of the answer, was never trained.
        #[test]
        fn the_pair_that_the_first_draft_starts_from_is_supervised(prompt in 1usize..6, answer in 1usize..6) {
            let n = prompt + answer;
            let tokens: Vec<TokenId> = (0..n as u32).map(TokenId).collect();
            let mask: Vec<bool> = (0..n).map(|i| i >= prompt).collect();
            let aligned = Aligned::new(&tokens, rows(n), rows(n), &mask);
            let at = |x: &Tensor<B, 2>, row: usize| x.clone().into_data().iter::<f32>().nth(row).unwrap();
            // What a session observes of the prompt, and its anchor.
            let first = prompt - 1;
            prop_assert_eq!(at(&aligned.features, first) as usize, prompt - 1);
            prop_assert_eq!(aligned.next[first], tokens[prompt]);
            prop_assert_eq!(at(&aligned.last, first) as usize, prompt);
            prop_assert_eq!(aligned.mask.iter().position(|&m| m), Some(first));
            prop_assert_eq!(aligned.next.len(), n - 1);
        }
    }

    #[test]
    fn nothing_supervised_costs_nothing() {
        let logits = Tensor::<B, 2>::from_floats([[0.0, 1.0], [2.0, 0.0]], &Default::default());
        let samples = Samples { anchors: vec![0, 1], depths: vec![0, 0] };
        let targets = logits.clone().flip([1]);
        let loss = |mask: &[bool]| {
            parallel_divergence(logits.clone(), targets.clone(), mask, &samples).into_scalar()
        };
        assert_eq!(loss(&[false, false]), 0.0);
        // KL of (s, 1 - s) and (1 - s, s) is (2 s - 1) times the difference of the logits.
        let s = 1.0 / (1.0 + (-2f32).exp());
        assert_abs_diff_eq!(loss(&[false, true]), (2.0 * s - 1.0) * 2.0, epsilon = 1e-4);
    }
}
