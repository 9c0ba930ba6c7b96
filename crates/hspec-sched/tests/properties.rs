//! What holds for any confidences and any profile, staircases included.

use hspec_sched::{Drafted, Load, Policy, PrefixScheduler, Survival, ThroughputProfile};
use hspec_sched::{admit, budget, early_stop, whole_path};
use proptest::{collection::vec, prelude::*};

/// Stairs of random width and height on a slope, with noise that may leave a longer step cheaper.
fn staircase() -> impl Strategy<Value = ThroughputProfile> {
    let noise = vec(0.0f64..0.3, 20);
    (1usize..6, 0.0f64..3.0, 0.0f64..0.5, noise).prop_map(|(width, height, slope, noise)| {
        let row =
            |(b, noise): (usize, &f64)| (b + 1, 1.0 + height * (b / width) as f64 + slope * b as f64 + noise);
        let rows: Vec<_> = noise.iter().enumerate().map(row).collect();
        ThroughputProfile::from_milliseconds(&rows).expect("positive times")
    })
}

fn confidence() -> impl Strategy<Value = f64> {
    prop_oneof![8 => 0.0f64..=1.0, 1 => Just(1.0), 1 => Just(0.0), 1 => Just(f64::NAN)]
}

fn confidences() -> impl Strategy<Value = Vec<Vec<f64>>> {
    vec(vec(confidence(), 0..5), 1..4)
}

fn throughput(survival: &Survival, lengths: &[usize], profile: &ThroughputProfile) -> f64 {
    let tokens = survival.requests() + lengths.iter().sum::<usize>();
    survival.expected_tokens(lengths) * profile.steps_per_second(tokens)
}

/// All length vectors.
fn every_length(rows: &[Vec<f64>]) -> Vec<Vec<usize>> {
    rows.iter().fold(vec![vec![]], |shorter, row| {
        let longer =
            |lengths: &Vec<usize>| (0..=row.len()).map(|l| [&lengths[..], &[l]].concat()).collect::<Vec<_>>();
        shorter.iter().flat_map(longer).collect()
    })
}

/// Lengths by each lossless policy; the stale budget is given.
fn policies(rows: &[Vec<f64>], profile: &ThroughputProfile, number: f64) -> Vec<Vec<usize>> {
    let decide = |policy| {
        let drafted: Vec<_> = (0..).zip(rows).map(|(id, confidences)| Drafted { id, confidences }).collect();
        PrefixScheduler::new(policy).expect("valid").round(&drafted).lengths
    };
    vec![
        decide(Policy::Fixed { length: (number * 5.0) as usize }),
        decide(Policy::Threshold { confidence: number }),
        decide(Policy::EarlyStop { profile: profile.clone() }),
        admit(&Survival::new(rows), (number * 10.0) as usize),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// An early stop is caught by the first stair (TensorRT-LLM#17056); the whole path is not.
    #[test]
    fn the_whole_path_is_the_best_of_all_lengths(
        rows in confidences(), profile in staircase().prop_map(ThroughputProfile::monotone),
    ) {
        let survival = Survival::new(&rows);
        let best = every_length(&rows)
            .iter()
            .map(|lengths| throughput(&survival, lengths, &profile))
            .fold(0.0, f64::max);
        let plan = whole_path(&survival, &profile);
        approx::assert_relative_eq!(plan.tokens_per_second, best, max_relative = 1e-12);
        let found = throughput(&survival, &plan.lengths, &profile);
        approx::assert_relative_eq!(plan.tokens_per_second, found, max_relative = 1e-12);
    }

    #[test]
    fn the_whole_path_beats_every_fixed_length_and_the_early_stop(
        rows in vec(vec(confidence(), 7), 1..6),
        profile in staircase().prop_map(ThroughputProfile::monotone),
    ) {
        let survival = Survival::new(&rows);
        let best = whole_path(&survival, &profile).tokens_per_second * (1.0 + 1e-12);
        for length in 0..=7 {
            prop_assert!(throughput(&survival, &vec![length; rows.len()], &profile) <= best);
        }
        let early = early_stop(&survival, &profile);
        prop_assert!(early.tokens_per_second <= best);
        prop_assert!(early.tokens_per_second >= throughput(&survival, &vec![0; rows.len()], &profile));
        let found = throughput(&survival, &early.lengths, &profile);
        approx::assert_relative_eq!(early.tokens_per_second, found, max_relative = 1e-12);
    }

    #[test]
    fn admitted_drafts_are_the_likeliest_prefixes(rows in confidences(), budget in 0usize..16) {
        let survival = Survival::new(&rows);
        let lengths = admit(&survival, budget);
        let possible: usize = (0..rows.len()).map(|r| survival.row(r).iter().filter(|&&a| a > 0.0).count()).sum();
        prop_assert_eq!(lengths.iter().sum::<usize>(), budget.min(possible));
        let best = every_length(&rows)
            .iter()
            .filter(|lengths| lengths.iter().sum::<usize>() <= budget)
            .map(|lengths| survival.expected_tokens(lengths))
            .fold(0.0, f64::max);
        approx::assert_relative_eq!(survival.expected_tokens(&lengths), best, max_relative = 1e-12);
    }

    /// A serving engine's budget under a load of anchors alone is the whole path's.
    #[test]
    fn a_budget_is_the_length_of_the_whole_path(
        rows in confidences(), profile in staircase(), prompts in 0usize..9, draft_ms in 0.0f64..2.0,
    ) {
        let survival = Survival::new(&rows);
        let n = rows.len();
        let plan = whole_path(&survival, &profile);
        let load = Load { sampling: n, tokens: n, draft_ms: 0.0 };
        let lengths = admit(&survival, budget(&survival, load, &profile).unwrap());
        let found = throughput(&survival, &lengths, &profile);
        approx::assert_relative_eq!(found, plan.tokens_per_second, max_relative = 1e-12);

        let load = Load { sampling: n, tokens: n + prompts, draft_ms };
        let rate = |drafts| {
            let tokens = survival.expected_tokens(&admit(&survival, drafts));
            tokens / (draft_ms + profile.milliseconds(n + prompts + drafts))
        };
        let best = (0..=survival.ranked().len()).map(rate).fold(0.0, f64::max);
        approx::assert_relative_eq!(rate(budget(&survival, load, &profile).unwrap()), best, max_relative = 1e-12);
    }

    /// Invariant: verifying slot j depends on nothing drawn at slot j or later. The confidence of slot
    /// j + 1 is the first that sees the token of slot j, so slot j is admitted or not whatever stands
    /// there. More than that: nothing at all changes with confidences beyond the first slot left out, of
    /// any request, which is what makes several requests independent.
    #[test]
    fn no_decision_depends_on_later_confidences(
        rows in confidences(), others in vec(vec(confidence(), 5), 4), profile in staircase(),
        number in 0.0f64..=1.0, request in 0usize..3, slot in 0usize..5,
    ) {
        let before = policies(&rows, &profile, number);
        let request = request % rows.len();
        let mut changed = rows.clone();
        changed[request].iter_mut().zip(&others[request]).skip(slot).for_each(|(c, &other)| *c = other);
        for (before, after) in before.iter().zip(policies(&changed, &profile, number)) {
            for length in 1..=slot {
                prop_assert_eq!(before[request] >= length, after[request] >= length);
            }
        }
        for (i, lengths) in before.iter().enumerate() {
            let mut changed = rows.clone();
            for ((row, other), &length) in changed.iter_mut().zip(&others).zip(lengths) {
                row.iter_mut().zip(other).skip(length + 1).for_each(|(c, &other)| *c = other);
            }
            prop_assert_eq!(&policies(&changed, &profile, number)[i], lengths);
        }
    }

    /// Also where drafts of several requests are equally likely, of which a batch's order once chose.
    #[test]
    fn permuted_requests_get_permuted_lengths(
        rows in vec(vec(prop_oneof![3 => Just(0.5), 1 => Just(1.0), 1 => confidence()], 0..5), 1..5),
        profile in staircase(), number in 0.0f64..=1.0, turn in 0usize..4,
    ) {
        let turn = turn % rows.len();
        let rotate = |lengths: &[usize]| [&lengths[turn..], &lengths[..turn]].concat();
        let drafted: Vec<_> = (0..).zip(&rows).map(|(id, row)| Drafted { id: 7 - id, confidences: row }).collect();
        let rotated = [&drafted[turn..], &drafted[..turn]].concat();
        for policy in [
            Policy::Fixed { length: (number * 5.0) as usize },
            Policy::Threshold { confidence: number },
            Policy::EarlyStop { profile: profile.clone() },
            Policy::StaleBudget { profile: profile.clone() },
        ] {
            let [mut plain, mut turned] = [(); 2].map(|()| PrefixScheduler::new(policy.clone()).expect("valid"));
            // The third round is the first with a budget from confidences.
            for _ in 0..3 {
                prop_assert_eq!(rotate(&plain.round(&drafted).lengths), turned.round(&rotated).lengths);
            }
        }
    }

    /// Without ids there is nothing to tell equal requests apart by.
    #[test]
    fn permuted_survivals_get_permuted_lengths_where_no_two_are_equal(
        rows in confidences(), profile in staircase(), budget in 0usize..16, turn in 0usize..3,
    ) {
        let survival = Survival::new(&rows);
        let ranked = survival.ranked();
        prop_assume!(ranked.windows(2).all(|w| w[0].survival != w[1].survival || w[0].request == w[1].request));
        let turn = turn % rows.len();
        let rotate = |lengths: &[usize]| [&lengths[turn..], &lengths[..turn]].concat();
        let rotated = Survival::new(&[&rows[turn..], &rows[..turn]].concat());
        prop_assert_eq!(rotate(&admit(&survival, budget)), admit(&rotated, budget));
        let plan = whole_path(&survival, &profile);
        prop_assert_eq!(rotate(&plan.lengths), whole_path(&rotated, &profile).lengths);
        let plan = early_stop(&survival, &profile);
        prop_assert_eq!(rotate(&plan.lengths), early_stop(&rotated, &profile).lengths);
    }
}
