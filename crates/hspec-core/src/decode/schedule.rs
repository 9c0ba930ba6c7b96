//! How many drafts of a round the target verifies, by the drafter's confidence.

use crate::{Error, Result, drafter::Proposal};
use hspec_sched::{Drafted, Policy, PrefixScheduler, StsCalibration};

/// A policy, and what makes the drafter's confidences mean what they say.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// How a round decides.
    pub policy: Policy,
    /// Turns confidence logits into probabilities; the sigmoid where there is none.
    pub calibration: Option<StsCalibration>,
}

/// The schedule of one request.
pub(super) struct Scheduler<'a> {
    schedule: &'a Schedule,
    rounds: PrefixScheduler,
}

impl<'a> Scheduler<'a> {
    /// # Errors
    /// [`Error::Mismatch`] for a threshold that is no probability.
    pub(super) fn new(schedule: &'a Schedule) -> Result<Self> {
        let rounds = PrefixScheduler::new(schedule.policy.clone());
        Ok(Self { schedule, rounds: rounds.map_err(|e| Error::Mismatch(e.to_string()))? })
    }

    /// Whether a round's rejected drafts have a say in later rounds, which then need numbers of their own.
    pub(super) fn remembers(&self) -> bool {
        matches!(self.schedule.policy, Policy::StaleBudget { .. })
    }

    /// How many of the proposed tokens to verify, and how many confidences were no probabilities.
    ///
    /// # Errors
    /// [`Error::Request`] for a policy that needs the confidences of a drafter without any.
    pub(super) fn round(&mut self, id: u64, proposal: &Proposal) -> Result<(usize, usize)> {
        let logits: Vec<f64> = proposal.confidence.iter().map(|&c| f64::from(c)).collect();
        let confidences = match (&self.schedule.policy, &self.schedule.calibration) {
            (Policy::Fixed { .. }, _) => vec![1.0; proposal.tokens.len()],
            _ if logits.len() < proposal.tokens.len() => {
                return Err(Error::Request {
                    what: "schedule",
                    found: "a drafter without a confidence head".into(),
                    expected: "one with it, or a fixed length".into(),
                });
            }
            (_, Some(calibration)) => calibration.confidences(&logits),
            (_, None) => logits.iter().map(|z| 1.0 / (1.0 + (-z).exp())).collect(),
        };
        let decision = self.rounds.round(&[Drafted { id, confidences: &confidences }]);
        Ok((decision.lengths[0], decision.unusable))
    }
}
