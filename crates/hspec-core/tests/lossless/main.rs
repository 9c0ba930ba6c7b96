//! Speculative decoding leaves the target's law as it is: exactly, by enumeration of every branch over
//! small vocabularies, for several rounds of drafting and verifying; and by counts for the real
//! random numbers. Verifiers with the mistakes that others made fail the same checks.

mod block;
mod mistakes;
mod scene;
mod stale;
#[path = "../support/mod.rs"]
mod support;

use hspec_core::{
    TokenId,
    decode::{Chance, CounterRng, Draft, Law, Purpose},
};
use mistakes::{mistakes, p_over_q, wrong};
use proptest::prelude::*;
use scene::{Round, Scene, Verifier, right, scenes, step};
use std::collections::BTreeMap;
use support::Explorer;

/// The law of the first `n` tokens. All that a round hands on is the context, so contexts reached in
/// different ways are merged.
fn emitted(scene: &Scene, verifier: Verifier, n: usize) -> BTreeMap<Vec<u32>, f64> {
    let mut reached = vec![BTreeMap::new(); n + 1];
    reached[0].insert(vec![], 1.0);
    for length in 0..n {
        for (context, weight) in reached[length].clone() {
            let next = Explorer::law(|chance| {
                let mut next = step(scene, verifier, &context, chance);
                next.truncate(n);
                next
            });
            for (next, probability) in next {
                *reached[next.len()].entry(next).or_insert(0.0) += weight * probability;
            }
        }
    }
    reached.swap_remove(n)
}

/// The largest difference between the law of `n` tokens and the target's.
fn deviation(scene: &Scene, verifier: Verifier, n: usize) -> f64 {
    let found = emitted(scene, verifier, n);
    let mut reference = BTreeMap::from([(vec![], 1.0)]);
    for _ in 0..n {
        let longer = reference.iter().flat_map(|(context, &weight): (&Vec<u32>, _)| {
            let law = scene.reference(context);
            let next = move |(t, p)| ([&context[..], &[t]].concat(), weight * p);
            (0..).zip(law).map(next).collect::<Vec<_>>()
        });
        reference = longer.collect();
    }
    let total: f64 = found.values().sum();
    assert!((total - 1.0).abs() < 1e-12, "total {total}");
    assert!(found.keys().all(|tokens| reference.contains_key(tokens)));
    let difference = |(tokens, p): (&Vec<u32>, &f64)| (found.get(tokens).unwrap_or(&0.0) - p).abs();
    reference.iter().map(difference).fold(0.0, f64::max)
}

#[test]
fn every_scene_keeps_the_law_of_the_target() {
    for (name, scene) in scenes() {
        for seed in 0..3 {
            let deviation = deviation(&Scene { seed, ..scene.clone() }, right, 4);
            assert!(deviation < 1e-12, "{name}, seed {seed}: off by {deviation:e}");
        }
    }
}

#[test]
fn identical_laws_accept_everything_and_disjoint_ones_nothing() {
    for (name, scene) in scenes() {
        let accepted = Explorer::law(|chance| {
            let round = Round::draft(&scene, &[2], chance);
            right(&round, chance).accepted
        });
        match name {
            "identical" => assert_eq!(accepted.into_keys().collect::<Vec<_>>(), [3]),
            "disjoint" => assert_eq!(accepted.into_keys().collect::<Vec<_>>(), [0]),
            "k = 3" => assert_eq!(accepted.into_keys().collect::<Vec<_>>(), [0, 1, 2, 3]),
            _ => {}
        }
    }
}

#[test]
fn the_check_finds_every_mistake() {
    let scenes: BTreeMap<_, _> = scenes().into_iter().collect();
    for (mistake, scene, verifier) in mistakes() {
        let scene = &scenes[scene];
        let worst = (0..3).map(|seed| deviation(&Scene { seed, ..scene.clone() }, verifier, 4));
        let worst = worst.fold(0.0, f64::max);
        assert!(worst > 1e-3, "{mistake}: off by no more than {worst:e}");
    }
    // The frame that the mistakes stand in is not what fails.
    let frame: Verifier = |r, c| {
        let correction = |i: usize, d: &Draft| r.target(i).residual(&d.law);
        wrong(r, c, |i, d| p_over_q(r, i, d), correction, r.target(r.drafts.len()))
    };
    assert!(deviation(&scenes["pruned"], frame, 4) < 1e-12);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_scene_keeps_the_law_of_the_target(
        seed in any::<u64>(), vocabulary in 2u32..6, k in 0usize..4, temperature in 0.3f64..2.0,
        top_k in proptest::option::of(1usize..5), top_p in proptest::option::of(0.1f64..1.0),
        kept in 1u32..64, greedy_drafts in any::<bool>(),
    ) {
        let pruned: Vec<_> = (0..vocabulary).filter(|t| kept >> t & 1 == 1).collect();
        let pruned = (!pruned.is_empty()).then_some(pruned);
        let base = Scene::new(vocabulary, k);
        let scene = Scene { seed, temperature, top_k, top_p, pruned, greedy_drafts, ..base };
        let deviation = deviation(&scene, right, 3);
        prop_assert!(deviation < 1e-12, "off by {:e}", deviation);
    }
}

/// The draft's number decides about the draft as well.
struct SharedNoise(CounterRng);

impl Chance for SharedNoise {
    fn accept(&mut self, position: u64, probability: f64) -> bool {
        let coin = [(TokenId(0), probability), (TokenId(1), 1.0 - probability)];
        let coin = Law::from_weights(coin).expect("a probability");
        self.0.pick(position, Purpose::Draft, &coin) == TokenId(0)
    }

    fn pick(&mut self, position: u64, purpose: Purpose, law: &Law) -> TokenId {
        self.0.pick(position, purpose, law)
    }
}

/// Pearson's statistic of the first two tokens of many requests, 15 degrees of freedom.
fn chi_square<C: Chance>(scene: &Scene, make: impl Fn(u64) -> C) -> f64 {
    const REQUESTS: u64 = 20_000;
    let mut counts = BTreeMap::new();
    for request in 0..REQUESTS {
        let mut chance = make(request);
        let mut context = vec![];
        while context.len() < 2 {
            context = step(scene, right, &context, &mut chance);
        }
        context.truncate(2);
        *counts.entry(context).or_insert(0u32) += 1;
    }
    let mut statistic = 0.0;
    for (a, p) in (0..).zip(scene.reference(&[])) {
        for (b, q) in (0..).zip(scene.reference(&[a])) {
            let expected = p * q * REQUESTS as f64;
            let found = f64::from(*counts.get(&vec![a, b]).unwrap_or(&0));
            statistic += (found - expected).powi(2) / expected;
        }
    }
    statistic
}

#[test]
fn counted_random_numbers_sample_the_target() {
    for seed in 0..3 {
        for scene in [Scene::new(4, 2), Scene { pruned: Some(vec![0, 3]), ..Scene::new(4, 3) }] {
            // 44.3 is passed once in ten thousand seeds.
            let statistic = chi_square(&scene, |request| CounterRng::new(seed, request));
            assert!(statistic < 44.3, "seed {seed}: {statistic}");
            let shared = chi_square(&scene, |request| SharedNoise(CounterRng::new(seed, request)));
            assert!(shared > 200.0, "seed {seed}: shared noise passes with {shared}");
        }
    }
}

#[test]
fn a_seed_and_a_request_fix_the_tokens() {
    let scene = Scene::new(5, 3);
    let decode = |seed, request| {
        let mut chance = CounterRng::new(seed, request);
        let mut context = vec![];
        while context.len() < 40 {
            context = step(&scene, right, &context, &mut chance);
        }
        context.truncate(40);
        context
    };
    assert_eq!(decode(3, 4), decode(3, 4));
    assert_ne!(decode(3, 4), decode(3, 5));
    assert_ne!(decode(3, 4), decode(4, 4));
    // Two requests decoded in turns emit what they emit alone.
    let mut mates = [0, 1].map(|request| (CounterRng::new(3, request), vec![]));
    while mates.iter().any(|(_, context)| context.len() < 40) {
        for (chance, context) in &mut mates {
            *context = step(&scene, right, context, chance);
        }
    }
    for (request, (_, context)) in (0..).zip(mates) {
        assert_eq!(context[..40], decode(3, request));
    }
}
