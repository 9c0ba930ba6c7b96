//! Which schedules keep the target's law, by enumeration of every draft of two requests over a small
//! vocabulary.

use hspec_sched::{
    Drafted, Policy, PrefixScheduler, Survival, ThroughputProfile, admit, early_stop, whole_path,
};
use proptest::{collection::vec, prelude::*};
use std::collections::BTreeMap;

/// Confidences of each request to lengths.
type Schedule<'a> = dyn Fn(&[Vec<f64>]) -> Vec<usize> + 'a;

/// Two tokens, laws that depend on the tokens before, and confidences that do too.
struct Scene {
    slots: usize,
    numbers: Vec<f64>,
}

impl Scene {
    /// A number from 0 to 1 for a request and the tokens before.
    fn number(&self, what: usize, request: usize, before: &[usize]) -> f64 {
        let context = before.iter().fold(1, |h, t| 2 * h + t);
        self.numbers[(what * 64 + request * 32 + context) % self.numbers.len()]
    }

    fn law(&self, what: usize, request: usize, before: &[usize]) -> [f64; 2] {
        let p = 0.05 + 0.9 * self.number(what, request, before);
        [p, 1.0 - p]
    }

    fn target(&self, request: usize, before: &[usize]) -> [f64; 2] {
        self.law(0, request, before)
    }

    fn drafter(&self, request: usize, before: &[usize]) -> [f64; 2] {
        self.law(1, request, before)
    }

    /// Conditional confidences of a drafted block: that of slot j knows the tokens before it.
    fn confidences(&self, request: usize, tokens: &[usize]) -> Vec<f64> {
        (0..tokens.len()).map(|j| self.number(2, request, &tokens[..j])).collect()
    }

    /// The law of the first `slots` tokens of one request that drafted `tokens` and has `length` of them
    /// verified: kept with min(1, p / q), corrected or followed by a token of the target, and completed
    /// by the target.
    fn emitted(&self, request: usize, tokens: &[usize], length: usize) -> BTreeMap<Vec<usize>, f64> {
        let mut law = BTreeMap::new();
        let mut reached = 1.0;
        for j in 0..length {
            let (p, q) = (self.target(request, &tokens[..j]), self.drafter(request, &tokens[..j]));
            let keep = (p[tokens[j]] / q[tokens[j]]).min(1.0);
            // The residual of two tokens is the one that the drafter gives too little.
            let other = usize::from(p[1] > q[1]);
            self.complete(request, [&tokens[..j], &[other]].concat(), reached * (1.0 - keep), &mut law);
            reached *= keep;
        }
        self.complete(request, tokens[..length].to_vec(), reached, &mut law);
        law
    }

    fn complete(&self, request: usize, tokens: Vec<usize>, weight: f64, law: &mut BTreeMap<Vec<usize>, f64>) {
        if tokens.len() >= self.slots {
            *law.entry(tokens).or_default() += weight;
            return;
        }
        for (token, p) in self.target(request, &tokens).into_iter().enumerate() {
            self.complete(request, [&tokens[..], &[token]].concat(), weight * p, law);
        }
    }

    /// Every block that a request may draft, with its probability.
    fn blocks(&self, request: usize) -> Vec<(Vec<usize>, f64)> {
        let mut blocks = vec![(vec![], 1.0)];
        for _ in 0..self.slots {
            let longer = |(block, weight): &(Vec<usize>, f64)| {
                let q = self.drafter(request, block);
                [0, 1].map(|t| ([&block[..], &[t]].concat(), weight * q[t]))
            };
            blocks = blocks.iter().flat_map(longer).collect();
        }
        blocks
    }

    /// The largest difference between the joint law of all requests' tokens and the target's.
    fn deviation(&self, requests: usize, schedule: &Schedule) -> f64 {
        let join = |joint: &BTreeMap<Vec<usize>, f64>, law: &BTreeMap<Vec<usize>, f64>| {
            let pair = |(a, p): (&Vec<usize>, &f64)| {
                law.iter().map(|(b, q)| ([&a[..], b].concat(), p * q)).collect::<Vec<_>>()
            };
            joint.iter().flat_map(pair).collect::<BTreeMap<_, _>>()
        };
        let start = BTreeMap::from([(vec![], 1.0)]);
        let mut drafts = vec![(vec![], 1.0)];
        let mut reference = start.clone();
        for request in 0..requests {
            let blocks = self.blocks(request);
            let with = |(before, weight): &(Vec<Vec<usize>>, f64)| {
                let longer = |(block, p): &(Vec<usize>, f64)| {
                    ([&before[..], std::slice::from_ref(block)].concat(), weight * p)
                };
                blocks.iter().map(longer).collect::<Vec<_>>()
            };
            drafts = drafts.iter().flat_map(with).collect();
            let mut law = BTreeMap::new();
            self.complete(request, vec![], 1.0, &mut law);
            reference = join(&reference, &law);
        }
        let mut found = BTreeMap::new();
        for (blocks, weight) in drafts {
            let confidences: Vec<_> =
                blocks.iter().enumerate().map(|(r, block)| self.confidences(r, block)).collect();
            let lengths = schedule(&confidences);
            let laws = (0..requests).map(|r| self.emitted(r, &blocks[r], lengths[r]));
            for (tokens, p) in laws.fold(start.clone(), |joint, law| join(&joint, &law)) {
                *found.entry(tokens).or_insert(0.0) += weight * p;
            }
        }
        assert!(found.keys().all(|tokens| reference.contains_key(tokens)));
        let off = |(tokens, p): (&Vec<usize>, &f64)| (found.get(tokens).unwrap_or(&0.0) - p).abs();
        reference.iter().map(off).fold(0.0, f64::max)
    }
}

fn by(policy: &Policy, confidences: &[Vec<f64>]) -> Vec<usize> {
    let drafted: Vec<_> =
        (0..).zip(confidences).map(|(id, confidences)| Drafted { id, confidences }).collect();
    PrefixScheduler::new(policy.clone()).expect("valid").round(&drafted).lengths
}

/// DSpark, appendix A: p = (.7, .3), q = (.5, .5), SPS = (1, .5, .45), confidence .8 in the first slot;
/// in the second .9 after the first token and 0 after the other. The whole path with live confidences
/// verifies the draft if it is the first token and replaces it by a draw from p if not.
#[test]
fn searching_the_whole_path_of_live_confidences_shifts_the_output_law() {
    let rows = [(1, 1.0), (2, 0.5), (3, 0.45)];
    let profile = ThroughputProfile::from_steps_per_second(&rows).expect("valid");
    let (p, q) = ([0.7, 0.3], [0.5, 0.5]);
    let first_token = |schedule: fn(&Survival, &ThroughputProfile) -> Vec<usize>| {
        let mut law = [0.0; 2];
        for (x, second) in [(0, 0.9), (1, 0.0)] {
            if schedule(&Survival::new(&[[0.8, second]]), &profile)[0] == 0 {
                (0..2).for_each(|t| law[t] += q[x] * p[t]);
            } else {
                let keep = f64::min(1.0, p[x] / q[x]);
                law[x] += q[x] * keep;
                law[0] += q[x] * (1.0 - keep);
            }
        }
        law
    };
    let whole = first_token(|survival, profile| whole_path(survival, profile).lengths);
    approx::assert_relative_eq!(whole[0], 0.85, max_relative = 1e-12);
    approx::assert_relative_eq!(whole[1], 0.15, max_relative = 1e-12);
    let early = first_token(|survival, profile| early_stop(survival, profile).lengths);
    approx::assert_relative_eq!(early[0], 0.7, max_relative = 1e-12);
    approx::assert_relative_eq!(early[1], 0.3, max_relative = 1e-12);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_policy_keeps_the_joint_law_of_two_requests(
        numbers in vec(0.0f64..1.0, 192), costs in vec(0.2f64..2.0, 8), number in 0.0f64..1.0,
    ) {
        let scene = Scene { slots: 2, numbers };
        let rows: Vec<_> = costs.iter().copied().enumerate().map(|(b, ms)| (b + 1, ms)).collect();
        let profile = ThroughputProfile::from_milliseconds(&rows).expect("valid");
        for policy in [
            Policy::Fixed { length: (number * 3.0) as usize },
            Policy::Threshold { confidence: number },
            Policy::EarlyStop { profile },
        ] {
            let off = scene.deviation(2, &|confidences| by(&policy, confidences));
            prop_assert!(off < 1e-12, "{policy:?} is off by {off:e}");
        }
        // A budget that knows nothing of this round.
        let budget = (number * 5.0) as usize;
        let off = scene.deviation(2, &|confidences| admit(&Survival::new(confidences), budget));
        prop_assert!(off < 1e-12, "a budget of {budget} is off by {off:e}");
    }
}

/// The enumeration finds schedules that look ahead.
#[test]
fn looking_at_later_slots_is_found() {
    let mut state = 7u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as f64 / (1u64 << 31) as f64
    };
    let mut scene = || Scene { slots: 3, numbers: (0..192).map(|_| next()).collect() };
    let scenes: Vec<_> = (0..20).map(|_| scene()).collect();
    let rows = [(1, 1.0), (2, 1.6), (3, 1.6), (4, 1.61)];
    let profile = ThroughputProfile::from_milliseconds(&rows).expect("valid");
    let schedules: [(&str, &Schedule); 3] = [
        ("whole path", &|rows| whole_path(&Survival::new(rows), &profile).lengths),
        ("last slot decides", &|rows| vec![if rows[0][2] > 0.5 { 3 } else { 0 }]),
        ("cut after the lowest confidence", &|rows| {
            let lowest = rows[0].iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).expect("slots").0;
            vec![lowest + 1]
        }),
    ];
    for (name, schedule) in schedules {
        let off = scenes.iter().map(|scene| scene.deviation(1, schedule)).fold(0.0, f64::max);
        assert!(off > 1e-3, "{name}: off by no more than {off:e}");
    }
}
