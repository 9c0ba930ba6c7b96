//! The real random numbers, by counts.

use crate::{B, PROMPT, target};
use burn::tensor::Tensor;
use hspec_attn::KvCache;
use hspec_core::{
    Result, TokenId,
    decode::{Chance, CounterRng, Decoder, Law, Purpose, Request, SamplingParams, Schedule},
    drafter::{Drafter, Footprint, Proposal, Session},
};
use hspec_sched::{Policy, ThroughputProfile};
use std::ops::ControlFlow;

const REQUESTS: u64 = 4000;
const TOKENS: usize = 16;
const K: usize = 4;

/// Gives the first of two tokens a quarter. The confidence of the fourth slot is .9 after the first token and
/// 0 after the other.
struct Biased;

impl Drafter<B> for Biased {
    fn kind(&self) -> &'static str {
        "biased"
    }
    fn max_draft(&self) -> usize {
        K
    }
    fn feature_layers(&self) -> &[usize] {
        &[]
    }
    fn vocabulary(&self) -> Option<&[TokenId]> {
        None
    }
    fn footprint(&self) -> Footprint {
        Footprint { params_trainable: 0, params_frozen: 0, kv_bytes_per_token: 0, state_bytes: 0 }
    }
    fn session(&self, _: usize) -> Box<dyn Session<B> + '_> {
        Box::new(Biased)
    }
}

impl Session<B> for Biased {
    fn observe(&mut self, _: &[TokenId], _: Tensor<B, 2>) {}
    fn draft(
        &mut self,
        _: TokenId,
        _: &KvCache<B>,
        k: usize,
        pick: &mut dyn FnMut(usize, &[f32]) -> Result<TokenId>,
    ) -> Result<Proposal> {
        let tokens =
            (1..=k).map(|slot| pick(slot, &[0.25f32.ln(), 0.75f32.ln()])).collect::<Result<Vec<_>>>()?;
        let likely = 9f32.ln();
        let last = if tokens[2] == TokenId(0) { likely } else { -100.0 };
        Ok(Proposal { tokens, confidence: vec![likely, likely, likely, last] })
    }
}

/// Gives a position the same numbers in every round: takes back what [`PerRound`] does to positions.
///
/// [`PerRound`]: hspec_core::decode::PerRound
struct Shared(CounterRng);

impl Shared {
    fn position(own: u64) -> u64 {
        let start = own << 1 >> 17;
        if own >> 63 == 1 { start + (own & 0xffff) } else { own }
    }
}

impl Chance for Shared {
    fn accept(&mut self, position: u64, probability: f64) -> bool {
        self.0.accept(Self::position(position), probability)
    }
    fn pick(&mut self, position: u64, purpose: Purpose, law: &Law) -> TokenId {
        self.0.pick(Self::position(position), purpose, law)
    }
}

/// Pearson's statistic of how often each of two tokens is emitted that have a half everywhere.
fn chi_square<C: Chance>(numbers: impl Fn(CounterRng) -> C) -> f64 {
    // Embeddings of zero leave logits of zero.
    let target = target(2, 1, 0.0);
    let profile = ThroughputProfile::from_steps_per_second(&[(1, 1.0), (2, 0.25), (5, 0.25)]).unwrap();
    let schedule = Schedule { policy: Policy::StaleBudget { profile }, calibration: None };
    let decoder = Decoder::new(&target, Some(&Biased)).scheduled(&schedule);
    let mut counts = [0.0; 2];
    for id in 0..REQUESTS {
        let request = Request {
            prompt: &PROMPT,
            sampling: SamplingParams::new(1.0, None, None).unwrap(),
            seed: 5,
            id,
            // So many that no round drafts less before the tokens that count are there.
            max_new_tokens: TOKENS + K + 1,
            k: K,
            stop_tokens: &[],
        };
        let mut emitted = 0;
        let emit = &mut |new: &[TokenId]| {
            emitted += new.len();
            if emitted < TOKENS { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        let mut chance = numbers(CounterRng::new(request.seed, id));
        let tokens = decoder.generate_with(&request, &mut chance, emit).unwrap().tokens;
        tokens[..TOKENS].iter().for_each(|token| counts[token.index()] += 1.0);
    }
    let expected = REQUESTS as f64 * TOKENS as f64 / 2.0;
    counts.iter().map(|count: &f64| (count - expected).powi(2) / expected).sum()
}

/// Without numbers of its own in each round, a stale budget is not blind: by a rejected draft's number, the
/// confidences of two rounds ago know a token of this round, and only four drafts pay for themselves.
#[test]
fn a_stale_budget_draws_numbers_anew_in_every_round() {
    // Five standard deviations, with one degree of freedom.
    let found = chi_square(|numbers| numbers);
    assert!(found < 25.0, "{found}");
    let found = chi_square(Shared);
    assert!(found > 100.0, "shared numbers pass with {found}");
}
