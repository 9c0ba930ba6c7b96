//! Drafting for a request. What outlives a draft are the keys and values of pairs whose features are the
//! target's and whose token is final; nothing else needs rolling back:
//!
//! 1. `observe` fuses the new features and lets them wait. Feature `t` waits for token `t + 1`, so the last
//!    one has no pair yet, and the first token of a request completes none.
//! 2. `draft` runs all pairs that wait and, last, the newest feature with the anchor. Its output is the
//!    first proposal; each further step pairs the token just drafted with the drafter's own output, at the
//!    next rotary position.
//! 3. The next `draft` first cuts the cache back to the pairs of 2. without the anchor's and the steps'. The
//!    anchor's pair comes again with those that were accepted: one row more in a pass that runs anyway.

use super::{Eagle3, Heads};
use crate::{
    Error, Result, TokenId,
    drafter::{Drafter, Footprint, Proposal, Session},
};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use hspec_attn::{CausalMask, KvCache, causal_attention};

/// Pairs that go through the layers together: bounds the memory of attention scores.
const CHUNK: usize = 256;

impl<B: Backend> Drafter<B> for Eagle3<B> {
    fn kind(&self) -> &'static str {
        "eagle3"
    }

    fn max_draft(&self) -> usize {
        self.shape.max_draft
    }

    fn feature_layers(&self) -> &[usize] {
        &self.shape.feature_layers
    }

    fn vocabulary(&self) -> Option<&[TokenId]> {
        self.pruned()
    }

    fn footprint(&self) -> Footprint {
        self.weigh()
    }

    fn session(&self, capacity: usize) -> Box<dyn Session<B> + '_> {
        Box::new(Eagle3Session { drafter: self, pairs: PairCache::new(self, capacity) })
    }
}

struct Eagle3Session<'a, B: Backend> {
    drafter: &'a Eagle3<B>,
    pairs: PairCache<'a, B>,
}

impl<B: Backend> Session<B> for Eagle3Session<'_, B> {
    fn observe(&mut self, tokens: &[TokenId], features: Tensor<B, 2>) {
        self.pairs.observe(tokens, features);
    }

    fn draft(
        &mut self,
        anchor: TokenId,
        _cache: &KvCache<B>,
        k: usize,
        pick: &mut dyn FnMut(usize, &[f32]) -> Result<TokenId>,
    ) -> Result<Proposal> {
        let (waiting, states) = self.pairs.complete(anchor)?;
        let out = self.pairs.run(&waiting, states);
        let mut last = out.narrow(0, waiting.len() - 1, 1);
        let mut tokens = Vec::with_capacity(k);
        for slot in 1..=k.min(self.drafter.shape.max_draft) {
            if let Some(&drafted) = tokens.last() {
                last = self.pairs.run(&[drafted], last);
            }
            let (logits, state) = self.drafter.emit(last);
            let logits: Vec<f32> = logits.into_data().iter::<f32>().collect();
            tokens.push(pick(slot, &logits)?);
            last = state;
        }
        Ok(Proposal { tokens, confidence: Vec::new() })
    }
}

/// Keys and values of pairs, and the features that wait for their pair.
pub(in crate::drafter) struct PairCache<'a, B: Backend> {
    drafter: &'a Eagle3<B>,
    cache: KvCache<B>,
    /// Entries of the cache that stay: pairs of the target's features with final tokens.
    settled: usize,
    /// Final tokens whose pair has not run.
    tokens: Vec<TokenId>,
    /// Fused features whose pair has not run, one row more than there are such tokens: `[_, H]` each.
    states: Vec<Tensor<B, 2>>,
}

impl<'a, B: Backend> PairCache<'a, B> {
    /// For a request of at most `capacity` tokens.
    pub(in crate::drafter) fn new(drafter: &'a Eagle3<B>, capacity: usize) -> Self {
        let shape = &drafter.shape;
        let device = drafter.model.norm.weight.device();
        let entries = capacity + shape.max_draft;
        let cache = KvCache::new(
            shape.num_hidden_layers,
            1,
            shape.num_key_value_heads,
            entries,
            shape.head_dim,
            &device,
        );
        Self { drafter, cache, settled: 0, tokens: Vec::new(), states: Vec::new() }
    }

    pub(in crate::drafter) fn observe(&mut self, tokens: &[TokenId], features: Tensor<B, 2>) {
        if tokens.is_empty() {
            return;
        }
        let without_feature_before = usize::from(self.states.is_empty());
        self.tokens.extend(&tokens[without_feature_before..]);
        self.states.push(self.drafter.fuse(features));
    }

    /// The pairs that wait, the last one with the anchor. What earlier drafts left behind is forgotten; of
    /// the pairs returned all but the last count as settled once they have run.
    pub(in crate::drafter) fn complete(&mut self, anchor: TokenId) -> Result<(Vec<TokenId>, Tensor<B, 2>)> {
        if self.states.is_empty() {
            return Err(Error::nothing_observed());
        }
        let states = Tensor::cat(std::mem::take(&mut self.states), 0);
        let mut tokens = std::mem::take(&mut self.tokens);
        self.cache.truncate(self.settled);
        self.settled += tokens.len();
        // A copy: a view would keep the rows of the whole prompt.
        let last = Tensor::from_data(TensorData::new(vec![tokens.len() as i64], [1]), &states.device());
        self.states.push(states.clone().select(0, last));
        tokens.push(anchor);
        Ok((tokens, states))
    }

    /// Runs pairs behind those of the cache, which keeps theirs: `[n, H]`.
    pub(in crate::drafter) fn run(&mut self, tokens: &[TokenId], states: Tensor<B, 2>) -> Tensor<B, 2> {
        let device = states.device();
        let mut outputs = Vec::new();
        for (i, tokens) in tokens.chunks(CHUNK).enumerate() {
            let (n, before) = (tokens.len(), self.cache.len());
            let first = before + self.drafter.shape.first_position;
            let positions: Vec<usize> = (first..first + n).collect();
            let mask = CausalMask::new(&self.cache, n, &device);
            let cache = &mut self.cache;
            let states = states.clone().narrow(0, i * CHUNK, n);
            outputs.push(self.drafter.run(tokens, states, &positions, &mut |layer, Heads { q, k, v }| {
                cache.write(layer, k.unsqueeze(), v.unsqueeze());
                causal_attention(q.unsqueeze(), cache, layer, before + n, mask.as_ref()).squeeze_dim(0)
            }));
            self.cache.advance(n);
        }
        Tensor::cat(outputs, 0)
    }
}
