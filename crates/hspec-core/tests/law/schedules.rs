//! Every schedule, by the confidences of a real head; and one that looks ahead.

use crate::{B, K, PROMPT, deviation, dspark, emitted, reference, shrunk, target};
use burn::tensor::Tensor;
use hspec_attn::KvCache;
use hspec_core::{
    Result, TokenId,
    decode::{Decoder, Schedule},
    drafter::{Drafter, Footprint, Proposal, Session},
    target::{Rows, Target, Want},
};
use hspec_sched::{Policy, Survival, ThroughputProfile, whole_path};
use std::collections::BTreeSet;

/// A drafter whose confidence logits are those of another, put differently.
struct Judged<'a> {
    drafter: &'a dyn Drafter<B>,
    judge: &'a dyn Fn(&[f32]) -> Vec<f32>,
}

struct JudgedSession<'a> {
    session: Box<dyn Session<B> + 'a>,
    judge: &'a dyn Fn(&[f32]) -> Vec<f32>,
}

impl Drafter<B> for Judged<'_> {
    fn kind(&self) -> &'static str {
        self.drafter.kind()
    }
    fn max_draft(&self) -> usize {
        self.drafter.max_draft()
    }
    fn feature_layers(&self) -> &[usize] {
        self.drafter.feature_layers()
    }
    fn vocabulary(&self) -> Option<&[TokenId]> {
        self.drafter.vocabulary()
    }
    fn footprint(&self) -> Footprint {
        self.drafter.footprint()
    }
    fn session(&self, capacity: usize) -> Box<dyn Session<B> + '_> {
        Box::new(JudgedSession { session: self.drafter.session(capacity), judge: self.judge })
    }
}

impl Session<B> for JudgedSession<'_> {
    fn observe(&mut self, tokens: &[TokenId], features: Tensor<B, 2>) {
        self.session.observe(tokens, features);
    }
    fn draft(
        &mut self,
        anchor: TokenId,
        cache: &KvCache<B>,
        k: usize,
        pick: &mut dyn FnMut(usize, &[f32]) -> Result<TokenId>,
    ) -> Result<Proposal> {
        let proposal = self.session.draft(anchor, cache, k, pick)?;
        Ok(Proposal { confidence: (self.judge)(&proposal.confidence), ..proposal })
    }
}

/// Makes the logits of a head without training tell tokens apart: those of the first slot, which know the
/// anchor, get mean 3 and deviation 1 over all anchors; those of the second, which know the first draft too,
/// mean 0 and deviation 3 over all drafts behind token 0.
fn sharpened(target: &Target<B>, drafter: &dyn Drafter<B>) -> impl Fn(&[f32]) -> Vec<f32> + use<> {
    let mut cache = target.cache(1, PROMPT.len());
    let want = Want { logits: Rows::None, hidden: drafter.feature_layers() };
    let pass = target.forward(&PROMPT, &mut cache, &want).unwrap();
    let mut session = drafter.session(PROMPT.len());
    let features = pass.hidden.into_iter().map(|h| h.squeeze_dim::<2>(0)).collect();
    session.observe(&PROMPT, Tensor::cat(features, 1));
    let mut confidence = |anchor: TokenId, draft: TokenId| -> Vec<f32> {
        session.draft(anchor, &cache, K, &mut |_, _| Ok(draft)).unwrap().confidence
    };
    let tokens = || (0..target.config().vocab_size as u32).map(TokenId);
    let first = moments(tokens().map(|anchor| confidence(anchor, TokenId(0))[0]).collect());
    let second = moments(tokens().map(|draft| confidence(TokenId(0), draft)[1]).collect());
    move |logits| {
        let standard = |z: f32, (mean, deviation): (f32, f32)| (z - mean) / deviation;
        vec![3.0 + standard(logits[0], first), 3.0 * standard(logits[1], second)]
    }
}

/// Mean and standard deviation.
fn moments(values: Vec<f32>) -> (f32, f32) {
    let n = values.len() as f32;
    let mean = values.iter().sum::<f32>() / n;
    (mean, (values.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / n).sqrt())
}

/// Two drafts pay where both are likely, one alone never does.
fn staircase() -> ThroughputProfile {
    ThroughputProfile::from_steps_per_second(&[(1, 1.0), (2, 0.5), (3, 0.45)]).unwrap()
}

#[test]
fn every_schedule_keeps_the_law_of_the_target() {
    let target = target(4, 4, 1.0);
    let reference = reference(&target, K + 2);
    let smooth = ThroughputProfile::from_milliseconds(&[(1, 1.0), (3, 2.0)]).unwrap();
    for head in ["vanilla", "gated", "rnn"] {
        let drafter = dspark::drafter(&shrunk(dspark::deepspec(head), 4));
        let judge = sharpened(&target, &drafter);
        let drafter = Judged { drafter: &drafter, judge: &judge };
        for policy in [
            Policy::Fixed { length: 0 },
            Policy::Fixed { length: 1 },
            Policy::Threshold { confidence: 0.8 },
            Policy::EarlyStop { profile: smooth.clone() },
        ] {
            let schedule = Schedule { policy, calibration: None };
            let found = emitted(&Decoder::new(&target, Some(&drafter)).scheduled(&schedule), 1);
            let off = deviation(&found.law, &reference);
            assert!(off < 1e-6, "{head}, {:?}: off by {off:e}", schedule.policy);
            let depends = !matches!(schedule.policy, Policy::Fixed { .. });
            assert_eq!(found.verified.len() > 1, depends, "{head}, {:?}", schedule.policy);
        }
    }
}

/// Three rounds, so that the confidences of the first decide about the third.
#[test]
fn a_stale_budget_keeps_the_law_of_the_target() {
    let target = target(2, 1, 1.0);
    let mut config = shrunk(dspark::deepspec("vanilla"), 2);
    config["target_layer_ids"] = [-1, 0].as_slice().into();
    let drafter = dspark::drafter(&config);
    let judge = sharpened(&target, &drafter);
    let drafter = Judged { drafter: &drafter, judge: &judge };
    let schedule = Schedule { policy: Policy::StaleBudget { profile: staircase() }, calibration: None };
    let found = emitted(&Decoder::new(&target, Some(&drafter)).scheduled(&schedule), 3);
    let off = deviation(&found.law, &reference(&target, 3 * (K + 1) + 1));
    assert!(off < 1e-6, "off by {off:e}");
    assert_eq!(found.verified, BTreeSet::from([vec![2, 2, 0], vec![2, 2, 2]]));
}

/// DSpark, appendix A: the best length by the confidences of this round. Whether the first draft is verified
/// then depends on the confidence of the second slot, which knows the first draft's token.
#[test]
fn a_schedule_that_searches_live_confidences_shifts_the_law() {
    let target = target(4, 4, 1.0);
    let drafter = dspark::drafter(&shrunk(dspark::deepspec("vanilla"), 4));
    let sharp = sharpened(&target, &drafter);
    // A threshold verifies exactly what the search chose.
    let judge = |logits: &[f32]| {
        let live: Vec<f64> = sharp(logits).iter().map(|z| 1.0 / (1.0 + f64::from(-z).exp())).collect();
        let length = whole_path(&Survival::new(&[live]), &staircase()).lengths[0];
        (0..logits.len()).map(|slot| if slot < length { 20.0 } else { -20.0 }).collect()
    };
    let drafter = Judged { drafter: &drafter, judge: &judge };
    let schedule = Schedule { policy: Policy::Threshold { confidence: 0.5 }, calibration: None };
    let found = emitted(&Decoder::new(&target, Some(&drafter)).scheduled(&schedule), 1);
    assert_eq!(found.verified, BTreeSet::from([vec![0], vec![2]]));
    let off = deviation(&found.law, &reference(&target, K + 2));
    assert!(off > 1e-3, "off by no more than {off:e}");
}
