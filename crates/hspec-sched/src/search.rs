//! Which drafts to verify for the most tokens per second.

use crate::{Candidate, Error, Result, Survival, ThroughputProfile};

/// Lengths and what they are expected to bring.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Drafts to verify, per request.
    pub lengths: Vec<usize>,
    /// `theta = tau SPS(B)`, with tau the expected tokens of the round and B its tokens, anchors
    /// included.
    pub tokens_per_second: f64,
}

/// DSpark, Algorithm 1: admits drafts by descending survival as long as each raises theta, and stops at
/// the first that does not. The best lengths where theta has a single peak along the way. Depends on the
/// confidence of no slot beyond the first one left out, hence on no token that is not verified.
pub fn early_stop(survival: &Survival, profile: &ThroughputProfile) -> Plan {
    plan(survival, profile, true)
}

/// The best lengths there are, on staircases too: for each number of drafts the likeliest are the best,
/// and every number is tried (DSpark, section 5.2). Among equals the fewest drafts. Drafts that cannot
/// survive are never taken, even where by the noise of a profile that is not
/// [`monotone`](ThroughputProfile::monotone) more tokens would take less time.
///
/// Not lossless with the confidences of the drafts in question: that a slot is verified then depends on
/// confidences after it, and so on its own token (appendix A). Use confidences of earlier rounds.
pub fn whole_path(survival: &Survival, profile: &ThroughputProfile) -> Plan {
    plan(survival, profile, false)
}

fn plan(survival: &Survival, profile: &ThroughputProfile, early: bool) -> Plan {
    let ranked = survival.ranked();
    let requests = survival.requests();
    let rate = |drafts| profile.steps_per_second(requests + drafts);
    let (drafts, tokens_per_second) = best(&ranked, requests as f64, rate, early);
    Plan { lengths: lengths(&ranked[..drafts], requests), tokens_per_second }
}

/// The number of candidates, from the first on, with the highest theta, and that theta: the first such
/// number, or with `early` the one before theta first fails to rise.
fn best(
    ranked: &[Candidate],
    tokens: f64,
    steps_per_second: impl Fn(usize) -> f64,
    early: bool,
) -> (usize, f64) {
    let mut best = (0, tokens * steps_per_second(0));
    let mut tau = tokens;
    for (drafts, candidate) in (1..).zip(ranked) {
        tau += candidate.survival;
        let theta = tau * steps_per_second(drafts);
        if theta > best.1 {
            best = (drafts, theta);
        } else if early {
            break;
        }
    }
    best
}

/// Admitted candidates as lengths. They are a beginning of the ranking, so each request's highest counts.
fn lengths(admitted: &[Candidate], requests: usize) -> Vec<usize> {
    let mut lengths = vec![0; requests];
    admitted.iter().for_each(|c| lengths[c.request] = c.length);
    lengths
}

/// The `budget` likeliest drafts of all requests, as lengths. Whether a draft is among them depends on no
/// confidence after it, as long as the budget does not.
pub fn admit(survival: &Survival, budget: usize) -> Vec<usize> {
    let ranked = survival.ranked();
    lengths(&ranked[..budget.min(ranked.len())], survival.requests())
}

/// What a step of a serving engine consists of besides the drafts to verify.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Requests that sample in this step; each gets one token whatever becomes of its drafts.
    pub sampling: usize,
    /// Tokens of the step that are no drafts: anchors and pieces of prompts.
    pub tokens: usize,
    /// Milliseconds that drafting takes.
    pub draft_ms: f64,
}

/// How many drafts to verify, n, for the most tokens per second of drafting and verifying together:
///
/// ```text
/// argmax_n  (sampling + the n highest survivals) / (draft + verify(tokens + n))
/// ```
///
/// the smallest n among equals (vLLM's adaptive verification). For lossless use, `stale` must come from
/// earlier rounds; [`admit`] then fills the budget by live confidences.
///
/// # Errors
/// [`Error::Value`] for a drafting time that is negative or no number: no comparison would hold.
pub fn budget(stale: &Survival, load: Load, verify: &ThroughputProfile) -> Result<usize> {
    if !(load.draft_ms >= 0.0 && load.draft_ms.is_finite()) {
        return Err(Error::value("draft milliseconds", load.draft_ms, "a finite number from 0"));
    }
    let rate = |drafts| 1e3 / (load.draft_ms + verify.milliseconds(load.tokens + drafts));
    Ok(best(&stale.ranked(), load.sampling as f64, rate, false).0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drafting_time_that_is_no_number_is_refused() {
        let survival = Survival::new(&[[0.5]]);
        let verify = ThroughputProfile::from_milliseconds(&[(1, 1.0)]).unwrap();
        for draft_ms in [f64::NAN, f64::INFINITY, -1.0] {
            let load = Load { sampling: 1, tokens: 1, draft_ms };
            let error = budget(&survival, load, &verify).unwrap_err().to_string();
            assert!(error.starts_with("draft milliseconds: found"), "{error}");
        }
    }
}
