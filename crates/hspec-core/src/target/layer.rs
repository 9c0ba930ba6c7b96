//! One decoder layer: pre-norm attention and SwiGLU.

use burn::tensor::{Tensor, backend::Backend};
use hspec_attn::{CausalMask, KvCache, RopeTables, causal_attention};
use hspec_nn::{Linear, RmsNorm, SwiGlu};

/// Weights of a decoder layer; a drafter may start from them.
#[derive(Debug)]
#[allow(missing_docs)] // the names are the file format's
pub struct Layer<B: Backend> {
    pub input_layernorm: RmsNorm<B>,
    pub q_proj: Linear<B>,
    pub k_proj: Linear<B>,
    pub v_proj: Linear<B>,
    pub o_proj: Linear<B>,
    /// Qwen3 only.
    pub q_norm: Option<RmsNorm<B>>,
    /// Qwen3 only.
    pub k_norm: Option<RmsNorm<B>>,
    pub post_attention_layernorm: RmsNorm<B>,
    pub mlp: SwiGlu<B>,
}

/// What the layers of one pass share.
pub(super) struct Step<B: Backend> {
    pub batch: usize,
    pub t: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub rope_q: RopeTables<B>,
    pub rope_k: RopeTables<B>,
    pub mask: Option<CausalMask<B>>,
}

impl<B: Backend> Layer<B> {
    /// `x: [batch * t, H]` entering layer `id` -> leaving it; writes the layer's keys and values.
    pub(super) fn forward(
        &self,
        x: Tensor<B, 2>,
        id: usize,
        cache: &mut KvCache<B>,
        step: &Step<B>,
    ) -> Tensor<B, 2> {
        let Step { batch, t, heads, kv_heads, head_dim: d, .. } = *step;
        let rows = batch * t;
        let h = self.input_layernorm.forward(x.clone());
        let per_head = |y: Tensor<B, 2>, n: usize, norm: &Option<RmsNorm<B>>| {
            let y = y.reshape([rows * n, d]);
            norm.as_ref().map_or(y.clone(), |norm| norm.forward(y))
        };
        let projected = Linear::forward_all(&[&self.q_proj, &self.k_proj, &self.v_proj], h);
        let [q, k, v] = projected.try_into().expect("three layers, three results");
        let q = step.rope_q.apply(per_head(q, heads, &self.q_norm));
        let k = step.rope_k.apply(per_head(k, kv_heads, &self.k_norm));
        cache.write(id, k.reshape([batch, t, kv_heads, d]), v.reshape([batch, t, kv_heads, d]));
        let q = q.reshape([batch, t, heads, d]);
        let attended = causal_attention(q, cache, id, cache.len() + t, step.mask.as_ref());
        let x = x + self.o_proj.forward(attended.reshape([rows, heads * d]));
        let h = self.post_attention_layernorm.forward(x.clone());
        x + self.mlp.forward(h)
    }
}
