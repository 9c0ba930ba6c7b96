//! Rotary position embeddings in the half-split (`rotate_half`) convention.

use crate::Position;
use burn::tensor::{Tensor, TensorData, backend::Backend};

/// How the base frequencies are stretched for long contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Frequencies as they are.
    None,
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear blend between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original / high` are kept.
        high_freq_factor: f64,
        /// Context length before stretching.
        original_max_position: f64,
    },
}

/// The frequencies of one rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    inv_freq: Vec<f32>,
}

impl Rope {
    /// Frequencies `theta^(-2i/rotary_dim)`, scaled. `rotary_dim` is even and at most the head's
    /// width; dimensions past it are left alone.
    pub fn new(theta: f64, rotary_dim: usize, scaling: RopeScaling) -> Self {
        let base = |i: usize| {
            // The exponent and the power are rounded to f32 on the way, as the reference does.
            let exponent = (2 * i) as f32 / rotary_dim as f32;
            1.0 / f64::from(theta as f32).powf(f64::from(exponent)) as f32
        };
        let inv_freq = (0..rotary_dim / 2).map(|i| scale(base(i), scaling)).collect();
        Self { inv_freq }
    }

    /// Angular frequency of each rotated pair.
    pub fn inv_freq(&self) -> &[f32] {
        &self.inv_freq
    }

    /// Tables for rows laid out `[positions, heads]`: one row per position and head. Angles are f32
    /// position times f32 frequency: wider arithmetic would miss the cached keys of far positions.
    pub fn tables<B: Backend>(
        &self,
        positions: &[Position],
        heads: usize,
        device: &B::Device,
    ) -> RopeTables<B> {
        let half = self.inv_freq.len();
        let rows = positions.len() * heads;
        let (mut cos, mut sin) = (Vec::with_capacity(rows * 2 * half), Vec::with_capacity(rows * 2 * half));
        for &Position(p) in positions {
            let angles: Vec<f32> = self.inv_freq.iter().map(|f| p as f32 * f).collect();
            let c = angles.iter().map(|a| a.cos());
            let s = angles.iter().map(|a| a.sin());
            for _ in 0..heads {
                cos.extend(c.clone().chain(c.clone()));
                sin.extend(s.clone().map(|s| -s).chain(s.clone()));
            }
        }
        let tensor = |v| Tensor::from_data(TensorData::new(v, [rows, 2 * half]), device);
        RopeTables { cos: tensor(cos), sin: tensor(sin) }
    }
}

fn scale(f: f32, scaling: RopeScaling) -> f32 {
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } = scaling
    else {
        return f;
    };
    let (factor, low, high) = (factor as f32, low_freq_factor as f32, high_freq_factor as f32);
    let wavelength = 2.0 * std::f32::consts::PI / f;
    let original = original_max_position as f32;
    if wavelength > original / low {
        f / factor
    } else if wavelength < original / high {
        f
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * f / factor + smooth * f
    }
}

/// Cosines and signed sines for a batch of rows, shared by all layers of a forward pass.
#[derive(Debug, Clone)]
pub struct RopeTables<B: Backend> {
    /// `[rows, rotary_dim]`.
    cos: Tensor<B, 2>,
    /// `[rows, rotary_dim]`: the first half negated, so that a rotation is
    /// `x · cos + swap_halves(x) · sin`.
    sin: Tensor<B, 2>,
}

impl<B: Backend> RopeTables<B> {
    /// Rotates `x: [rows, head_dim]`.
    pub fn apply(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        #[cfg(feature = "flex")]
        if let Some(rotated) = crate::flex::rotate(&x, &self.cos, &self.sin) {
            return rotated;
        }
        let [_, width] = x.dims();
        let [_, rotary] = self.cos.dims();
        let turned = x.clone().narrow(1, 0, rotary);
        let turned = if rotary == width { x.clone() } else { hspec_nn::contiguous(turned) };
        let swapped = Tensor::cat(
            vec![turned.clone().narrow(1, rotary / 2, rotary / 2), turned.clone().narrow(1, 0, rotary / 2)],
            1,
        );
        let rotated = turned * self.cos.clone() + swapped * self.sin.clone();
        if rotary == width {
            rotated
        } else {
            Tensor::cat(vec![rotated, x.narrow(1, rotary, width - rotary)], 1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_abs_diff_eq;
    use proptest::prelude::*;
    type B = burn_ndarray::NdArray;

    fn turn(rope: &Rope, x: &[f32], position: usize) -> Vec<f32> {
        let device = Default::default();
        let row = Tensor::<B, 2>::from_data(TensorData::new(x.to_vec(), [1, x.len()]), &device);
        rope.tables(&[Position(position)], 1, &device).apply(row).into_data().to_vec().unwrap()
    }

    proptest! {
        /// Scores depend on the distance of two positions only.
        #[test]
        fn scores_depend_on_the_distance_only(
            q in proptest::collection::vec(-1f32..1.0, 8), k in proptest::collection::vec(-1f32..1.0, 8),
            a in 0usize..50, b in 0usize..50, shift in 0usize..100,
        ) {
            let rope = Rope::new(10_000.0, 8, RopeScaling::None);
            let score = |a, b| -> f32 {
                turn(&rope, &q, a).iter().zip(turn(&rope, &k, b)).map(|(x, y)| x * y).sum()
            };
            assert_abs_diff_eq!(score(a, b), score(a + shift, b + shift), epsilon = 1e-4);
        }
    }

    #[test]
    fn only_the_rotary_dimensions_turn() {
        let rope = Rope::new(10_000.0, 2, RopeScaling::None);
        let y = turn(&rope, &[1.0, 0.0, 5.0, 6.0], 3);
        assert_abs_diff_eq!(y[0], 3f32.cos(), epsilon = 1e-6);
        assert_abs_diff_eq!(y[1], 3f32.sin(), epsilon = 1e-6);
        assert_eq!(&y[2..], [5.0, 6.0]);
    }

    #[test]
    fn the_body_for_flex_turns_as_the_plain_one() {
        for rotary in [4, 6] {
            let rope = Rope::new(100.0, rotary, RopeScaling::None);
            let x: Vec<f32> = (0..4 * 6).map(|i| (i as f32 * 0.7).sin()).collect();
            let data = TensorData::new(x, [4, 6]);
            let device = Default::default();
            let plain = rope
                .tables::<B>(&[2, 9].map(Position), 2, &device)
                .apply(Tensor::from_data(data.clone(), &device));
            let device = Default::default();
            let tables = rope.tables::<burn_flex::Flex>(&[2, 9].map(Position), 2, &device);
            let fast = tables.apply(Tensor::from_data(data, &device));
            let (plain, fast): (Vec<f32>, Vec<f32>) =
                (plain.into_data().to_vec().unwrap(), fast.into_data().to_vec().unwrap());
            for (a, b) in plain.iter().zip(fast) {
                assert_abs_diff_eq!(*a, b, epsilon = 1e-6);
            }
        }
    }
}
