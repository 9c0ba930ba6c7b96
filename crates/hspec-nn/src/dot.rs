//! Dot products of every weight row with a few rows, by the widest instructions of the machine.
//!
//! Each weight row is streamed once and multiplied with up to eight rows of `x` from the first cache. The
//! order of additions does not depend on how many rows there are: a row's result is the same, bit for bit,
//! alone and in company, so that verifying a block says what decoding its tokens one by one would.

/// The widest instructions that this machine has.
#[derive(Clone, Copy)]
pub(crate) enum Kernel {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Kernel {
    pub(crate) fn widest() -> Self {
        Self::all()[0]
    }

    /// What this machine can run, widest first.
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                all.push(Self::Avx512);
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                all.push(Self::Avx2);
            }
        }
        all.push(Self::Portable);
        all
    }

    /// `y [rows, m] = w [rows, input] x [m, input]ᵀ`.
    pub(crate) fn run(self, y: &mut [f32], w: &[f32], x: &[f32], m: usize, input: usize) {
        match self {
            // SAFETY: `all` found the features on this machine.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { x86::avx512(y, w, x, m, input) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { x86::avx2(y, w, x, m, input) },
            Self::Portable => rows::<[f32; 8]>(y, w, x, m, input),
        }
    }
}

/// A register of floats.
trait Vector: Copy {
    const LANES: usize;
    fn zero() -> Self;
    /// The first [`Self::LANES`] values of `from`, which has at least as many.
    fn load(from: &[f32]) -> Self;
    /// `self + a b`.
    fn add_product(self, a: Self, b: Self) -> Self;
    fn sum(self) -> f32;
}

impl Vector for [f32; 8] {
    const LANES: usize = 8;
    #[inline(always)]
    fn zero() -> Self {
        [0.0; 8]
    }
    #[inline(always)]
    fn load(from: &[f32]) -> Self {
        std::array::from_fn(|l| from[l])
    }
    #[inline(always)]
    fn add_product(self, a: Self, b: Self) -> Self {
        std::array::from_fn(|l| self[l] + a[l] * b[l])
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        self.iter().sum()
    }
}

/// Rows of `x` in groups whose sums fit the registers.
#[inline(always)]
fn rows<V: Vector>(y: &mut [f32], w: &[f32], x: &[f32], m: usize, input: usize) {
    for (y, w) in y.chunks_exact_mut(m).zip(w.chunks_exact(input)) {
        let mut r = 0;
        while r < m {
            let (y, x) = (&mut y[r..], &x[r * input..]);
            r += match m - r {
                8.. => group::<V, 8>(y, w, x),
                4.. => group::<V, 4>(y, w, x),
                2.. => group::<V, 2>(y, w, x),
                _ => group::<V, 1>(y, w, x),
            };
        }
    }
}

/// `y[r] = w · x[r]` for the first `R` rows of `x`; returns `R`.
#[inline(always)]
fn group<V: Vector, const R: usize>(y: &mut [f32], w: &[f32], x: &[f32]) -> usize {
    let n = w.len();
    let x: [&[f32]; R] = std::array::from_fn(|r| &x[r * n..(r + 1) * n]);
    let mut sums = [V::zero(); R];
    let whole = n / V::LANES * V::LANES;
    let mut at = 0;
    while at < whole {
        let weights = V::load(&w[at..at + V::LANES]);
        for r in 0..R {
            sums[r] = sums[r].add_product(weights, V::load(&x[r][at..at + V::LANES]));
        }
        at += V::LANES;
    }
    for r in 0..R {
        let tail: f32 = w[whole..].iter().zip(&x[r][whole..]).map(|(a, b)| a * b).sum();
        y[r] = sums[r].sum() + tail;
    }
    R
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Vector, rows};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512(y: &mut [f32], w: &[f32], x: &[f32], m: usize, input: usize) {
        rows::<__m512>(y, w, x, m, input);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2(y: &mut [f32], w: &[f32], x: &[f32], m: usize, input: usize) {
        rows::<__m256>(y, w, x, m, input);
    }

    // SAFETY of all bodies below: only the two functions above instantiate these types, under their
    // features; `load` reads from a slice whose length it has checked.
    impl Vector for __m512 {
        const LANES: usize = 16;
        #[inline(always)]
        fn zero() -> Self {
            unsafe { _mm512_setzero_ps() }
        }
        #[inline(always)]
        fn load(from: &[f32]) -> Self {
            assert!(from.len() >= Self::LANES);
            unsafe { _mm512_loadu_ps(from.as_ptr()) }
        }
        #[inline(always)]
        fn add_product(self, a: Self, b: Self) -> Self {
            unsafe { _mm512_fmadd_ps(a, b, self) }
        }
        #[inline(always)]
        fn sum(self) -> f32 {
            unsafe { _mm512_reduce_add_ps(self) }
        }
    }

    impl Vector for __m256 {
        const LANES: usize = 8;
        #[inline(always)]
        fn zero() -> Self {
            unsafe { _mm256_setzero_ps() }
        }
        #[inline(always)]
        fn load(from: &[f32]) -> Self {
            assert!(from.len() >= Self::LANES);
            unsafe { _mm256_loadu_ps(from.as_ptr()) }
        }
        #[inline(always)]
        fn add_product(self, a: Self, b: Self) -> Self {
            unsafe { _mm256_fmadd_ps(a, b, self) }
        }
        #[inline(always)]
        fn sum(self) -> f32 {
            let mut lanes = [0f32; 8];
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), self) };
            lanes.iter().sum()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every kernel of this machine against a plain sum in f64, and each row alone against the same
        /// row in company.
        #[test]
        fn every_kernel_equals_the_plain_sum(
            m in 1usize..=16, input in 1usize..70, output in 1usize..40, seed in 0u32..1000,
        ) {
            let value = |i: usize| ((i as u32).wrapping_mul(2_654_435_761).wrapping_add(seed) >> 16) as f32 / 65536.0 - 0.5;
            let x: Vec<f32> = (0..m * input).map(value).collect();
            let w: Vec<f32> = (0..output * input).map(|i| value(i + 7919)).collect();
            for kernel in Kernel::all() {
                let mut y = vec![0f32; output * m];
                kernel.run(&mut y, &w, &x, m, input);
                let mut alone = vec![0f32; output];
                for r in 0..m {
                    let x = &x[r * input..(r + 1) * input];
                    kernel.run(&mut alone, &w, x, 1, input);
                    for (o, alone) in alone.iter().enumerate() {
                        prop_assert_eq!(y[o * m + r].to_bits(), alone.to_bits());
                        let w = &w[o * input..(o + 1) * input];
                        let plain: f64 = w.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                        prop_assert!((f64::from(*alone) - plain).abs() < 1e-5 * (1.0 + input as f64));
                    }
                }
            }
        }
    }
}
