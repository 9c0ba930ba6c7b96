//! What the factors of a product in training are packed as: their values, or pairs of them as bf16.

use super::{PANEL, Vector, Weight};

/// A factor's values at one step of a [tile](super::Tile) or at several.
pub trait Element: Weight<Factor = Self> + Default {
    /// Values of a factor per step.
    const STEPS: usize;
    /// Puts the steps of rows of one length side by side, `stride` from one step to the next; what is missing at the
    /// end of the last one is zero.
    fn turn<const N: usize>(to: &mut [Self], stride: usize, rows: [&[f32]; N]);
    /// A step of neighbouring lines, whose values lie in `lines`, in the order of the steps, at most
    /// [`Element::STEPS`].
    fn fill(to: &mut [Self], lines: [Option<&[f32]>; 2]);
}

impl Element for f32 {
    const STEPS: usize = 1;
    #[inline(always)]
    fn turn<const N: usize>(to: &mut [Self], stride: usize, rows: [&[f32]; N]) {
        for (k, to) in to.chunks_mut(stride).take(rows[0].len()).enumerate() {
            for (to, row) in to[..N].iter_mut().zip(&rows) {
                *to = row[k];
            }
        }
    }
    #[inline(always)]
    fn fill(to: &mut [Self], lines: [Option<&[f32]>; 2]) {
        if let Some(line) = lines[0] {
            to.copy_from_slice(line);
        }
    }
}

/// Two bf16 numbers: that of an even step in the lower half, that of the odd one after it in the upper half.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Pair(u32);

impl Pair {
    #[inline(always)]
    fn new(even: f32, odd: f32) -> Self {
        Self(u32::from(bf16(even)) | u32::from(bf16(odd)) << 16)
    }

    /// A row's pairs, one behind the other.
    #[inline(always)]
    fn pack(to: &mut [Self], row: &[f32]) {
        let pairs = row.chunks_exact(2);
        if let [even] = pairs.remainder() {
            to[row.len() / 2] = Self::new(*even, 0.0);
        }
        to.iter_mut().zip(pairs).for_each(|(to, pair)| *to = Self::new(pair[0], pair[1]));
    }
}

impl Element for Pair {
    const STEPS: usize = 2;
    #[inline(always)]
    fn turn<const N: usize>(to: &mut [Self], stride: usize, rows: [&[f32]; N]) {
        /// Pairs that are rounded one behind the other, in registers, before they are put among the neighbours'.
        const CHUNK: usize = 64;
        let mut lines = [[Self::default(); CHUNK]; N];
        for from in (0..rows[0].len()).step_by(2 * CHUNK) {
            let part = from..rows[0].len().min(from + 2 * CHUNK);
            lines.iter_mut().zip(rows).for_each(|(line, row)| Self::pack(line, &row[part.clone()]));
            let to = to[from / 2 * stride..].chunks_mut(stride).take(part.len().div_ceil(2));
            for (k, to) in to.enumerate() {
                for (to, line) in to[..N].iter_mut().zip(&lines) {
                    *to = line[k];
                }
            }
        }
    }
    #[inline(always)]
    fn fill(to: &mut [Self], lines: [Option<&[f32]>; 2]) {
        match lines {
            [Some(even), Some(odd)] => {
                to.iter_mut().zip(even.iter().zip(odd)).for_each(|(to, (e, o))| *to = Self::new(*e, *o));
            }
            [Some(even), None] => {
                to.iter_mut().zip(even).for_each(|(to, e)| *to = Self::new(*e, 0.0));
            }
            _ => {}
        }
    }
}

// SAFETY: registers number 32 / LANES, side by side.
unsafe impl Weight for Pair {
    const STEP: usize = PANEL;
    type Factor = Self;
    type Register<V: Vector> = V::Pairs;
    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const Self, vector: usize) -> V::Pairs {
        unsafe { V::load_pairs(at.cast::<u32>().add(vector * V::LANES)) }
    }
    #[inline(always)]
    unsafe fn splat<V: Vector>(x: Self) -> V::Pairs {
        unsafe { V::splat_pair(x.0) }
    }
    #[inline(always)]
    unsafe fn add<V: Vector>(sum: V, x: V::Pairs, w: V::Pairs) -> V {
        unsafe { sum.add_products(x, w) }
    }
}

/// The upper half of the nearest bf16 number, ties to even; NaN stays NaN.
#[inline(always)]
pub fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let nearest = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { nearest }
}

#[cfg(test)]
mod tests {
    use super::bf16;

    #[test]
    fn bf16_rounds_to_the_nearest_even() {
        let widened = |x: f32| f32::from_bits(u32::from(bf16(x)) << 16);
        assert_eq!(widened(1.0 + 1.0 / 256.0), 1.0);
        assert_eq!(widened(1.0 + 3.0 / 256.0), 1.0 + 4.0 / 256.0);
        assert_eq!(widened(f32::NEG_INFINITY), f32::NEG_INFINITY);
        assert!(widened(f32::NAN).is_nan() && widened(f32::from_bits(0x7f80_0001)).is_nan());
        // All of a NaN's bits set: the carry of rounding would make it a zero.
        assert!(widened(f32::from_bits(0x7fff_ffff)).is_nan() && widened(f32::from_bits(u32::MAX)).is_nan());
    }
}
