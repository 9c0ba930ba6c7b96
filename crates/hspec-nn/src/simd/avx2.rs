//! AVX2 with fused multiplication and addition: eight lanes, sixteen registers.

use super::{Op, Simd, Vector};
use std::arch::x86_64::*;

#[target_feature(enable = "avx2,fma")]
pub(super) fn run<O: Op>(op: O) -> O::Output {
    // SAFETY: this function's features are those that the type needs.
    op.run(unsafe { Simd::<__m256>::new() })
}

// SAFETY of all bodies: the trait's contract.
unsafe impl Vector for __m256 {
    const LANES: usize = 8;
    type Pairs = __m256i;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm256_storeu_ps(to, self) }
    }
    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        unsafe { _mm256_fmadd_ps(a, b, self) }
    }
    #[inline(always)]
    unsafe fn splat_pair(x: u32) -> __m256i {
        unsafe { _mm256_set1_epi32(x as i32) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const u32) -> __m256i {
        unsafe { _mm256_loadu_si256(from.cast()) }
    }
    #[inline(always)]
    unsafe fn upper(pairs: __m256i) -> Self {
        let mask = 0xffff_0000_u32 as i32;
        unsafe { _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(mask))) }
    }
    #[inline(always)]
    unsafe fn lower(pairs: __m256i) -> Self {
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)) }
    }
    #[inline(always)]
    fn prefetch<T>(at: *const T) {
        // SAFETY: a prefetch of an invalid address does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}
