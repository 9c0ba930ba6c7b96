//! The one product that everything is made of: a few rows times a panel of 32 columns.

use super::{Body, Element, Vector};
use std::marker::PhantomData;

/// Columns of a panel.
pub const PANEL: usize = 32;
/// Bytes that weights are asked for ahead of their use.
const AHEAD: usize = 6144;

/// How a panel's step of 32 weights is stored.
///
/// # Safety
/// `load` reads only the [`Weight::STEP`] elements of a step.
pub unsafe trait Weight: Copy + Send + Sync + 'static {
    /// Elements per step.
    const STEP: usize;
    /// What a row has at a step.
    type Factor: Copy;
    /// A register of weights, or of one factor.
    type Register<V: Vector>: Copy;
    /// Register `vector` of the step.
    ///
    /// # Safety
    /// As [`Vector`]; the whole step is readable at `at`.
    unsafe fn load<V: Vector>(at: *const Self, vector: usize) -> Self::Register<V>;
    /// All lanes the factor `x`.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn splat<V: Vector>(x: Self::Factor) -> Self::Register<V>;
    /// `sum + x w`.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn add<V: Vector>(sum: V, x: Self::Register<V>, w: Self::Register<V>) -> V;
}

// SAFETY: registers number 32 / LANES, side by side.
unsafe impl Weight for f32 {
    const STEP: usize = PANEL;
    type Factor = f32;
    type Register<V: Vector> = V;
    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const Self, vector: usize) -> V {
        unsafe { V::load(at.add(vector * V::LANES)) }
    }
    #[inline(always)]
    unsafe fn splat<V: Vector>(x: f32) -> V {
        unsafe { V::splat(x) }
    }
    #[inline(always)]
    unsafe fn add<V: Vector>(sum: V, x: V, w: V) -> V {
        unsafe { sum.add_product(x, w) }
    }
}

// SAFETY: sixteen words; columns 0..16 are their upper halves and 16..32 their lower halves, as bf16.
unsafe impl Weight for u32 {
    const STEP: usize = PANEL / 2;
    type Factor = f32;
    type Register<V: Vector> = V;
    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const Self, vector: usize) -> V {
        let half = PANEL / 2 / V::LANES;
        unsafe {
            if vector < half {
                V::upper(V::load_pairs(at.add(vector * V::LANES)))
            } else {
                V::lower(V::load_pairs(at.add((vector - half) * V::LANES)))
            }
        }
    }
    #[inline(always)]
    unsafe fn splat<V: Vector>(x: f32) -> V {
        unsafe { V::splat(x) }
    }
    #[inline(always)]
    unsafe fn add<V: Vector>(sum: V, x: V, w: V) -> V {
        unsafe { sum.add_product(x, w) }
    }
}

/// Rows that are computed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowGroup {
    /// The first row.
    pub row: usize,
    /// How many there are.
    pub rows: usize,
    /// How many are computed: those after `rows` repeat the last one, and nobody sees them.
    pub padded: usize,
    /// Where its block `[inner, padded]` begins among the packed rows.
    pub at: usize,
}

/// Splits `m` rows of length `inner` in the groups that a body computes at once.
pub fn group_rows(body: Body, m: usize, inner: usize) -> Vec<RowGroup> {
    let mut groups = Vec::with_capacity(m.div_ceil(4));
    let (mut row, mut at) = (0, 0);
    while row < m {
        let left = m - row;
        let padded = match (body.lanes(), left) {
            (_, 1) => 1,
            (_, 2) => 2,
            (_, 3 | 4) => 4,
            (16, 5..=8 | 13..=16) => 8,
            (16, _) => 12,
            (_, 7 | 8) => 4,
            (_, _) => 6,
        };
        let rows = padded.min(left);
        groups.push(RowGroup { row, rows, padded, at });
        row += rows;
        at += padded * inner;
    }
    groups
}

/// A group's rows of `x: [.., inner]` turned into `[inner, padded]`.
#[inline(always)]
pub fn pack_rows(packed: &mut [f32], x: &[f32], group: RowGroup, inner: usize) {
    let RowGroup { row, rows, padded, .. } = group;
    turn(packed, padded, padded, |r| {
        let row = row + r.min(rows - 1);
        &x[row * inner..(row + 1) * inner]
    });
}

/// Rows of the same length side by side: number `r < rows` goes to `r, r + stride, r + 2 stride ..`.
#[inline(always)]
pub fn turn<'a, E: Element>(to: &mut [E], stride: usize, rows: usize, row: impl Fn(usize) -> &'a [f32]) {
    let mut r = 0;
    while r < rows {
        // Stores of neighbours: single floats far apart would be scattered by the slowest of instructions.
        let to = &mut to[r..];
        r += match rows - r {
            8.. => neighbours(
                to,
                stride,
                [row(r), row(r + 1), row(r + 2), row(r + 3), row(r + 4), row(r + 5), row(r + 6), row(r + 7)],
            ),
            4.. => neighbours(to, stride, [row(r), row(r + 1), row(r + 2), row(r + 3)]),
            2.. => neighbours(to, stride, [row(r), row(r + 1)]),
            _ => neighbours(to, stride, [row(r)]),
        };
    }
}

#[inline(always)]
fn neighbours<E: Element, const N: usize>(to: &mut [E], stride: usize, rows: [&[f32]; N]) -> usize {
    E::turn(to, stride, rows);
    N
}

/// The right to use registers of type `V`: only [`Body::run`] makes one.
#[derive(Debug, Clone, Copy)]
pub struct Simd<V>(PhantomData<V>);

/// `y[r, c] = Σ_k x[k, r] w[k, c]` for `rows` of `padded` rows and 32 columns, steps in ascending order.
#[derive(Debug)]
pub struct Tile<'a, W: Weight> {
    /// Packed rows, `[steps, padded]`.
    pub x: &'a [W::Factor],
    /// Of the packed rows, how many there are really.
    pub rows: usize,
    /// Rows per step of `x`.
    pub padded: usize,
    /// `steps` times 32 weights.
    pub w: &'a [W],
    /// From one step's weights to the next's, in elements.
    pub stride: usize,
    /// Steps.
    pub steps: usize,
    /// Whether to add to `y` and not to overwrite it.
    pub accumulate: bool,
}

impl<V: Vector> Simd<V> {
    /// # Safety
    /// The instructions of `V` are there, and the caller is compiled for them.
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        Self(PhantomData)
    }

    /// Computes a tile into `y`, whose rows lie `y_stride` apart.
    ///
    /// # Panics
    /// If a slice is shorter than the tile needs.
    #[inline(always)]
    pub fn tile<W: Weight>(self, tile: &Tile<'_, W>, y: &mut [f32], y_stride: usize) {
        assert!(tile.rows >= 1 && y.len() >= (tile.rows - 1) * y_stride + PANEL);
        // SAFETY: `y` holds every row of 32 columns.
        unsafe { self.tile_at(tile, y.as_mut_ptr(), y_stride) }
    }

    /// [`Simd::tile`] into memory that is shared with other columns' tiles.
    ///
    /// # Safety
    /// `y` is valid for 32 floats at each of `rows` multiples of `y_stride`, and nobody else uses them.
    #[inline(always)]
    pub unsafe fn tile_at<W: Weight>(self, tile: &Tile<'_, W>, y: *mut f32, y_stride: usize) {
        let Tile { x, rows, padded, w, stride, steps, .. } = *tile;
        assert!(rows <= padded && x.len() >= steps * padded);
        assert!(steps == 0 || w.len() >= (steps - 1) * stride + W::STEP);
        // Registers per row at once, so that sums, weights and one row's value fit the register file.
        // SAFETY: lengths were checked, and a `Simd<V>` exists only under the instructions of `V`.
        unsafe {
            match (V::LANES, padded) {
                (16, 1) => columns::<V, W, 1, 2>(tile, y, y_stride),
                (16, 2) => columns::<V, W, 2, 2>(tile, y, y_stride),
                (16, 4) => columns::<V, W, 4, 2>(tile, y, y_stride),
                (16, 8) => columns::<V, W, 8, 2>(tile, y, y_stride),
                (16, 12) => columns::<V, W, 12, 2>(tile, y, y_stride),
                (8, 1) => columns::<V, W, 1, 4>(tile, y, y_stride),
                (8, 2) => columns::<V, W, 2, 4>(tile, y, y_stride),
                (8, 4) => columns::<V, W, 4, 2>(tile, y, y_stride),
                (8, 6) => columns::<V, W, 6, 2>(tile, y, y_stride),
                (4, 1) => columns::<V, W, 1, 8>(tile, y, y_stride),
                (4, 2) => columns::<V, W, 2, 8>(tile, y, y_stride),
                (4, 4) => columns::<V, W, 4, 4>(tile, y, y_stride),
                (4, 6) => columns::<V, W, 6, 4>(tile, y, y_stride),
                _ => unreachable!("groups have these sizes"),
            }
        }
    }
}

/// All columns, `N` registers at a time.
#[inline(always)]
unsafe fn columns<V: Vector, W: Weight, const R: usize, const N: usize>(
    tile: &Tile<'_, W>,
    y: *mut f32,
    y_stride: usize,
) {
    unsafe {
        part::<V, W, R, N>(tile, y, y_stride, 0);
        if N * V::LANES < PANEL {
            part::<V, W, R, N>(tile, y, y_stride, N);
        }
    }
}

/// The columns of registers `first .. first + N`.
// Loops over indices, which the compiler unrolls so that the sums stay in registers.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn part<V: Vector, W: Weight, const R: usize, const N: usize>(
    tile: &Tile<'_, W>,
    y: *mut f32,
    y_stride: usize,
    first: usize,
) {
    let (mut x, mut w) = (tile.x.as_ptr(), tile.w.as_ptr());
    unsafe {
        let mut sums = [[V::splat(0.0); N]; R];
        if tile.accumulate {
            for r in 0..R {
                if r < tile.rows {
                    for n in 0..N {
                        sums[r][n] = V::load(y.add(r * y_stride + (first + n) * V::LANES));
                    }
                }
            }
        }
        for _ in 0..tile.steps {
            if first == 0 {
                V::prefetch(w.cast::<u8>().wrapping_add(AHEAD));
                if W::STEP * size_of::<W>() > 64 {
                    V::prefetch(w.cast::<u8>().wrapping_add(AHEAD + 64));
                }
            }
            let mut weights = [W::load::<V>(w, first); N];
            for n in 1..N {
                weights[n] = W::load::<V>(w, first + n);
            }
            for r in 0..R {
                let value = W::splat::<V>(*x.add(r));
                for n in 0..N {
                    sums[r][n] = W::add(sums[r][n], value, weights[n]);
                }
            }
            x = x.add(R);
            w = w.wrapping_add(tile.stride);
        }
        for r in 0..R {
            if r < tile.rows {
                for n in 0..N {
                    sums[r][n].store(y.add(r * y_stride + (first + n) * V::LANES));
                }
            }
        }
    }
}
