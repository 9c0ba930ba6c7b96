//! The objective and its gradient in closed form, on the flex backend (see [`crate::objective`]).

use crate::{
    loss::{self, Agreement, LossConfig, Weighting},
    objective::{Objective, scalar},
    pack::Forward,
};
use burn::tensor::{
    Tensor, TensorData,
    backend::{AutodiffBackend, Backend},
};
use burn_flex::FlexTensor;
use rayon::prelude::*;
use std::any::TypeId;

/// The objective, or none where the backend beneath autodiff is not flex.
pub(crate) fn objective<B: AutodiffBackend>(
    forward: &Forward<B>,
    config: &LossConfig,
) -> Option<Objective<B>> {
    if !is_flex::<B::InnerBackend>() {
        return None;
    }
    let device = forward.logits.device();
    let [n, k, width] = forward.logits.dims();
    let host = |data: TensorData| data.convert::<f32>().into_vec::<f32>().expect("just converted");
    let logits = host(forward.logits.clone().inner().into_data());
    let mask = host(forward.mask.clone().inner().into_data());
    let table = Table::new(host(forward.table.clone().into_data()), width);
    let count = forward.slots.denominator(mask.iter().sum());
    let decay = match config.weighting {
        Weighting::Decay { gamma } => forward.slots.decay(gamma),
        Weighting::Dpace { .. } => Vec::new(),
    };

    let mut gradient = vec![0f32; n * k * width];
    let judged: Vec<Vec<Slot>> = gradient
        .par_chunks_mut(k * width)
        .enumerate()
        .map(|(b, gradient)| {
            let slots = b * k..(b + 1) * k;
            let block = Block {
                logits: &logits[slots.start * width..slots.end * width],
                rows: &forward.rows[slots.clone()],
                decay: decay.get(slots.clone()).unwrap_or_default(),
                mask: &mask[slots],
                table: &table,
            };
            block.judge(gradient, config, count)
        })
        .collect();
    let slots: Vec<Slot> = judged.into_iter().flatten().collect();

    let agreement = Agreement::gather(&forward.slots, &mask, |i| slots[i].agrees);
    let term = |value: &dyn Fn(&Slot) -> f32| {
        slots.iter().map(|s| f64::from(value(s) * s.weight)).sum::<f64>() / f64::from(count)
    };
    let (ce, tv, kl) = (term(&|s| s.ce), term(&|s| 1.0 - s.overlap), term(&|s| s.kl));

    let gradient = Tensor::<B, 3>::from_data(TensorData::new(gradient, [n, k, width]), &device);
    let mut differentiable = (forward.logits.clone() * gradient).sum();
    let mut confidence = 0.0;
    if let Some(z) = &forward.confidence {
        let row = |value: &dyn Fn(&Slot) -> f32| {
            let values: Vec<f32> = slots.iter().map(value).collect();
            Tensor::<B, 2>::from_data(TensorData::new(values, [n, k]), &device)
        };
        let bce = loss::confidence_bce(z.clone(), row(&|s| s.overlap));
        let loss = (bce * row(&|s| s.weight)).sum().div_scalar(count);
        confidence = scalar(&loss);
        differentiable = differentiable + loss.mul_scalar(config.confidence);
    }
    let total = config.ce * ce + config.tv * tv + config.kl * kl + config.confidence * confidence;
    Some(Objective { differentiable, total, ce, tv, kl, confidence, count: f64::from(count), agreement })
}

fn is_flex<B: Backend>() -> bool {
    TypeId::of::<B::FloatTensorPrimitive>() == TypeId::of::<FlexTensor>()
}

/// The target's probabilities, one row per packed position.
struct Table {
    width: usize,
    probabilities: Vec<f32>,
    /// Best id of each row.
    labels: Vec<usize>,
}

impl Table {
    fn new(mut logits: Vec<f32>, width: usize) -> Self {
        let labels = logits
            .par_chunks_mut(width)
            .map(|row| {
                let (label, _) = softmax(row);
                label
            })
            .collect();
        Self { width, probabilities: logits, labels }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.probabilities[row * self.width..(row + 1) * self.width]
    }
}

/// Turns logits into probabilities; returns the first best id and the logarithm of the normaliser.
fn softmax(row: &mut [f32]) -> (usize, f32) {
    let (mut best, mut max) = (0, f32::NEG_INFINITY);
    for (i, &x) in row.iter().enumerate() {
        if x > max {
            (best, max) = (i, x);
        }
    }
    for x in row.iter_mut() {
        *x = (*x - max).exp();
    }
    let sum = sum(row, row, |x, _| x);
    let scale = 1.0 / sum;
    row.iter_mut().for_each(|x| *x *= scale);
    (best, max + sum.ln())
}

/// Sum of `f` over pairs, in lanes that the compiler can turn into vectors.
fn sum(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0f32; LANES];
    let (a_lanes, b_lanes) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a_lanes.remainder().iter().zip(b_lanes.remainder()).map(|(a, b)| f(*a, *b)).sum();
    for (a, b) in a_lanes.zip(b_lanes) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += f(*a, *b);
        }
    }
    lanes.iter().sum::<f32>() + rest
}

/// The slots of one anchor.
struct Block<'a> {
    logits: &'a [f32],
    rows: &'a [usize],
    mask: &'a [f32],
    /// Weights of the slots where those are given beforehand.
    decay: &'a [f32],
    table: &'a Table,
}

/// What a slot adds to the objective.
#[derive(Clone, Copy, Default)]
struct Slot {
    ce: f32,
    kl: f32,
    /// `sum_v min(p, q)`.
    overlap: f32,
    /// Mask times the slot's weight.
    weight: f32,
    agrees: bool,
}

impl Block<'_> {
    /// Fills `gradient` with the gradient of the logits.
    fn judge(&self, gradient: &mut [f32], config: &LossConfig, count: f32) -> Vec<Slot> {
        let width = self.table.width;
        let mut slots = vec![Slot::default(); self.rows.len()];
        for (t, slot) in slots.iter_mut().enumerate().filter(|(t, _)| self.mask[*t] > 0.0) {
            let p = &mut gradient[t * width..(t + 1) * width];
            let logits = &self.logits[t * width..(t + 1) * width];
            p.copy_from_slice(logits);
            let (best, log_sum) = softmax(p);
            let label = self.table.labels[self.rows[t]];
            let q = self.table.row(self.rows[t]);
            slot.ce = log_sum - logits[label];
            slot.overlap = sum(p, q, f32::min);
            if config.kl > 0.0 {
                let part = |q: f32, x: f32| if q > 0.0 { q * (q.ln() - x) } else { 0.0 };
                slot.kl = sum(q, logits, part) + log_sum;
            }
            slot.agrees = best == label;
        }
        let weights: Vec<f32> = match config.weighting {
            Weighting::Decay { .. } => self.decay.to_vec(),
            Weighting::Dpace { alpha } => {
                let ce: Vec<f32> = slots.iter().map(|s| s.ce).collect();
                loss::dpace_weights(&ce, self.mask, alpha)
            }
        };
        for (t, slot) in slots.iter_mut().enumerate() {
            slot.weight = self.mask[t] * weights[t];
            let row = &mut gradient[t * width..(t + 1) * width];
            let scale = slot.weight / count;
            let part = |weight: f64| weight as f32 * scale;
            let (ce, tv, kl) = (part(config.ce), part(config.tv), part(config.kl));
            let q = self.table.row(self.rows[t]);
            let below = sum(row, q, |p, q| if p < q { p } else { 0.0 });
            for (p, q) in row.iter_mut().zip(q) {
                let rises = if *p < *q { 1.0 } else { 0.0 };
                *p = *p * (ce + kl - tv * (rises - below)) - kl * *q;
            }
            row[self.table.labels[self.rows[t]]] -= ce;
        }
        slots
    }
}
