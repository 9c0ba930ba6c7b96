//! Counts of drafted and accepted tokens.

/// What the rounds of one or many requests came to. A round verifies up to k drafts and emits those
/// that are accepted plus one token of the target's; the token that the prompt's pass yields belongs
/// to no round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acceptance {
    /// `proposed[i]`: rounds that had a slot i.
    proposed: Vec<u64>,
    /// `reached[i]`: rounds in which slots before i were all accepted and slot i was proposed.
    reached: Vec<u64>,
    /// `accepted[i]`: those of them in which slot i was accepted too.
    accepted: Vec<u64>,
    rounds: u64,
    tokens: u64,
}

impl Acceptance {
    /// No rounds yet, of at most `k` drafts each.
    pub fn new(k: usize) -> Self {
        Self { proposed: vec![0; k], reached: vec![0; k], accepted: vec![0; k], rounds: 0, tokens: 0 }
    }

    /// Adds a round of `proposed` drafts (0 to k; 0 is a plain step), the first `accepted` of which
    /// were kept.
    ///
    /// `ended_by_accepted_stop`: the last one kept ends the request, as an end-of-text token does. Such
    /// a round emits no bonus token, and the drafts after the stop count as never proposed: a block
    /// `[d1, d2, stop, d4, d5]` kept whole, bonus and all, counts 3 (vllm#56101). A stop token that
    /// the target itself emits, as correction or bonus, is an ordinary token.
    ///
    /// # Panics
    /// Unless `accepted <= proposed <= k`, and `accepted >= 1` where a stop was accepted.
    pub fn record(&mut self, proposed: usize, accepted: usize, ended_by_accepted_stop: bool) {
        assert!(accepted <= proposed && proposed <= self.k(), "{accepted} of {proposed}, k = {}", self.k());
        assert!(accepted > 0 || !ended_by_accepted_stop, "a stop token was accepted, and no token was");
        let proposed = if ended_by_accepted_stop { accepted } else { proposed };
        let bonus = u64::from(!ended_by_accepted_stop);
        self.rounds += 1;
        self.tokens += accepted as u64 + bonus;
        self.proposed[..proposed].iter_mut().for_each(|n| *n += 1);
        self.reached[..proposed.min(accepted + 1)].iter_mut().for_each(|n| *n += 1);
        self.accepted[..accepted].iter_mut().for_each(|n| *n += 1);
    }

    /// Adds the rounds of other requests.
    ///
    /// # Panics
    /// If `other` has another k.
    pub fn merge(&mut self, other: &Self) {
        assert_eq!(self.k(), other.k(), "rounds of different k");
        let add = |to: &mut [u64], from: &[u64]| to.iter_mut().zip(from).for_each(|(a, b)| *a += b);
        add(&mut self.proposed, &other.proposed);
        add(&mut self.reached, &other.reached);
        add(&mut self.accepted, &other.accepted);
        self.rounds += other.rounds;
        self.tokens += other.tokens;
    }

    /// The most drafts that a round may have.
    pub fn k(&self) -> usize {
        self.proposed.len()
    }

    /// Number of rounds.
    pub fn rounds(&self) -> u64 {
        self.rounds
    }

    /// Tokens that the rounds emitted.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// `[i]`: rounds that proposed slot i.
    pub fn proposed(&self) -> &[u64] {
        &self.proposed
    }

    /// `[i]`: rounds in which slots before i were all accepted and slot i was proposed.
    pub fn reached(&self) -> &[u64] {
        &self.reached
    }

    /// `[i]`: rounds in which slots up to and including i were accepted.
    pub fn accepted(&self) -> &[u64] {
        &self.accepted
    }

    /// Mean accepted length: tokens per round, bonus included. 0 without rounds.
    pub fn tau(&self) -> f64 {
        ratio(self.tokens, self.rounds)
    }

    /// `[i]`: share of the rounds proposing slot i that accepted it and all before. 0 where none did
    /// propose it.
    pub fn survival(&self) -> Vec<f64> {
        self.accepted.iter().zip(&self.proposed).map(|(&a, &p)| ratio(a, p)).collect()
    }

    /// `[i]`: share of the rounds reaching slot i that accepted it. 0 where none reached it.
    pub fn conditional(&self) -> Vec<f64> {
        self.accepted.iter().zip(&self.reached).map(|(&a, &r)| ratio(a, r)).collect()
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_accepted_stop_counts_neither_bonus_nor_what_follows() {
        let mut counts = Acceptance::new(5);
        counts.record(5, 3, true);
        assert_eq!((counts.tokens(), counts.rounds()), (3, 1));
        assert_eq!(counts.proposed(), [1, 1, 1, 0, 0]);
        assert_eq!(counts.reached(), [1, 1, 1, 0, 0]);
        assert_eq!(counts.accepted(), [1, 1, 1, 0, 0]);
    }

    #[test]
    fn plain_steps_are_rounds_of_one_token() {
        let mut counts = Acceptance::new(2);
        counts.record(0, 0, false);
        counts.record(2, 2, false);
        assert_eq!(counts.tau(), 2.0);
        assert_eq!(counts.reached(), [1, 1]);
    }

    #[test]
    fn nothing_measured_is_zero() {
        let counts = Acceptance::new(2);
        assert_eq!(counts.tau(), 0.0);
        assert_eq!(counts.conditional(), [0.0, 0.0]);
        assert_eq!(counts.survival(), [0.0, 0.0]);
    }

    #[test]
    #[should_panic(expected = "3 of 2, k = 4")]
    fn more_accepted_than_proposed() {
        Acceptance::new(4).record(2, 3, false);
    }

    /// (proposed, accepted, stopped) with k = 5.
    fn rounds() -> impl Strategy<Value = Vec<(usize, usize, bool)>> {
        let round = (0usize..6).prop_flat_map(|p| (Just(p), 0..=p, any::<bool>()));
        proptest::collection::vec(round.prop_map(|(p, a, stop)| (p, a, stop && a > 0)), 1..30)
    }

    fn count(rounds: &[(usize, usize, bool)]) -> Acceptance {
        let mut counts = Acceptance::new(5);
        rounds.iter().for_each(|&(p, a, stop)| counts.record(p, a, stop));
        counts
    }

    proptest! {
        #[test]
        fn tau_lies_between_one_and_k_plus_one(rounds in rounds()) {
            let tau = count(&rounds).tau();
            prop_assert!((1.0..=6.0).contains(&tau), "{}", tau);
        }

        #[test]
        fn counts_equal_their_definitions(rounds in rounds()) {
            let counts = count(&rounds);
            for i in 0..5 {
                // A stop cuts the block where it stands.
                let cut = |&(p, a, stop): &(usize, usize, bool)| (if stop { a } else { p }, a);
                let number = |f: &dyn Fn((usize, usize)) -> bool| {
                    rounds.iter().map(cut).filter(|&r| f(r)).count() as u64
                };
                prop_assert_eq!(counts.proposed()[i], number(&|(p, _)| p > i));
                prop_assert_eq!(counts.reached()[i], number(&|(p, a)| p > i && a >= i));
                prop_assert_eq!(counts.accepted()[i], number(&|(_, a)| a > i));
            }
        }

        #[test]
        fn merging_is_recording_all(rounds in rounds(), cut in 0usize..30) {
            let (one, two) = rounds.split_at(cut.min(rounds.len()));
            let mut merged = count(one);
            merged.merge(&count(two));
            prop_assert_eq!(merged, count(&rounds));
        }

        #[test]
        fn survival_is_the_product_of_conditionals_for_full_blocks(
            accepted in proptest::collection::vec(0usize..6, 1..40),
        ) {
            let counts = count(&accepted.iter().map(|&a| (5, a, false)).collect::<Vec<_>>());
            let mut product = 1.0;
            for (conditional, survival) in counts.conditional().into_iter().zip(counts.survival()) {
                product *= conditional;
                approx::assert_abs_diff_eq!(product, survival, epsilon = 1e-12);
            }
            // And tau is one more than the sum of survivals.
            let sum: f64 = counts.survival().iter().sum();
            approx::assert_abs_diff_eq!(counts.tau(), 1.0 + sum, epsilon = 1e-12);
        }
    }
}
