//! NEON: four lanes, thirty-two registers.

use super::{Op, Simd, Vector};
use std::arch::aarch64::*;

#[target_feature(enable = "neon")]
pub(super) fn run<O: Op>(op: O) -> O::Output {
    // SAFETY: this function's features are those that the type needs.
    op.run(unsafe { Simd::<float32x4_t>::new() })
}

// SAFETY of all bodies: the trait's contract.
unsafe impl Vector for float32x4_t {
    const LANES: usize = 4;
    type Pairs = uint32x4_t;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { vld1q_f32(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { vst1q_f32(to, self) }
    }
    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        unsafe { vfmaq_f32(self, a, b) }
    }
    #[inline(always)]
    unsafe fn splat_pair(x: u32) -> uint32x4_t {
        unsafe { vdupq_n_u32(x) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const u32) -> uint32x4_t {
        unsafe { vld1q_u32(from) }
    }
    #[inline(always)]
    unsafe fn upper(pairs: uint32x4_t) -> Self {
        unsafe { vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff_0000))) }
    }
    #[inline(always)]
    unsafe fn lower(pairs: uint32x4_t) -> Self {
        unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs)) }
    }
    #[inline(always)]
    fn prefetch<T>(_: *const T) {
        // Without a stable intrinsic; the machine sees that the reads are consecutive.
    }
}
