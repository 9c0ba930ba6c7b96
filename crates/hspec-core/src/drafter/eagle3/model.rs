//! The parameters of EAGLE-3 and P-EAGLE; field paths are the file's tensor names.

use super::Eagle3Shape;
use crate::drafter::embedding::{Embedding, STD};
use burn::{
    module::{Module, Param, ParamId},
    tensor::{Distribution, Tensor, backend::Backend},
};
use hspec_attn::RopeTables;
use hspec_nn::{Linear, RmsNorm, SwiGlu, WeightStorage};

/// All parameters.
#[derive(Module, Debug)]
pub struct Eagle3Model<B: Backend> {
    /// The target's, `[V, H]`; P-EAGLE trains its copy.
    pub embed_tokens: Embedding<B>,
    /// Frozen rows of the target's head, `[Vd, H]`.
    pub lm_head: Linear<B>,
    /// Norm of all features, `[F * H]`, if configured.
    pub input_norm: Option<RmsNorm<B>>,
    /// One norm per feature, if configured.
    pub fc_norm: Vec<RmsNorm<B>>,
    /// Fuses the F features, `[H, F * H]`.
    pub fc: Linear<B>,
    /// At least one.
    pub layers: Vec<Eagle3Layer<B>>,
    /// Before the head.
    pub norm: RmsNorm<B>,
    /// P-EAGLE: stands for the features of a position that the target has not processed, `[1, 1, F * H]`.
    pub mask_hidden: Option<Param<Tensor<B, 3>>>,
}

/// A decoder layer; the first one reads a token beside the state.
#[derive(Module, Debug)]
#[allow(missing_docs)] // the names are the file format's
pub struct Eagle3Layer<B: Backend> {
    /// Norm of the token's embedding in the first layer, of the residual stream in the others.
    pub input_layernorm: RmsNorm<B>,
    /// Norm of the state; first layer only.
    pub hidden_norm: Option<RmsNorm<B>>,
    pub self_attn: SelfAttention<B>,
    pub post_attention_layernorm: RmsNorm<B>,
    pub mlp: SwiGlu<B>,
}

/// Projections of causal attention, whose input is 2 H wide in the first layer.
#[derive(Module, Debug)]
#[allow(missing_docs)] // the names are the file format's
pub struct SelfAttention<B: Backend> {
    pub q_proj: Linear<B>,
    pub k_proj: Linear<B>,
    pub v_proj: Linear<B>,
    pub o_proj: Linear<B>,
    /// Per-head norm, `[head_dim]`; Qwen3 only.
    pub q_norm: Option<RmsNorm<B>>,
    /// Per-head norm, `[head_dim]`; Qwen3 only.
    pub k_norm: Option<RmsNorm<B>>,
    /// Width of a head.
    pub head_dim: usize,
}

/// Queries `[rows, heads, head_dim]`, keys and values `[rows, kv_heads, head_dim]` of a layer, rotated.
#[derive(Debug, Clone)]
pub(in crate::drafter) struct Heads<B: Backend> {
    pub q: Tensor<B, 3>,
    pub k: Tensor<B, 3>,
    pub v: Tensor<B, 3>,
}

/// Rotary tables of some rows, for queries and for keys.
pub(super) struct Rotation<B: Backend> {
    pub q: RopeTables<B>,
    pub k: RopeTables<B>,
}

impl<B: Backend> SelfAttention<B> {
    /// `x: [rows, in]`.
    pub(super) fn project(&self, x: Tensor<B, 2>, rotation: &Rotation<B>) -> Heads<B> {
        let (rows, d) = (x.dims()[0], self.head_dim);
        let per_head = |y: Tensor<B, 2>, norm: &Option<RmsNorm<B>>| {
            let n = y.dims()[1] / d;
            let y = y.reshape([rows * n, d]);
            norm.as_ref().map_or(y.clone(), |norm| norm.forward(y))
        };
        let split = |y: Tensor<B, 2>| {
            let n = y.shape().num_elements() / (rows * d);
            y.reshape([rows, n, d])
        };
        let projected = Linear::forward_all(&[&self.q_proj, &self.k_proj, &self.v_proj], x);
        let [q, k, v] = projected.try_into().expect("three layers, three results");
        Heads {
            q: split(rotation.q.apply(per_head(q, &self.q_norm))),
            k: split(rotation.k.apply(per_head(k, &self.k_norm))),
            v: split(v),
        }
    }
}

impl<B: Backend> Eagle3Model<B> {
    /// Fresh weights: `N(0, 0.02)`, norms one, biases zero.
    pub fn init(shape: &Eagle3Shape, device: &B::Device) -> Self {
        let (h, d, features) = (shape.hidden_size, shape.head_dim, shape.feature_layers.len());
        let norm = |n| RmsNorm::ones(n, shape.rms_norm_eps, device);
        let linear = |input, output, bias| Linear::random(input, output, bias, STD, device);
        let (q, kv) = (shape.num_attention_heads * d, shape.num_key_value_heads * d);
        let layer = |i: usize| {
            let (input, bias) = (if i == 0 { 2 * h } else { h }, shape.attention_bias);
            Eagle3Layer {
                input_layernorm: norm(h),
                hidden_norm: (i == 0).then(|| norm(h)),
                self_attn: SelfAttention {
                    q_proj: linear(input, q, bias),
                    k_proj: linear(input, kv, bias),
                    v_proj: linear(input, kv, bias),
                    o_proj: linear(q, h, bias),
                    q_norm: shape.qk_norm.then(|| norm(d)),
                    k_norm: shape.qk_norm.then(|| norm(d)),
                    head_dim: d,
                },
                post_attention_layernorm: norm(h),
                mlp: SwiGlu::random(h, shape.intermediate_size, STD, device),
            }
        };
        let masked = || {
            let vector = Tensor::random([1, 1, features * h], Distribution::Normal(0.0, 1.0), device);
            Param::initialized(ParamId::new(), vector)
        };
        Self {
            embed_tokens: Embedding::random(shape.vocab_size, h, device),
            lm_head: linear(h, shape.draft_vocab_size, false),
            input_norm: shape.norm_before_fc.then(|| norm(features * h)),
            fc_norm: (0..if shape.fc_norm { features } else { 0 }).map(|_| norm(h)).collect(),
            fc: linear(features * h, h, false),
            layers: (0..shape.num_hidden_layers).map(layer).collect(),
            norm: norm(h),
            mask_hidden: shape.mask_token.map(|_| masked()),
        }
    }

    /// The same model for decoding, see [`Linear::prepack`].
    #[must_use]
    pub fn prepack(self) -> Self {
        let pack = |l: Linear<B>| l.prepack(WeightStorage::Lossless);
        let layer = |l: Eagle3Layer<B>| {
            let a = l.self_attn;
            let self_attn = SelfAttention {
                q_proj: pack(a.q_proj),
                k_proj: pack(a.k_proj),
                v_proj: pack(a.v_proj),
                o_proj: pack(a.o_proj),
                ..a
            };
            Eagle3Layer { self_attn, mlp: l.mlp.prepack(WeightStorage::Lossless), ..l }
        };
        Self {
            lm_head: pack(self.lm_head),
            fc: pack(self.fc),
            layers: self.layers.into_iter().map(layer).collect(),
            ..self
        }
    }
}
