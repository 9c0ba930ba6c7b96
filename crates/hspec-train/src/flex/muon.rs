//! A step of Muon on plain memory.

use crate::muon::{ITERATIONS, LEAST_NORM, MOMENTUM, QUINTIC};
use burn::tensor::{Tensor, backend::Backend};
use hspec_nn::{
    autocast::{Compute, compute},
    flex,
    gemm::{Matrix, gram, product},
    simd::{Body, Element, Pair},
};
use rayon::prelude::*;

/// Elements of a task.
const ELEMENTS: usize = 1 << 14;

/// The matrix and the velocity after a step: see [`crate::muon`]; none unless flex computes. `kept` is the share
/// of the matrix that decay leaves, `rate` what the update is multiplied with.
pub(crate) fn muon<B: Backend, const D: usize>(
    tensor: &Tensor<B, D>,
    grad: &Tensor<B, D>,
    velocity: Option<&Tensor<B, D>>,
    kept: f64,
    rate: f64,
) -> Option<(Tensor<B, D>, Tensor<B, D>)> {
    let shape = tensor.dims();
    let (rows, columns) = (shape[0], shape[1]);
    let (tensor, grad) = (flex::contiguous(tensor)?, flex::contiguous(grad)?);
    let grad = flex::values(&grad);
    let momentum = MOMENTUM as f32;
    let mut new = grad.to_vec();
    if let Some(velocity) = velocity {
        let velocity = flex::contiguous(velocity)?;
        let pairs = new.par_iter_mut().zip(flex::values(&velocity)).with_min_len(ELEMENTS);
        pairs.for_each(|(new, v)| *new += momentum * v);
    }
    let mut update = grad.to_vec();
    update.par_iter_mut().zip(&new).with_min_len(ELEMENTS).for_each(|(u, v)| *u += momentum * v);
    let orthogonal = match compute() {
        Compute::F32 => orthogonal::<f32>,
        Compute::Bf16 => orthogonal::<Pair>,
    };
    let update = match rows > columns {
        true => transposed(&orthogonal(transposed(&update, rows, columns), columns, rows), columns, rows),
        false => orthogonal(update, rows, columns),
    };
    let (kept, rate) = (kept as f32, rate as f32);
    let mut moved = flex::values(&tensor).to_vec();
    let pairs = moved.par_iter_mut().zip(&update).with_min_len(ELEMENTS);
    pairs.for_each(|(w, u)| *w = *w * kept - rate * u);
    Some((flex::tensor(moved, shape), flex::tensor(new, shape)))
}

/// Singular values of `[rows, columns]`, no taller than wide, brought near one; factors of products are packed as `E`.
fn orthogonal<E: Element>(mut x: Vec<f32>, rows: usize, columns: usize) -> Vec<f32> {
    let norm = (squares(&x).sqrt() as f32).max(LEAST_NORM);
    x.par_iter_mut().with_min_len(ELEMENTS).for_each(|x| *x /= norm);
    let (body, [a, b, c]) = (Body::widest(), QUINTIC);
    for _ in 0..ITERATIONS {
        let once = gram::<E>(body, Matrix::new(&x, rows, columns));
        // Symmetric, so that its square is its product with its transpose.
        let mut sum = gram::<E>(body, Matrix::new(&once, rows, rows));
        sum.par_iter_mut()
            .zip(&once)
            .with_min_len(ELEMENTS)
            .for_each(|(sum, once)| *sum = b * once + c * *sum);
        sum.iter_mut().step_by(rows + 1).for_each(|diagonal| *diagonal += a);
        x = product::<E>(body, Matrix::new(&sum, rows, rows), Matrix::new(&x, rows, columns));
    }
    x
}

/// Sum of squares, always added up in the same order.
pub(crate) fn squares(x: &[f32]) -> f64 {
    let of = |part: &[f32]| part.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>();
    let parts: Vec<f64> = x.par_chunks(ELEMENTS).map(of).collect();
    parts.iter().sum()
}

fn transposed(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    const TILE: usize = 32;
    let mut y = vec![0f32; x.len()];
    y.par_chunks_mut(TILE * rows).enumerate().for_each(|(tile, y)| {
        let from = tile * TILE;
        for start in (0..rows).step_by(TILE) {
            for (c, y) in y.chunks_exact_mut(rows).enumerate() {
                for (r, y) in y[start..rows.min(start + TILE)].iter_mut().enumerate() {
                    *y = x[(start + r) * columns + from + c];
                }
            }
        }
    });
    y
}
