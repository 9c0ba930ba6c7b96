//! Factors as tiles read them.

use crate::simd::{Body, Element, Op, PANEL, RowGroup, Simd, Vector, group_rows, turn};
use rayon::prelude::*;
use std::ops::Range;

/// Values below which packing is not shared out.
const PACKED: usize = 1 << 16;

/// A matrix in memory.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    values: &'a [f32],
    pub(super) rows: usize,
    columns: usize,
    turned: bool,
}

impl<'a> Matrix<'a> {
    /// `[rows, columns]`, row-major.
    ///
    /// # Panics
    /// If the number of values is another.
    pub fn new(values: &'a [f32], rows: usize, columns: usize) -> Self {
        assert_eq!(values.len(), rows * columns);
        Self { values, rows, columns, turned: false }
    }

    /// The transpose, of the same values.
    #[must_use]
    pub fn turned(self) -> Self {
        Self { rows: self.columns, columns: self.rows, turned: !self.turned, ..self }
    }

    /// Row `i` of a matrix as it lies, or column `i` of a turned one.
    #[inline(always)]
    fn line(&self, i: usize) -> &'a [f32] {
        let length = if self.turned { self.rows } else { self.columns };
        &self.values[i * length..(i + 1) * length]
    }

    /// Part of the lines of a step, as many as there are of `lines`.
    #[inline(always)]
    fn lines<E: Element>(&self, step: usize, lines: usize, part: Range<usize>) -> [Option<&'a [f32]>; 2] {
        [0, 1].map(|i| {
            let line = step * E::STEPS + i;
            (i < E::STEPS && line < lines).then(|| &self.line(line)[part.clone()])
        })
    }
}

/// Left factors `[m, k]` as tiles read them: groups of rows, `[k, padded]` each.
pub struct Left<E> {
    pub(super) groups: Vec<RowGroup>,
    pub(super) packed: Vec<E>,
    pub(super) steps: usize,
}

impl<E: Element> Left<E> {
    /// m.
    pub(super) fn rows(&self) -> usize {
        self.groups.last().map_or(0, |g| g.row + g.rows)
    }

    /// Packs `[m, k]`.
    pub fn pack(body: Body, a: Matrix<'_>) -> Self {
        Self::pack_all(body, &[a])
    }

    /// Packs matrices that lie side by side.
    ///
    /// # Panics
    /// Unless they have the same number of rows.
    pub fn pack_all(body: Body, parts: &[Matrix<'_>]) -> Self {
        let rows = parts.first().map_or(0, |a| a.rows);
        assert!(parts.iter().all(|a| a.rows == rows));
        let steps = parts.iter().map(|a| a.columns.div_ceil(E::STEPS)).sum();
        let groups = group_rows(body, rows, steps);
        let mut packed = vec![E::default(); groups.last().map_or(0, |g| g.at + g.padded * steps)];
        let mut blocks = Vec::with_capacity(groups.len());
        let mut rest = packed.as_mut_slice();
        for &group in &groups {
            let (block, after) = rest.split_at_mut(group.padded * steps);
            blocks.push((block, group));
            rest = after;
        }
        let pack = |(block, group): (&mut [E], RowGroup)| {
            let mut to = block;
            for &a in parts {
                let (block, rest) = to.split_at_mut(group.padded * a.columns.div_ceil(E::STEPS));
                body.run(Pack { block, group, a });
                to = rest;
            }
        };
        if rows * steps == 0 {
            // Nothing to pack: no rows, or sums of no products.
        } else if rows * steps < PACKED {
            blocks.into_iter().for_each(pack);
        } else {
            blocks.into_par_iter().for_each(pack);
        }
        Self { groups, packed, steps }
    }
}

struct Pack<'a, E> {
    block: &'a mut [E],
    group: RowGroup,
    a: Matrix<'a>,
}

impl<E: Element> Op for Pack<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, _: Simd<V>) {
        let Self { block, group, a } = self;
        let RowGroup { row, rows, padded, .. } = group;
        if a.turned {
            for (step, to) in block.chunks_exact_mut(padded).enumerate() {
                E::fill(&mut to[..rows], a.lines::<E>(step, a.columns, row..row + rows));
            }
        } else {
            turn(block, padded, padded, |r| a.line(row + r.min(rows - 1)));
        }
    }
}

/// Right factors `[k, n]` as tiles read them: panels of 32 columns, `[k, 32]` each.
pub struct Right<E> {
    pub(super) packed: Vec<E>,
    pub(super) steps: usize,
    pub(super) columns: usize,
}

impl<E: Element> Right<E> {
    /// Packs `[k, n]`.
    pub fn pack(body: Body, b: Matrix<'_>) -> Self {
        Self::pack_all(body, &[b])
    }

    /// Packs matrices that lie below one another.
    ///
    /// # Panics
    /// Unless they have the same number of columns.
    pub fn pack_all(body: Body, parts: &[Matrix<'_>]) -> Self {
        let columns = parts.first().map_or(0, |b| b.columns);
        assert!(parts.iter().all(|b| b.columns == columns));
        let steps = parts.iter().map(|b| b.rows.div_ceil(E::STEPS)).sum::<usize>();
        let mut packed = vec![E::default(); columns.div_ceil(PANEL) * steps * PANEL];
        let fill = |(panel, to): (usize, &mut [E])| {
            let mut to = to;
            for &b in parts {
                let (block, rest) = to.split_at_mut(b.rows.div_ceil(E::STEPS) * PANEL);
                body.run(PackPanel { block, panel, b });
                to = rest;
            }
        };
        if packed.is_empty() {
            // Nothing to pack, as above.
        } else if packed.len() < PACKED {
            packed.chunks_mut(steps * PANEL).enumerate().for_each(fill);
        } else {
            packed.par_chunks_mut(steps * PANEL).enumerate().for_each(fill);
        }
        Self { packed, steps, columns }
    }
}

struct PackPanel<'a, E> {
    block: &'a mut [E],
    panel: usize,
    b: Matrix<'a>,
}

impl<E: Element> Op for PackPanel<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<V: Vector>(self, _: Simd<V>) {
        let Self { block, panel, b } = self;
        let from = panel * PANEL;
        let width = PANEL.min(b.columns - from);
        if b.turned {
            turn(block, PANEL, width, |c| b.line(from + c));
        } else {
            for (step, to) in block.chunks_exact_mut(PANEL).enumerate() {
                E::fill(&mut to[..width], b.lines::<E>(step, b.rows, from..from + width));
            }
        }
    }
}
