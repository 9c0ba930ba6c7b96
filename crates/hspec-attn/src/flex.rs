//! Bodies for the flex backend: cache writes in place (its `slice_assign` copies the whole tensor), rotations
//! and attention in one pass each, over the cache as it lies.

mod back;

use crate::{
    Anchor, BlockRule, KvCache, Prefix,
    attend::{Segment, attend},
};
use burn::tensor::{Tensor, TensorPrimitive, backend::Backend};
use burn_flex::FlexTensor;
use hspec_nn::flex;
use rayon::prelude::*;
use std::any::Any;

/// Multiplications below which threads cost more than they bring.
const PARALLEL: usize = 100_000;
/// Tokens whose queries are computed together: enough to share a block of keys, few enough for the caches.
const TOKENS: usize = 32;

/// `cache[row..row+b, :, at..at+t, :] = new` in place, or both tensors unchanged when they are not flex's.
pub(crate) fn write_at<B: Backend>(
    cache: Tensor<B, 4>,
    new: Tensor<B, 4>,
    row: usize,
    at: usize,
) -> Result<Tensor<B, 4>, (Tensor<B, 4>, Tensor<B, 4>)> {
    let ([_, kv, capacity, d], [b, t, _, _]) = (cache.dims(), new.dims());
    let mut cache = cache.into_primitive().tensor();
    let new = new.into_primitive().tensor();
    let wrap = |p| Tensor::from_primitive(TensorPrimitive::Float(p));
    let target = (&mut cache as &mut dyn Any).downcast_mut::<FlexTensor>();
    let source = (&new as &dyn Any).downcast_ref::<FlexTensor>();
    let (Some(target), Some(source)) = (target, source) else {
        return Err((wrap(cache), wrap(new)));
    };
    let source = source.to_contiguous();
    let offset = source.layout().start_offset();
    let from = &source.storage::<f32>()[offset..offset + b * t * kv * d];
    let to = target.storage_mut::<f32>();
    for (i, vector) in from.chunks_exact(d).enumerate() {
        let (r, slot, head) = (row + i / (t * kv), i / kv % t, i % kv);
        let start = ((r * kv + head) * capacity + at + slot) * d;
        to[start..start + d].copy_from_slice(vector);
    }
    Ok(wrap(cache))
}

/// [`crate::RopeTables::apply`]; none unless the tensors are flex's.
pub(crate) fn rotate<B: Backend>(
    x: &Tensor<B, 2>,
    cos: &Tensor<B, 2>,
    sin: &Tensor<B, 2>,
) -> Option<Tensor<B, 2>> {
    let (shape, rotary) = (x.dims(), cos.dims()[1]);
    if flex::is_tracked::<B>() {
        return back::rotate(x, cos, sin);
    }
    let (x, cos, sin) = (flex::contiguous(x)?, flex::contiguous(cos)?, flex::contiguous(sin)?);
    let [x, cos, sin] = [&x, &cos, &sin].map(flex::values);
    Some(flex::tensor(rotated(x, shape[1], (cos, sin), rotary), shape))
}

/// Rows of `width`, of which the first `rotary` values turn.
fn rotated(x: &[f32], width: usize, (cos, sin): (&[f32], &[f32]), rotary: usize) -> Vec<f32> {
    let mut y = x.to_vec();
    let turn = |(row, (cos, sin)): (&mut [f32], (&[f32], &[f32]))| {
        let (low, high) = row[..rotary].split_at_mut(rotary / 2);
        let ((cos_low, cos_high), (sin_low, sin_high)) = (cos.split_at(rotary / 2), sin.split_at(rotary / 2));
        for i in 0..rotary / 2 {
            let (a, b) = (low[i], high[i]);
            low[i] = a * cos_low[i] + b * sin_low[i];
            high[i] = b * cos_high[i] + a * sin_high[i];
        }
    };
    if y.len() < PARALLEL {
        let tables = cos.chunks_exact(rotary).zip(sin.chunks_exact(rotary));
        y.chunks_exact_mut(width).zip(tables).for_each(turn);
    } else {
        let tables = cos.par_chunks_exact(rotary).zip(sin.par_chunks_exact(rotary));
        y.par_chunks_exact_mut(width).zip(tables).with_min_len(64).for_each(turn);
    }
    y
}

/// A tensor of which rows of the last dimension are read where they lie.
#[derive(Debug, Clone)]
struct Rows {
    tensor: FlexTensor,
    /// Strides of the dimensions before the last two.
    outer: Vec<usize>,
    /// From one row to the next.
    stride: usize,
}

impl Rows {
    fn new<B: Backend, const D: usize>(x: &Tensor<B, D>) -> Option<Self> {
        Some(Self::of(flex::inner(x)?))
    }

    fn of(tensor: FlexTensor) -> Self {
        let strides = tensor.layout().strides();
        let tensor = match strides.iter().all(|s| *s >= 0) && strides.last() == Some(&1) {
            true => tensor,
            false => tensor.to_contiguous(),
        };
        let strides: Vec<usize> = tensor.layout().strides().iter().map(|s| s.unsigned_abs()).collect();
        let outer = strides.len() - 2;
        Self { outer: strides[..outer].to_vec(), stride: strides[outer], tensor }
    }

    /// From the first row at some outer index on.
    fn at(&self, index: &[usize]) -> &[f32] {
        let offset: usize = index.iter().zip(&self.outer).map(|(i, s)| i * s).sum();
        &self.tensor.storage::<f32>()[self.tensor.layout().start_offset() + offset..]
    }
}

/// `[n, heads, d]` of some tokens, one key-value head's queries at a time, scaled.
fn queries(q: &[f32], tokens: std::ops::Range<usize>, shape: Shape, head: usize) -> Vec<f32> {
    let Shape { heads, rep, d } = shape;
    let scale = (d as f64).powf(-0.5) as f32;
    let of = |token: usize| &q[(token * heads + head * rep) * d..(token * heads + (head + 1) * rep) * d];
    tokens.flat_map(of).map(|x| x * scale).collect()
}

#[derive(Debug, Clone, Copy)]
struct Shape {
    heads: usize,
    /// Heads that share a key-value head.
    rep: usize,
    d: usize,
}

/// Computes `[tokens, heads, d]` in units of (tokens, key-value head).
fn in_units(
    units: Vec<(std::ops::Range<usize>, usize)>,
    shape: Shape,
    total: usize,
    work: usize,
    run: impl Fn(&std::ops::Range<usize>, usize) -> Vec<f32> + Sync + Send,
) -> Vec<f32> {
    let Shape { heads, rep, d } = shape;
    let compute = |(tokens, head): (std::ops::Range<usize>, usize)| (run(&tokens, head), tokens, head);
    let parts: Vec<_> = match work < PARALLEL {
        true => units.into_iter().map(compute).collect(),
        false => units.into_par_iter().map(compute).collect(),
    };
    let mut out = vec![0f32; total * heads * d];
    for (part, tokens, head) in parts {
        for (token, values) in tokens.zip(part.chunks_exact(rep * d)) {
            out[(token * heads + head * rep) * d..][..rep * d].copy_from_slice(values);
        }
    }
    out
}

/// [`crate::causal_attention`]; none unless the tensors are flex's. What a query must not see follows from its
/// place, without a mask.
pub(crate) fn causal<B: Backend>(
    q: &Tensor<B, 4>,
    cache: &KvCache<B>,
    layer: usize,
    len: usize,
) -> Option<Tensor<B, 3>> {
    let [b, t, heads, d] = q.dims();
    let (keys, values) = (cache.keys(layer, 0, len), cache.values(layer, 0, len));
    let kv = keys.dims()[1];
    let shape = Shape { heads, rep: heads / kv, d };
    let q = flex::contiguous(q)?;
    let q = flex::values(&q);
    let (keys, values) = (Rows::new(&keys)?, Rows::new(&values)?);
    let mut units = Vec::new();
    for r in 0..b {
        for from in (0..t).step_by(TOKENS) {
            let tokens = r * t + from..r * t + t.min(from + TOKENS);
            units.extend((0..kv).map(|head| (tokens.clone(), head)));
        }
    }
    let run = |tokens: &std::ops::Range<usize>, head: usize| {
        let r = tokens.start / t;
        let seen = tokens.clone().flat_map(|token| {
            let own = len - t + token % t;
            // A padding query sees itself, so that its result stays finite; nobody reads it.
            std::iter::repeat_n(cache.start(r).min(own)..own + 1, shape.rep)
        });
        let (keys, values) = (keys.at(&[r, head]), values.at(&[r, head]));
        let segment = Segment { keys, values, stride: d, seen: seen.collect() };
        attend(&queries(q, tokens.clone(), shape, head), d, &[segment])
    };
    debug_assert!(keys.stride == d && values.stride == d);
    let out = in_units(units, shape, b * t, b * t * heads * len * d, run);
    Some(flex::tensor(out, [b, t, heads * d]))
}

/// The attention of blocks, `q: [n * k, heads * d]` and the blocks' own keys and values `[n * k, kv * d]`
/// after RoPE -> `[n * k, heads * d]`; none unless the tensors are flex's.
pub(crate) fn blocks<B: Backend>(
    q: &Tensor<B, 2>,
    own: (&Tensor<B, 2>, &Tensor<B, 2>),
    anchors: &[Anchor],
    prefix: Option<&Prefix<B>>,
    rule: &BlockRule,
    d: usize,
) -> Option<Tensor<B, 2>> {
    let (shape, own_shape) = (q.dims(), own.0.dims());
    if flex::is_tracked::<B>() {
        return back::blocks(q, own, anchors, prefix, rule, d);
    }
    let blocks = Blocks {
        q: flex::contiguous(q)?,
        keys: flex::contiguous(own.0)?,
        values: flex::contiguous(own.1)?,
        prefix: match prefix {
            Some(p) => Some((Rows::new(&p.keys)?, Rows::new(&p.values)?)),
            None => None,
        },
        anchors: anchors.to_vec(),
        rule: *rule,
        shape: Shape { heads: shape[1] / d, rep: shape[1] / own_shape[1], d },
    };
    Some(flex::tensor(blocks.attend(), shape))
}

/// Blocks and what they attend to.
#[derive(Debug, Clone)]
struct Blocks {
    /// `[n * k, heads * d]`.
    q: FlexTensor,
    /// Own keys and values, `[n * k, kv * d]`.
    keys: FlexTensor,
    values: FlexTensor,
    prefix: Option<(Rows, Rows)>,
    anchors: Vec<Anchor>,
    rule: BlockRule,
    shape: Shape,
}

impl Blocks {
    /// Slots per block, and key-value heads.
    fn sizes(&self) -> (usize, usize) {
        let Shape { heads, rep, d } = self.shape;
        (flex::values(&self.q).len() / (heads * d) / self.anchors.len(), heads / rep)
    }

    /// `[n * k, heads * d]`.
    fn attend(&self) -> Vec<f32> {
        let Self { prefix, anchors, rule, shape, .. } = self;
        let ((k, kv), Shape { heads, rep, d }) = (self.sizes(), *shape);
        let (q, own_keys, own_values) =
            (flex::values(&self.q), flex::values(&self.keys), flex::values(&self.values));
        let own_width = kv * d;
        let units = (0..anchors.len()).flat_map(|i| (0..kv).map(move |head| (i * k..(i + 1) * k, head)));
        let run = |tokens: &std::ops::Range<usize>, head: usize| {
            let (block, anchor) = (tokens.start / k, &anchors[tokens.start / k]);
            let per_slot = |seen: &dyn Fn(usize) -> std::ops::Range<usize>| {
                (0..k).flat_map(|t| std::iter::repeat_n(seen(t), rep)).collect()
            };
            let mut segments = Vec::with_capacity(2);
            if let Some((keys, values)) = prefix {
                debug_assert_eq!(keys.stride, values.stride);
                segments.push(Segment {
                    keys: keys.at(&[head]),
                    values: values.at(&[head]),
                    stride: keys.stride,
                    seen: per_slot(&|t| rule.prefix(anchor, t)),
                });
            }
            let at = (block * k) * own_width + head * d;
            segments.push(Segment {
                keys: &own_keys[at..],
                values: &own_values[at..],
                stride: own_width,
                seen: per_slot(&|t| rule.own(t, k)),
            });
            attend(&queries(q, tokens.clone(), *shape, head), d, &segments)
        };
        let longest =
            prefix.as_ref().map_or(0, |_| anchors.iter().map(|a| a.index - a.document).max().unwrap_or(0));
        let rows = anchors.len() * k;
        in_units(units.collect(), *shape, rows, rows * heads * d * (longest + k), run)
    }
}
