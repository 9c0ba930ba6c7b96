//! Random numbers that no other round uses.

use super::{Chance, Law, Purpose};
use crate::TokenId;

/// The [`Chance`] of one round. [`CounterRng`](super::CounterRng) gives a position the same numbers in
/// every round that drafts it, which does no harm as long as nothing that a round keeps or hands on
/// depends on its rejected drafts. It does with [`verify_block`](super::verify_block), and where the
/// confidences of one round decide about later ones.
///
/// Numbers still depend on nothing but (seed, request, first position of the round, position, purpose).
#[derive(Debug)]
pub struct PerRound<'a, C: ?Sized> {
    chance: &'a mut C,
    start: u64,
}

impl<'a, C: Chance + ?Sized> PerRound<'a, C> {
    /// The numbers of the round whose first draft has position `start`, below 2^47. The round draws
    /// nothing before `start`, nor 2^16 positions or more after it.
    pub fn new(chance: &'a mut C, start: u64) -> Self {
        Self { chance, start }
    }

    /// A position that no text has, different for each (start, position).
    fn own(&self, position: u64) -> u64 {
        1 << 63 | self.start << 16 | position.wrapping_sub(self.start) & 0xffff
    }
}

impl<C: Chance + ?Sized> Chance for PerRound<'_, C> {
    fn accept(&mut self, position: u64, probability: f64) -> bool {
        self.chance.accept(self.own(position), probability)
    }

    fn pick(&mut self, position: u64, purpose: Purpose, law: &Law) -> TokenId {
        self.chance.pick(self.own(position), purpose, law)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_round_has_its_own_numbers() {
        struct Positions(HashSet<u64>);
        impl Chance for Positions {
            fn accept(&mut self, position: u64, _: f64) -> bool {
                self.0.insert(position)
            }
            fn pick(&mut self, position: u64, _: Purpose, law: &Law) -> TokenId {
                assert!(!self.0.contains(&position));
                law.quantile(0.0)
            }
        }
        let mut seen = Positions((0..100).collect());
        for start in (0..70).chain([65_535, 65_536, (1 << 47) - 1]) {
            for offset in (0..20).chain([65_535]) {
                let mut round = PerRound::new(&mut seen, start);
                round.pick(start + offset, Purpose::Draft, &Law::point(TokenId(0)));
                assert!(round.accept(start + offset, 0.5), "{start} + {offset}");
            }
        }
    }
}
