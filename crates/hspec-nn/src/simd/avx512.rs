//! AVX-512: sixteen lanes, thirty-two registers; with or without products of bf16 pairs in one instruction.

use super::{Op, Simd, Vector};
use std::arch::x86_64::*;

#[target_feature(enable = "avx512f")]
pub(super) fn run<O: Op>(op: O) -> O::Output {
    // SAFETY: this function's features are those that the type needs.
    op.run(unsafe { Simd::<Lanes<false>>::new() })
}

#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn run_bf16<O: Op>(op: O) -> O::Output {
    // SAFETY: as above.
    op.run(unsafe { Simd::<Lanes<true>>::new() })
}

/// Sixteen floats; `BF16` where the machine multiplies pairs of bf16 numbers.
#[derive(Clone, Copy)]
pub(super) struct Lanes<const BF16: bool>(__m512);

// SAFETY of all bodies: the trait's contract.
unsafe impl<const BF16: bool> Vector for Lanes<BF16> {
    const LANES: usize = 16;
    type Pairs = __m512i;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self(unsafe { _mm512_set1_ps(x) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Self(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        Self(unsafe { _mm512_fmadd_ps(a.0, b.0, self.0) })
    }
    #[inline(always)]
    unsafe fn splat_pair(x: u32) -> __m512i {
        unsafe { _mm512_set1_epi32(x as i32) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const u32) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn upper(pairs: __m512i) -> Self {
        let mask = 0xffff_0000_u32 as i32;
        Self(unsafe { _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(mask))) })
    }
    #[inline(always)]
    unsafe fn lower(pairs: __m512i) -> Self {
        Self(unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)) })
    }
    #[inline(always)]
    unsafe fn add_products(self, a: __m512i, b: __m512i) -> Self {
        unsafe {
            if BF16 {
                // The same bits under the name that the instruction's operands have.
                let [a, b] = [a, b].map(|x| std::mem::transmute::<__m512i, __m512bh>(x));
                return Self(_mm512_dpbf16_ps(self.0, a, b));
            }
            let sum = self.add_product(Self::upper(a), Self::upper(b));
            sum.add_product(Self::lower(a), Self::lower(b))
        }
    }
    #[inline(always)]
    fn prefetch<T>(at: *const T) {
        // SAFETY: a prefetch of an invalid address does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}
