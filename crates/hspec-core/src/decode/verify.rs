//! Lossless verification of a drafted block.

use super::{Chance, Law, Purpose};
use crate::{Error, Result, TokenId};

/// A drafted token.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// The token, in the target's vocabulary.
    pub token: TokenId,
    /// The law q that the token was really drawn from, given the tokens before it: a point for a
    /// drafter that takes the maximum, 0 outside a pruned vocabulary.
    pub law: Law,
}

/// What a round emits: the first `accepted` drafts, then `next`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Number of drafts kept, 0 to k.
    pub accepted: usize,
    /// The token after them: the correction of the first rejected draft, or the bonus token.
    pub next: TokenId,
}

/// Keeps a prefix of `drafts` and adds one token, so that the tokens are distributed as the target's
/// own (speculative sampling; H-Spec, section 2). With p the target's law of a draft's position and u
/// uniform:
///
/// ```text
/// keep x        iff  u q(x) < p(x)
/// first one not kept is replaced by a token of  (p - q)+ / sum (p - q)+
/// all kept: one more token of p at the next position
/// ```
///
/// `start` is the position of the first draft. `target(i)` gives p at position `start + i`, after
/// temperature, top-k and top-p, given the drafts before it; `target(k)` is the law after the whole
/// block. Rows are asked for in order and only as far as needed. With no drafts this is plain
/// decoding. Greedy decoding is the case of p being a point: keep x iff it is the target's maximum.
///
/// # Errors
/// Those of `target`; [`Error::Mismatch`] if a draft has no probability under its own law, because no
/// rule makes such a draft lossless.
pub fn verify(
    drafts: &[Draft],
    mut target: impl FnMut(usize) -> Result<Law>,
    start: u64,
    chance: &mut (impl Chance + ?Sized),
) -> Result<Verdict> {
    for (i, draft) in drafts.iter().enumerate() {
        let position = start + i as u64;
        let p = target(i)?;
        let ratio = ratio(&p, draft).ok_or_else(|| {
            let token = draft.token.0;
            Error::Mismatch(format!("draft {token} at position {position} has probability 0 in its own law"))
        })?;
        if !chance.accept(position, ratio) {
            let next = chance.pick(position, Purpose::Residual, &p.residual(&draft.law));
            return Ok(Verdict { accepted: i, next });
        }
    }
    let next = chance.pick(start + drafts.len() as u64, Purpose::Bonus, &target(drafts.len())?);
    Ok(Verdict { accepted: drafts.len(), next })
}

/// `min(1, p(x) / q(x))`, none where q(x) is 0.
fn ratio(p: &Law, draft: &Draft) -> Option<f64> {
    let (p, q) = (p.prob(draft.token), draft.law.prob(draft.token));
    (q > 0.0).then(|| (p / q).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::CounterRng;

    fn law(weights: &[f64]) -> Law {
        Law::from_weights(weights.iter().enumerate().map(|(t, &w)| (TokenId(t as u32), w))).unwrap()
    }

    /// q(a) = 0.2, p(a) = 0.3, p(b) = 0.5 and greedy decoding: b, never a
    /// (jaymody/speculative-sampling#9).
    #[test]
    fn greedy_keeps_nothing_but_the_maximum() {
        let p = Law::point(TokenId(1));
        for seed in 0..200 {
            let mut chance = CounterRng::new(seed, 0);
            for (token, accepted) in [(0, 0), (1, 1)] {
                let draft = Draft { token: TokenId(token), law: law(&[0.2, 0.5, 0.3]) };
                let verdict = verify(&[draft], |_| Ok(p.clone()), 4, &mut chance).unwrap();
                assert_eq!(verdict, Verdict { accepted, next: TokenId(1) });
            }
        }
    }

    /// A forced rejection with p equal to q stays finite and samples p.
    #[test]
    fn a_rejection_without_residual_mass_samples_p() {
        struct Reject(Option<Law>);
        impl Chance for Reject {
            fn accept(&mut self, _: u64, probability: f64) -> bool {
                assert_eq!(probability, 1.0);
                false
            }
            fn pick(&mut self, _: u64, purpose: Purpose, law: &Law) -> TokenId {
                assert_eq!(purpose, Purpose::Residual);
                self.0 = Some(law.clone());
                TokenId(2)
            }
        }
        let p = law(&[0.1, 0.2, 0.7]);
        let mut chance = Reject(None);
        let draft = Draft { token: TokenId(2), law: p.clone() };
        let verdict = verify(&[draft], |_| Ok(p.clone()), 0, &mut chance).unwrap();
        assert_eq!(verdict, Verdict { accepted: 0, next: TokenId(2) });
        assert_eq!(chance.0, Some(p));
    }

    #[test]
    fn rows_after_the_first_rejection_are_not_asked_for() {
        let drafts = [0, 3, 0].map(|t| Draft { token: TokenId(t), law: Law::point(TokenId(t)) });
        let mut asked = vec![];
        let target = |row| {
            asked.push(row);
            Ok(Law::point(TokenId(0)))
        };
        let verdict = verify(&drafts, target, 0, &mut CounterRng::new(0, 0)).unwrap();
        assert_eq!(verdict, Verdict { accepted: 1, next: TokenId(0) });
        assert_eq!(asked, [0, 1]);
    }

    /// A round without drafts is plain decoding, and rounds of other requests that drafted more change
    /// nothing (vllm-ascend#13608).
    #[test]
    fn a_row_without_drafts_is_plain_decoding() {
        let p = law(&[1.0, 2.0, 3.0, 4.0]);
        let mut tokens = std::collections::HashSet::new();
        for position in 0..100 {
            let plain = CounterRng::new(1, 8).pick(position, Purpose::Bonus, &p);
            let mut chance = CounterRng::new(1, 8);
            let mut mate = CounterRng::new(1, 9);
            let drafts = vec![Draft { token: TokenId(0), law: p.clone() }; 3];
            verify(&drafts, |_| Ok(p.clone()), position, &mut mate).unwrap();
            let verdict = verify(&[], |_| Ok(p.clone()), position, &mut chance).unwrap();
            assert_eq!(verdict, Verdict { accepted: 0, next: plain });
            tokens.insert(plain);
        }
        assert_eq!(tokens.len(), 4);
    }

    #[test]
    fn a_draft_that_cannot_have_been_drawn_is_an_error() {
        let draft = Draft { token: TokenId(1), law: Law::point(TokenId(0)) };
        let result = verify(&[draft], |_| Ok(law(&[0.5, 0.5])), 6, &mut CounterRng::new(0, 0));
        assert!(result.unwrap_err().to_string().contains("draft 1 at position 6"));
    }
}
