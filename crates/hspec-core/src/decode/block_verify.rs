//! Lossless verification of a block as a whole.

use super::{Chance, Draft, Law, Purpose, Verdict};
use crate::{Error, Result, TokenId};

/// Keeps a prefix of `drafts` and adds one token, so that the tokens are distributed as the target's own,
/// by deciding about prefixes instead of tokens: of all such rules the one that keeps most on average
/// (Sun et al., "Block Verification Accelerates Speculative Decoding", algorithm 2). Arguments and errors
/// are [`verify`](super::verify)'s. With p_i and q_i the laws of target and drafter at the draft x_i, i
/// from 1 to k, and u_i uniform:
///
/// ```text
/// P_0 = 1,   P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))
/// R_i = sum_x (P_i p_{i+1}(x) - q_{i+1}(x))+
/// h_i = R_i / (R_i + 1 - P_i) for i < k, or 1 where that is 0 / 0;   h_k = P_k
/// keep the first tau drafts, tau the largest i with u_i < h_i, or 0
/// then one token of (P_tau p_{tau+1} - q_{tau+1})+ / R_tau, or of p_{k+1} if all are kept
/// ```
///
/// Rows are asked for in order, up to the first draft that the target finds impossible. Greedy decoding
/// keeps what [`verify`](super::verify) keeps.
///
/// Whether a prefix is kept depends on the drafts after it. Numbers that drew and judged them say something
/// about the round's result and must not serve again in the next round, which drafts some of the same
/// positions: give both the drafting and this function a [`PerRound`](super::PerRound).
///
/// # Errors
/// Those of `target`; [`Error::Mismatch`] if a draft has no probability under its own law.
pub fn verify_block(
    drafts: &[Draft],
    mut target: impl FnMut(usize) -> Result<Law>,
    start: u64,
    chance: &mut (impl Chance + ?Sized),
) -> Result<Verdict> {
    let mut rows = vec![target(0)?];
    let mut prefix = 1.0;
    // The longest prefix kept so far and its P.
    let mut kept = (0, prefix);
    for (i, draft) in drafts.iter().enumerate() {
        let position = start + i as u64;
        let q = draft.law.prob(draft.token);
        if q == 0.0 {
            let token = draft.token.0;
            let what = format!("draft {token} at position {position} has probability 0 in its own law");
            return Err(Error::Mismatch(what));
        }
        prefix = f64::min(1.0, prefix * rows[i].prob(draft.token) / q);
        if prefix == 0.0 {
            break;
        }
        rows.push(target(i + 1)?);
        let keep = match drafts.get(i + 1) {
            Some(next) => {
                let left: f64 = excess(&rows[i + 1], prefix, &next.law).map(|(_, w)| w).sum();
                let all = left + (1.0 - prefix);
                if all == 0.0 { 1.0 } else { left / all }
            }
            None => prefix,
        };
        if chance.accept(position, keep) {
            kept = (i + 1, prefix);
        }
    }
    let (accepted, prefix) = kept;
    let position = start + accepted as u64;
    let p = &rows[accepted];
    let next = match drafts.get(accepted) {
        None => chance.pick(position, Purpose::Bonus, p),
        Some(rejected) => {
            // Without mass the rejection had no probability either and comes from rounding.
            let left = Law::from_weights(excess(p, prefix, &rejected.law));
            chance.pick(position, Purpose::Residual, left.as_ref().unwrap_or(p))
        }
    };
    Ok(Verdict { accepted, next })
}

/// `(prefix p - q)+` for each token of p.
fn excess<'a>(p: &'a Law, prefix: f64, q: &'a Law) -> impl Iterator<Item = (TokenId, f64)> + 'a {
    let mut others = q.iter().peekable();
    p.iter().map(move |(token, p)| {
        while others.next_if(|&(other, _)| other < token).is_some() {}
        let q = others.next_if(|&(other, _)| other == token).map_or(0.0, |(_, q)| q);
        (token, (prefix * p - q).max(0.0))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::{CounterRng, verify};

    fn law(weights: &[f64]) -> Law {
        Law::from_weights(weights.iter().enumerate().map(|(t, &w)| (TokenId(t as u32), w))).unwrap()
    }

    /// Takes given numbers for the decisions and remembers the rest.
    struct Scripted {
        uniforms: Vec<f64>,
        asked: Vec<f64>,
        next: Option<(Purpose, Law)>,
    }

    impl Chance for Scripted {
        fn accept(&mut self, position: u64, probability: f64) -> bool {
            self.asked.push(probability);
            self.uniforms[position as usize] < probability
        }
        fn pick(&mut self, _: u64, purpose: Purpose, law: &Law) -> TokenId {
            self.next = Some((purpose, law.clone()));
            law.quantile(0.0)
        }
    }

    fn run(drafts: &[Draft], rows: &[Law], uniforms: &[f64]) -> (Verdict, Scripted) {
        let mut chance = Scripted { uniforms: uniforms.to_vec(), asked: vec![], next: None };
        let verdict = verify_block(drafts, |row| Ok(rows[row].clone()), 0, &mut chance).unwrap();
        (verdict, chance)
    }

    /// p = (1/3, 2/3), q = (2/3, 1/3) twice: the drafts 0, 1 are likely as a pair, though 0 alone is not.
    #[test]
    fn a_later_draft_redeems_an_earlier_one() {
        let (p, q) = (law(&[1.0, 2.0]), law(&[2.0, 1.0]));
        let drafts = [0, 1].map(|t| Draft { token: TokenId(t), law: q.clone() });
        let rows = [p.clone(), p.clone(), p.clone()];
        // P = (1/2, 1), R_1 = 0: the first draft is never kept alone, the pair always.
        let (verdict, chance) = run(&drafts, &rows, &[0.9, 0.9]);
        approx::assert_relative_eq!(chance.asked[..], [0.0, 1.0], max_relative = 1e-12);
        assert_eq!(verdict.accepted, 2);
        assert_eq!(chance.next, Some((Purpose::Bonus, p.clone())));
        // Token by token the first is kept half the time.
        let mut chance = Scripted { uniforms: vec![0.9, 0.9], asked: vec![], next: None };
        let verdict = verify(&drafts, |row| Ok(rows[row].clone()), 0, &mut chance).unwrap();
        assert_eq!(verdict.accepted, 0);
    }

    /// A draft that fails is replaced by what the *prefix* leaves of the target, not the position alone.
    #[test]
    fn the_correction_weighs_the_target_with_the_prefix() {
        let drafts = [
            Draft { token: TokenId(0), law: law(&[0.8, 0.2]) },
            Draft { token: TokenId(0), law: law(&[0.3, 0.6, 0.1]) },
        ];
        let rows = [law(&[0.4, 0.6]), law(&[0.15, 0.15, 0.7]), law(&[1.0])];
        // P_1 = 1/2, (P_1 p_2 - q_2)+ = (0, 0, 0.25), h_1 = 0.25 / 0.75, P_2 = 1/4.
        let (verdict, chance) = run(&drafts, &rows, &[0.33, 0.26]);
        approx::assert_relative_eq!(chance.asked[..], [1.0 / 3.0, 0.25], max_relative = 1e-12);
        assert_eq!(verdict, Verdict { accepted: 1, next: TokenId(2) });
        let (verdict, chance) = run(&drafts, &rows, &[0.34, 0.26]);
        assert_eq!(verdict, Verdict { accepted: 0, next: TokenId(1) });
        assert_eq!(chance.next.unwrap().0, Purpose::Residual);
    }

    #[test]
    fn greedy_keeps_what_single_tokens_keep() {
        let point = |t| Law::point(TokenId(t));
        let rows = [3, 1, 4, 1].map(point);
        for tokens in [[3, 1, 4], [3, 1, 5], [3, 2, 4], [0, 1, 4]] {
            let drafts = tokens.map(|t| Draft { token: TokenId(t), law: point(t) });
            let mut asked = vec![];
            let target = |row: usize| {
                asked.push(row);
                Ok(rows[row].clone())
            };
            let found = verify_block(&drafts, target, 0, &mut CounterRng::new(1, 2)).unwrap();
            let single = verify(&drafts, |row| Ok(rows[row].clone()), 0, &mut CounterRng::new(1, 2)).unwrap();
            assert_eq!(found, single, "{tokens:?}");
            assert_eq!(asked, (0..=found.accepted).collect::<Vec<_>>());
        }
    }

    #[test]
    fn no_drafts_are_plain_decoding() {
        let p = law(&[1.0, 2.0, 3.0]);
        for position in 0..50 {
            let plain = CounterRng::new(1, 8).pick(position, Purpose::Bonus, &p);
            let verdict = verify_block(&[], |_| Ok(p.clone()), position, &mut CounterRng::new(1, 8)).unwrap();
            assert_eq!(verdict, Verdict { accepted: 0, next: plain });
        }
    }

    /// A forced rejection with p equal to q stays finite and samples p.
    #[test]
    fn a_rejection_without_residual_mass_samples_p() {
        let p = law(&[0.1, 0.2, 0.7]);
        let draft = Draft { token: TokenId(2), law: p.clone() };
        let (verdict, chance) = run(&[draft.clone(), draft], &[p.clone(), p.clone(), p.clone()], &[1.0, 1.0]);
        assert_eq!(chance.asked, [1.0, 1.0]);
        assert_eq!(verdict.accepted, 0);
        assert_eq!(chance.next, Some((Purpose::Residual, p)));
    }

    #[test]
    fn a_draft_that_cannot_have_been_drawn_is_an_error() {
        let draft = Draft { token: TokenId(1), law: Law::point(TokenId(0)) };
        let result = verify_block(&[draft], |_| Ok(law(&[0.5, 0.5])), 6, &mut CounterRng::new(0, 0));
        assert!(result.unwrap_err().to_string().contains("draft 1 at position 6"));
    }
}
