//! Verifiers with the mistakes that others made.

use crate::scene::{Round, Verifier};
use hspec_core::decode::{Chance, Draft, Law, Purpose, SamplingParams, Verdict};

/// A round by other rules: the probability of keeping draft i, the law of its correction, and the row
/// that the bonus token comes from.
pub fn wrong(
    round: &Round<'_>,
    chance: &mut dyn Chance,
    keep: impl Fn(usize, &Draft) -> f64,
    correction: impl Fn(usize, &Draft) -> Law,
    bonus: Law,
) -> Verdict {
    for (i, draft) in round.drafts.iter().enumerate() {
        let position = round.start() + i as u64;
        if !chance.accept(position, keep(i, draft).min(1.0)) {
            let next = chance.pick(position, Purpose::Residual, &correction(i, draft));
            return Verdict { accepted: i, next };
        }
    }
    let k = round.drafts.len();
    Verdict { accepted: k, next: chance.pick(round.start() + k as u64, Purpose::Bonus, &bonus) }
}

/// The right ratio.
pub fn p_over_q(round: &Round<'_>, row: usize, draft: &Draft) -> f64 {
    round.target(row).prob(draft.token) / draft.law.prob(draft.token)
}

/// Verifiers with a mistake, and the scene that shows it.
pub fn mistakes() -> Vec<(&'static str, &'static str, Verifier)> {
    vec![
        ("keeps every draft", "k = 1", |r, c| {
            wrong(r, c, |_, _| 1.0, |i, _| r.target(i), r.target(r.drafts.len()))
        }),
        ("keeps with p instead of p / q", "k = 2", |r, c| {
            let keep = |i: usize, d: &Draft| r.target(i).prob(d.token);
            wrong(r, c, keep, |i, d| r.target(i).residual(&d.law), r.target(r.drafts.len()))
        }),
        ("ratio with q at temperature 1", "temperature", |r, c| {
            let plain = SamplingParams::new(1.0, None, None).expect("valid");
            let q = |i| r.scene.drafter_with(&plain, &r.context_of(i));
            let keep = |i: usize, d: &Draft| r.target(i).prob(d.token) / q(i).prob(d.token);
            wrong(r, c, keep, |i, _| r.target(i).residual(&q(i)), r.target(r.drafts.len()))
        }),
        ("greedy drafts, ratio with their softmax", "one-hot drafts", |r, c| {
            let q = |i| r.scene.drafter_with(&r.scene.params(), &r.context_of(i));
            let keep = |i: usize, d: &Draft| r.target(i).prob(d.token) / q(i).prob(d.token);
            wrong(r, c, keep, |i, _| r.target(i).residual(&q(i)), r.target(r.drafts.len()))
        }),
        ("correction from p", "k = 2", |r, c| {
            wrong(r, c, |i, d| p_over_q(r, i, d), |i, _| r.target(i), r.target(r.drafts.len()))
        }),
        ("correction from the next row", "k = 2", |r, c| {
            let correction = |i: usize, d: &Draft| r.target(i + 1).residual(&d.law);
            wrong(r, c, |i, d| p_over_q(r, i, d), correction, r.target(r.drafts.len()))
        }),
        ("bonus from row k - 1", "k = 2", |r, c| {
            let correction = |i: usize, d: &Draft| r.target(i).residual(&d.law);
            wrong(r, c, |i, d| p_over_q(r, i, d), correction, r.target(r.drafts.len() - 1))
        }),
        ("residual within the draft vocabulary", "pruned", |r, c| {
            let correction = |i: usize, d: &Draft| {
                let residual = r.target(i).residual(&d.law);
                let inside = residual.iter().filter(|&(t, _)| d.law.prob(t) > 0.0);
                Law::from_weights(inside).unwrap_or(residual.clone())
            };
            wrong(r, c, |i, d| p_over_q(r, i, d), correction, r.target(r.drafts.len()))
        }),
        ("target renormalised to the draft vocabulary", "pruned", |r, c| {
            let p = |i| {
                let draft_vocabulary = r.scene.drafter(&r.context_of(i));
                let target = r.target(i);
                let inside = target.iter().filter(|&(t, _)| draft_vocabulary.prob(t) > 0.0);
                Law::from_weights(inside).expect("some token is in both")
            };
            let keep = |i: usize, d: &Draft| p(i).prob(d.token) / d.law.prob(d.token);
            wrong(r, c, keep, |i, d| p(i).residual(&d.law), r.target(r.drafts.len()))
        }),
        ("target without top-k", "top-k", |r, c| {
            let plain = SamplingParams::new(r.scene.temperature, None, None).expect("valid");
            let p = |i| {
                let logits = r.scene.target_logits(&r.context_of(i));
                plain.distribution(&logits, 0).expect("finite logits")
            };
            let keep = |i: usize, d: &Draft| p(i).prob(d.token) / d.law.prob(d.token);
            wrong(r, c, keep, |i, d| p(i).residual(&d.law), r.target(r.drafts.len()))
        }),
        ("greedy, keeps what the target finds possible", "greedy", |r, c| {
            let plain = SamplingParams::new(1.0, None, None).expect("valid");
            let keep = |i: usize, d: &Draft| {
                let logits = r.scene.target_logits(&r.context_of(i));
                plain.distribution(&logits, 0).expect("finite logits").prob(d.token)
            };
            wrong(r, c, keep, |i, _| r.target(i), r.target(r.drafts.len()))
        }),
    ]
}
