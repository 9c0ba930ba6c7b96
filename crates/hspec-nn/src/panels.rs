//! Weights in the order in which products read them.

use crate::{
    WeightStorage,
    memory::Memory,
    multiply::Matrix,
    simd::{PANEL, Weight, bf16},
};

/// A matrix `[out, in]` in panels of 32 outputs, `[out / 32, in, 32]`, the last panel filled up with zeros.
/// A product then reads all weights once, in order, whatever the number of rows.
pub struct Panels {
    output: usize,
    input: usize,
    stored: Stored,
}

enum Stored {
    F32(Memory),
    /// Two bf16 numbers per word, see [`Weight`].
    Bf16(Memory),
}

impl std::fmt::Debug for Panels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Panels [{}, {}] {:?}", self.output, self.input, self.storage())
    }
}

impl Panels {
    /// Packs `w: [out, in]`, row-major.
    pub fn pack(w: &[f32], output: usize, input: usize, storage: WeightStorage) -> Self {
        assert_eq!(w.len(), output * input);
        let row = |o: usize| &w[o * input..(o + 1) * input];
        let exact = storage == WeightStorage::Lossless && w.iter().all(|x| x.to_bits() & 0xffff == 0);
        let stored = match if exact { WeightStorage::Bf16 } else { storage } {
            WeightStorage::F32 | WeightStorage::Lossless => {
                let mut memory = Memory::zeroed::<f32>(output.div_ceil(PANEL) * input * f32::STEP);
                let weights = memory.weights_mut::<f32>();
                for o in 0..output {
                    let to = weights[o / PANEL * input * f32::STEP + o % PANEL..].iter_mut();
                    for (to, x) in to.step_by(f32::STEP).zip(row(o)) {
                        *to = *x;
                    }
                }
                Stored::F32(memory)
            }
            WeightStorage::Bf16 => {
                let mut memory = Memory::zeroed::<u32>(output.div_ceil(PANEL) * input * u32::STEP);
                let words = memory.weights_mut::<u32>();
                for o in 0..output {
                    let (lane, shift) = word(o);
                    let to = words[o / PANEL * input * u32::STEP + lane..].iter_mut();
                    for (to, x) in to.step_by(u32::STEP).zip(row(o)) {
                        *to |= u32::from(bf16(*x)) << shift;
                    }
                }
                Stored::Bf16(memory)
            }
        };
        Self { output, input, stored }
    }

    /// `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.output, self.input]
    }

    /// How the weights are stored: as f32 or as bf16.
    pub fn storage(&self) -> WeightStorage {
        match self.stored {
            Stored::F32(_) => WeightStorage::F32,
            Stored::Bf16(_) => WeightStorage::Bf16,
        }
    }

    /// Some rows of the matrix, one after the other.
    pub fn rows(&self, ids: impl ExactSizeIterator<Item = usize>) -> Vec<f32> {
        let mut rows = Vec::with_capacity(ids.len() * self.input);
        for o in ids {
            assert!(o < self.output, "row {o} of {}", self.output);
            match &self.stored {
                Stored::F32(memory) => {
                    let weights = &memory.weights::<f32>()[o / PANEL * self.input * f32::STEP + o % PANEL..];
                    rows.extend(weights.iter().step_by(f32::STEP).take(self.input));
                }
                Stored::Bf16(memory) => {
                    let (lane, shift) = word(o);
                    let words = &memory.weights::<u32>()[o / PANEL * self.input * u32::STEP + lane..];
                    let words = words.iter().step_by(u32::STEP).take(self.input);
                    rows.extend(words.map(|w| f32::from_bits(w >> shift << 16)));
                }
            }
        }
        rows
    }

    /// The matrix, row-major.
    pub fn unpack(&self) -> Vec<f32> {
        self.rows(0..self.output)
    }

    pub(crate) fn matrix(&self) -> Matrix<'_> {
        match &self.stored {
            Stored::F32(memory) => Matrix::F32(memory.weights()),
            Stored::Bf16(memory) => Matrix::Bf16(memory.weights()),
        }
    }
}

/// The word of a step that has an output's bf16 number, and at which bit it begins.
fn word(output: usize) -> (usize, u32) {
    let lane = output % PANEL;
    if lane < PANEL / 2 { (lane, 16) } else { (lane - PANEL / 2, 0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn packing_loses_nothing(output in 1usize..70, input in 1usize..20, seed in 0u32..1000) {
            let value = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) ^ seed) as f32 / 1e9 - 2.0;
            let w: Vec<f32> = (0..output * input).map(value).collect();
            let panels = Panels::pack(&w, output, input, WeightStorage::F32);
            prop_assert_eq!(panels.unpack(), w.clone());
            let narrow: Vec<f32> = w.iter().map(|x| f32::from_bits(u32::from(bf16(*x)) << 16)).collect();
            let panels = Panels::pack(&w, output, input, WeightStorage::Bf16);
            prop_assert_eq!(panels.unpack(), narrow.clone());
            let exact = Panels::pack(&narrow, output, input, WeightStorage::Lossless);
            prop_assert_eq!((exact.unpack(), exact.storage()), (narrow.clone(), WeightStorage::Bf16));
            let mut one = narrow;
            one[output * input - 1] = 0.1;
            let exact = Panels::pack(&one, output, input, WeightStorage::Lossless);
            prop_assert_eq!((exact.unpack(), exact.storage()), (one, WeightStorage::F32));
            let last = panels.rows([output - 1].into_iter());
            prop_assert_eq!(&last, &panels.unpack()[(output - 1) * input..]);
        }
    }
}
