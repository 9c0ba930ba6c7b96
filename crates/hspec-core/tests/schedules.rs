//! Schedules cut drafts and change no text.

#![allow(clippy::unwrap_used)] // a test may panic

#[path = "dspark/scene.rs"]
#[allow(dead_code)] // parts that only its own tests need
mod scene;

use hspec_core::{
    Error, TokenId,
    decode::{Decoder, Generation, Request, SamplingParams, Schedule},
    drafter::Drafter,
};
use hspec_sched::{Form, Policy, StsCalibration, ThroughputProfile};
use scene::B;
use std::{collections::BTreeSet, ops::ControlFlow};

fn schedules() -> Vec<(&'static str, Schedule)> {
    // Few tokens are nearly free, a full block is not.
    let profile = || ThroughputProfile::from_milliseconds(&[(1, 1.0), (3, 1.1), (4, 1.9), (8, 4.0)]).unwrap();
    let calibration = StsCalibration::new(Form::Logit, vec![0.5, 1.0, 2.0, 2.0, 2.0]).unwrap();
    let plain = |policy| Schedule { policy, calibration: None };
    vec![
        ("fixed", plain(Policy::Fixed { length: 2 })),
        ("nothing", plain(Policy::Fixed { length: 0 })),
        ("threshold", plain(Policy::Threshold { confidence: 0.5 })),
        (
            "calibrated threshold",
            Schedule { policy: Policy::Threshold { confidence: 0.5 }, calibration: Some(calibration) },
        ),
        ("early stop", plain(Policy::EarlyStop { profile: profile() })),
        ("stale budget", plain(Policy::StaleBudget { profile: profile() })),
    ]
}

fn generate(
    drafter: Option<&dyn Drafter<B>>,
    schedule: Option<&Schedule>,
    sampling: SamplingParams,
) -> Result<Generation, Error> {
    let prompt: Vec<TokenId> = (0..5).map(|i| TokenId(i * 37 % 500)).collect();
    let request =
        Request { prompt: &prompt, sampling, seed: 0, id: 0, max_new_tokens: 24, k: 5, stop_tokens: &[] };
    let target = scene::target();
    let decoder = Decoder::new(&target, drafter).scheduled(schedule);
    decoder.generate(&request, &mut |_| ControlFlow::Continue(()))
}

#[test]
fn every_kind_under_every_schedule_emits_what_plain_decoding_emits() {
    let plain = generate(None, None, SamplingParams::greedy()).unwrap().tokens;
    let mut cut = BTreeSet::new();
    for config in scene::all() {
        let drafter = scene::drafter(&config);
        let full = generate(Some(&drafter), None, SamplingParams::greedy()).unwrap();
        let proposed = |g: &Generation| g.rounds.iter().map(|r| r.proposed).collect::<Vec<_>>();
        let confident = config["enable_confidence_head"] == true;
        for (name, schedule) in schedules() {
            let kind = drafter.kind();
            let found = generate(Some(&drafter), Some(&schedule), SamplingParams::greedy());
            match (found, &schedule.policy) {
                (Ok(found), policy) => {
                    assert!(confident || matches!(policy, Policy::Fixed { .. }), "{kind}, {name}");
                    assert_eq!(found.tokens, plain, "{kind}, {name}");
                    if proposed(&found) != proposed(&full) {
                        cut.insert(name);
                    }
                    assert_eq!(found.unusable_confidences, 0);
                    if let Policy::Fixed { length } = policy {
                        assert!(proposed(&found).iter().all(|p| p <= length), "{kind}, {name}");
                    }
                }
                (Err(error), _) => {
                    let expected = "schedule: found a drafter without a confidence head, \
                                    expected one with it, or a fixed length";
                    assert_eq!((confident, error.to_string().as_str()), (false, expected), "{kind}, {name}");
                }
            }
        }
    }
    assert_eq!(cut.len(), schedules().len(), "schedules that ever cut a draft: {cut:?}");
}

/// Rounds that remember need numbers of their own; a seed still fixes the text.
#[test]
fn a_seed_fixes_sampled_text_under_every_schedule() {
    let drafter = scene::drafter(&scene::deepspec("vanilla"));
    let sampling = SamplingParams::new(1.0, None, None).unwrap();
    for (name, schedule) in schedules() {
        let run = || generate(Some(&drafter), Some(&schedule), sampling).unwrap().tokens;
        assert_eq!(run(), run(), "{name}");
    }
}

#[test]
fn a_threshold_that_is_no_probability_is_refused() {
    let drafter = scene::drafter(&scene::deepspec("vanilla"));
    let schedule = Schedule { policy: Policy::Threshold { confidence: 2.0 }, calibration: None };
    let error = generate(Some(&drafter), Some(&schedule), SamplingParams::greedy()).unwrap_err();
    assert_eq!(error.to_string(), "confidence threshold: found 2, expected a number from 0 to 1");
}
