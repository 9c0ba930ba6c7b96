//! Which anchors are trained at which depth. All depths of all positions would be K times the sequence; the
//! deeper a depth, the fewer anchors it keeps.

use rand::{SeedableRng, seq::index};
use rand_chacha::ChaCha12Rng;

/// How quickly the depths thin out: of `n` supervised positions depth `j` keeps
/// `(n - j) max(ratio^j, least)`, rounded down.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cod {
    /// Depths, the one that sees real features included.
    pub depths: usize,
    /// Share that survives from one depth to the next.
    pub ratio: f64,
    /// Least share that a depth keeps.
    pub least: f64,
}

impl Default for Cod {
    /// As released.
    fn default() -> Self {
        Self { depths: 8, ratio: 0.7, least: 0.2 }
    }
}

/// The pairs of a training pass, depth by depth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Samples {
    /// The pair of depth 0 that each continues.
    pub anchors: Vec<usize>,
    /// How far behind it each lies: it stands for pair `anchor + depth`.
    pub depths: Vec<usize>,
}

impl Cod {
    /// Depth 0 is every pair. Depth `j` keeps anchors whose pair `anchor + j` is supervised and of the
    /// anchor's document, and which depth `j - 1` kept, so that whoever is sampled sees all its predecessors.
    pub fn sample(&self, supervised: &[bool], documents: &[i64], seed: u64) -> Samples {
        let total = supervised.len();
        let count = supervised.iter().filter(|&&s| s).count();
        let mut rng = ChaCha12Rng::seed_from_u64(seed);
        let mut samples = Samples { anchors: (0..total).collect(), depths: vec![0; total] };
        // A pair that follows another one of its document: position 0 has no anchor before it.
        let follows = |p: usize| p > 0 && p < total && supervised[p] && documents[p] == documents[p - 1];
        let mut pool: Vec<usize> = (0..total).filter(|&p| follows(p)).collect();
        for depth in 1..self.depths {
            let share = self.ratio.powi(depth as i32).max(self.least);
            let size = (count.saturating_sub(depth) as f64 * share) as usize;
            let mut kept: Vec<usize> = if size < pool.len() {
                index::sample(&mut rng, pool.len(), size).into_iter().map(|i| pool[i]).collect()
            } else {
                pool
            };
            if kept.is_empty() {
                break;
            }
            kept.sort_unstable();
            samples.anchors.extend(kept.iter().map(|p| p - depth));
            samples.depths.extend(kept.iter().map(|_| depth));
            pool = kept.into_iter().map(|p| p + 1).filter(|&p| follows(p)).collect();
        }
        samples
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn at(samples: &Samples, depth: usize) -> BTreeSet<usize> {
        let all = samples.anchors.iter().zip(&samples.depths);
        all.filter(|&(_, &d)| d == depth).map(|(&a, _)| a).collect()
    }

    proptest! {
        #[test]
        fn chains_are_whole_supervised_and_of_one_document(
            supervised in proptest::collection::vec(proptest::bool::weighted(0.8), 0..60),
            cuts in proptest::collection::btree_set(0usize..60, 0..4),
            ratio in 0.1f64..1.0, least in 0.0f64..0.5, depths in 1usize..9, seed in 0u64..9,
        ) {
            let n = supervised.len();
            let documents: Vec<i64> = (0..n).map(|p| cuts.range(..=p).count() as i64).collect();
            let cod = Cod { depths, ratio, least };
            let samples = cod.sample(&supervised, &documents, seed);
            prop_assert_eq!(&samples, &cod.sample(&supervised, &documents, seed));
            prop_assert_eq!(at(&samples, 0), (0..n).collect());
            prop_assert!(samples.depths.iter().all(|&d| d < depths));
            let count = supervised.iter().filter(|&&s| s).count();
            for depth in 1..depths {
                let kept = at(&samples, depth);
                prop_assert!(kept.is_subset(&at(&samples, depth - 1)));
                for &a in &kept {
                    prop_assert!(supervised[a + depth] && documents[a] == documents[a + depth]);
                }
                let most = count.saturating_sub(depth) as f64 * ratio.powi(depth as i32).max(least);
                prop_assert!(kept.len() <= most as usize);
            }
        }
    }

    #[test]
    fn a_long_supervised_document_keeps_the_stated_share() {
        let n = 1000;
        let samples = Cod::default().sample(&vec![true; n], &vec![0; n], 7);
        assert_eq!(at(&samples, 1).len(), (999.0 * 0.7) as usize);
        assert_eq!(at(&samples, 2).len(), (998.0 * 0.7 * 0.7) as usize);
        assert_ne!(samples, Cod::default().sample(&vec![true; n], &vec![0; n], 8));
    }

    /// A supervised first position once became anchor -1 of depth 1.
    #[test]
    fn position_zero_has_no_anchor_before_it() {
        let cod = Cod { depths: 3, ratio: 1.0, least: 1.0 };
        let samples = cod.sample(&[true; 4], &[0; 4], 0);
        assert_eq!(at(&samples, 1), BTreeSet::from([0, 1, 2]));
        assert_eq!(at(&samples, 2), BTreeSet::from([0, 1]));
    }

    /// Packing once let a chain run into the next document, whose tokens it does not see.
    #[test]
    fn no_chain_leaves_its_document() {
        let cod = Cod { depths: 4, ratio: 1.0, least: 1.0 };
        let samples = cod.sample(&[true; 6], &[0, 0, 1, 1, 1, 1], 0);
        assert_eq!(at(&samples, 1), BTreeSet::from([0, 2, 3, 4]));
        assert_eq!(at(&samples, 2), BTreeSet::from([2, 3]));
        assert_eq!(at(&samples, 3), BTreeSet::from([2]));
    }
}
