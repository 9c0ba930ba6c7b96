//! Calibrating a drafter's confidences by the rounds that an evaluation saw.

use crate::{Error, Result, TaskRuns};
use hspec_sched::{BINS, Form, StsCalibration, Verified, temperature_grid};
use serde::{Deserialize, Serialize};

/// What a calibration changes, on the rounds that it was fitted on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CalibrationFit {
    /// Those rounds.
    pub rounds: usize,
    /// Temperature of each slot.
    pub temperatures: Vec<f64>,
    /// `[i]`: expected calibration error, over [`BINS`] bins, of the product of confidences up to slot i
    /// against its acceptance, without temperatures.
    pub ece_before: Vec<f64>,
    /// The same with them.
    pub ece_after: Vec<f64>,
}

/// Fits Sequential Temperature Scaling (DSpark, section 3.2.1) in logit form to the rounds of all tasks. They
/// must have verified all that was drafted: what a schedule lets through is no fair sample.
///
/// # Errors
/// [`Error::Undefined`] for a drafter without a confidence head; [`Error::Schedule`] for confidences that are
/// not finite.
pub fn calibrate(tasks: &TaskRuns) -> Result<(StsCalibration, CalibrationFit)> {
    let runs = tasks.iter().flat_map(|(_, runs)| runs);
    let blocks: Vec<Verified> = runs.flat_map(|run| run.verified.iter().cloned()).collect();
    if blocks.is_empty() {
        let why = "no draft was verified, or the drafter has no confidence head";
        return Err(Error::Undefined { what: "calibration".to_owned(), why });
    }
    let fitted = StsCalibration::fit(Form::Logit, &blocks, &temperature_grid(), BINS)?;
    let plain = StsCalibration::new(Form::Logit, Vec::new())?;
    let errors = |calibration: &StsCalibration| {
        let slots = 0..fitted.temperatures().len();
        slots.map(|slot| Ok(calibration.reliability(&blocks, slot, BINS)?.ece())).collect::<Result<Vec<_>>>()
    };
    let fit = CalibrationFit {
        rounds: blocks.len(),
        temperatures: fitted.temperatures().to_vec(),
        ece_before: errors(&plain)?,
        ece_after: errors(&fitted)?,
    };
    Ok((fitted, fit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Acceptance, PromptRun};

    fn run(verified: Vec<Verified>) -> PromptRun {
        PromptRun {
            acceptance: Acceptance::new(2),
            verified,
            seconds: 0.0,
            draft_seconds: 0.0,
            verify_seconds: 0.0,
            plain_seconds: 0.0,
            plain_tokens: 0,
            same_text: true,
        }
    }

    #[test]
    fn rounds_of_all_tasks_count_and_the_error_falls() {
        // Sure of itself to 0.88, and right half of the time.
        let block = |i: usize| Verified { logits: vec![2.0; 1 + i % 2], accepted: (i / 2) % 2 };
        let tasks = vec![
            ("a".to_owned(), vec![run((0..40).map(block).collect()), run(vec![])]),
            ("b".to_owned(), vec![run((40..100).map(block).collect())]),
        ];
        let (calibration, fit) = calibrate(&tasks).unwrap();
        assert_eq!((fit.rounds, fit.temperatures.len()), (100, 2));
        assert_eq!(calibration.temperatures(), fit.temperatures);
        assert!(fit.ece_before[0] > 0.38 && fit.ece_after[0] < 0.07, "{fit:?}");
        assert!(fit.temperatures[0] > 2.0);
    }

    #[test]
    fn without_confidences_there_is_nothing_to_fit() {
        let message = calibrate(&vec![("a".to_owned(), vec![run(vec![])])]).unwrap_err().to_string();
        assert_eq!(message, "calibration: no draft was verified, or the drafter has no confidence head");
        let bad = run(vec![Verified { logits: vec![f64::NAN], accepted: 0 }]);
        let message = calibrate(&vec![("a".to_owned(), vec![bad])]).unwrap_err().to_string();
        assert!(message.starts_with("block 0, logit of slot 0: found NaN"), "{message}");
    }
}
