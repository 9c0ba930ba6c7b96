//! The loss of a forward pass, ready for a backward pass.
//!
//! [`crate::loss`] states the objective in plain tensor operations, and autodiff takes its gradient. With
//! thousands of slots and draft ids that reads and writes the logits some thirty times, on one thread of a
//! CPU. The objective is a function of the logits alone, so its gradient has a closed form: with the weight
//! `g = m w / sum(m)` of a slot, label `y` and `S = sum_{p < q} p`,
//!
//! ```text
//! d total / d logit_v = g (ce_weight (p_v - [v = y]) - tv_weight p_v ([p_v < q_v] - S) + kl_weight (p_v - q_v))
//! ```
//!
//! On flex that gradient is computed in one pass over the logits, blocks shared out among threads, and where the
//! logits are a sum of products ([`crate::logits::Logits`]) a few blocks at a time, from the products to the
//! gradients of their factors; other backends take the plain way. All give the same numbers, which a test checks.

use crate::{
    loss::{self, Agreement, LossConfig},
    pack::Forward,
};
use burn::tensor::{Tensor, backend::AutodiffBackend};

/// What a row adds to a step, and what it reports.
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
    /// Divergence; 0 where it has no weight.
    pub kl: f64,
    /// Confidence term.
    pub confidence: f64,
    /// The terms' denominator: rows of a step are weighted by it.
    pub count: f64,
    /// Agreement per slot.
    pub agreement: Agreement,
}

/// The objective of a forward pass. Logits before a correction that has a share of their own in the objective
/// are judged like the corrected ones; the terms reported are those of the latter.
pub fn objective<B: AutodiffBackend>(mut forward: Forward<B>, config: &LossConfig) -> Objective<B> {
    let Some(base) = forward.base.take() else { return single(forward, config) };
    let before = Forward {
        logits: base.logits.into(),
        confidence: None,
        base: None,
        table: forward.table.clone(),
        anchors: forward.anchors.clone(),
        rows: forward.rows.clone(),
        slots: forward.slots.clone(),
        mask: forward.mask.clone(),
    };
    let (before, after) = (single(before, config), single(forward, config));
    Objective {
        differentiable: after.differentiable.mul_scalar(base.corrected)
            + before.differentiable.mul_scalar(base.share),
        total: base.corrected * after.total + base.share * before.total,
        ..after
    }
}

fn single<B: AutodiffBackend>(forward: Forward<B>, config: &LossConfig) -> Objective<B> {
    #[cfg(feature = "flex")]
    if let Some(objective) = crate::flex::objective(&forward, config) {
        return objective;
    }
    plain(forward, config)
}

/// The objective in plain tensor operations, of corrected logits alone.
pub fn plain<B: AutodiffBackend>(forward: Forward<B>, config: &LossConfig) -> Objective<B> {
    let targets = forward.targets();
    let logits = forward.logits.whole();
    let agreement = Agreement::count(
        logits.clone().inner(),
        targets.clone(),
        &forward.mask.clone().inner(),
        &forward.slots,
    );
    let counted: f32 = forward.mask.clone().into_data().iter::<f32>().sum();
    let targets = Tensor::from_inner(targets);
    let elements = loss::elements_with(logits, targets, forward.confidence, config.kl > 0.0);
    let loss = loss::loss_of(elements, forward.mask, &forward.slots, config);
    Objective {
        total: scalar(&loss.total),
        ce: scalar(&loss.ce),
        tv: scalar(&loss.tv),
        kl: scalar(&loss.kl),
        confidence: scalar(&loss.confidence),
        count: f64::from(forward.slots.denominator(counted)),
        differentiable: loss.total,
        agreement,
    }
}

/// The value of a one-element tensor.
pub(crate) fn scalar<B: burn::tensor::backend::Backend>(t: &Tensor<B, 1>) -> f64 {
    f64::from(t.clone().into_data().iter::<f32>().next().unwrap_or(f32::NAN))
}
