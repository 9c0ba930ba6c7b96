//! Rotations and the attention of blocks under autodiff, with their gradients.

use super::{Blocks, Rows, Shape, queries, rotated};
use crate::{Anchor, BlockRule, Prefix};
use burn::tensor::{Tensor, backend::Backend};
use burn_flex::FlexTensor;
use hspec_nn::{
    flex::{self, Gradient},
    gemm::{Left, Matrix, Right, product_into},
    simd::{Body, Op, Simd, Vector, exp},
};
use rayon::prelude::*;
use std::ops::Range;

/// [`super::rotate`].
pub(super) fn rotate<B: Backend>(
    x: &Tensor<B, 2>,
    cos: &Tensor<B, 2>,
    sin: &Tensor<B, 2>,
) -> Option<Tensor<B, 2>> {
    let (shape, rotary) = (x.dims(), cos.dims()[1]);
    let (x, cos, sin) = (flex::tracked(x)?, flex::tracked(cos)?, flex::tracked(sin)?);
    let turn = Turn { cos: cos.primitive, sin: sin.primitive, shape, rotary };
    let tables = (flex::values(&turn.cos), flex::values(&turn.sin));
    let y = flex::primitive(rotated(flex::values(&x.primitive), shape[1], tables, rotary), shape);
    Some(flex::node([x], y, turn))
}

#[derive(Debug, Clone)]
struct Turn {
    cos: FlexTensor,
    sin: FlexTensor,
    shape: [usize; 2],
    rotary: usize,
}

impl Gradient<1> for Turn {
    /// The other way round.
    fn backward(self, dy: &FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let sin: Vec<f32> = flex::values(&self.sin).iter().map(|s| -s).collect();
        let tables = (flex::values(&self.cos), sin.as_slice());
        let dx = rotated(flex::values(dy), self.shape[1], tables, self.rotary);
        [Some(flex::primitive(dx, self.shape))]
    }
}

/// [`super::blocks`]; none where a prefix learns.
pub(super) fn blocks<B: Backend>(
    q: &Tensor<B, 2>,
    own: (&Tensor<B, 2>, &Tensor<B, 2>),
    anchors: &[Anchor],
    prefix: Option<&Prefix<B>>,
    rule: &BlockRule,
    d: usize,
) -> Option<Tensor<B, 2>> {
    let (shape, own_shape) = (q.dims(), own.0.dims());
    let prefix = match prefix {
        Some(p) => {
            let (keys, values) = (flex::tracked(&p.keys)?, flex::tracked(&p.values)?);
            if keys.is_tracked() || values.is_tracked() {
                return None;
            }
            Some((Rows::of(keys.primitive), Rows::of(values.primitive)))
        }
        None => None,
    };
    let (q, keys, values) = (flex::tracked(q)?, flex::tracked(own.0)?, flex::tracked(own.1)?);
    let blocks = Blocks {
        q: q.primitive.clone(),
        keys: keys.primitive.clone(),
        values: values.primitive.clone(),
        prefix,
        anchors: anchors.to_vec(),
        rule: *rule,
        shape: Shape { heads: shape[1] / d, rep: shape[1] / own_shape[1], d },
    };
    let out = flex::primitive(blocks.attend(), shape);
    Some(flex::node([q, keys, values], out, blocks))
}

impl Gradient<3> for Blocks {
    fn backward(self, output: &FlexTensor, _: [bool; 3]) -> [Option<FlexTensor>; 3] {
        let ((k, kv), Shape { heads, rep, d }) = (self.sizes(), self.shape);
        let (rows, width, own_width) = (self.anchors.len() * k, heads * d, kv * d);
        let mut dq = vec![0f32; rows * width];
        let (mut d_keys, mut d_values) = (vec![0f32; rows * own_width], vec![0f32; rows * own_width]);
        let dy = flex::values(output);
        let of_keys = d_keys.par_chunks_mut(k * own_width).zip(d_values.par_chunks_mut(k * own_width));
        dq.par_chunks_mut(k * width).zip(of_keys).enumerate().for_each(
            |(block, (dq, (d_keys, d_values)))| {
                for head in 0..kv {
                    let part = self.head(block, head, dy);
                    for t in 0..k {
                        let to = &mut dq[t * width + head * rep * d..][..rep * d];
                        to.copy_from_slice(&part[0][t * rep * d..][..rep * d]);
                        for (to, from) in [(&mut *d_keys, &part[1]), (&mut *d_values, &part[2])] {
                            to[t * own_width + head * d..][..d].copy_from_slice(&from[t * d..][..d]);
                        }
                    }
                }
            },
        );
        [
            Some(flex::primitive(dq, [rows, width])),
            Some(flex::primitive(d_keys, [rows, own_width])),
            Some(flex::primitive(d_values, [rows, own_width])),
        ]
    }
}

impl Blocks {
    /// A block's gradients in one key-value head: of its queries `[k * rep, d]`, its keys and its values `[k, d]`.
    fn head(&self, block: usize, head: usize, dy: &[f32]) -> [Vec<f32>; 3] {
        let ((k, kv), Shape { heads, rep, d }) = (self.sizes(), self.shape);
        let (body, anchor, own_width) = (Body::widest(), &self.anchors[block], kv * d);
        let slots = block * k..(block + 1) * k;
        let q = queries(flex::values(&self.q), slots.clone(), self.shape, head);
        let at = |token: usize| (token * heads + head * rep) * d;
        let dy: Vec<f32> = slots.clone().flat_map(|t| &dy[at(t)..at(t) + rep * d]).copied().collect();

        // All keys that some slot sees, the block's own last.
        let (mut keys, mut values, mut span) = (Vec::new(), Vec::new(), 0..0);
        if let Some((prefix_keys, prefix_values)) = &self.prefix {
            let seen = (0..k).map(|t| self.rule.prefix(anchor, t)).filter(|seen| !seen.is_empty());
            span = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
            for (to, from) in [(&mut keys, prefix_keys), (&mut values, prefix_values)] {
                let rows = from.at(&[head]);
                span.clone().for_each(|j| to.extend_from_slice(&rows[j * from.stride..][..d]));
            }
        }
        for token in slots {
            keys.extend_from_slice(&flex::values(&self.keys)[token * own_width + head * d..][..d]);
            values.extend_from_slice(&flex::values(&self.values)[token * own_width + head * d..][..d]);
        }
        let (m, all) = (k * rep, span.len() + k);
        let matrix = |x: &[f32], rows| -> Left<f32> { Left::pack(body, Matrix::new(x, rows, d)) };
        let (mut weights, mut slopes) = (vec![0f32; m * all], vec![0f32; m * all]);
        let of = |x| Right::pack(body, Matrix::new(x, all, d).turned());
        product_into(body, &matrix(&q, m), &of(&keys), &mut weights, false);
        product_into(body, &matrix(&dy, m), &of(&values), &mut slopes, false);
        let seen: Vec<[Range<usize>; 2]> = (0..k)
            .map(|t| {
                let (seen, own) = (self.rule.prefix(anchor, t), self.rule.own(t, k));
                let seen = if span.is_empty() { 0..0 } else { seen };
                let from = |i: usize| i.saturating_sub(span.start).min(span.len());
                [from(seen.start)..from(seen.end), span.len() + own.start..span.len() + own.end]
            })
            .collect();
        body.run(Slopes { weights: &mut weights, slopes: &mut slopes, seen: &seen, rep });

        let scale = (d as f64).powf(-0.5) as f32;
        let mut dq = vec![0f32; m * d];
        let left = Left::<f32>::pack(body, Matrix::new(&slopes, m, all));
        product_into(body, &left, &Right::pack(body, Matrix::new(&keys, all, d)), &mut dq, false);
        dq.iter_mut().for_each(|x| *x *= scale);
        let own = |x: &[f32]| -> Vec<f32> {
            x.chunks_exact(all).flat_map(|row| &row[span.len()..]).copied().collect()
        };
        let times = |own: &[f32], x: &[f32]| {
            let mut y = vec![0f32; k * d];
            let left = Left::<f32>::pack(body, Matrix::new(own, m, k).turned());
            product_into(body, &left, &Right::pack(body, Matrix::new(x, m, d)), &mut y, false);
            y
        };
        // The queries are scaled already.
        [dq, times(&own(&slopes), &q), times(&own(&weights), &dy)]
    }
}

/// From scores to weights, and from the slopes of weights to those of scores, row by row.
struct Slopes<'a> {
    weights: &'a mut [f32],
    slopes: &'a mut [f32],
    /// Which keys each slot sees.
    seen: &'a [[Range<usize>; 2]],
    /// Rows per slot.
    rep: usize,
}

impl Op for Slopes<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, _: Simd<V>) {
        let Self { weights, slopes, seen, rep } = self;
        let all = weights.len() / (seen.len() * rep);
        for (i, (row, slopes)) in weights.chunks_exact_mut(all).zip(slopes.chunks_exact_mut(all)).enumerate()
        {
            let seen = &seen[i / rep];
            let mut max = f32::NEG_INFINITY;
            for x in seen.iter().flat_map(|part| &row[part.clone()]) {
                max = if *x > max { *x } else { max };
            }
            let (mut sum, mut mean, mut from) = (0.0, 0.0, 0);
            for part in seen {
                row[from..part.start].fill(0.0);
                slopes[from..part.start].fill(0.0);
                from = part.end;
                for (w, s) in row[part.clone()].iter_mut().zip(&slopes[part.clone()]) {
                    *w = exp(*w - max);
                    sum += *w;
                    mean += *w * s;
                }
            }
            row[from..].fill(0.0);
            slopes[from..].fill(0.0);
            mean /= sum;
            for (w, s) in row.iter_mut().zip(slopes.iter_mut()) {
                *w /= sum;
                *s = *w * (*s - mean);
            }
        }
    }
}
