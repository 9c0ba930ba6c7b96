//! Products of matrices that are used once or twice, as in training: both are packed on the way.
//!
//! Every element is one sum in one order, whatever the number of threads and however the work is cut, so
//! that neither timing nor other rows change a bit of it. Factors are packed as they are ([`f32`]) or rounded to
//! bf16 ([`Pair`](crate::simd::Pair)); sums are f32.

mod pack;

pub use pack::{Left, Matrix, Right};

use crate::simd::{Body, Element, Op, PANEL, RowGroup, Simd, Tile, Vector};
use rayon::prelude::*;
use std::{mem::MaybeUninit, ops::Range};

/// Multiplications below which threads cost more than they bring.
const PARALLEL: usize = 1 << 20;
/// Rows and steps of a block, which is read for every panel: a third of a megabyte, for the second cache.
const ROWS: usize = 144;
const STEPS: usize = 576;
/// Panels of a task.
const PANELS: usize = 12;
/// Most rows computed at once.
const MAX_PADDED: usize = 12;

/// `a b`, `[m, n]` row-major.
pub fn product<E: Element>(body: Body, a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
    packed_product::<E>(body, &Left::pack(body, a), &Right::pack(body, b))
}

/// `a aᵀ`, `[m, m]`: one half is computed, and is the other.
pub fn gram<E: Element>(body: Body, a: Matrix<'_>) -> Vec<f32> {
    let (left, right) = (Left::<E>::pack(body, a), Right::pack(body, a.turned()));
    let n = a.rows;
    let write = |y: &mut [MaybeUninit<f32>]| {
        fill(body, &left, &right, y, true);
        for i in 0..n {
            for j in 0..i {
                y[i * n + j] = y[j * n + i];
            }
        }
    };
    // SAFETY: no tile above or on the diagonal is left out, and what lies below it is written after.
    unsafe { filled(n * n, left.steps, write) }
}

/// [`product`] of packed factors.
pub fn packed_product<E: Element>(body: Body, a: &Left<E>, b: &Right<E>) -> Vec<f32> {
    assert_eq!(a.steps, b.steps, "the factors fit each other");
    // SAFETY: all tiles together are the result.
    unsafe { filled(a.rows() * b.columns, a.steps, |y| fill(body, a, b, y, false)) }
}

/// A result that is not zeroed before `write` writes it: sums of `steps` products.
///
/// # Safety
/// `write` writes every element.
unsafe fn filled(length: usize, steps: usize, write: impl FnOnce(&mut [MaybeUninit<f32>])) -> Vec<f32> {
    if steps == 0 {
        return vec![0.0; length];
    }
    let mut y = Vec::with_capacity(length);
    write(&mut y.spare_capacity_mut()[..length]);
    // SAFETY: the caller's.
    unsafe { y.set_len(length) };
    y
}

/// [`packed_product`] on this thread, into the rows of `y`; added to what is there if `accumulate`.
pub fn product_into<E: Element>(body: Body, a: &Left<E>, b: &Right<E>, y: &mut [f32], accumulate: bool) {
    assert_eq!((a.steps, y.len()), (b.steps, a.rows() * b.columns));
    let cells = Cells { y: y.as_mut_ptr(), output: b.columns };
    for groups in a.groups.chunks(ROWS / MAX_PADDED) {
        let panels = 0..b.columns.div_ceil(PANEL);
        body.run(Block { a, b, cells, groups, panels, upper: false, accumulate });
    }
}

/// Writes the product; if only its `upper` half is wanted, no tiles that lie below the diagonal.
fn fill<E: Element>(body: Body, a: &Left<E>, b: &Right<E>, y: &mut [MaybeUninit<f32>], upper: bool) {
    assert_eq!((a.steps, y.len()), (b.steps, a.rows() * b.columns), "the factors fit each other");
    let cells = Cells { y: y.as_mut_ptr().cast(), output: b.columns };
    let panels = b.columns.div_ceil(PANEL);
    let tasks: Vec<_> = a
        .groups
        .chunks(ROWS / MAX_PADDED)
        .flat_map(|groups| {
            (0..panels).step_by(PANELS).map(move |from| (groups, from..panels.min(from + PANELS)))
        })
        .collect();
    let run = |(groups, panels)| {
        body.run(Block { a, b, cells, groups, panels, upper, accumulate: false });
    };
    if y.len() * a.steps < PARALLEL {
        tasks.into_iter().for_each(run);
    } else {
        tasks.into_par_iter().for_each(run);
    }
}

/// A result that tasks fill, each its own part.
#[derive(Clone, Copy)]
struct Cells {
    y: *mut f32,
    output: usize,
}

// SAFETY: every element is written by one task only.
unsafe impl Send for Cells {}
// SAFETY: as above.
unsafe impl Sync for Cells {}

/// Some rows times some panels.
struct Block<'a, E> {
    a: &'a Left<E>,
    b: &'a Right<E>,
    cells: Cells,
    groups: &'a [RowGroup],
    panels: Range<usize>,
    /// Whether tiles below the diagonal are left out.
    upper: bool,
    accumulate: bool,
}

impl<E: Element> Op for Block<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, simd: Simd<V>) {
        let Self { a, b, cells, groups, panels, upper, accumulate } = self;
        for from in (0..a.steps).step_by(STEPS) {
            let steps = STEPS.min(a.steps - from);
            for panel in panels.clone() {
                let w = &b.packed[(panel * b.steps + from) * PANEL..][..steps * PANEL];
                let width = PANEL.min(b.columns - panel * PANEL);
                for &RowGroup { row, rows, padded, at } in groups {
                    if upper && (panel + 1) * PANEL <= row {
                        continue;
                    }
                    let x = &a.packed[at + from * padded..][..steps * padded];
                    let accumulate = accumulate || from > 0;
                    let tile = Tile { x, rows, padded, w, stride: PANEL, steps, accumulate };
                    // SAFETY: the rows and columns are the result's, and this task's alone.
                    unsafe {
                        let y = cells.y.add(row * cells.output + panel * PANEL);
                        if width == PANEL {
                            simd.tile_at(&tile, y, cells.output);
                            continue;
                        }
                        let mut block = [0f32; MAX_PADDED * PANEL];
                        if accumulate {
                            for r in 0..rows {
                                let from = y.add(r * cells.output);
                                std::ptr::copy_nonoverlapping(from, block[r * PANEL..].as_mut_ptr(), width);
                            }
                        }
                        simd.tile(&tile, &mut block, PANEL);
                        for r in 0..rows {
                            let to = y.add(r * cells.output);
                            std::ptr::copy_nonoverlapping(block[r * PANEL..].as_ptr(), to, width);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Pair, bf16};
    use proptest::prelude::*;

    fn values(n: usize, seed: u32) -> Vec<f32> {
        let mut x = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        let mut next = || {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (x >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    fn transposed(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
        (0..x.len()).map(|i| x[i % rows * columns + i / rows]).collect()
    }

    fn naive(a: &[f32], b: &[f32], m: usize, k: usize, n: usize) -> Vec<f64> {
        let dot = |r: usize, c: usize| {
            (0..k).map(|i| f64::from(a[r * k + i]) * f64::from(b[i * n + c])).sum::<f64>()
        };
        (0..m * n).map(|i| dot(i / n, i % n)).collect()
    }

    fn check(m: usize, k: usize, n: usize, seed: u32) {
        check_as::<f32>(m, k, n, seed, |x| x);
        check_as::<Pair>(m, k, n, seed, |x| f32::from_bits(u32::from(bf16(x)) << 16));
    }

    /// Factors packed as `E` are held against sums of products of what `rounded` makes of them.
    fn check_as<E: Element>(m: usize, k: usize, n: usize, seed: u32, rounded: fn(f32) -> f32) {
        let (a, b) = (values(m * k, seed), values(k * n, seed + 1));
        let (at, bt) = (transposed(&a, m, k), transposed(&b, k, n));
        let of = |x: &[f32]| x.iter().map(|x| rounded(*x)).collect::<Vec<_>>();
        let expected = naive(&of(&a), &of(&b), m, k, n);
        for body in Body::all() {
            let lefts = [Matrix::new(&a, m, k), Matrix::new(&at, k, m).turned()];
            let rights = [Matrix::new(&b, k, n), Matrix::new(&bt, n, k).turned()];
            let first = product::<E>(body, lefts[0], rights[0]);
            for (y, e) in first.iter().zip(&expected) {
                assert!((f64::from(*y) - e).abs() < 1e-5 * k as f64, "{y} {e}");
            }
            for left in lefts {
                for right in rights {
                    assert_eq!(product::<E>(body, left, right), first);
                }
            }
            let mut twice = first.clone();
            let (left, right) = (Left::<E>::pack(body, lefts[0]), Right::pack(body, rights[0]));
            product_into(body, &left, &right, &mut twice, true);
            for (y, e) in twice.iter().zip(&expected) {
                assert!((f64::from(*y) - 2.0 * e).abs() < 2e-5 * k as f64, "{y} {e}");
            }
            let mut again = vec![f32::NAN; first.len()];
            product_into(body, &left, &right, &mut again, false);
            assert_eq!(again, first);
            assert_eq!(gram::<E>(body, lefts[0]), product::<E>(body, lefts[0], lefts[0].turned()));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn products_of_matrices_as_they_lie_and_turned_equal_the_sums(
            m in 1usize..80, k in 1usize..40, n in 1usize..80, seed in 0u32..1000,
        ) {
            check(m, k, n, seed);
        }
    }

    /// A block none of whose slots counts has no rows, and a sum over them no terms.
    #[test]
    fn matrices_of_no_rows_give_nothing_and_sums_of_nothing_are_zero() {
        let (body, x) = (Body::widest(), values(40, 1));
        assert!(product::<f32>(body, Matrix::new(&[], 0, 5), Matrix::new(&x, 5, 8)).is_empty());
        assert_eq!(product::<f32>(body, Matrix::new(&[], 30, 0), Matrix::new(&[], 0, 40)), [0.0; 1200]);
    }

    #[test]
    fn matrices_of_several_blocks_and_threads() {
        check(301, 1300, 451, 7);
    }

    #[test]
    fn matrices_beside_and_below_one_another_are_one() {
        // In pairs, a part of an odd number of steps ends with half a pair, and the sums with it.
        beside_and_below::<f32>();
        beside_and_below::<Pair>();
    }

    fn beside_and_below<E: Element>() {
        let (a, b) = (values(5 * 7, 1), values(7 * 40, 2));
        let body = Body::widest();
        let parts = [Matrix::new(&b[..3 * 40], 3, 40), Matrix::new(&b[3 * 40..], 4, 40)];
        let (at, head) = (transposed(&a, 5, 7), transposed(&transposed(&a, 5, 7)[..3 * 5], 3, 5));
        let sides = [Matrix::new(&head, 5, 3), Matrix::new(&at[3 * 5..], 4, 5).turned()];
        let whole = product::<E>(body, Matrix::new(&a, 5, 7), Matrix::new(&b, 7, 40));
        let (left, right) = (Left::<E>::pack_all(body, &sides), Right::pack_all(body, &parts));
        for (found, whole) in packed_product(body, &left, &right).iter().zip(whole) {
            assert!((found - whole).abs() < 1e-5, "{found} {whole}");
        }
    }
}
