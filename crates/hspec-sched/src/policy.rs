//! The decision of each round.

use crate::{Error, Result, Survival, ThroughputProfile, admit, early_stop, survival::usable, whole_path};
use std::collections::{BTreeMap, VecDeque};

/// How the number of drafts to verify is chosen.
///
/// Speculative decoding keeps the target's law only if the decision to verify slot j does not depend on
/// the token in it: a token that is left out because of what it is gets replaced by a draw from the
/// target, and tokens that are let in gain that probability. The confidence `c_j` is known before the
/// token of slot j is drawn, `c_{j+1}` is not. All policies here are lossless in this sense:
///
/// - `Fixed` looks at nothing drawn.
/// - `Threshold` cuts a request before the first low confidence: slot j is in iff `c_1 .. c_j` pass.
/// - `EarlyStop` admits drafts of all requests by descending survival, so `c_{j+1}` is looked at after
///   slot j is in, and stops for good at the first that does not pay.
/// - `StaleBudget` takes the number of drafts from confidences of two rounds ago, when no token of this
///   round was drawn, and admits that many by descending survival.
///
/// Missing on purpose: [`whole_path`] over the confidences of this round, which finds better lengths and
/// shifts the law (DSpark, appendix A).
///
/// The argument needs random numbers that are drawn anew in each round. Where a draft that came to
/// nothing and a later draft at the same position share a number, what `StaleBudget` remembers of the
/// first tells about the second. And with `EarlyStop` and `StaleBudget` the lengths of a request, and so
/// the tokens that it draws though not their law, depend on who else is in the batch.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Policy {
    /// This many drafts, or all there are.
    Fixed {
        /// Drafts per request.
        length: usize,
    },
    /// The drafts before the first whose confidence is below this; 0 keeps all.
    Threshold {
        /// Conditional confidence, 0 to 1.
        confidence: f64,
    },
    /// DSpark, Algorithm 1, with the confidences of this round. For smooth profiles: on a staircase it
    /// stops at the first stair.
    EarlyStop {
        /// Steps per second by tokens.
        profile: ThroughputProfile,
    },
    /// DSpark, section 5.2, for any profile: the best total length under the confidences of two rounds
    /// ago, given to the likeliest drafts of this round. A request that was not there two rounds ago
    /// counts with confidence 1.
    StaleBudget {
        /// Steps per second by tokens; made [monotone](ThroughputProfile::monotone).
        profile: ThroughputProfile,
    },
}

/// What was drafted for one request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drafted<'a> {
    /// Tells requests of the batch apart from round to round.
    pub id: u64,
    /// Conditional confidence of each drafted slot, calibrated. For a drafter without a confidence head
    /// and [`Policy::Fixed`]: anything, one number per draft.
    pub confidences: &'a [f64],
}

/// What to verify in this round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Drafts to verify, per request, at most as many as there are.
    pub lengths: Vec<usize>,
    /// Confidences that were no probabilities and counted as 0.
    pub unusable: usize,
}

/// Decides round by round how many drafts of each request the target verifies.
#[derive(Debug, Clone)]
pub struct PrefixScheduler {
    policy: Policy,
    /// Confidences of the last rounds by request, oldest first.
    seen: VecDeque<BTreeMap<u64, Vec<f64>>>,
}

/// Rounds between the confidences that a budget is computed from and the round that it is for.
const STALE: usize = 2;

impl PrefixScheduler {
    /// A scheduler that has seen no round.
    ///
    /// # Errors
    /// [`Error::Value`] if a threshold is no probability.
    pub fn new(policy: Policy) -> Result<Self> {
        match policy {
            // By the noise of a measured profile a longer step can look cheaper, and no drafts best.
            Policy::StaleBudget { profile } => {
                let policy = Policy::StaleBudget { profile: profile.monotone() };
                Ok(Self { policy, seen: VecDeque::new() })
            }
            Policy::Threshold { confidence } if !(0.0..=1.0).contains(&confidence) => {
                Err(Error::value("confidence threshold", confidence, "a number from 0 to 1"))
            }
            _ => Ok(Self { policy, seen: VecDeque::new() }),
        }
    }

    /// Decides about a round. Call it once per round, with every request in it.
    ///
    /// Of equally likely drafts that cannot all be verified, those of the request with the lowest id are: the
    /// order of requests in the batch, which is not theirs, changes nothing.
    pub fn round(&mut self, drafted: &[Drafted<'_>]) -> Decision {
        let mut order: Vec<usize> = (0..drafted.len()).collect();
        order.sort_by_key(|&i| drafted[i].id);
        let sorted: Vec<_> = order.iter().map(|&i| drafted[i]).collect();
        let Decision { lengths: found, unusable } = self.decide(&sorted);
        let mut lengths = vec![0; drafted.len()];
        order.iter().zip(found).for_each(|(&i, length)| lengths[i] = length);
        Decision { lengths, unusable }
    }

    fn decide(&mut self, drafted: &[Drafted<'_>]) -> Decision {
        let confidences: Vec<_> = drafted.iter().map(|d| d.confidences).collect();
        let survival = Survival::new(&confidences);
        let lengths = match &self.policy {
            Policy::Fixed { length } => confidences.iter().map(|c| c.len().min(*length)).collect(),
            Policy::Threshold { confidence } => confidences.iter().map(|c| before(c, *confidence)).collect(),
            Policy::EarlyStop { profile } => early_stop(&survival, profile).lengths,
            Policy::StaleBudget { profile } => {
                let old = if self.seen.len() == STALE { self.seen.pop_front() } else { None };
                let mut old = old.unwrap_or_default();
                let stale: Vec<_> = drafted
                    .iter()
                    .map(|d| old.remove(&d.id).unwrap_or_else(|| vec![1.0; d.confidences.len()]))
                    .collect();
                self.seen.push_back(drafted.iter().map(|d| (d.id, d.confidences.to_vec())).collect());
                let budget = whole_path(&Survival::new(&stale), profile).lengths.iter().sum();
                admit(&survival, budget)
            }
        };
        Decision { lengths, unusable: survival.unusable() }
    }
}

/// Number of confidences before the first below the threshold.
fn before(confidences: &[f64], threshold: f64) -> usize {
    let low = |&c: &f64| usable(c, &mut 0) < threshold;
    confidences.iter().position(low).unwrap_or(confidences.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat() -> ThroughputProfile {
        ThroughputProfile::from_milliseconds(&[(1, 1.0)]).unwrap()
    }

    fn round(scheduler: &mut PrefixScheduler, rows: &[(u64, &[f64])]) -> Decision {
        let drafted: Vec<_> = rows.iter().map(|&(id, confidences)| Drafted { id, confidences }).collect();
        scheduler.round(&drafted)
    }

    #[test]
    fn static_policies_look_at_one_request_at_a_time() {
        let rows: [(u64, &[f64]); 4] =
            [(1, &[0.9, 0.5, 0.9]), (2, &[]), (3, &[0.6, 0.6, f64::NAN, 1.0]), (4, &[0.59; 2])];
        for (policy, lengths) in [
            (Policy::Fixed { length: 2 }, [2, 0, 2, 2]),
            (Policy::Fixed { length: 0 }, [0, 0, 0, 0]),
            (Policy::Threshold { confidence: 0.6 }, [1, 0, 2, 0]),
            (Policy::Threshold { confidence: 0.0 }, [3, 0, 4, 2]),
        ] {
            let decision = round(&mut PrefixScheduler::new(policy).unwrap(), &rows);
            assert_eq!(decision, Decision { lengths: lengths.to_vec(), unusable: 1 });
        }
    }

    #[test]
    fn a_threshold_that_is_no_probability_is_refused() {
        for confidence in [f64::NAN, -0.1, 1.1] {
            let error = PrefixScheduler::new(Policy::Threshold { confidence }).unwrap_err().to_string();
            assert!(error.starts_with("confidence threshold: found"), "{error}");
        }
    }

    #[test]
    fn nothing_to_verify_is_no_error() {
        for policy in [
            Policy::Fixed { length: 3 },
            Policy::Threshold { confidence: 0.5 },
            Policy::EarlyStop { profile: flat() },
            Policy::StaleBudget { profile: flat() },
        ] {
            let mut scheduler = PrefixScheduler::new(policy).unwrap();
            assert!(round(&mut scheduler, &[]).lengths.is_empty());
            assert_eq!(round(&mut scheduler, &[(1, &[]), (2, &[f64::NAN])]).lengths.len(), 2);
        }
    }

    /// One token costs a step of 1 ms, each further one 0.3 ms: drafts pay for a survival above 0.3 or so.
    #[test]
    fn the_budget_is_two_rounds_old_and_new_requests_are_trusted() {
        let profile = ThroughputProfile::from_milliseconds(&[(1, 1.0), (2, 1.3)]).unwrap();
        let mut scheduler = PrefixScheduler::new(Policy::StaleBudget { profile }).unwrap();
        let (high, low): (&[f64], &[f64]) = (&[0.9; 4], &[0.1; 4]);
        let mut length = |id, row| round(&mut scheduler, &[(id, row)]).lengths[0];
        assert_eq!(length(7, low), 4);
        assert_eq!(length(7, high), 4);
        // Two rounds ago: low, then high.
        assert_eq!(length(7, high), 0);
        assert_eq!(length(7, low), 4);
        assert_eq!(length(7, low), 4);
        assert_eq!(length(7, high), 0);
        // Another request takes the place.
        assert_eq!(length(8, low), 4);
        assert_eq!(length(8, low), 4);
        assert_eq!(length(8, low), 0);
    }
}
