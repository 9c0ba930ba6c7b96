//! A number of drafts that depends on earlier rounds.

use hspec_core::{
    TokenId,
    decode::{Chance, CounterRng, Draft, Law, PerRound, Purpose, verify},
};
use hspec_sched::{Drafted, Policy, PrefixScheduler, ThroughputProfile};

const REQUESTS: u64 = 4000;
const TOKENS: usize = 16;

/// How often the first of two tokens is emitted. The target gives it .6, the drafter .3. The confidence of
/// the fourth slot is .9 after the first token and 0 after the other, and only four drafts pay for
/// themselves: the token in the third slot decides whether the round after the next verifies anything.
fn share(fresh: bool) -> f64 {
    let law = |p| Law::from_weights([(TokenId(0), p), (TokenId(1), 1.0 - p)]).expect("probabilities");
    let (p, q) = (law(0.6), law(0.3));
    let profile = ThroughputProfile::from_steps_per_second(&[(1, 1.0), (2, 0.25), (5, 0.25)]);
    let policy = Policy::StaleBudget { profile: profile.expect("valid") };
    let mut first = 0;
    for request in 0..REQUESTS {
        let mut scheduler = PrefixScheduler::new(policy.clone()).expect("valid");
        let mut numbers = CounterRng::new(5, request);
        let mut tokens = vec![];
        while tokens.len() < TOKENS {
            let start = tokens.len() as u64;
            let mut own;
            let chance: &mut dyn Chance = match fresh {
                true => {
                    own = PerRound::new(&mut numbers, start);
                    &mut own
                }
                false => &mut numbers,
            };
            let draft = |i| Draft { token: chance.pick(start + i, Purpose::Draft, &q), law: q.clone() };
            let drafts: Vec<_> = (0..4).map(draft).collect();
            let last = if drafts[2].token == TokenId(0) { 0.9 } else { 0.0 };
            let confidences = [0.9, 0.9, 0.9, last];
            let length = scheduler.round(&[Drafted { id: request, confidences: &confidences }]).lengths[0];
            let verdict = verify(&drafts[..length], |_| Ok(p.clone()), start, chance).expect("laws exist");
            tokens.extend(drafts[..verdict.accepted].iter().map(|d| d.token));
            tokens.push(verdict.next);
        }
        first += tokens[..TOKENS].iter().filter(|&&t| t == TokenId(0)).count();
    }
    first as f64 / (REQUESTS as f64 * TOKENS as f64)
}

/// Staleness alone does not make a budget blind: by a rejected draft's number, kept for its position, the
/// confidences of two rounds ago know a token of this round.
#[test]
fn a_stale_budget_knows_drafts_that_share_numbers_with_rejected_ones() {
    // Five standard deviations of a binomial.
    let limit = 5.0 * (0.6 * 0.4 / (REQUESTS as f64 * TOKENS as f64)).sqrt();
    let found = share(true);
    assert!((found - 0.6).abs() < limit, "{found}");
    let found = share(false);
    assert!((found - 0.6).abs() > 2.0 * limit, "reused numbers pass with {found}");
}
