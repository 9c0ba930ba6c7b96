//! How many drafted tokens to verify, and what that buys: plain numbers in, plain numbers out, no
//! tensors.
//!
//! [`draft_length`] keeps a block inside the context and inside the tokens that are still allowed.
//! [`LatencyModel`] is the latency model of H-Spec (arXiv 2609.24197, section 2): a round drafts k
//! tokens in `T_D`, verifies them in `T_T` and emits tau tokens on average, so one token takes
//!
//! ```text
//! L = (T_D + T_T) / tau,      1 <= tau <= k + 1,
//! ```
//!
//! tau being the mean accepted length with the bonus token.
//!
//! ```
//! use hspec_sched::{LatencyModel, draft_length};
//!
//! // Seven drafts, but the context ends four positions after the anchor.
//! assert_eq!(draft_length(7, 4091, 4096, 100), 4);
//! // One token left to emit: plain decoding.
//! assert_eq!(draft_length(7, 10, 4096, 1), 0);
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
mod latency;

pub use draft_length::draft_length;
pub use error::{Error, Result};
pub use latency::LatencyModel;
