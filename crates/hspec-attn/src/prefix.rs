//! Attention of draft blocks over a prefix and their own keys (H-Spec section 3.2).

use crate::{Anchor, BlockRule, RopeTables};
use burn::{
    module::Module,
    tensor::{DType, Tensor, TensorData, activation::softmax, backend::Backend},
};
use hspec_nn::{Linear, RmsNorm, WeightStorage};

/// Multi-head attention whose queries are block slots, and whose keys are cached keys before the block's
/// anchor, a target's or the drafter's own, followed by the block's.
#[derive(Module, Debug)]
pub struct PrefixAttention<B: Backend> {
    /// `[heads * head_dim, hidden]`.
    pub q_proj: Linear<B>,
    /// `[kv_heads * head_dim, hidden]`.
    pub k_proj: Linear<B>,
    /// `[kv_heads * head_dim, hidden]`.
    pub v_proj: Linear<B>,
    /// `[hidden, heads * head_dim]`.
    pub o_proj: Linear<B>,
    /// Per-head norm of queries, `[head_dim]`.
    pub q_norm: Option<RmsNorm<B>>,
    /// Per-head norm of the block's keys, `[head_dim]`; the prefix's are used as cached.
    pub k_norm: Option<RmsNorm<B>>,
    /// Width of a head.
    pub head_dim: usize,
}

/// The keys and values that a block attends to besides its own.
#[derive(Debug, Clone)]
pub struct Prefix<B: Backend> {
    /// `[kv_heads, T, head_dim]`, after RoPE, by index.
    pub keys: Tensor<B, 3>,
    /// `[kv_heads, T, head_dim]`.
    pub values: Tensor<B, 3>,
}

/// Rotary tables of the block's slots, `[n * K, heads]` and `[n * K, kv_heads]` rows.
#[derive(Debug, Clone)]
pub struct BlockRope<B: Backend> {
    /// For queries.
    pub q: RopeTables<B>,
    /// For keys.
    pub k: RopeTables<B>,
}

impl<B: Backend> PrefixAttention<B> {
    /// Keys and values of context vectors, for a drafter whose prefix is its own cache and not a target's
    /// (DSpark section 2): `[T, hidden]` and the tables of their positions, `[T, kv_heads]` rows, to twice
    /// `[T, kv_heads, head_dim]`. The same projections make the block's own.
    pub fn context(&self, context: Tensor<B, 2>, rope: &RopeTables<B>) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let (t, d) = (context.dims()[0], self.head_dim);
        let keys = rope.apply(per_head(self.k_proj.forward(context.clone()), d, self.k_norm.as_ref()));
        let kv = keys.dims()[0] / t;
        (keys.reshape([t, kv, d]), self.v_proj.forward(context).reshape([t, kv, d]))
    }

    /// The same layer for inference, see [`Linear::prepack`].
    #[must_use]
    pub fn prepack(self, storage: WeightStorage) -> Self {
        Self {
            q_proj: self.q_proj.prepack(storage),
            k_proj: self.k_proj.prepack(storage),
            v_proj: self.v_proj.prepack(storage),
            o_proj: self.o_proj.prepack(storage),
            ..self
        }
    }

    /// Queries, keys and values before norm and RoPE.
    fn project(&self, x: Tensor<B, 2>) -> [Tensor<B, 2>; 3] {
        let projected = Linear::forward_all(&[&self.q_proj, &self.k_proj, &self.v_proj], x);
        projected.try_into().expect("three layers, three results")
    }

    /// `x: [n, K, hidden]`, one block per anchor in the order of `anchors` -> `[n, K, hidden]`.
    /// Without a prefix the blocks see only themselves.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        anchors: &[Anchor],
        rope: &BlockRope<B>,
        prefix: Option<&Prefix<B>>,
        rule: &BlockRule,
    ) -> Tensor<B, 3> {
        let [n, k, hidden] = x.dims();
        let d = self.head_dim;
        let x = x.reshape([n * k, hidden]);
        let [q, keys, values] = self.project(x);
        let (heads, kv) = (q.dims()[1] / d, keys.dims()[1] / d);
        let rep = heads / kv;
        let q = rope.q.apply(per_head(q, d, self.q_norm.as_ref()));
        let keys = rope.k.apply(per_head(keys, d, self.k_norm.as_ref()));
        #[cfg(feature = "flex")]
        {
            let (q, keys) = (q.clone().reshape([n * k, heads * d]), keys.clone().reshape([n * k, kv * d]));
            if let Some(out) = crate::flex::blocks(&q, (&keys, &values), anchors, prefix, rule, d) {
                return self.o_proj.forward(out).reshape([n, k, hidden]);
            }
        }
        let q = q.mul_scalar((d as f64).powf(-0.5)).reshape([n, k, kv, rep, d]);
        let keys = keys.reshape([n, k, kv, d]).permute([0, 2, 3, 1]);
        let values = values.reshape([n, k, kv, d]).permute([0, 2, 1, 3]);

        let grouped = q.permute([0, 2, 3, 1, 4]);
        let own = grouped.clone().reshape([n, kv, rep * k, d]).matmul(keys);
        // [n, kv, rep * K, K] -> [kv * rep, n, K, K], the order in which prefix scores come.
        let own = own.reshape([n, kv * rep, k, k]).swap_dims(0, 1);
        let grouped = grouped.permute([1, 2, 0, 3, 4]).reshape([kv * rep, n, k, d]);

        let mut seen = Vec::new();
        let mut outside = Vec::new();
        for group in groups(anchors, rule, k, prefix.is_some()) {
            let g = group.to - group.from;
            let span = group.keys.len();
            let own = own.clone().narrow(1, group.from, g);
            let scores = match prefix {
                Some(p) if span > 0 => {
                    let q = grouped.clone().narrow(1, group.from, g).reshape([kv, rep * g * k, d]);
                    let keys = p.keys.clone().narrow(1, group.keys.start, span);
                    let scores = q.matmul(keys.swap_dims(1, 2)).reshape([kv * rep, g, k, span]);
                    Tensor::cat(vec![scores, own], 3)
                }
                _ => own,
            };
            let width = scores.dims()[3];
            let bias = group.bias::<B>(&anchors[group.from..group.to], rule, k, &scores.device());
            let scores = scores.reshape([kv * rep, g * k * width]).cast(DType::F32) + bias;
            let weights = softmax(scores.reshape([kv * rep * g * k, width]), 1);
            if let (Some(p), true) = (prefix, span > 0) {
                let values = p.values.clone().narrow(1, group.keys.start, span);
                let weights = weights.clone().narrow(1, 0, span).reshape([kv, rep * g * k, span]);
                outside.push(weights.cast(values.dtype()).matmul(values).reshape([kv * rep, g, k, d]));
            } else {
                outside.push(Tensor::zeros([kv * rep, g, k, d], &weights.device()));
            }
            seen.push(weights.narrow(1, width - k, k).reshape([kv * rep, g, k, k]));
        }
        let outside = Tensor::cat(outside, 1).permute([1, 2, 0, 3]).reshape([n * k, heads * d]);
        let own = Tensor::cat(seen, 1).swap_dims(0, 1).reshape([n, kv, rep * k, k]);
        let own = own.cast(values.dtype()).matmul(values);
        let own = own.reshape([n, kv * rep, k, d]).swap_dims(1, 2).reshape([n * k, heads * d]);
        self.o_proj.forward(own + outside).reshape([n, k, hidden])
    }
}

/// `[rows, heads * d] -> [rows * heads, d]`, normed per head.
fn per_head<B: Backend>(x: Tensor<B, 2>, d: usize, norm: Option<&RmsNorm<B>>) -> Tensor<B, 2> {
    let [rows, width] = x.dims();
    let x = x.reshape([rows * width / d, d]);
    match norm {
        Some(norm) => norm.forward(x),
        None => x,
    }
}

/// Consecutive anchors of one document, which share one slice of the prefix.
struct Group {
    from: usize,
    to: usize,
    keys: std::ops::Range<usize>,
}

impl Group {
    /// Zero where a slot sees a key and -inf elsewhere: `[1, g * K * (span + K)]`.
    fn bias<B: Backend>(
        &self,
        anchors: &[Anchor],
        rule: &BlockRule,
        k: usize,
        device: &B::Device,
    ) -> Tensor<B, 2> {
        let span = self.keys.len();
        let mut bias = vec![f32::NEG_INFINITY; anchors.len() * k * (span + k)];
        for (row, slice) in bias.chunks_exact_mut(span + k).enumerate() {
            let (anchor, t) = (&anchors[row / k], row % k);
            if span > 0 {
                let seen = rule.prefix(anchor, t);
                slice[seen.start - self.keys.start..seen.end - self.keys.start].fill(0.0);
            }
            for s in (0..k).filter(|&s| rule.block(s, t)) {
                slice[span + s] = 0.0;
            }
        }
        let n = bias.len();
        Tensor::from_data(TensorData::new(bias, [1, n]), device)
    }
}

fn groups(anchors: &[Anchor], rule: &BlockRule, k: usize, prefix: bool) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (i, anchor) in anchors.iter().enumerate() {
        let widest =
            (0..k).map(|t| rule.prefix(anchor, t)).reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
        let keys = widest.filter(|_| prefix).unwrap_or(0..0);
        match groups.last_mut() {
            Some(last) if anchors[last.from].document == anchor.document || !prefix => {
                last.to = i + 1;
                last.keys = last.keys.start.min(keys.start)..last.keys.end.max(keys.end);
            }
            _ => groups.push(Group { from: i, to: i + 1, keys }),
        }
    }
    groups
}
