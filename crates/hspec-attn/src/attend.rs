//! Attention of some queries over keys that lie where they are, in blocks of 32 keys: one pass with a running
//! maximum, no scores in memory.
//!
//! Blocks are counted from the first key of a segment, not from the first that is seen, and each query
//! follows its own maximum: its result is the same, bit for bit, whatever other queries are computed with it.

use hspec_nn::simd::{Body, Op, PANEL, RowGroup, Simd, Tile, Vector, exp, group_rows, pack_rows, turn};
use std::ops::Range;

/// Keys and values of one head, row by row.
#[derive(Debug)]
pub(crate) struct Segment<'a> {
    pub keys: &'a [f32],
    pub values: &'a [f32],
    /// From one row to the next.
    pub stride: usize,
    /// Which rows each query sees.
    pub seen: Vec<Range<usize>>,
}

/// Attention of `queries: [n, width]`, scaled already, over all segments together: `[n, width]`. Every query
/// sees at least one key.
pub(crate) fn attend(queries: &[f32], width: usize, segments: &[Segment<'_>]) -> Vec<f32> {
    let body = Body::widest();
    body.run(Attend { body, queries, width, segments })
}

struct Attend<'a> {
    body: Body,
    queries: &'a [f32],
    width: usize,
    segments: &'a [Segment<'a>],
}

/// What is known of each query so far.
struct Running {
    max: Vec<f32>,
    sum: Vec<f32>,
    /// `[n, padded width]`: values weighted by `exp(score - max)`.
    values: Vec<f32>,
}

/// Scores or weights of a group's queries for the keys of a block.
type Block = [f32; 12 * PANEL];

impl Op for Attend<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<V: Vector>(self, simd: Simd<V>) -> Vec<f32> {
        let Self { body, queries, width, segments } = self;
        let n = queries.len() / width;
        let padded = width.next_multiple_of(PANEL);
        let groups = group_rows(body, n, width);
        let mut packed = vec![0f32; groups.last().map_or(0, |g| g.at + g.padded * width)];
        for group in &groups {
            pack_rows(&mut packed[group.at..], queries, *group, width);
        }
        let mut state =
            Running { max: vec![f32::NEG_INFINITY; n], sum: vec![0.0; n], values: vec![0.0; n * padded] };
        let mut turned = vec![0f32; width * PANEL];
        let mut copied = vec![0f32; if padded == width { 0 } else { PANEL * padded }];
        for segment in segments {
            let first = segment.seen.iter().map(|s| s.start).min().unwrap_or(0) / PANEL * PANEL;
            let end = segment.seen.iter().map(|s| s.end).max().unwrap_or(0);
            for from in (first..end).step_by(PANEL) {
                let keys = PANEL.min(end - from);
                // Lanes without a key get the last one's; no query sees them.
                turn(&mut turned, PANEL, keys.next_multiple_of(8), |j| {
                    &segment.keys[(from + j.min(keys - 1)) * segment.stride..][..width]
                });
                let (values, stride) = if padded == width {
                    (&segment.values[from * segment.stride..], segment.stride)
                } else {
                    for (j, row) in copied.chunks_exact_mut(padded).take(keys).enumerate() {
                        row[..width].copy_from_slice(&segment.values[(from + j) * segment.stride..][..width]);
                    }
                    (copied.as_slice(), padded)
                };
                for &group in &groups {
                    let seen = &segment.seen[group.row..group.row + group.rows];
                    if seen.iter().all(|s| s.end <= from || s.start >= from + keys) {
                        continue;
                    }
                    let RowGroup { row, rows, padded: together, at } = group;
                    let x = &packed[at..at + together * width];
                    let mut block: Block = [0.0; 12 * PANEL];
                    let scores = Tile {
                        x,
                        rows,
                        padded: together,
                        w: turned.as_slice(),
                        stride: PANEL,
                        steps: width,
                        accumulate: false,
                    };
                    simd.tile(&scores, &mut block, PANEL);
                    let mut weights: Block = [0.0; 12 * PANEL];
                    for r in 0..rows {
                        let seen = inside(&seen[r], from, keys);
                        let lanes: &mut [f32; PANEL] =
                            (&mut block[r * PANEL..(r + 1) * PANEL]).try_into().expect("a panel's lanes");
                        state.weigh(row + r, lanes, seen, padded);
                    }
                    turn(&mut weights, together, together, |r| &block[r * PANEL..r * PANEL + keys]);
                    for column in (0..padded).step_by(PANEL) {
                        let weighted = Tile {
                            x: &weights[..keys * together],
                            rows,
                            padded: together,
                            w: &values[column..],
                            stride,
                            steps: keys,
                            accumulate: true,
                        };
                        simd.tile(&weighted, &mut state.values[row * padded + column..], padded);
                    }
                }
            }
        }
        state.finish(width, padded)
    }
}

impl Running {
    /// Turns a query's scores into weights for the keys `seen` of a block and zeros for the others, and
    /// rescales what there is to the new maximum.
    #[inline(always)]
    fn weigh(&mut self, query: usize, scores: &mut [f32; PANEL], seen: Range<usize>, padded: usize) {
        if seen.is_empty() {
            *scores = [0.0; PANEL];
            return;
        }
        let before = self.max[query];
        let hidden = |j: usize| j < seen.start || j >= seen.end;
        for (j, x) in scores.iter_mut().enumerate() {
            *x = if hidden(j) { f32::NEG_INFINITY } else { *x };
        }
        let max = before.max(fold(*scores, |a, b| if b > a { b } else { a }));
        for (j, x) in scores.iter_mut().enumerate() {
            let weight = exp(*x - max);
            *x = if hidden(j) { 0.0 } else { weight };
        }
        let sum = fold(*scores, |a, b| a + b);
        let kept = if before == f32::NEG_INFINITY { 0.0 } else { exp(before - max) };
        self.sum[query] = self.sum[query] * kept + sum;
        self.max[query] = max;
        if kept != 1.0 {
            for x in &mut self.values[query * padded..(query + 1) * padded] {
                *x *= kept;
            }
        }
    }

    #[inline(always)]
    fn finish(self, width: usize, padded: usize) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.sum.len() * width);
        for (row, sum) in self.values.chunks_exact(padded).zip(&self.sum) {
            out.extend(row[..width].iter().map(|x| x / sum));
        }
        out
    }
}

/// All lanes in one, by halves: registers do this side by side.
#[inline(always)]
fn fold(mut lanes: [f32; PANEL], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = PANEL / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = join(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// The part of `seen` that lies in the block at `from`, counted from there.
#[inline(always)]
fn inside(seen: &Range<usize>, from: usize, keys: usize) -> Range<usize> {
    seen.start.saturating_sub(from).min(keys)..seen.end.saturating_sub(from).min(keys)
}
