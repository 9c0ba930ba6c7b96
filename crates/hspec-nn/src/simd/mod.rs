//! Arithmetic in the widest registers of the machine, chosen at run time.
//!
//! An [`Op`] is written once over any register ([`Vector`]); a [`Body`] runs it compiled for one set of
//! instructions. What an instruction set offers is in the file of its name, and nothing else there: all of
//! them compute in the same order, so a result differs between bodies at most by the rounding of a fused
//! multiplication and addition (and where bf16 numbers are multiplied in pairs by subnormals, which AVX-512 takes for
//! zero), and never by the number of rows that are computed together.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod element;
mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod tile;

pub use element::{Element, Pair, bf16};
pub use math::{exp, gated, rms_norm};
pub use tile::{PANEL, RowGroup, Simd, Tile, Weight, group_rows, pack_rows, turn};

/// A register of floats.
///
/// # Safety
/// Every method needs the instructions of its type, which [`Body::run`] makes sure of; pointers must be
/// valid for [`Vector::LANES`] elements, of any alignment.
#[allow(clippy::missing_safety_doc)] // it stands above, once for all
pub unsafe trait Vector: Copy {
    /// Floats in a register.
    const LANES: usize;
    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self;
    /// Lanes from memory.
    unsafe fn load(from: *const f32) -> Self;
    /// Lanes to memory.
    unsafe fn store(self, to: *mut f32);
    /// `self + a b`.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;
    /// A register of words, each two bf16 numbers.
    type Pairs: Copy;
    /// All lanes the word `x`.
    unsafe fn splat_pair(x: u32) -> Self::Pairs;
    /// Words from memory.
    unsafe fn load_pairs(from: *const u32) -> Self::Pairs;
    /// The upper halves of words, widened.
    unsafe fn upper(pairs: Self::Pairs) -> Self;
    /// The lower halves of words, widened.
    unsafe fn lower(pairs: Self::Pairs) -> Self;
    /// `self + a b`, the products of upper halves added before those of lower ones, as AVX-512's instruction does.
    #[inline(always)]
    unsafe fn add_products(self, a: Self::Pairs, b: Self::Pairs) -> Self {
        unsafe {
            let sum = self.add_product(Self::upper(a), Self::upper(b));
            sum.add_product(Self::lower(a), Self::lower(b))
        }
    }
    /// Asks for the cache line at an address, which need not be valid.
    fn prefetch<T>(at: *const T);
}

/// A computation over registers of any kind.
pub trait Op {
    /// What it returns.
    type Output;
    /// Computes; to be marked `#[inline(always)]`, so that it is compiled for each body.
    fn run<V: Vector>(self, simd: Simd<V>) -> Self::Output;
}

/// A set of instructions that this machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Body(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Body {
    /// The widest.
    pub fn widest() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                let products = is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512bw");
                return Self(if products { Kind::Avx512Bf16 } else { Kind::Avx512 });
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self(Kind::Avx2);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            return Self(Kind::Neon);
        }
        Self(Kind::Portable)
    }

    /// All that this machine can run, widest first.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::widest()];
        #[cfg(target_arch = "x86_64")]
        {
            if all[0].0 == Kind::Avx512Bf16 {
                all.push(Self(Kind::Avx512));
            }
            if all[0].lanes() == 16 && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                all.push(Self(Kind::Avx2));
            }
        }
        if all[0].0 != Kind::Portable {
            all.push(Self(Kind::Portable));
        }
        all
    }

    /// Floats in a register.
    pub fn lanes(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16 | Kind::Avx512 => 16,
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => 4,
            _ => 8,
        }
    }

    /// Runs an operation with these instructions.
    pub fn run<O: Op>(self, op: O) -> O::Output {
        match self.0 {
            // SAFETY: a body is only made after its instructions were found on this machine.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16 => unsafe { avx512::run_bf16(op) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => unsafe { avx512::run(op) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => unsafe { avx2::run(op) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => unsafe { neon::run(op) },
            // SAFETY: it needs no instructions that the whole program does not.
            Kind::Portable => op.run(unsafe { Simd::<portable::Lanes>::new() }),
        }
    }
}
