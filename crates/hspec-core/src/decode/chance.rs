//! Every random choice of decoding, behind one small trait.

use super::Law;
use crate::TokenId;
use rand_chacha::{
    ChaCha12Rng,
    rand_core::{Rng, SeedableRng},
};

/// What a random number is for. Numbers for different purposes are independent: a test that decides
/// about a token with the number that the token was drawn with is not lossless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Drawing a draft token.
    Draft = 0,
    /// Deciding whether a draft token is kept.
    Accept = 1,
    /// Drawing the token that replaces a rejected one.
    Residual = 2,
    /// Drawing a token from the target's own law: after the prompt, in plain decoding, and after a
    /// block that was accepted whole.
    Bonus = 3,
}

/// Makes the random choices of one request. `position` is the absolute position of the token in
/// question.
pub trait Chance {
    /// True with the given probability (0 never, 1 always).
    fn accept(&mut self, position: u64, probability: f64) -> bool;

    /// A token drawn from `law`.
    fn pick(&mut self, position: u64, purpose: Purpose, law: &Law) -> TokenId;
}

/// Counter-based random numbers: each is a function of (seed, request, position, purpose) alone, so
/// the order of calls, other requests in the batch and drafts that came to nothing change no result.
///
/// ChaCha12 with the seed as key, the request as stream and (position, purpose) as block counter.
#[derive(Debug, Clone)]
pub struct CounterRng {
    rng: ChaCha12Rng,
}

impl CounterRng {
    /// The numbers of request `request` under `seed`.
    pub fn new(seed: u64, request: u64) -> Self {
        // The seed is the key as it stands: a hash of it would tie results to that hash's version.
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        let mut rng = ChaCha12Rng::from_seed(key);
        rng.set_stream(request);
        Self { rng }
    }

    /// A number in [0, 1), a multiple of 2^-53.
    fn uniform(&mut self, position: u64, purpose: Purpose) -> f64 {
        // Four purposes of two 32-bit words each; the highest position stays below ChaCha's 2^68 words.
        self.rng.set_word_pos((u128::from(position) * 4 + purpose as u128) * 2);
        (self.rng.next_u64() >> 11) as f64 * 2f64.powi(-53)
    }
}

impl Chance for CounterRng {
    fn accept(&mut self, position: u64, probability: f64) -> bool {
        self.uniform(position, Purpose::Accept) < probability
    }

    fn pick(&mut self, position: u64, purpose: Purpose, law: &Law) -> TokenId {
        law.quantile(self.uniform(position, purpose))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PURPOSES: [Purpose; 4] = [Purpose::Draft, Purpose::Accept, Purpose::Residual, Purpose::Bonus];

    fn uniform_law(tokens: u32) -> Law {
        Law::from_weights((0..tokens).map(|t| (TokenId(t), 1.0))).unwrap()
    }

    /// Pearson's statistic of counts against equal expectations.
    fn chi_square(counts: &[u32]) -> f64 {
        let expected = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
        counts.iter().map(|&c| (f64::from(c) - expected).powi(2) / expected).sum()
    }

    #[test]
    fn order_of_calls_changes_nothing() {
        let forward: Vec<_> = {
            let mut rng = CounterRng::new(7, 3);
            (0..50).flat_map(|p| PURPOSES.map(|u| rng.uniform(p, u))).collect()
        };
        let mut backward: Vec<_> = {
            let mut rng = CounterRng::new(7, 3);
            let rev = |p| PURPOSES.into_iter().rev().map(move |u| (p, u));
            (0..50).rev().flat_map(rev).map(|(p, u)| rng.uniform(p, u)).collect()
        };
        backward.reverse();
        assert_eq!(forward, backward);
    }

    #[test]
    fn every_seed_request_position_and_purpose_has_its_own_number() {
        let mut seen = std::collections::HashSet::new();
        let mut count = 0;
        for seed in [0, 1, u64::MAX] {
            for request in [0, 1, u64::MAX] {
                let mut rng = CounterRng::new(seed, request);
                for position in (0..20).chain([u64::MAX - 1, u64::MAX]) {
                    for purpose in PURPOSES {
                        count += 1;
                        seen.insert(rng.uniform(position, purpose).to_bits());
                    }
                }
            }
        }
        assert_eq!(seen.len(), count);
    }

    /// Results stay what they are: numbers of a ChaCha12 written apart from this crate's.
    #[test]
    fn numbers_never_change() {
        for (seed, request, position, purpose, bits) in [
            (0, 0, 0, Purpose::Draft, 0xa_7f2a_a0ed_535e_u64),
            (42, 7, 1000, Purpose::Accept, 0x6_0726_8df5_7343),
            (u64::MAX, u64::MAX, 1 << 63, Purpose::Bonus, 0xe_7544_740e_2f65),
            (1, 2, 5, Purpose::Residual, 0x10_187e_49dc_095b),
        ] {
            let found = CounterRng::new(seed, request).uniform(position, purpose);
            assert_eq!(found, bits as f64 / 2f64.powi(53));
        }
    }

    #[test]
    fn pairs_of_streams_are_independent() {
        // Cells of a 4 x 4 table of two uniforms at the same position: 15 degrees of freedom.
        let table = |mut pair: Box<dyn FnMut(u64) -> (f64, f64)>| {
            let mut counts = [0; 16];
            for position in 0..16_000 {
                let (x, y) = pair(position);
                counts[(x * 4.0) as usize * 4 + (y * 4.0) as usize] += 1;
            }
            chi_square(&counts)
        };
        let rng = |seed, request| CounterRng::new(seed, request);
        for (i, a) in PURPOSES.into_iter().enumerate() {
            for b in PURPOSES.into_iter().skip(i + 1) {
                let mut same = rng(5, 9);
                let statistic = table(Box::new(move |p| (same.uniform(p, a), same.uniform(p, b))));
                assert!(statistic < 45.0, "{a:?} and {b:?}: {statistic}");
            }
        }
        let pairs = [(rng(5, 9), rng(6, 9)), (rng(5, 9), rng(5, 10)), (rng(5, 9), rng(9, 5))];
        for (i, (mut a, mut b)) in pairs.into_iter().enumerate() {
            let statistic =
                table(Box::new(move |p| (a.uniform(p, Purpose::Draft), b.uniform(p, Purpose::Draft))));
            assert!(statistic < 45.0, "pair {i}: {statistic}");
        }
        // The check can fail: a stream against itself.
        let mut same = rng(5, 9);
        let statistic =
            table(Box::new(move |p| (same.uniform(p, Purpose::Draft), same.uniform(p, Purpose::Draft))));
        assert!(statistic > 1000.0);
    }

    #[test]
    fn picks_and_accepts_with_the_right_frequency() {
        let mut rng = CounterRng::new(11, 0);
        let law = uniform_law(10);
        let mut counts = [0; 10];
        let mut accepted = 0;
        for position in 0..20_000 {
            counts[rng.pick(position, Purpose::Bonus, &law).index()] += 1;
            accepted += u32::from(rng.accept(position, 0.3));
            assert!(rng.accept(position, 1.0) && !rng.accept(position, 0.0));
        }
        // 9 degrees of freedom: 33.7 is passed once in ten thousand seeds.
        assert!(chi_square(&counts) < 33.7, "{counts:?}");
        // Five standard deviations of a binomial.
        assert!((f64::from(accepted) - 6000.0).abs() < 5.0 * 65.0, "{accepted}");
    }
}
