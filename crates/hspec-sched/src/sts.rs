//! Sequential Temperature Scaling of confidences.

use crate::{Error, Reliability, Result, json, reliability::calibration_error};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// How a temperature acts on a confidence `c = sigma(z)`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Form {
    /// `sigma(z / T)`: ordinary temperature scaling, towards 1/2 as T grows.
    #[default]
    Logit,
    /// `c^(1/T)`: towards 1 as T grows. Leaves a confidence near 1 where it is.
    Power,
}

impl Form {
    fn confidence(self, logit: f64, temperature: f64) -> f64 {
        let sigmoid = |z: f64| 1.0 / (1.0 + (-z).exp());
        match self {
            Self::Logit => sigmoid(logit / temperature),
            Self::Power => sigmoid(logit).powf(1.0 / temperature),
        }
    }
}

/// A verified block to calibrate with.
#[derive(Debug, Clone, PartialEq)]
pub struct Verified {
    /// Confidence logit z of every verified slot, those after the first rejection included; cut where an
    /// accepted stop token ended the answer.
    pub logits: Vec<f64>,
    /// Number of drafts accepted.
    pub accepted: usize,
}

/// A temperature per slot, fitted from left to right so that the *product* of confidences up to a slot is
/// calibrated: the survival that the scheduler works with (DSpark, section 3.2.1).
///
/// In JSON: `{"form": "logit", "temperatures": [2.9, 2.5]}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Raw")]
pub struct StsCalibration {
    form: Form,
    temperatures: Vec<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    form: Form,
    temperatures: Vec<f64>,
}

impl StsCalibration {
    /// Given temperatures, by slot.
    ///
    /// # Errors
    /// [`Error::Value`], naming the slot, unless all are finite and above 0.
    pub fn new(form: Form, temperatures: Vec<f64>) -> Result<Self> {
        check("temperature of slot", &temperatures)?;
        Ok(Self { form, temperatures })
    }

    /// Fits one slot after the other: of the temperatures in `grid` the first with the smallest
    /// calibration error, over `bins` bins ([`BINS`](crate::BINS) as a rule), of the product of the
    /// confidences up to the slot, the earlier ones at their temperatures already.
    ///
    /// # Errors
    /// [`Error::Value`] if the grid is empty or not positive, if there are no bins or no verified slots,
    /// or naming the block that holds a logit that is not finite or accepts more drafts than it has.
    pub fn fit(form: Form, blocks: &[Verified], grid: &[f64], bins: usize) -> Result<Self> {
        check("grid temperature", grid)?;
        let slots = checked_slots(blocks)?;
        if grid.is_empty() || slots == 0 {
            let what = if grid.is_empty() { "grid of temperatures" } else { "verified slots" };
            return Err(Error::value(what, "none", "at least one"));
        }
        let mut reached = vec![1.0; blocks.len()];
        let mut temperatures = Vec::with_capacity(slots);
        for slot in 0..slots {
            let mut best = (f64::INFINITY, grid[0]);
            for &t in grid {
                let pairs = blocks.iter().zip(&reached).filter_map(|(block, reached)| {
                    let logit = block.logits.get(slot)?;
                    Some((reached * form.confidence(*logit, t), block.accepted > slot))
                });
                let error = calibration_error(pairs, bins)?;
                if error < best.0 {
                    best = (error, t);
                }
            }
            for (reached, block) in reached.iter_mut().zip(blocks) {
                *reached *= block.logits.get(slot).map_or(1.0, |&z| form.confidence(z, best.1));
            }
            temperatures.push(best.1);
        }
        Ok(Self { form, temperatures })
    }

    /// How temperatures act.
    pub fn form(&self) -> Form {
        self.form
    }

    /// Temperatures by slot.
    pub fn temperatures(&self) -> &[f64] {
        &self.temperatures
    }

    /// Calibrated conditional confidences of a block's logits; slots beyond the fitted ones keep
    /// `sigma(z)`. A logit of NaN stays NaN, which the scheduler counts.
    pub fn confidences(&self, logits: &[f64]) -> Vec<f64> {
        let temperatures = self.temperatures.iter().copied().chain(std::iter::repeat(1.0));
        logits.iter().zip(temperatures).map(|(&z, t)| self.form.confidence(z, t)).collect()
    }

    /// Survival up to `slot` (from 0) against what happened, over the blocks that reach it.
    ///
    /// # Errors
    /// As [`fit`](Self::fit), and if no block reaches the slot.
    pub fn reliability(&self, blocks: &[Verified], slot: usize, bins: usize) -> Result<Reliability> {
        checked_slots(blocks)?;
        let reaching = blocks.iter().filter(|b| b.logits.len() > slot);
        let pairs = reaching.map(|b| {
            let survival: f64 = self.confidences(&b.logits[..=slot]).iter().product();
            (survival, b.accepted > slot)
        });
        Reliability::new(pairs, bins)
    }

    /// Reads a calibration.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Json`] with the field that cannot be right.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        json::load(path.as_ref())
    }

    /// Writes the calibration, whole or not at all.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        json::save(self, path.as_ref())
    }
}

impl TryFrom<Raw> for StsCalibration {
    type Error = Error;

    fn try_from(raw: Raw) -> Result<Self> {
        Self::new(raw.form, raw.temperatures)
    }
}

/// 49 temperatures from 1/8 to 8, equally far apart in their logarithms.
pub fn temperature_grid() -> Vec<f64> {
    (0..49).map(|i| 2f64.powf(f64::from(i) / 8.0 - 3.0)).collect()
}

fn check(what: &str, temperatures: &[f64]) -> Result<()> {
    match temperatures.iter().position(|t| !(t.is_finite() && *t > 0.0)) {
        Some(i) => Err(Error::value(format!("{what} {i}"), temperatures[i], "a finite number above 0")),
        None => Ok(()),
    }
}

/// The longest block.
fn checked_slots(blocks: &[Verified]) -> Result<usize> {
    for (i, block) in blocks.iter().enumerate() {
        if let Some(slot) = block.logits.iter().position(|z| !z.is_finite()) {
            let what = format!("block {i}, logit of slot {slot}");
            return Err(Error::value(what, block.logits[slot], "a finite number"));
        }
        if block.accepted > block.logits.len() {
            let what = format!("block {i}, accepted drafts");
            return Err(Error::value(what, block.accepted, "at most as many as logits"));
        }
    }
    Ok(blocks.iter().map(|b| b.logits.len()).max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BINS;

    fn blocks() -> Vec<Verified> {
        // Logit 2 says 0.88, half of them come true; the second slot is right about itself.
        let block = |i: usize| Verified { logits: vec![2.0, 0.0], accepted: [0, 2, 0, 1][i % 4] };
        (0..400).map(block).collect()
    }

    #[test]
    fn a_temperature_brings_an_overconfident_slot_down() {
        let fit = StsCalibration::fit(Form::Logit, &blocks(), &temperature_grid(), BINS).unwrap();
        // The highest temperature of the grid comes closest to 1/2.
        assert_eq!(fit.temperatures()[0], 8.0);
        let plain = StsCalibration::new(Form::Logit, vec![]).unwrap();
        let ece = |calibration: &StsCalibration, slot| {
            calibration.reliability(&blocks(), slot, BINS).unwrap().ece()
        };
        assert!(ece(&plain, 0) > 0.38 && ece(&fit, 0) < 0.07);
        assert!(ece(&plain, 1) > 0.19 && ece(&fit, 1) < 0.04);
    }

    /// c^(1/T) goes to 1 as T grows and to 0 as it falls, but hardly moves what is near 1.
    #[test]
    fn the_two_forms_differ() {
        let confidences =
            |form, t| StsCalibration::new(form, vec![t; 2]).unwrap().confidences(&[5.0, -2.0, 0.0]);
        let logit = confidences(Form::Logit, 4.0);
        let power = confidences(Form::Power, 0.5);
        approx::assert_relative_eq!(logit[0], 1.0 / (1.0 + (-1.25f64).exp()));
        approx::assert_relative_eq!(logit[1], 1.0 / (1.0 + 0.5f64.exp()));
        approx::assert_relative_eq!(power[0], (1.0 + (-5.0f64).exp()).powi(-2), max_relative = 1e-12);
        // Beyond the fitted slots.
        assert_eq!((logit[2], power[2]), (0.5, 0.5));
    }

    #[test]
    fn blocks_of_different_lengths_count_where_they_reach() {
        let mut blocks = blocks();
        blocks.iter_mut().step_by(4).for_each(|b| b.logits.truncate(1));
        let fit = StsCalibration::fit(Form::Power, &blocks, &temperature_grid(), BINS).unwrap();
        assert_eq!(fit.temperatures().len(), 2);
        assert_eq!(fit.reliability(&blocks, 0, BINS).unwrap().total.count, 400);
        assert_eq!(fit.reliability(&blocks, 1, BINS).unwrap().total.count, 300);
        assert!(fit.reliability(&blocks, 2, BINS).is_err());
    }

    #[test]
    fn refuses_what_cannot_be_fitted() {
        let fit = |blocks: &[Verified], grid: &[f64], bins| {
            StsCalibration::fit(Form::Logit, blocks, grid, bins).unwrap_err().to_string()
        };
        let bad = |logits: &[f64], accepted| [Verified { logits: logits.to_vec(), accepted }];
        assert!(fit(&blocks(), &[], BINS).starts_with("grid of temperatures: found none"));
        assert!(fit(&blocks(), &[1.0, 0.0], BINS).starts_with("grid temperature 1: found 0"));
        assert!(fit(&blocks(), &[1.0], 0).starts_with("bins: found 0"));
        assert!(fit(&[], &[1.0], BINS).starts_with("verified slots: found none"));
        assert!(fit(&bad(&[], 0), &[1.0], BINS).starts_with("verified slots: found none"));
        assert!(
            fit(&bad(&[0.0, f64::NAN], 0), &[1.0], BINS).starts_with("block 0, logit of slot 1: found NaN")
        );
        assert!(fit(&bad(&[0.0], 2), &[1.0], BINS).starts_with("block 0, accepted drafts: found 2"));
    }

    #[test]
    fn comes_back_from_a_file_and_refuses_wrong_ones() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sts.json");
        for form in [Form::Logit, Form::Power] {
            let fit = StsCalibration::fit(form, &blocks(), &temperature_grid(), BINS).unwrap();
            fit.save(&path).unwrap();
            assert_eq!(StsCalibration::load(&path).unwrap(), fit);
        }
        for (text, message) in [
            (r#"{"form": "logit", "temperatures": [1.0, -2.0]}"#, "temperature of slot 1: found -2"),
            (r#"{"form": "logit", "temperatures": [null]}"#, "invalid type: null"),
            (r#"{"form": "root", "temperatures": [1.0]}"#, "unknown variant `root`"),
            (r#"{"form": "logit"}"#, "missing field `temperatures`"),
            (r#"{"form": "logit", "temperatures": [1.0], "bins": 3}"#, "unknown field `bins`"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = StsCalibration::load(&path).unwrap_err().to_string();
            assert!(error.contains("sts.json: ") && error.contains(message), "{error}");
        }
    }
}
