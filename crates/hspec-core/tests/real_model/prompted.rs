//! A drafter that is told some of the answer.

use crate::{B, Text};
use burn::tensor::Tensor;
use hspec_attn::KvCache;
use hspec_core::{
    Result, TokenId,
    drafter::{Drafter, Footprint, Proposal, Session},
};

/// A drafter as it is, but for the logits of the token that comes next in a known text: these are raised in the
/// first n slots of a round, n going through 0 to k from round to round. What is random is rejected at once, and
/// so never met with a round of which some or all is kept.
pub struct Prompted<'a> {
    pub drafter: &'a dyn Drafter<B>,
    pub text: &'a Text,
}

struct PromptedSession<'a> {
    told: &'a Prompted<'a>,
    session: Box<dyn Session<B> + 'a>,
    rounds: usize,
}

impl Drafter<B> for Prompted<'_> {
    fn kind(&self) -> &'static str {
        self.drafter.kind()
    }
    fn max_draft(&self) -> usize {
        self.drafter.max_draft()
    }
    fn feature_layers(&self) -> &[usize] {
        self.drafter.feature_layers()
    }
    fn vocabulary(&self) -> Option<&[TokenId]> {
        self.drafter.vocabulary()
    }
    fn footprint(&self) -> Footprint {
        self.drafter.footprint()
    }
    fn session(&self, capacity: usize) -> Box<dyn Session<B> + '_> {
        Box::new(PromptedSession { told: self, session: self.drafter.session(capacity), rounds: 0 })
    }
}

impl Session<B> for PromptedSession<'_> {
    fn observe(&mut self, tokens: &[TokenId], features: Tensor<B, 2>) {
        self.session.observe(tokens, features);
    }

    fn draft(
        &mut self,
        anchor: TokenId,
        cache: &KvCache<B>,
        k: usize,
        pick: &mut dyn FnMut(usize, &[f32]) -> Result<TokenId>,
    ) -> Result<Proposal> {
        let Prompted { drafter, text } = self.told;
        let told = self.rounds % (k + 1);
        self.rounds += 1;
        // Position `cache.len()` is the anchor's.
        let next = |slot: usize| text.answer.get(cache.len() + slot - text.prompt.len()).copied();
        let draft_id = |token: TokenId| match drafter.vocabulary() {
            Some(kept) => kept.binary_search(&token).ok(),
            None => Some(token.index()),
        };
        self.session.draft(anchor, cache, k, &mut |slot, logits| {
            let mut logits = logits.to_vec();
            if let Some(id) = next(slot).and_then(draft_id).filter(|_| slot <= told) {
                logits[id] = 1e9;
            }
            pick(slot, &logits)
        })
    }
}
