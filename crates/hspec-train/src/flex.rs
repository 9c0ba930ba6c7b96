//! The objective and its gradient in closed form, on the flex backend (see [`crate::objective`]).

mod judge;
mod muon;
mod sum;

pub(crate) use muon::{muon, squares};

use crate::{
    logits::Logits,
    loss::{self, Agreement, LossConfig, Weighting},
    objective::{Objective, scalar},
    pack::Forward,
};
use burn::tensor::{Tensor, TensorData, backend::AutodiffBackend};
use hspec_nn::flex;
use judge::{Block, Slot, Table};
use rayon::prelude::*;

/// What all slots are judged by.
struct Bench<'a> {
    config: &'a LossConfig,
    /// The terms' denominator.
    count: f32,
    table: Table,
    /// Of each slot: its row of the table.
    rows: &'a [usize],
    mask: Vec<f32>,
    /// Weights where those are given beforehand.
    decay: Vec<f32>,
}

/// The objective, or none where the backend beneath autodiff is not flex.
pub(crate) fn objective<B: AutodiffBackend>(
    forward: &Forward<B>,
    config: &LossConfig,
) -> Option<Objective<B>> {
    let table = flex::contiguous(&forward.table)?;
    let [n, k, width] = forward.logits.dims();
    let mask: Vec<f32> = forward.mask.clone().into_data().iter::<f32>().collect();
    let count = forward.slots.denominator(mask.iter().sum());
    let bench = Bench {
        config,
        count,
        table: Table::new(flex::values(&table).to_vec(), width),
        rows: &forward.rows,
        decay: match config.weighting {
            Weighting::Decay { gamma } => forward.slots.decay(gamma),
            Weighting::Dpace { .. } => Vec::new(),
        },
        mask,
    };
    let (slots, mut differentiable) = match &forward.logits {
        Logits::Whole(logits) => whole(&bench, logits, k)?,
        Logits::Sum { terms, .. } => sum::judged(&bench, terms, k)?,
    };

    let agreement = Agreement::gather(&forward.slots, &bench.mask, |i| slots[i].agrees);
    let term = |value: &dyn Fn(&Slot) -> f32| {
        slots.iter().map(|s| f64::from(value(s) * s.weight)).sum::<f64>() / f64::from(count)
    };
    let (ce, tv, kl) = (term(&|s| s.ce), term(&|s| 1.0 - s.overlap), term(&|s| s.kl));

    let mut confidence = 0.0;
    if let Some(z) = &forward.confidence {
        let row = |value: &dyn Fn(&Slot) -> f32| {
            let values: Vec<f32> = slots.iter().map(value).collect();
            Tensor::<B, 2>::from_data(TensorData::new(values, [n, k]), &z.device())
        };
        let bce = loss::confidence_bce(z.clone(), row(&|s| s.overlap));
        let loss = (bce * row(&|s| s.weight)).sum().div_scalar(count);
        confidence = scalar(&loss);
        differentiable = differentiable + loss.mul_scalar(config.confidence);
    }
    let total = config.ce * ce + config.tv * tv + config.kl * kl + config.confidence * confidence;
    Some(Objective { differentiable, total, ce, tv, kl, confidence, count: f64::from(count), agreement })
}

/// Judges logits that are there, `[n, k, width]`; returns the slots and a scalar with the gradient.
fn whole<B: AutodiffBackend>(
    bench: &Bench<'_>,
    logits: &Tensor<B, 3>,
    k: usize,
) -> Option<(Vec<Slot>, Tensor<B, 1>)> {
    let (inner, width) = (flex::contiguous(&logits.clone().inner())?, bench.table.width);
    let values = flex::values(&inner);
    let mut gradient = vec![0f32; values.len()];
    let judged: Vec<Vec<Slot>> = gradient
        .par_chunks_mut(k * width)
        .enumerate()
        .map(|(b, gradient)| {
            let slots = b * k..(b + 1) * k;
            let mask = &bench.mask[slots.clone()];
            let rows = gradient.chunks_exact_mut(width).zip(slots.clone()).zip(mask);
            let rows = rows.map(|((row, i), mask)| {
                (*mask > 0.0).then(|| {
                    row.copy_from_slice(&values[i * width..(i + 1) * width]);
                    row
                })
            });
            Block { bench, first: slots.start, rows: rows.collect() }.judge()
        })
        .collect();
    let differentiable = flex::pull(logits, gradient)?;
    Some((judged.into_iter().flatten().collect(), differentiable))
}
