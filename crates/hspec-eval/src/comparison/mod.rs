//! Drafters compared over tasks, draft lengths, temperatures, context lengths and seeds.
//!
//! [`Measurer`] decodes a prompt plainly and with each drafter, one right after the other, and makes a
//! [`Record`] of each. [`Results::new`] turns the records of a [`Manifest`] into figures, each with its 95 %
//! interval: the prompt is what is resampled (paired, within tasks), and all seeds of a prompt stay together.
//! Drafters that are named alike before a `#` are trainings of one, with other random numbers: their counts are
//! pooled, and the trainings are resampled too.

mod figures;
mod gains;
mod manifest;
mod measure;
mod record;
mod results;
mod statistics;
mod sums;
pub(crate) mod tables;
mod text;

pub use figures::{Calibration, ContextFigures, Estimate, Figures, Memory, PlainTime, Times};
pub use gains::{Gain, Rival};
pub use manifest::{DrafterEntry, Manifest, Missing, PromptEntry, Row, TargetFacts, TaskEntry};
pub use measure::{Measurer, Question, Run};
pub use record::{Cell, Record, Timing};
pub use results::{DrafterResult, Results, Setting, TaskResult, TrainingResult};
pub use sums::CONTEXTS;
