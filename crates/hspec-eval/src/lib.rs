//! Acceptance and speed of drafters, measured beside plain decoding of the same prompts.
//!
//! [`Acceptance`] counts what rounds of drafting and verifying come to. Its mean accepted length
//!
//! ```text
//! tau = tokens emitted / rounds,      1 <= tau <= k + 1,
//! ```
//!
//! counts the bonus token (H-Spec, arXiv 2609.24197, section 2); conditional acceptance at a position
//! is its Figure 4. [`Evaluation`] decodes prompts plainly and with drafters in turn and counts;
//! [`calibrate`] makes a drafter's confidences mean what they say by what it saw;
//! [`bootstrap`] says how sure a figure is, given these prompts, and [`Report`] puts everything into
//! JSON and Markdown. [`comparison`] does so for many drafters, settings and seeds, says how sure every
//! difference between drafters is, and makes a page of it; [`synthetic`] writes prompts of any length.
//!
//! ```
//! use hspec_eval::Acceptance;
//!
//! let mut counts = Acceptance::new(3);
//! counts.record(3, 2, false); // two of three drafts kept, and the correction
//! counts.record(3, 3, false); // all kept, and the bonus token
//! counts.record(3, 0, false); // the correction alone
//! assert_eq!(counts.tau(), 8.0 / 3.0);
//! assert_eq!(counts.survival(), [2.0 / 3.0, 2.0 / 3.0, 1.0 / 3.0]);
//! assert_eq!(counts.conditional(), [2.0 / 3.0, 1.0, 0.5]);
//! ```

pub mod bootstrap;
mod calibration;
pub mod comparison;
mod error;
pub mod kv;
mod markdown;
mod metrics;
mod page;
mod report;
mod runner;
pub mod subset;
pub mod synthetic;

pub use calibration::{CalibrationFit, calibrate};
pub use error::{Error, Result};
pub use hspec_core::provenance::{Machine, commit, utc_date};
pub use metrics::Acceptance;
pub use report::{DrafterFacts, DrafterReport, PromptRun, Report, Settings, TaskReport};
pub use runner::{Evaluation, Task, TaskPrompt, TaskRuns};
