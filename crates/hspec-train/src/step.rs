//! The gradients of one step: of its rows, each weighted by what it counts, so that the rows of a step weigh
//! what they would as one.

use crate::{
    kinds::Learner,
    loss::{Agreement, LossConfig},
    objective::objective,
    optim::{self, add, scale},
    pack::{Draw, Judge, Packed},
};
use burn::{
    optim::GradientsParams,
    tensor::backend::{AutodiffBackend, Backend},
};
use hspec_core::{Error, Result};
use std::sync::{PoisonError, RwLock};

/// Read while a graph is built, written while one is walked backwards: where another thread ends a backward pass
/// in between, Burn 0.21 takes parts of the unfinished graph for abandoned ones, and gradients go missing without
/// a word (tracel-ai/burn#5573).
static GRAPHS: RwLock<()> = RwLock::new(());

/// One row of a step.
#[derive(Debug, Clone)]
pub struct Row<B: Backend> {
    /// Its documents and what the target computed for them.
    pub packed: Packed<B>,
    /// What is drawn in it.
    pub draw: Draw,
}

impl<B: Backend> Row<B> {
    /// The row on another device.
    pub fn on_device(self, device: &B::Device) -> Self {
        Self { packed: self.packed.on_device(device), draw: self.draw }
    }
}

/// What the rows of a step add up to. Terms are weighted by their row's denominator.
#[derive(Debug, Default)]
pub struct Tally {
    /// Sum of the denominators.
    pub count: f64,
    /// The objective.
    pub total: f64,
    /// Cross-entropy.
    pub ce: f64,
    /// Total variation distance.
    pub tv: f64,
    /// Divergence.
    pub kl: f64,
    /// Confidence loss.
    pub confidence: f64,
    /// Agreement per slot.
    pub agreement: Agreement,
    /// Blocks drafted from.
    pub blocks: usize,
    /// Positions of the target that a slot was held against.
    pub judged: usize,
}

impl Tally {
    /// Adds what other rows add up to.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in [
            (&mut self.count, other.count),
            (&mut self.total, other.total),
            (&mut self.ce, other.ce),
            (&mut self.tv, other.tv),
            (&mut self.kl, other.kl),
            (&mut self.confidence, other.confidence),
        ] {
            *mine += theirs;
        }
        self.agreement.add(&other.agreement);
        self.blocks += other.blocks;
        self.judged += other.judged;
    }
}

/// Gradients times their rows' denominators, summed.
pub struct Sum {
    /// By parameter.
    pub grads: GradientsParams,
    /// The values.
    pub tally: Tally,
}

impl Sum {
    /// The gradients of the step.
    pub fn mean<B: AutodiffBackend, L: Learner<B>>(mut self, learner: &L) -> (GradientsParams, Tally) {
        scale(learner.module(), &mut self.grads, 1.0 / self.tally.count);
        (self.grads, self.tally)
    }
}

/// Runs rows one after the other; nothing where no row has a token to learn from.
///
/// # Errors
/// A loss that is not finite, with the first parameter that is not.
pub fn sum<B: AutodiffBackend, L: Learner<B>>(
    learner: &L,
    rows: Vec<Row<B::InnerBackend>>,
    judge: &Judge<B::InnerBackend>,
    config: &LossConfig,
) -> Result<Option<Sum>> {
    let mut all: Option<Sum> = None;
    for row in rows {
        let building = GRAPHS.read().unwrap_or_else(PoisonError::into_inner);
        let packed = row.packed.constant::<B>();
        let Some(forward) = learner.forward(&packed, &row.draw, judge) else { continue };
        let (blocks, judged) = (forward.logits.dims()[0], forward.judged());
        let found = objective(forward, config);
        if !found.total.is_finite() {
            optim::check_finite(learner.module())?;
            return Err(Error::Mismatch("the loss is not finite, though every parameter is".into()));
        }
        drop(building);
        let walking = GRAPHS.write().unwrap_or_else(PoisonError::into_inner);
        let mut grads = GradientsParams::from_grads(found.differentiable.backward(), learner.module());
        drop(walking);
        scale(learner.module(), &mut grads, found.count);
        let of_row = |term: f64| term * found.count;
        let tally = Tally {
            count: found.count,
            total: of_row(found.total),
            ce: of_row(found.ce),
            tv: of_row(found.tv),
            kl: of_row(found.kl),
            confidence: of_row(found.confidence),
            agreement: found.agreement,
            blocks,
            judged,
        };
        match &mut all {
            None => all = Some(Sum { grads, tally }),
            Some(all) => {
                add(learner.module(), &mut all.grads, &mut grads);
                all.tally.add(&tally);
            }
        }
    }
    Ok(all)
}
