//! Rotations and the attention of blocks under autodiff, with their gradients.

use super::{Blocks, Rows, Shape, queries, rotated};
use crate::{Anchor, BlockRule, Prefix};
use burn::tensor::{Tensor, backend::Backend};
use burn_flex::FlexTensor;
use hspec_nn::{
    flex::{self, Gradient, Tracked},
    gemm::{Left, Matrix, Right, product_into},
    simd::{Body, Op, Simd, Vector, exp},
};
use rayon::prelude::*;
use std::{borrow::Cow, ops::Range};

/// Parts in which the gradients of a prefix are added up, whatever the number of threads.
const PARTS: usize = 16;

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

/// [`super::blocks`].
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
        Some(p) => Some((flex::tracked(&p.keys)?, flex::tracked(&p.values)?)),
        None => None,
    };
    let (q, keys, values) = (flex::tracked(q)?, flex::tracked(own.0)?, flex::tracked(own.1)?);
    let rows = |x: &Tracked| Rows::of(x.primitive.clone());
    let blocks = Blocks {
        q: q.primitive.clone(),
        keys: keys.primitive.clone(),
        values: values.primitive.clone(),
        prefix: prefix.as_ref().map(|(keys, values)| (rows(keys), rows(values))),
        anchors: anchors.to_vec(),
        rule: *rule,
        shape: Shape { heads: shape[1] / d, rep: shape[1] / own_shape[1], d },
    };
    let out = flex::primitive(blocks.attend(), shape);
    Some(match prefix {
        Some(prefix) => flex::node([q, keys, values, prefix.0, prefix.1], out, blocks),
        None => flex::node([q, keys, values], out, blocks),
    })
}

/// Without a prefix.
impl Gradient<3> for Blocks {
    fn backward(self, output: &FlexTensor, _: [bool; 3]) -> [Option<FlexTensor>; 3] {
        self.gradients(output, false).0.map(Some)
    }
}

impl Gradient<5> for Blocks {
    fn backward(self, output: &FlexTensor, wanted: [bool; 5]) -> [Option<FlexTensor>; 5] {
        let ([q, keys, values], prefix) = self.gradients(output, wanted[3] || wanted[4]);
        let [prefix_keys, prefix_values] = prefix.map_or([None, None], |prefix| prefix.map(Some));
        [Some(q), Some(keys), Some(values), prefix_keys, prefix_values]
    }
}

/// Gradients of a part of a prefix, keys and values: `[kv, span, d]` each.
struct Outside {
    span: Range<usize>,
    sums: [Vec<f32>; 2],
}

impl Outside {
    /// Adds those of one head for the rows `span`, `[span, d]` each.
    fn add(&mut self, head: usize, span: &Range<usize>, gradients: [&[f32]; 2]) {
        let Some(d) = gradients[0].len().checked_div(span.len()) else { return };
        let at = (head * self.span.len() + span.start - self.span.start) * d;
        for (to, from) in self.sums.iter_mut().zip(gradients) {
            to[at..at + from.len()].iter_mut().zip(from).for_each(|(to, x)| *to += x);
        }
    }
}

impl Blocks {
    /// Gradients of the queries, of the blocks' own keys and their values, and, if it `learns`, of the prefix's
    /// keys and values.
    fn gradients(&self, output: &FlexTensor, learns: bool) -> ([FlexTensor; 3], Option<[FlexTensor; 2]>) {
        let ((k, kv), Shape { heads, rep, d }) = (self.sizes(), self.shape);
        let (n, width, own_width) = (self.anchors.len(), heads * d, kv * d);
        let mut dq = vec![0f32; n * k * width];
        let (mut d_keys, mut d_values) = (vec![0f32; n * k * own_width], vec![0f32; n * k * own_width]);
        let dy = flex::values(output);
        let together = if learns { n.div_ceil(PARTS) } else { 1 };
        let keys = d_keys.par_chunks_mut(together * k * own_width);
        let of_keys = keys.zip(d_values.par_chunks_mut(together * k * own_width));
        let parts = dq.par_chunks_mut(together * k * width).zip(of_keys).enumerate();
        let parts = parts.map(|(part, (dq, (d_keys, d_values)))| {
            let blocks = part * together..n.min((part + 1) * together);
            let span = blocks.clone().filter(|_| learns).map(|block| self.span(block)).reduce(union);
            let span = span.unwrap_or(0..0);
            let sums = [0, 1].map(|_| vec![0f32; kv * span.len() * d]);
            let mut outside = Outside { span, sums };
            for (i, block) in blocks.enumerate() {
                for head in 0..kv {
                    let [of_q, of_keys, of_values] = self.head(block, head, dy, learns);
                    let (before, of_keys) = of_keys.split_at(of_keys.len() - k * d);
                    let (before_values, of_values) = of_values.split_at(of_values.len() - k * d);
                    for t in 0..k {
                        let to = &mut dq[(i * k + t) * width + head * rep * d..][..rep * d];
                        to.copy_from_slice(&of_q[t * rep * d..][..rep * d]);
                        for (to, from) in [(&mut *d_keys, of_keys), (&mut *d_values, of_values)] {
                            to[(i * k + t) * own_width + head * d..][..d]
                                .copy_from_slice(&from[t * d..][..d]);
                        }
                    }
                    if learns {
                        outside.add(head, &self.span(block), [before, before_values]);
                    }
                }
            }
            outside
        });
        let parts: Vec<Outside> = parts.collect();
        let own = |x: Vec<f32>, width| flex::primitive(x, [n * k, width]);
        let prefix = self.prefix.as_ref().filter(|_| learns).map(|(keys, _)| {
            let total = flex::values(&keys.tensor).len() / own_width;
            let mut all = Outside { span: 0..total, sums: [0, 1].map(|_| vec![0f32; kv * total * d]) };
            for Outside { span, sums } in &parts {
                for head in 0..kv {
                    let rows = head * span.len() * d..(head + 1) * span.len() * d;
                    all.add(head, span, [&sums[0][rows.clone()], &sums[1][rows]]);
                }
            }
            all.sums.map(|x| flex::primitive(x, [kv, total, d]))
        });
        ([own(dq, width), own(d_keys, own_width), own(d_values, own_width)], prefix)
    }

    /// Rows of the prefix that hold all that a block's slots see.
    fn span(&self, block: usize) -> Range<usize> {
        if self.prefix.is_none() {
            return 0..0;
        }
        let slots = 0..self.sizes().0;
        slots.map(|t| self.rule.prefix(&self.anchors[block], t)).reduce(union).unwrap_or(0..0)
    }

    /// A block's gradients in one key-value head: of its queries `[k * rep, d]`, of its keys and of its values
    /// `[k, d]`; if the prefix `learns`, of the keys and values of its [span](Self::span) before them.
    fn head(&self, block: usize, head: usize, dy: &[f32], learns: bool) -> [Vec<f32>; 3] {
        let ((k, kv), Shape { heads, rep, d }) = (self.sizes(), self.shape);
        let (body, anchor, own_width) = (Body::widest(), &self.anchors[block], kv * d);
        let slots = block * k..(block + 1) * k;
        let q = queries(flex::values(&self.q), slots.clone(), self.shape, head);
        let at = |token: usize| (token * heads + head * rep) * d;
        let dy: Vec<f32> = slots.clone().flat_map(|t| &dy[at(t)..at(t) + rep * d]).copied().collect();

        // All keys that some slot sees, the block's own last.
        let (mut keys, mut values, span) = (Vec::new(), Vec::new(), self.span(block));
        if let Some((prefix_keys, prefix_values)) = &self.prefix {
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
        let from = if learns { 0 } else { span.len() };
        let times = |slopes: &[f32], x: &[f32]| {
            let rows = || slopes.chunks_exact(all).flat_map(|row| &row[from..]).copied().collect();
            let learned: Cow<'_, [f32]> = if from == 0 { slopes.into() } else { Cow::Owned(rows()) };
            let mut y = vec![0f32; (all - from) * d];
            let left = Left::<f32>::pack(body, Matrix::new(&learned, m, all - from).turned());
            product_into(body, &left, &Right::pack(body, Matrix::new(x, m, d)), &mut y, false);
            y
        };
        // The queries are scaled already.
        [dq, times(&slopes, &q), times(&weights, &dy)]
    }
}

/// The least range that holds both, of which an empty one holds nothing.
fn union(a: Range<usize>, b: Range<usize>) -> Range<usize> {
    match (a.is_empty(), b.is_empty()) {
        (_, true) => a,
        (true, _) => b,
        _ => a.start.min(b.start)..a.end.max(b.end),
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
