//! The plain causal attention of targets, grouped heads, over a cache.

use crate::KvCache;
use burn::tensor::{Bool, DType, Tensor, TensorData, activation::softmax, backend::Backend};

/// Causal attention of the last `t` positions over the first `len` entries of a layer's cache.
///
/// `q: [batch, t, heads, head_dim]` after RoPE, queries at indices `len - t ..`; keys and values of
/// those positions are already in the cache. Returns `[batch, t, heads * head_dim]`. A row's padding
/// (indices before its start) is never visible to its tokens.
pub fn causal_attention<B: Backend>(
    q: Tensor<B, 4>,
    cache: &KvCache<B>,
    layer: usize,
    len: usize,
    mask: Option<&CausalMask<B>>,
) -> Tensor<B, 3> {
    #[cfg(feature = "flex")]
    if let Some(out) = crate::flex::causal(&q, cache, layer, len) {
        return out;
    }
    let [b, t, heads, d] = q.dims();
    let first = cache.first();
    let (keys, values) = (cache.keys(layer, first, len), cache.values(layer, first, len));
    let len = len - first;
    let kv = keys.dims()[1];
    let rep = heads / kv;
    // [b, kv, rep * t, d]: grouped heads share their keys in one product instead of repeating them.
    let q = q.reshape([b, t, kv, rep, d]).permute([0, 2, 3, 1, 4]).reshape([b, kv, rep * t, d]);
    let scores = q.matmul(keys.swap_dims(2, 3)).cast(DType::F32).mul_scalar((d as f64).powf(-0.5));
    let scores = match mask {
        Some(mask) => scores
            .reshape([b, kv * rep, t, len])
            .mask_fill(mask.hidden.clone(), f32::NEG_INFINITY)
            .reshape([b, kv, rep * t, len]),
        None => scores,
    };
    let out = softmax(scores, 3).cast(values.dtype()).matmul(values);
    out.reshape([b, kv, rep, t, d]).permute([0, 3, 1, 2, 4]).reshape([b, t, heads * d])
}

/// Which keys each query of a pass must not see, shared by all layers.
#[derive(Debug, Clone)]
pub struct CausalMask<B: Backend> {
    /// `[batch, 1, t, len - first]`, true = hidden: of the keys that some row uses.
    hidden: Tensor<B, 4, Bool>,
}

impl<B: Backend> CausalMask<B> {
    /// The mask for queries at indices `cache.len() .. + t`, or none when every query sees every key
    /// (one token, no padding) or the backend's attention knows without one.
    pub fn new(cache: &KvCache<B>, t: usize, device: &B::Device) -> Option<Self> {
        #[cfg(feature = "flex")]
        if hspec_nn::flex::is_flex::<B>() {
            return None;
        }
        let (b, first, before) = (cache.batch(), cache.first(), cache.len());
        let padded = (0..b).any(|r| cache.start(r) > first);
        if t == 1 && !padded {
            return None;
        }
        let len = before + t;
        let mut hidden = Vec::with_capacity(b * t * (len - first));
        for r in 0..b {
            for q in before..len {
                // A padding query sees itself, so that its softmax stays finite; nobody reads it.
                hidden.extend((first..len).map(|k| k > q || (k < cache.start(r) && k != q)));
            }
        }
        let hidden = Tensor::from_data(TensorData::new(hidden, [b, 1, t, len - first]), device);
        Some(Self { hidden })
    }
}
