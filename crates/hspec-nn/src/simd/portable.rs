//! Eight lanes in plain Rust, for the compiler to put into whatever registers there are.

use super::Vector;

/// Eight floats.
#[derive(Clone, Copy)]
pub struct Lanes([f32; 8]);

// SAFETY of all bodies: pointers are valid by the trait's contract, and no instructions are needed.
unsafe impl Vector for Lanes {
    const LANES: usize = 8;
    type Pairs = [u32; 8];
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 8])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Self(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn add_product(mut self, a: Self, b: Self) -> Self {
        for l in 0..8 {
            self.0[l] += a.0[l] * b.0[l];
        }
        self
    }
    #[inline(always)]
    unsafe fn splat_pair(x: u32) -> [u32; 8] {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const u32) -> [u32; 8] {
        unsafe { from.cast::<[u32; 8]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn upper(pairs: [u32; 8]) -> Self {
        Self(pairs.map(|w| f32::from_bits(w & 0xffff_0000)))
    }
    #[inline(always)]
    unsafe fn lower(pairs: [u32; 8]) -> Self {
        Self(pairs.map(|w| f32::from_bits(w << 16)))
    }
    #[inline(always)]
    fn prefetch<T>(_: *const T) {}
}
