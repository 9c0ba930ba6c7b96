//! Drafting for a request: the cache of pairs is that of EAGLE-3, and the mask pairs go through the layers
//! behind the anchor's in the same pass. The next draft forgets them.

use super::PEagle;
use crate::{
    Result, TokenId,
    drafter::{Drafter, Footprint, Proposal, Session, eagle3::PairCache},
};
use burn::tensor::{Tensor, backend::Backend};
use hspec_attn::KvCache;

impl<B: Backend> Drafter<B> for PEagle<B> {
    fn kind(&self) -> &'static str {
        "peagle"
    }

    fn max_draft(&self) -> usize {
        self.trunk.shape.max_draft
    }

    fn feature_layers(&self) -> &[usize] {
        &self.trunk.shape.feature_layers
    }

    fn vocabulary(&self) -> Option<&[TokenId]> {
        self.trunk.pruned()
    }

    fn footprint(&self) -> Footprint {
        self.trunk.weigh()
    }

    fn session(&self, capacity: usize) -> Box<dyn Session<B> + '_> {
        Box::new(PEagleSession { drafter: self, pairs: PairCache::new(&self.trunk, capacity) })
    }
}

struct PEagleSession<'a, B: Backend> {
    drafter: &'a PEagle<B>,
    pairs: PairCache<'a, B>,
}

impl<B: Backend> Session<B> for PEagleSession<'_, B> {
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
        let (drafter, trunk) = (self.drafter, &self.drafter.trunk);
        let k = k.min(trunk.shape.max_draft);
        let (mut tokens, mut states) = self.pairs.complete(anchor)?;
        let anchor_row = tokens.len() - 1;
        if k > 1 {
            tokens.extend(std::iter::repeat_n(drafter.mask, k - 1));
            states = Tensor::cat(vec![states, drafter.masked().repeat_dim(0, k - 1)], 0);
        }
        let out = self.pairs.run(&tokens, states);
        let (logits, _) = trunk.emit(out.narrow(0, anchor_row, k));
        let width = logits.dims()[1];
        let logits: Vec<f32> = logits.into_data().iter::<f32>().collect();
        let rows = logits.chunks_exact(width).enumerate();
        let tokens = rows.map(|(i, logits)| pick(i + 1, logits)).collect::<Result<_>>()?;
        Ok(Proposal { tokens, confidence: Vec::new() })
    }
}
