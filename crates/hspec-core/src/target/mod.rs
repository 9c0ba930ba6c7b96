//! The model that verifies.

mod layer;
mod load;
mod random;

use crate::{Error, Result, TokenId, config::TargetConfig};
use burn::tensor::{Tensor, backend::Backend};
pub use hspec_attn::KvCache;
use hspec_attn::{CausalMask, Position, Rope};
pub use hspec_nn::WeightStorage;
use hspec_nn::{Linear, RmsNorm};
use layer::{Layer, Step};

/// Tokens of a prompt that go through the layers together: bounds the memory of attention scores.
const CHUNK: usize = 256;

/// A decoder-only language model (Llama and Qwen3 families) over a borrowed cache.
///
/// Hidden id `L` everywhere means the residual stream *entering* 0-based layer `L`; id
/// `num_hidden_layers` is the un-normed output of the last layer.
#[derive(Debug)]
pub struct Target<B: Backend> {
    config: TargetConfig,
    /// None where the head's weight is the embedding too.
    embed: Option<Linear<B>>,
    layers: Vec<Layer<B>>,
    norm: RmsNorm<B>,
    lm_head: Linear<B>,
    rope: Rope,
    device: B::Device,
}

/// Which logits a pass returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// None.
    None,
    /// Of the last token of each row.
    Last,
    /// Of every token.
    All,
}

/// What a pass returns besides filling the cache.
#[derive(Debug, Clone, Copy)]
pub struct Want<'a> {
    /// Rows of logits.
    pub logits: Rows,
    /// Hidden ids to capture.
    pub hidden: &'a [usize],
}

/// What a pass returned.
#[derive(Debug)]
pub struct Pass<B: Backend> {
    /// `[batch, rows, V]`; none if none were wanted.
    pub logits: Option<Tensor<B, 3>>,
    /// `[batch, t, H]` for each wanted hidden id, in the order asked for.
    pub hidden: Vec<Tensor<B, 3>>,
}

impl<B: Backend> Target<B> {
    /// Its configuration.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// Where its tensors live.
    pub fn device(&self) -> &B::Device {
        &self.device
    }

    /// The final norm, which maps hidden id `num_hidden_layers` to the head's input.
    pub fn norm(&self) -> &RmsNorm<B> {
        &self.norm
    }

    /// The embedding, `[V, H]`: a copy where the target's own is packed.
    pub fn embedding(&self) -> Tensor<B, 2> {
        self.embed.as_ref().unwrap_or(&self.lm_head).to_weight()
    }

    /// The output head, `[V, H]`.
    pub fn head(&self) -> &Linear<B> {
        &self.lm_head
    }

    /// A decoder layer, from which a drafter may start.
    pub fn layer(&self, id: usize) -> Option<&Layer<B>> {
        self.layers.get(id)
    }

    /// An empty cache of its shape.
    pub fn cache(&self, batch: usize, capacity: usize) -> KvCache<B> {
        let c = &self.config;
        KvCache::new(c.num_hidden_layers, batch, c.num_key_value_heads, capacity, c.head_dim, &self.device)
    }

    /// Processes `ids` (`batch` rows of equal length, row-major) behind what the cache holds. Long
    /// inputs go through in chunks.
    ///
    /// # Errors
    /// [`Error::Request`] when the ids do not fill the rows, exceed the cache, or are no token.
    pub fn forward(&self, ids: &[TokenId], cache: &mut KvCache<B>, want: &Want<'_>) -> Result<Pass<B>> {
        let batch = cache.batch();
        let t = ids.len() / batch;
        let positions: Vec<Position> = (0..batch)
            .flat_map(|r| (0..t).map(move |i| (r, i)))
            .map(|(r, i)| cache.position(r, cache.len() + i))
            .collect();
        self.forward_at(ids, &positions, cache, want)
    }

    /// [`Target::forward`] with the rotary position of every token given.
    ///
    /// # Errors
    /// As [`Target::forward`].
    pub fn forward_at(
        &self,
        ids: &[TokenId],
        positions: &[Position],
        cache: &mut KvCache<B>,
        want: &Want<'_>,
    ) -> Result<Pass<B>> {
        let t = self.check(ids, positions, cache, want.hidden)?;
        Ok(hspec_nn::pass::<B, _>(|| self.chunks(ids, positions, t, cache, want)))
    }

    fn chunks(
        &self,
        ids: &[TokenId],
        positions: &[Position],
        t: usize,
        cache: &mut KvCache<B>,
        want: &Want<'_>,
    ) -> Pass<B> {
        let batch = cache.batch();
        let mut chunks = Vec::new();
        for from in (0..t).step_by(CHUNK) {
            let n = CHUNK.min(t - from);
            let of = |r: usize| r * t + from..r * t + from + n;
            let ids: Vec<TokenId> = (0..batch).flat_map(|r| &ids[of(r)]).copied().collect();
            let positions: Vec<Position> = (0..batch).flat_map(|r| &positions[of(r)]).copied().collect();
            let last = from + n == t;
            let logits = match want.logits {
                Rows::Last if !last => Rows::None,
                rows => rows,
            };
            chunks.push(self.chunk(&ids, &positions, cache, &Want { logits, ..*want }));
        }
        if chunks.len() == 1
            && let Some(only) = chunks.pop()
        {
            return only;
        }
        let joined = |parts: Vec<Tensor<B, 3>>| Tensor::cat(parts, 1);
        let hidden = (0..want.hidden.len())
            .map(|i| joined(chunks.iter().map(|c| c.hidden[i].clone()).collect()))
            .collect();
        let logits: Vec<_> = chunks.into_iter().filter_map(|c| c.logits).collect();
        Pass { logits: (!logits.is_empty()).then(|| joined(logits)), hidden }
    }

    fn check(
        &self,
        ids: &[TokenId],
        positions: &[Position],
        cache: &KvCache<B>,
        hidden: &[usize],
    ) -> Result<usize> {
        let batch = cache.batch();
        let refuse = |what, found: String, expected: String| Err(Error::Request { what, found, expected });
        if ids.is_empty() || !ids.len().is_multiple_of(batch) || positions.len() != ids.len() {
            let expected = format!("{batch} rows of equal length, at least one token each");
            return refuse("tokens", format!("{} ids, {} positions", ids.len(), positions.len()), expected);
        }
        let t = ids.len() / batch;
        if cache.len() + t > cache.capacity() {
            let found = format!("{} tokens behind {}", t, cache.len());
            return refuse("tokens", found, format!("at most {} in all", cache.capacity()));
        }
        if let Some(bad) = ids.iter().find(|id| id.index() >= self.config.vocab_size) {
            return refuse("token id", bad.0.to_string(), format!("below {}", self.config.vocab_size));
        }
        if let Some(bad) = hidden.iter().find(|&&id| id > self.config.num_hidden_layers) {
            return refuse(
                "hidden id",
                bad.to_string(),
                format!("at most {}", self.config.num_hidden_layers),
            );
        }
        Ok(t)
    }

    fn chunk(
        &self,
        ids: &[TokenId],
        positions: &[Position],
        cache: &mut KvCache<B>,
        want: &Want<'_>,
    ) -> Pass<B> {
        let batch = cache.batch();
        let t = ids.len() / batch;
        let c = &self.config;
        let step = Step {
            batch,
            t,
            heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            rope_q: self.rope.tables(positions, c.num_attention_heads, &self.device),
            rope_k: self.rope.tables(positions, c.num_key_value_heads, &self.device),
            mask: CausalMask::new(cache, t, &self.device),
        };
        let mut x = self.embed_ids(ids);
        let mut captured: Vec<Option<Tensor<B, 3>>> = vec![None; want.hidden.len()];
        let mut capture = |id: usize, x: &Tensor<B, 2>| {
            for (slot, _) in captured.iter_mut().zip(want.hidden).filter(|(_, wanted)| **wanted == id) {
                *slot = Some(x.clone().reshape([batch, t, c.hidden_size]));
            }
        };
        for (id, layer) in self.layers.iter().enumerate() {
            capture(id, &x);
            x = layer.forward(x, id, cache, &step);
        }
        capture(self.layers.len(), &x);
        cache.advance(t);
        let rows = match want.logits {
            Rows::None => None,
            Rows::All => Some((x, t)),
            Rows::Last => {
                let last = x.reshape([batch, t, c.hidden_size]).narrow(1, t - 1, 1);
                Some((last.reshape([batch, c.hidden_size]), 1))
            }
        };
        let logits = rows
            .map(|(x, rows)| self.lm_head.forward(self.norm.forward(x)).reshape([batch, rows, c.vocab_size]));
        Pass { logits, hidden: captured.into_iter().flatten().collect() }
    }

    fn embed_ids(&self, ids: &[TokenId]) -> Tensor<B, 2> {
        let ids: Vec<usize> = ids.iter().map(|id| id.index()).collect();
        self.embed.as_ref().unwrap_or(&self.lm_head).rows(&ids)
    }
}
