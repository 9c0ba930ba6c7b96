//! DFlash-2's convolution over the slots of a block.

use crate::{B, Weights, close, filled, floats, matrix, numbers, tensor, weights};
use burn::tensor::Tensor;
use hspec_heads::BlockConv;
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Case {
    n: usize,
    k: usize,
    taps: usize,
    groups: usize,
    size: usize,
    /// `[n, k, groups · size]` each: input and output of the sub-layer.
    x: Vec<f32>,
    y: Vec<f32>,
    weights: Weights,
}

fn cases() -> impl Strategy<Value = Case> {
    (1..4usize, 1..6usize, 1..4usize, 1..4usize, 1..4usize).prop_flat_map(|(n, k, taps, groups, size)| {
        let empty = BlockConv::<B>::identity(groups * size, taps, size, &Default::default());
        let count = n * k * groups * size;
        (floats(count), floats(count), weights(&empty)).prop_map(move |(x, y, weights)| Case {
            n,
            k,
            taps,
            groups,
            size,
            x,
            y,
            weights,
        })
    })
}

impl Case {
    fn conv(&self) -> BlockConv<B> {
        let empty = BlockConv::identity(self.channels(), self.taps, self.size, &Default::default());
        filled(empty, &self.weights)
    }

    fn channels(&self) -> usize {
        self.groups * self.size
    }

    fn shaped(&self, values: &[f32]) -> Tensor<B, 3> {
        tensor(values, [self.n, self.k, self.channels()])
    }

    /// One side of the equation, number by number.
    fn naive(&self, side: usize, values: &[f32]) -> Vec<f32> {
        let (c, taps, groups) = (self.channels(), self.taps, self.groups);
        let base =
            |tap: usize, channel: usize| self.weights["base_kernel"][(side * taps + tap) * c + channel];
        let mut out = vec![0.0; values.len()];
        for row in 0..self.n * self.k {
            let delta = matrix(&self.weights["kernel_projection.weight"], &self.x[row * c..][..c]);
            for channel in 0..c {
                for tap in 0..taps.min(row % self.k + 1) {
                    let dynamic = delta[(side * taps + tap) * groups + channel / self.size];
                    out[row * c + channel] +=
                        (base(tap, channel) + dynamic) * values[(row - tap) * c + channel];
                }
            }
        }
        out
    }
}

proptest! {
    #[test]
    fn both_sides_are_what_the_equation_says(case in cases()) {
        let conv = case.conv();
        let (x, kernel) = conv.prepare(case.shaped(&case.x));
        close(&numbers(x), &case.naive(0, &case.x))?;
        close(&numbers(conv.finish(case.shaped(&case.y), kernel)), &case.naive(1, &case.y))?;
    }

    /// Neither block nor slot: a block's first slot sees zeros before it, and no slot sees a later one.
    #[test]
    fn no_slot_sees_the_slots_behind_it_or_another_block(case in cases(), from in 0..6usize) {
        let conv = case.conv();
        let from = from.min(case.k);
        let mut other = case.clone();
        let c = case.channels();
        let changed = |i: usize| (i / c) % case.k >= from || i / c / case.k > 0;
        for values in [&mut other.x, &mut other.y] {
            values.iter_mut().enumerate().filter(|(i, _)| changed(*i)).for_each(|(_, x)| *x += 1.0);
        }
        let run = |case: &Case| numbers(conv.around(case.shaped(&case.x), |_| case.shaped(&case.y)));
        close(&run(&case)[..from * c], &run(&other)[..from * c])?;
    }

    #[test]
    fn a_fresh_convolution_changes_nothing(case in cases()) {
        let fresh = BlockConv::<B>::identity(case.channels(), case.taps, case.size, &Default::default());
        let double = |x: Tensor<B, 3>| x.mul_scalar(2.0);
        let twice: Vec<f32> = case.x.iter().map(|x| 2.0 * x).collect();
        prop_assert_eq!(numbers(fresh.around(case.shaped(&case.x), double)), twice);
    }
}
