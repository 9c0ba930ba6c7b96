//! How far predicted probabilities can be trusted.

use crate::{Error, Result};

/// Bins of the reference evaluator's calibration error.
pub const BINS: usize = 20;

/// Bins of the curve that the AUROC is read from.
const FINE: usize = 1000;

/// Predictions of one range of probabilities.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Bin {
    /// Number of predictions.
    pub count: usize,
    /// Their mean; 0 without any.
    pub predicted: f64,
    /// Share of them that came true; 0 without any.
    pub observed: f64,
}

/// Predictions against outcomes.
#[derive(Debug, Clone, PartialEq)]
pub struct Reliability {
    /// Bins of equal width over [0, 1], the diagram's points.
    pub bins: Vec<Bin>,
    /// All predictions together.
    pub total: Bin,
    /// Probability that a prediction that came true is above one that did not, ties counting half; over
    /// 1000 bins. None if all had the same outcome.
    pub auroc: Option<f64>,
    /// Mean squared error.
    pub brier: f64,
}

impl Reliability {
    /// Over (prediction, outcome) pairs. Predictions are clamped to `1e-8 .. 1 - 1e-8`; one of 1 falls into
    /// the last bin.
    ///
    /// # Errors
    /// [`Error::Value`] without bins or pairs, or if a prediction is NaN.
    pub fn new(pairs: impl IntoIterator<Item = (f64, bool)>, bins: usize) -> Result<Self> {
        let mut histogram = Histogram::new(bins)?;
        let mut fine = vec![[0usize; 2]; FINE];
        let mut squares = 0.0;
        for (p, came_true) in pairs {
            let p = histogram.add(p, came_true)?;
            fine[index(p, FINE)][usize::from(came_true)] += 1;
            squares += (p - f64::from(u8::from(came_true))).powi(2);
        }
        let bins = histogram.means();
        let total = bins.iter().fold(Bin::default(), |total, bin| Bin {
            count: total.count + bin.count,
            predicted: total.predicted + bin.predicted * bin.count as f64,
            observed: total.observed + bin.observed * bin.count as f64,
        });
        if total.count == 0 {
            return Err(Error::value("predictions", "none", "at least one"));
        }
        let n = total.count as f64;
        let total = Bin { predicted: total.predicted / n, observed: total.observed / n, ..total };
        Ok(Self { bins, total, auroc: auroc(&fine), brier: squares / n })
    }

    /// Expected calibration error: the mean over predictions of how far their bin's mean prediction is
    /// from its share of true outcomes.
    pub fn ece(&self) -> f64 {
        ece(&self.bins)
    }
}

/// The calibration error alone; 0 without predictions.
pub(crate) fn calibration_error(pairs: impl IntoIterator<Item = (f64, bool)>, bins: usize) -> Result<f64> {
    let mut histogram = Histogram::new(bins)?;
    for (p, came_true) in pairs {
        histogram.add(p, came_true)?;
    }
    Ok(ece(&histogram.means()))
}

fn ece(bins: &[Bin]) -> f64 {
    let count: usize = bins.iter().map(|b| b.count).sum();
    let errors = bins.iter().map(|b| b.count as f64 * (b.predicted - b.observed).abs());
    errors.sum::<f64>() / count.max(1) as f64
}

/// Sums per bin.
struct Histogram(Vec<Bin>);

impl Histogram {
    fn new(bins: usize) -> Result<Self> {
        if bins == 0 {
            return Err(Error::value("bins", bins, "at least 1"));
        }
        Ok(Self(vec![Bin::default(); bins]))
    }

    /// Returns the prediction as counted.
    fn add(&mut self, p: f64, came_true: bool) -> Result<f64> {
        if p.is_nan() {
            return Err(Error::value("prediction", p, "a probability"));
        }
        let p = p.clamp(1e-8, 1.0 - 1e-8);
        let count = self.0.len();
        let bin = &mut self.0[index(p, count)];
        bin.count += 1;
        bin.predicted += p;
        bin.observed += f64::from(u8::from(came_true));
        Ok(p)
    }

    fn means(self) -> Vec<Bin> {
        let mean = |bin: Bin| {
            let n = bin.count.max(1) as f64;
            Bin { predicted: bin.predicted / n, observed: bin.observed / n, ..bin }
        };
        self.0.into_iter().map(mean).collect()
    }
}

fn index(p: f64, bins: usize) -> usize {
    ((p * bins as f64) as usize).min(bins - 1)
}

/// From counts of [false, true] outcomes by ascending prediction.
fn auroc(fine: &[[usize; 2]]) -> Option<f64> {
    let (mut lost, mut pairs, mut won) = (0.0, 0.0, 0.0);
    for &[no, yes] in fine {
        let (no, yes) = (no as f64, yes as f64);
        pairs += yes * (lost + 0.5 * no);
        lost += no;
        won += yes;
    }
    let all = lost * won;
    (all > 0.0).then(|| pairs / all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hand_computed_case() {
        let pairs = [(0.1, false), (0.2, true), (0.9, true), (0.9, false), (1.0, true)];
        let found = Reliability::new(pairs, 2).unwrap();
        approx::assert_relative_eq!(found.bins[0].predicted, 0.15);
        assert_eq!((found.bins[0].count, found.bins[0].observed), (2, 0.5));
        approx::assert_relative_eq!(found.bins[1].predicted, 2.8 / 3.0, max_relative = 1e-7);
        approx::assert_relative_eq!(found.ece(), (2.0 * 0.35 + 0.8) / 5.0, max_relative = 1e-7);
        // Six pairs of a true and a false outcome: 0.2 > 0.1, 0.9 > 0.1, 0.9 = 0.9, 1 > both; 0.2 < 0.9.
        assert_eq!(found.auroc, Some(4.5 / 6.0));
        approx::assert_relative_eq!(found.brier, (0.01 + 0.64 + 0.01 + 0.81) / 5.0, max_relative = 1e-7);
        assert_eq!(found.total.observed, 0.6);
        approx::assert_relative_eq!(found.total.predicted, 3.1 / 5.0, max_relative = 1e-7);
    }

    #[test]
    fn one_outcome_has_no_ranking() {
        assert_eq!(Reliability::new([(0.3, true), (0.4, true)], 5).unwrap().auroc, None);
    }

    #[test]
    fn refuses_what_says_nothing() {
        for (pairs, bins, message) in [
            (vec![], 20, "predictions: found none, expected at least one"),
            (vec![(0.5, true)], 0, "bins: found 0, expected at least 1"),
            (vec![(0.5, true), (f64::NAN, true)], 20, "prediction: found NaN, expected a probability"),
        ] {
            assert_eq!(Reliability::new(pairs, bins).unwrap_err().to_string(), message);
        }
    }
}
