//! Every schedule, with the shipped drafter.

use crate::{assets, greedy, scene};
use hspec_core::{
    decode::{Decoder, Round, Schedule},
    drafter,
};
use hspec_sched::{Policy, ThroughputProfile};

#[test]
fn every_schedule_leaves_the_text_of_a_real_model_as_it_is() {
    let (target, texts) = scene();
    let dir = assets().join("drafters/smollm2-135m-hspec");
    let drafter = drafter::load(&dir, &target, target.device()).unwrap();
    // A few tokens are nearly free, a whole block is not.
    let profile = || ThroughputProfile::from_milliseconds(&[(1, 1.0), (3, 1.2), (4, 1.8), (8, 4.0)]).unwrap();
    let policies = [
        Policy::Fixed { length: 3 },
        Policy::Threshold { confidence: 0.5 },
        Policy::EarlyStop { profile: profile() },
        Policy::StaleBudget { profile: profile() },
    ];
    for policy in policies {
        let schedule = Schedule { policy, calibration: None };
        let mut rounds: Vec<Round> = Vec::new();
        for text in &texts {
            let decoder = Decoder::new(&target, Some(&*drafter)).scheduled(&schedule);
            let found = greedy(&decoder, &text.prompt, 7);
            assert_eq!(found.tokens, text.answer, "{:?}", schedule.policy);
            assert_eq!(found.unusable_confidences, 0);
            rounds.extend(found.rounds);
        }
        let some =
            |f: &dyn Fn(&Round) -> bool| assert!(rounds.iter().any(f), "{:?}: {rounds:?}", schedule.policy);
        some(&|r| r.proposed < 7);
        some(&|r| r.accepted > 0);
        some(&|r| r.accepted < r.proposed);
    }
}
