//! How many drafted tokens to verify, and what that buys: plain numbers in, plain numbers out, no
//! tensors.
//!
//! Verifying a draft costs time in every pass and pays only if it is accepted. A drafter with a confidence
//! head says for each slot how likely that is, given that the slots before it are; [`PrefixScheduler`] turns
//! these numbers into a draft length per request and round, by one [`Policy`] or another. With `c_{r,j}` the
//! confidence of slot j of request r, `l_r` the drafts verified of R requests, and `SPS(B)` the steps per
//! second over B tokens ([`ThroughputProfile`]), the scheduler seeks (DSpark, section 3.2)
//!
//! ```text
//! a_{r,j} = c_{r,1} .. c_{r,j}                      survival
//! theta(l) = tau SPS(B),    tau = R + sum_r sum_{j <= l_r} a_{r,j},    B = R + sum_r l_r
//! ```
//!
//! [`early_stop`] is Algorithm 1 of that paper. [`whole_path`] finds the best lengths under any profile, but
//! may only be fed with confidences of earlier rounds; [`Policy`] says why. [`StsCalibration`] makes
//! confidences mean what they say, [`Reliability`] measures how far they do.
//!
//! [`draft_length`] keeps a block inside the context and inside the tokens that are still allowed.
//! [`LatencyModel`] is the latency model of H-Spec (arXiv 2609.24197, section 2): a round drafts k tokens in
//! `T_D`, verifies them in `T_T` and emits tau tokens on average, the bonus token included, so that one
//! token takes `L = (T_D + T_T) / tau`.
//!
//! ```
//! use hspec_sched::{Drafted, LatencyModel, Policy, PrefixScheduler, ThroughputProfile, draft_length};
//!
//! // A step over one token takes 10 ms, and 0.8 ms more for every further one.
//! let profile = ThroughputProfile::from_milliseconds(&[(1, 10.0), (2, 10.8)])?;
//! let mut scheduler = PrefixScheduler::new(Policy::EarlyStop { profile })?;
//! let decision = scheduler.round(&[
//!     Drafted { id: 1, confidences: &[0.9, 0.9, 0.8, 0.2] },
//!     Drafted { id: 2, confidences: &[0.1, 0.9, 0.9, f64::NAN] },
//! ]);
//! assert_eq!(decision.lengths, [3, 0]);
//! assert_eq!(decision.unusable, 1);
//!
//! // Seven drafts, but the context ends four positions after the anchor.
//! assert_eq!(draft_length(7, 4091, 4096, 100), 4);
//!
//! // 2 ms to draft, 12 ms to verify, 10 ms for a plain step.
//! let model = LatencyModel::new(2e-3, 12e-3, 10e-3)?;
//! assert!((model.seconds_per_token(2.8)? - 5e-3).abs() < 1e-12);
//! assert!((model.speedup(2.8)? - 2.0).abs() < 1e-12);
//! assert!((model.break_even() - 1.4).abs() < 1e-12);
//! # Ok::<(), hspec_sched::Error>(())
//! ```

mod draft_length;
mod error;
mod json;
mod latency;
mod policy;
mod profile;
mod reliability;
mod search;
mod sts;
mod survival;

pub use draft_length::draft_length;
pub use error::{Error, Result};
pub use latency::LatencyModel;
pub use policy::{Decision, Drafted, Policy, PrefixScheduler};
pub use profile::ThroughputProfile;
pub use reliability::{BINS, Bin, Reliability};
pub use search::{Load, Plan, admit, budget, early_stop, whole_path};
pub use sts::{Form, StsCalibration, Verified, temperature_grid};
pub use survival::{Candidate, Survival};
