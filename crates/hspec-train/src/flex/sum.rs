//! Logits that are a sum of products, a few blocks at a time: from the products to the gradients of their
//! factors, so that neither logits nor their gradient are ever all there.

use super::{Bench, Block, Slot};
use burn::tensor::{Tensor, backend::Backend};
use burn_flex::FlexTensor;
use hspec_core::drafter::Term;
use hspec_nn::{
    autocast::{Compute, compute},
    flex,
    gemm::{Left, Matrix, Right, product_into},
    simd::{Body, Element, Pair},
};
use rayon::prelude::*;

/// Parts that blocks are split into, each summing the gradients of the weights on its own: so many whatever the
/// number of threads, as the order of a sum decides about its last bits.
const PARTS: usize = 16;
/// Blocks whose logits are there at once: few enough for the caches.
const BLOCKS: usize = 16;

/// A term's values.
struct Factors<E> {
    rows: FlexTensor,
    weight: FlexTensor,
    /// `[Vd, d]`, for the way back.
    back: Right<E>,
    width: usize,
    /// Whether the weight learns.
    learns: bool,
}

/// What a part of the blocks gives.
struct Part {
    slots: Vec<Slot>,
    /// Gradients of each term's rows, those of the part.
    rows: Vec<Vec<f32>>,
    /// Gradients of the weights that learn.
    weights: Vec<Vec<f32>>,
}

/// Judges slots by the sum of `terms`; returns them and a scalar with the gradient.
pub(super) fn judged<B: Backend>(
    bench: &Bench<'_>,
    terms: &[Term<B>],
    k: usize,
) -> Option<(Vec<Slot>, Tensor<B, 1>)> {
    match compute() {
        Compute::F32 => judged_as::<B, f32>(bench, terms, k),
        Compute::Bf16 => judged_as::<B, Pair>(bench, terms, k),
    }
}

/// [`judged`], with the factors of all products packed as `E`.
fn judged_as<B: Backend, E: Element>(
    bench: &Bench<'_>,
    terms: &[Term<B>],
    k: usize,
) -> Option<(Vec<Slot>, Tensor<B, 1>)> {
    let (body, vocab) = (Body::widest(), bench.table.width);
    let factors = terms.iter().map(|term| {
        let (rows, weight) = (flex::tracked(&term.rows)?, flex::tracked(&term.weight)?);
        let width = term.weight.dims()[1];
        let back = Right::pack(body, Matrix::new(flex::values(&weight.primitive), vocab, width));
        let learns = weight.is_tracked();
        Some(Factors { rows: rows.primitive, weight: weight.primitive, back, width, learns })
    });
    let factors: Vec<Factors<E>> = factors.collect::<Option<_>>()?;
    let weights = factors.iter().map(|f| Matrix::new(flex::values(&f.weight), vocab, f.width).turned());
    let weights: Vec<Matrix<'_>> = weights.collect();
    let forward = Right::pack_all(body, &weights);

    let blocks = bench.mask.len() / k;
    let size = blocks.div_ceil(PARTS).max(1);
    let starts: Vec<usize> = (0..blocks).step_by(size).collect();
    let parts: Vec<Part> = starts
        .into_par_iter()
        .map(|from| part(bench, &factors, &forward, from..blocks.min(from + size), k))
        .collect();

    let mut slots = Vec::with_capacity(blocks * k);
    let mut of_rows = vec![Vec::new(); terms.len()];
    let mut of_weights: Vec<Vec<f32>> = vec![Vec::new(); terms.len()];
    for part in parts {
        slots.extend(part.slots);
        of_rows.iter_mut().zip(part.rows).for_each(|(all, part)| all.extend(part));
        for (all, part) in of_weights.iter_mut().zip(part.weights) {
            if all.is_empty() {
                *all = part;
            } else {
                all.par_iter_mut().zip(part).with_min_len(1 << 14).for_each(|(a, b)| *a += b);
            }
        }
    }
    let mut differentiable = Vec::new();
    for ((term, factors), (of_rows, of_weight)) in
        terms.iter().zip(&factors).zip(of_rows.into_iter().zip(of_weights))
    {
        differentiable.push(flex::pull(&term.rows, of_rows)?);
        if factors.learns {
            differentiable.push(flex::pull(&term.weight, of_weight)?);
        }
    }
    Some((slots, differentiable.into_iter().reduce(|a, b| a + b)?))
}

fn part<E: Element>(
    bench: &Bench<'_>,
    factors: &[Factors<E>],
    forward: &Right<E>,
    blocks: std::ops::Range<usize>,
    k: usize,
) -> Part {
    let (body, vocab) = (Body::widest(), bench.table.width);
    let slots = blocks.len() * k;
    let mut part = Part {
        slots: Vec::with_capacity(slots),
        rows: factors.iter().map(|f| vec![0f32; slots * f.width]).collect(),
        weights: factors
            .iter()
            .map(|f| if f.learns { vec![0f32; vocab * f.width] } else { Vec::new() })
            .collect(),
    };
    let start = blocks.start * k;
    let mut logits = Vec::new();
    for from in blocks.clone().step_by(BLOCKS) {
        let to = blocks.end.min(from + BLOCKS);
        let counted: Vec<usize> = (from * k..to * k).filter(|&i| bench.mask[i] > 0.0).collect();
        let x: Vec<Vec<f32>> = factors.iter().map(|f| gather(f, &counted)).collect();
        let left = Left::pack_all(
            body,
            &x.iter().zip(factors).map(|(x, f)| Matrix::new(x, counted.len(), f.width)).collect::<Vec<_>>(),
        );
        logits.resize(counted.len() * vocab, 0.0);
        product_into(body, &left, forward, &mut logits, false);

        let mut rows = logits.chunks_exact_mut(vocab);
        for block in from..to {
            let slots = block * k..(block + 1) * k;
            let rows = bench.mask[slots.clone()].iter().map(|m| if *m > 0.0 { rows.next() } else { None });
            part.slots.extend(Block { bench, first: slots.start, rows: rows.collect() }.judge());
        }

        let gradient = Matrix::new(&logits, counted.len(), vocab);
        let left = Left::<E>::pack(body, gradient);
        for (t, f) in factors.iter().enumerate() {
            let mut dx = vec![0f32; counted.len() * f.width];
            product_into(body, &left, &f.back, &mut dx, false);
            for (&slot, dx) in counted.iter().zip(dx.chunks_exact(f.width)) {
                part.rows[t][(slot - start) * f.width..][..f.width].copy_from_slice(dx);
            }
            if f.learns {
                let x = Right::<E>::pack(body, Matrix::new(&x[t], counted.len(), f.width));
                product_into(body, &Left::pack(body, gradient.turned()), &x, &mut part.weights[t], true);
            }
        }
    }
    part
}

/// The term's rows of some slots.
fn gather<E>(factors: &Factors<E>, slots: &[usize]) -> Vec<f32> {
    let (rows, width) = (flex::values(&factors.rows), factors.width);
    slots.iter().flat_map(|&i| &rows[i * width..(i + 1) * width]).copied().collect()
}
