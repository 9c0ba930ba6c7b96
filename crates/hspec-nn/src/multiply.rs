//! Products of rows with packed weights, shared out among threads.

use crate::{
    panels::Panels,
    simd::{Body, Op, PANEL, RowGroup, Simd, Tile, Vector, Weight, gated, group_rows, pack_rows},
};
use rayon::prelude::*;
use std::borrow::Cow;

/// Multiplications below which threads cost more than they bring.
const PARALLEL: usize = 200_000;
/// Most rows computed at once.
const MAX_PADDED: usize = 12;

/// A matrix's panels.
#[derive(Clone, Copy)]
pub(crate) enum Matrix<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u32]),
}

/// Rows `[m, in]` as tiles read them.
struct Rows<'a> {
    groups: Vec<RowGroup>,
    packed: Cow<'a, [f32]>,
    input: usize,
}

impl<'a> Rows<'a> {
    fn new(body: Body, x: &'a [f32], input: usize) -> Self {
        let m = x.len() / input;
        let groups = group_rows(body, m, input);
        if m == 1 {
            return Self { groups, packed: Cow::Borrowed(x), input };
        }
        let size = groups.last().map_or(0, |g| g.at + g.padded * input);
        let mut packed = vec![0f32; size];
        let mut blocks = Vec::with_capacity(groups.len());
        let mut rest = packed.as_mut_slice();
        for group in &groups {
            let (block, after) = rest.split_at_mut(group.padded * input);
            blocks.push((block, *group));
            rest = after;
        }
        if size < PARALLEL {
            blocks.into_iter().for_each(|(block, group)| pack_rows(block, x, group, input));
        } else {
            blocks.into_par_iter().for_each(|(block, group)| pack_rows(block, x, group, input));
        }
        Self { groups, packed: Cow::Owned(packed), input }
    }

    fn tile<'t, W>(&'t self, group: RowGroup, w: &'t [W]) -> Tile<'t, W>
    where
        W: Weight<Factor = f32>,
    {
        let RowGroup { rows, padded, at, .. } = group;
        let x = &self.packed[at..at + padded * self.input];
        Tile { x, rows, padded, w, stride: W::STEP, steps: self.input, accumulate: false }
    }
}

/// A result `[m, out]` that threads fill, each its own columns.
#[derive(Clone, Copy)]
struct Columns {
    y: *mut f32,
    output: usize,
}

// SAFETY: every panel's columns are written by one task only.
unsafe impl Send for Columns {}
// SAFETY: as above.
unsafe impl Sync for Columns {}

impl Columns {
    fn new(y: &mut [f32], output: usize) -> Self {
        Self { y: y.as_mut_ptr(), output }
    }

    /// Copies a group's rows of 32 columns, as many as there are of them.
    ///
    /// # Safety
    /// The rows are among the result's, and no other task has this panel.
    unsafe fn write(self, panel: usize, group: RowGroup, tile: &[f32]) {
        let columns = PANEL.min(self.output - panel * PANEL);
        for r in 0..group.rows {
            // SAFETY: by contract.
            unsafe {
                let to = self.y.add((group.row + r) * self.output + panel * PANEL);
                std::ptr::copy_nonoverlapping(tile[r * PANEL..].as_ptr(), to, columns);
            }
        }
    }
}

/// `x [m, in]` times each of some matrices `[out, in]`: `[m, out]` each.
pub fn products(body: Body, x: &[f32], weights: &[&Panels]) -> Vec<Vec<f32>> {
    let Some(first) = weights.first() else { return Vec::new() };
    let input = first.shape()[1];
    let (rows, m) = (Rows::new(body, x, input), x.len() / input);
    let mut results: Vec<Vec<f32>> = weights.iter().map(|w| vec![0f32; m * w.shape()[0]]).collect();
    let mut tasks = Vec::new();
    for (y, w) in results.iter_mut().zip(weights) {
        let [output, width] = w.shape();
        assert_eq!(width, input, "matrices of one product have the same input");
        let y = Columns::new(y, output);
        tasks.extend((0..output.div_ceil(PANEL)).map(|panel| (y, w.matrix(), panel)));
    }
    share(tasks, m * input, |(y, w, panel)| body.run(Product { rows: &rows, y, w, panel }));
    results
}

/// `silu(x Gᵀ) · x Uᵀ` for two matrices of the same shape.
pub fn gated_product(body: Body, x: &[f32], gate: &Panels, up: &Panels) -> Vec<f32> {
    let [output, input] = gate.shape();
    assert_eq!(up.shape(), gate.shape(), "gate and up have the same shape");
    let (rows, m) = (Rows::new(body, x, input), x.len() / input);
    let mut result = vec![0f32; m * output];
    let y = Columns::new(&mut result, output);
    let tasks: Vec<usize> = (0..output.div_ceil(PANEL)).collect();
    share(tasks, 2 * m * input, |panel| {
        body.run(Gated { rows: &rows, y, gate: gate.matrix(), up: up.matrix(), panel });
    });
    result
}

/// Runs tasks of 32 columns, each of `per_column` multiplications per column.
fn share<T: Send>(tasks: Vec<T>, per_column: usize, run: impl Fn(T) + Send + Sync) {
    if tasks.len() * per_column * PANEL < PARALLEL {
        tasks.into_iter().for_each(run);
    } else {
        tasks.into_par_iter().for_each(run);
    }
}

struct Product<'a> {
    rows: &'a Rows<'a>,
    y: Columns,
    w: Matrix<'a>,
    panel: usize,
}

impl Op for Product<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, simd: Simd<V>) {
        match self.w {
            Matrix::F32(w) => self.over(simd, w),
            Matrix::Bf16(w) => self.over(simd, w),
        }
    }
}

impl Product<'_> {
    #[inline(always)]
    fn over<V: Vector, W: Weight<Factor = f32>>(&self, simd: Simd<V>, w: &[W]) {
        let Self { rows, y, panel, .. } = *self;
        let w = panel_of(w, panel, rows.input);
        let whole = (panel + 1) * PANEL <= y.output;
        for &group in &rows.groups {
            let tile = rows.tile(group, w);
            if whole {
                // SAFETY: the rows are the result's, the panel's 32 columns are all there and this task's.
                unsafe { simd.tile_at(&tile, y.y.add(group.row * y.output + panel * PANEL), y.output) };
            } else {
                let mut block = [0f32; MAX_PADDED * PANEL];
                simd.tile(&tile, &mut block, PANEL);
                // SAFETY: the rows are the result's, and this task has the panel.
                unsafe { y.write(panel, group, &block) };
            }
        }
    }
}

struct Gated<'a> {
    rows: &'a Rows<'a>,
    y: Columns,
    gate: Matrix<'a>,
    up: Matrix<'a>,
    panel: usize,
}

impl Op for Gated<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, simd: Simd<V>) {
        match (self.gate, self.up) {
            (Matrix::F32(gate), Matrix::F32(up)) => self.over(simd, gate, up),
            (Matrix::Bf16(gate), Matrix::Bf16(up)) => self.over(simd, gate, up),
            _ => unreachable!("callers pair matrices of one storage"),
        }
    }
}

impl Gated<'_> {
    #[inline(always)]
    fn over<V: Vector, W: Weight<Factor = f32>>(&self, simd: Simd<V>, gate: &[W], up: &[W]) {
        let Self { rows, y, panel, .. } = *self;
        let (gate, up) = (panel_of(gate, panel, rows.input), panel_of(up, panel, rows.input));
        let (mut g, mut u) = ([0f32; MAX_PADDED * PANEL], [0f32; MAX_PADDED * PANEL]);
        for &group in &rows.groups {
            simd.tile(&rows.tile(group, gate), &mut g, PANEL);
            simd.tile(&rows.tile(group, up), &mut u, PANEL);
            gated(&mut g[..group.rows * PANEL], &u);
            // SAFETY: the rows are the result's, and this task has the panel.
            unsafe { y.write(panel, group, &g) };
        }
    }
}

fn panel_of<W: Weight>(w: &[W], panel: usize, input: usize) -> &[W] {
    &w[panel * input * W::STEP..(panel + 1) * input * W::STEP]
}
