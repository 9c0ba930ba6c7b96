//! Drafting for a request. What outlives a draft are the keys and values of pairs whose features are the
//! target's and whose token is final; nothing else needs rolling back:
//!
//! 1. `observe` fuses the new features and lets them wait. Feature `t` waits for token `t + 1`, so the last
//!    one has no pair yet, and the first token of a request completes none. More than a round of drafting
//!    leaves, as of a prompt or of plain steps, goes through the layers at once.
//! 2. `draft` runs all pairs that wait and, last, the newest feature with the anchor. Its output is the
//!    first proposal; each further step pairs the token just drafted with the drafter's own output, at the
//!    next rotary position.
//! 3. The next run of pairs that waited first cuts the cache back to the pairs of 2. without the anchor's and the steps'. The
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
    /// Fused features whose pair has not run, one row more than there are such tokens: `[_, H]` each, of all
    /// at most `max_draft + 2` rows between two calls.
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
        if self.tokens.len() > self.drafter.shape.max_draft + 1 {
            let (tokens, states) = self.take();
            let states = states.narrow(0, 0, tokens.len());
            self.run(&tokens, states);
        }
    }

    /// The tokens that wait and all features, which are one row more and of which the last one stays. What
    /// earlier drafts left behind is forgotten; the pairs count as settled and are to be run.
    fn take(&mut self) -> (Vec<TokenId>, Tensor<B, 2>) {
        let states = Tensor::cat(std::mem::take(&mut self.states), 0);
        let tokens = std::mem::take(&mut self.tokens);
        self.cache.truncate(self.settled);
        self.settled += tokens.len();
        // A copy: a view would keep the rows of the whole prompt.
        let last = Tensor::from_data(TensorData::new(vec![tokens.len() as i64], [1]), &states.device());
        self.states.push(states.clone().select(0, last));
        (tokens, states)
    }

    /// The pairs that wait, the last one with the anchor. What earlier drafts left behind is forgotten; of
    /// the pairs returned all but the last count as settled once they have run.
    pub(in crate::drafter) fn complete(&mut self, anchor: TokenId) -> Result<(Vec<TokenId>, Tensor<B, 2>)> {
        if self.states.is_empty() {
            return Err(Error::nothing_observed());
        }
        let (mut tokens, states) = self.take();
        tokens.push(anchor);
        Ok((tokens, states))
    }

    /// Runs pairs behind those of the cache, which keeps theirs: `[n, H]`.
    pub(in crate::drafter) fn run(&mut self, tokens: &[TokenId], states: Tensor<B, 2>) -> Tensor<B, 2> {
        hspec_nn::pass::<B, _>(|| self.run_chunks(tokens, states))
    }

    fn run_chunks(&mut self, tokens: &[TokenId], states: Tensor<B, 2>) -> Tensor<B, 2> {
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

#[cfg(test)]
mod tests {
    use super::super::{Eagle3Config, Eagle3Model, testing};
    use super::*;
    use crate::drafter::DraftVocab;
    use burn::tensor::Distribution;
    use std::path::Path;
    type B = burn_ndarray::NdArray;

    /// Plain steps once piled up features for as long as nothing was drafted.
    #[test]
    fn pairs_do_not_pile_up_over_plain_steps() {
        let (file, device) = (Path::new("c"), Default::default());
        let config = Eagle3Config::from_value(&testing::speculators(), file).unwrap();
        let shape = config.shape(None, file).unwrap();
        let model = Eagle3Model::<B>::init(&shape, &device);
        let drafter = Eagle3 { config, vocab: DraftVocab::full(shape.vocab_size), shape, model };
        let features = Tensor::random([60, 24], Distribution::Normal(0.0, 1.0), &device);
        let token = |i: usize| TokenId(i as u32 * 7 % 16);
        let mut pairs = PairCache::new(&drafter, 64);
        let most = drafter.footprint().state_bytes / (8 * size_of::<f32>());
        for i in 0..60 {
            if i == 31 {
                // A draft in between, whose own pairs must go.
                let (tokens, states) = pairs.complete(token(i)).unwrap();
                let out = pairs.run(&tokens, states);
                pairs.run(&[TokenId(3)], out.narrow(0, tokens.len() - 1, 1));
            }
            pairs.observe(&[token(i)], features.clone().narrow(0, i, 1));
            let rows: usize = pairs.states.iter().map(|rows| rows.dims()[0]).sum();
            assert!(rows <= most, "{rows} features wait after {i}");
            assert_eq!(pairs.settled + pairs.tokens.len(), i);
        }
        let mut fresh = PairCache::new(&drafter, 64);
        fresh.observe(&(0..60).map(token).collect::<Vec<_>>(), features);
        assert_eq!((fresh.settled, fresh.tokens.len()), (59, 0));
        let last = |pairs: &mut PairCache<'_, B>| {
            let (tokens, states) = pairs.complete(TokenId(5)).unwrap();
            let out = pairs.run(&tokens, states);
            out.narrow(0, tokens.len() - 1, 1).into_data().iter::<f32>().collect::<Vec<_>>()
        };
        let (found, expected) = (last(&mut pairs), last(&mut fresh));
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{found:?} {expected:?}");
    }
}
