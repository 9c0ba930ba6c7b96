//! The loss of a forward pass, ready for a backward pass.
//!
//! [`crate::loss`] states the objective in plain tensor operations, and autodiff takes its gradient. With
//! thousands of slots and draft ids that reads and writes the logits some thirty times, on one thread of a
//! CPU. The objective is a function of the logits alone, so its gradient has a closed form: with the weight
//! `g = m w / sum(m)` of a slot, label `y` and `S = sum_{p < q} p`,
//!
//! ```text
//! d total / d logit_v = g (ce_weight (p_v - [v = y]) - tv_weight p_v ([p_v < q_v] - S))
//! ```
//!
//! On flex that gradient is computed in one pass over the logits, blocks shared out among threads; other
//! backends take the plain way. Both give the same numbers, which a test checks.

use crate::{
    loss::{self, Agreement, LossConfig},
    pack::Forward,
};
use burn::tensor::{Tensor, backend::AutodiffBackend};

/// What a step minimises, and what it reports.
#[derive(Debug)]
pub struct Objective<B: AutodiffBackend> {
    /// A scalar whose gradients are the objective's; its value is not the objective's.
    pub differentiable: Tensor<B, 1>,
    /// The objective.
    pub total: f64,
    /// Cross-entropy term.
    pub ce: f64,
    /// Total variation term.
    pub tv: f64,
    /// Confidence term.
    pub confidence: f64,
    /// Agreement per slot.
    pub agreement: Agreement,
}

/// The objective of a forward pass.
pub fn objective<B: AutodiffBackend>(forward: Forward<B>, config: &LossConfig) -> Objective<B> {
    #[cfg(feature = "flex")]
    if let Some(objective) = crate::flex::objective(&forward, config) {
        return objective;
    }
    plain(forward, config)
}

/// The objective in plain tensor operations.
pub fn plain<B: AutodiffBackend>(forward: Forward<B>, config: &LossConfig) -> Objective<B> {
    let targets = forward.targets();
    let agreement =
        Agreement::count(forward.logits.clone().inner(), targets.clone(), &forward.mask.clone().inner());
    let elements = loss::elements(forward.logits, Tensor::from_inner(targets), forward.confidence);
    let loss = loss::loss(elements, forward.mask, config);
    Objective {
        total: scalar(&loss.total),
        ce: scalar(&loss.ce),
        tv: scalar(&loss.tv),
        confidence: scalar(&loss.confidence),
        differentiable: loss.total,
        agreement,
    }
}

/// The value of a one-element tensor.
pub(crate) fn scalar<B: burn::tensor::backend::Backend>(t: &Tensor<B, 1>) -> f64 {
    f64::from(t.clone().into_data().iter::<f32>().next().unwrap_or(f32::NAN))
}
