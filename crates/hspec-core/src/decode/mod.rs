//! Sampling and lossless verification.
//!
//! A target's logits become a [`Law`] through [`SamplingParams`]; drafted tokens carry the law that
//! they were drawn from; [`verify`] keeps the prefix of them that leaves the output distributed as if
//! the target had sampled every token itself. Whatever is random goes through [`Chance`]:
//! [`CounterRng`] in earnest, an enumeration of all branches in tests.
//!
//! ```
//! use hspec_core::{TokenId, decode::{Chance, CounterRng, Draft, Purpose, SamplingParams, verify}};
//!
//! let params = SamplingParams::new(0.8, Some(2), None)?;
//! // A drafter of three tokens, ids 0, 1 and 4 of a target of five.
//! let kept = [TokenId(0), TokenId(1), TokenId(4)];
//! let mut chance = CounterRng::new(42, 0);
//! let anchor = 10;
//! let law = params.draft_distribution(&[0.0, 1.0, 2.0], Some(&kept), anchor + 1)?;
//! let token = chance.pick(anchor + 1, Purpose::Draft, &law);
//!
//! let target = [[0.0, 0.0, 3.0, 0.0, 2.5], [1.0, 0.0, 0.0, 0.0, 0.0]];
//! let verdict = verify(
//!     &[Draft { token, law }],
//!     |row| params.distribution(&target[row], anchor + 1 + row as u64),
//!     anchor + 1,
//!     &mut chance,
//! )?;
//! assert!(verdict.accepted <= 1);
//! # Ok::<(), hspec_core::Error>(())
//! ```

mod block_verify;
mod chance;
mod decoder;
mod law;
mod per_round;
mod sampling;
mod schedule;
mod verify;

pub use block_verify::verify_block;
pub use chance::{Chance, CounterRng, Purpose};
pub use decoder::{Decoder, Finish, Generation, Request, Round, Timing};
pub use law::Law;
pub use per_round::PerRound;
pub use sampling::SamplingParams;
pub use schedule::Schedule;
pub use verify::{Draft, Verdict, verify};
