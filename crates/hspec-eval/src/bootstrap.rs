//! How far a figure could move if other prompts of the same kind had been drawn.
//!
//! Prompts are resampled with replacement and each keeps all that was measured on it, plainly and
//! speculatively: the bootstrap is paired. The interval of a ratio of sums, as of tau:
//!
//! ```
//! use hspec_eval::bootstrap;
//!
//! // (tokens, rounds) of four prompts.
//! let prompts = [(128.0, 60.0), (128.0, 64.0), (90.0, 40.0), (128.0, 50.0)];
//! let tau = |prompts: &[&(f64, f64)]| {
//!     let (tokens, rounds) = prompts.iter().fold((0.0, 0.0), |sum, p| (sum.0 + p.0, sum.1 + p.1));
//!     tokens / rounds
//! };
//! let [low, high] = bootstrap::interval(&prompts, 7, tau)?;
//! assert!(2.0 <= low && low <= 474.0 / 214.0 && 474.0 / 214.0 <= high && high <= 2.56);
//! # Ok::<(), hspec_eval::Error>(())
//! ```

use crate::{Error, Result};
use rand::RngExt;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};

/// Number of resamples: the ends of a 95 % interval then rest on 250 values each.
pub const RESAMPLES: usize = 10_000;

/// The 95 % percentile interval of `statistic` over resamples of `prompts`, low end first. The same
/// seed gives the same interval.
///
/// # Errors
/// [`Error::Undefined`] without prompts, or where the statistic is not finite.
pub fn interval<T>(prompts: &[T], seed: u64, statistic: impl Fn(&[&T]) -> f64) -> Result<[f64; 2]> {
    let undefined = |why| Err(Error::Undefined { what: "bootstrap interval".into(), why });
    if prompts.is_empty() {
        return undefined("no prompts");
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut sample = Vec::with_capacity(prompts.len());
    let mut values = Vec::with_capacity(RESAMPLES);
    for _ in 0..RESAMPLES {
        sample.clear();
        sample.extend((0..prompts.len()).map(|_| &prompts[rng.random_range(0..prompts.len())]));
        values.push(statistic(&sample));
    }
    if values.iter().any(|v| !v.is_finite()) {
        return undefined("the figure is not finite for some resample");
    }
    values.sort_unstable_by(f64::total_cmp);
    Ok([percentile(&values, 0.025), percentile(&values, 0.975)])
}

/// Linear between the order statistics around `q (n - 1)`.
fn percentile(sorted: &[f64], q: f64) -> f64 {
    let place = q * (sorted.len() - 1) as f64;
    let below = place.floor() as usize;
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + (place - place.floor()) * (sorted[above] - sorted[below])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mean(sample: &[&f64]) -> f64 {
        sample.iter().copied().sum::<f64>() / sample.len() as f64
    }

    #[test]
    fn percentiles_of_a_hand_computed_case() {
        let values = [1.0, 2.0, 4.0, 8.0, 16.0];
        for (q, expected) in [(0.0, 1.0), (0.125, 1.5), (0.5, 4.0), (0.875, 12.0), (1.0, 16.0)] {
            assert_eq!(percentile(&values, q), expected);
        }
        assert_eq!(percentile(&[3.0], 0.975), 3.0);
    }

    /// The mean of n numbers has standard error sd / sqrt(n), and 95 % lie within 1.96 of it.
    #[test]
    fn the_interval_of_a_mean_has_its_standard_width() {
        let values: Vec<f64> = (0..400).map(|i| f64::from((i * 7919) % 400)).collect();
        let [low, high] = interval(&values, 1, mean).unwrap();
        let sd = ((400.0f64 * 400.0 - 1.0) / 12.0).sqrt();
        let half = 1.96 * sd / 20.0;
        approx::assert_abs_diff_eq!(low, 199.5 - half, epsilon = 0.05 * half);
        approx::assert_abs_diff_eq!(high, 199.5 + half, epsilon = 0.05 * half);
    }

    #[test]
    fn two_prompts_resample_to_three_means() {
        // Means 0, 1/2 and 1 with weights 1/4, 1/2, 1/4: both ends are in the outer quarters.
        assert_eq!(interval(&[0.0, 1.0], 3, mean).unwrap(), [0.0, 1.0]);
    }

    #[test]
    fn pairs_stay_together() {
        // Every prompt is exactly twice as fast; unpaired resampling would spread this.
        let pairs: Vec<(f64, f64)> = (1..20).map(|i| (2.0 * f64::from(i), f64::from(i))).collect();
        let ratio = |sample: &[&(f64, f64)]| {
            sample.iter().map(|p| p.0).sum::<f64>() / sample.iter().map(|p| p.1).sum::<f64>()
        };
        assert_eq!(interval(&pairs, 0, ratio).unwrap(), [2.0, 2.0]);
    }

    #[test]
    fn what_cannot_be_computed_is_an_error() {
        assert!(interval(&[], 0, mean).unwrap_err().to_string().contains("no prompts"));
        assert!(interval(&[1.0, f64::NAN], 0, mean).unwrap_err().to_string().contains("not finite"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn lies_within_the_range_and_repeats(
            values in proptest::collection::vec(-5.0f64..5.0, 1..12), seed in any::<u64>(),
        ) {
            let [low, high] = interval(&values, seed, mean).unwrap();
            let min = values.iter().copied().fold(f64::INFINITY, f64::min);
            let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            prop_assert!(min - 1e-12 <= low && low <= high && high <= max + 1e-12);
            prop_assert_eq!(interval(&values, seed, mean).unwrap(), [low, high]);
        }
    }
}
