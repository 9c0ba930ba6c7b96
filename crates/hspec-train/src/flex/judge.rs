//! Rows of logits against the target's: their terms, and their gradients in their place.

use super::Bench;
use crate::loss::{self, Weighting};
use hspec_nn::simd::{Body, Op, Simd, Vector, exp};
use rayon::prelude::*;

/// The target's probabilities, one row per packed position.
pub(super) struct Table {
    pub(super) width: usize,
    probabilities: Vec<f32>,
    /// Best id of each row.
    labels: Vec<usize>,
}

impl Table {
    pub(super) fn new(mut logits: Vec<f32>, width: usize) -> Self {
        struct Row<'a>(&'a mut [f32]);
        impl Op for Row<'_> {
            type Output = usize;
            #[inline(always)]
            fn run<V: Vector>(self, _: Simd<V>) -> usize {
                softmax(self.0).0
            }
        }
        let body = Body::widest();
        let labels = logits.par_chunks_mut(width).map(|row| body.run(Row(row))).collect();
        Self { width, probabilities: logits, labels }
    }

    #[inline(always)]
    fn row(&self, row: usize) -> &[f32] {
        &self.probabilities[row * self.width..(row + 1) * self.width]
    }
}

const LANES: usize = 16;

/// Turns logits into probabilities; returns the first best id and the logarithm of the normaliser.
#[inline(always)]
fn softmax(row: &mut [f32]) -> (usize, f32) {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in row.chunks(LANES) {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    let max = lanes.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    let best = row.iter().position(|&x| x == max).unwrap_or(0);
    for x in row.iter_mut() {
        *x = exp(*x - max);
    }
    let sum = sum(row, row, |x, _| x);
    let scale = 1.0 / sum;
    row.iter_mut().for_each(|x| *x *= scale);
    (best, max + sum.ln())
}

/// Sum of `f` over pairs, in lanes that the compiler can turn into vectors.
#[inline(always)]
fn sum(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
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
pub(super) struct Block<'a, 'b> {
    pub(super) bench: &'b Bench<'b>,
    /// The first slot.
    pub(super) first: usize,
    /// Logits of the slots that count, which become gradients.
    pub(super) rows: Vec<Option<&'a mut [f32]>>,
}

/// What a slot adds to the objective.
#[derive(Clone, Copy, Default)]
pub(super) struct Slot {
    pub(super) ce: f32,
    pub(super) kl: f32,
    /// `sum_v min(p, q)`.
    pub(super) overlap: f32,
    /// Mask times the slot's weight.
    pub(super) weight: f32,
    pub(super) agrees: bool,
}

impl Block<'_, '_> {
    pub(super) fn judge(self) -> Vec<Slot> {
        Body::widest().run(self)
    }
}

impl Op for Block<'_, '_> {
    type Output = Vec<Slot>;

    #[inline(always)]
    fn run<V: Vector>(mut self, _: Simd<V>) -> Vec<Slot> {
        let Bench { config, count, table, rows: targets, mask, decay } = self.bench;
        let mut slots = vec![Slot::default(); self.rows.len()];
        for (t, (slot, row)) in slots.iter_mut().zip(&mut self.rows).enumerate() {
            let Some(row) = row else { continue };
            let target = targets[self.first + t];
            let (q, label) = (table.row(target), table.labels[target]);
            let logit = row[label];
            if config.kl > 0.0 {
                let part = |q: f32, x: f32| if q > 0.0 { q * (q.ln() - x) } else { 0.0 };
                slot.kl = sum(q, row, part);
            }
            let (best, log_sum) = softmax(row);
            slot.ce = log_sum - logit;
            slot.kl += if config.kl > 0.0 { log_sum } else { 0.0 };
            slot.overlap = sum(row, q, f32::min);
            slot.agrees = best == label;
        }
        let mask = &mask[self.first..self.first + slots.len()];
        let weights: Vec<f32> = match config.weighting {
            Weighting::Decay { .. } => decay[self.first..self.first + slots.len()].to_vec(),
            Weighting::Dpace { alpha } => {
                let ce: Vec<f32> = slots.iter().map(|s| s.ce).collect();
                loss::dpace_weights(&ce, mask, alpha)
            }
        };
        for (t, (slot, row)) in slots.iter_mut().zip(&mut self.rows).enumerate() {
            slot.weight = mask[t] * weights[t];
            let Some(row) = row else { continue };
            let scale = slot.weight / count;
            let part = |weight: f64| weight as f32 * scale;
            let (ce, tv, kl) = (part(config.ce), part(config.tv), part(config.kl));
            let target = targets[self.first + t];
            let q = table.row(target);
            let below = sum(row, q, |p, q| if p < q { p } else { 0.0 });
            for (p, q) in row.iter_mut().zip(q) {
                let rises = if *p < *q { 1.0 } else { 0.0 };
                *p = *p * (ce + kl - tv * (rises - below)) - kl * *q;
            }
            row[table.labels[target]] -= ce;
        }
        slots
    }
}
