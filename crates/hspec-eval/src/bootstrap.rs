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
    let intervals = intervals(&[prompts.len()], seed, |drawn, values| {
        let sample: Vec<&T> = drawn[0].iter().map(|&i| &prompts[i]).collect();
        values.push(statistic(&sample));
    });
    match intervals[..] {
        [Some(interval)] => Ok(interval),
        _ => undefined("the figure is not finite for some resample"),
    }
}

/// The 95 % percentile intervals of many statistics over the same resamples, low ends first. Prompts are
/// resampled within strata, the tasks, of the given sizes: `statistics` gets the prompts drawn from each,
/// and pushes its values, always as many. A value that is not finite in some resample has no interval.
///
/// Resample number r depends on the seed, r and the sizes alone (a counter-based generator), so that what
/// is computed with the same sizes is paired.
pub fn intervals(
    strata: &[usize],
    seed: u64,
    mut statistics: impl FnMut(&[Vec<usize>], &mut Vec<f64>),
) -> Vec<Option<[f64; 2]>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut drawn: Vec<Vec<usize>> = strata.iter().map(|&size| vec![0; size]).collect();
    let mut values = Vec::new();
    let mut columns: Vec<Vec<f64>> = Vec::new();
    for resample in 0..RESAMPLES {
        rng.set_stream(resample as u64);
        rng.set_word_pos(0);
        for stratum in &mut drawn {
            let size = stratum.len();
            stratum.iter_mut().for_each(|prompt| *prompt = rng.random_range(0..size));
        }
        values.clear();
        statistics(&drawn, &mut values);
        columns.resize_with(values.len(), || Vec::with_capacity(RESAMPLES));
        columns.iter_mut().zip(&values).for_each(|(column, &value)| column.push(value));
    }
    let interval = |mut column: Vec<f64>| {
        column.sort_unstable_by(f64::total_cmp);
        let finite = column.iter().all(|value| value.is_finite());
        finite.then(|| [percentile(&column, 0.025), percentile(&column, 0.975)])
    };
    columns.into_iter().map(interval).collect()
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

    /// Tokens and rounds of ten prompts with two drafters.
    const RUNS: [[f64; 4]; 10] = [
        [128.0, 60.0, 128.0, 66.0],
        [128.0, 64.0, 128.0, 69.0],
        [90.0, 40.0, 92.0, 47.0],
        [128.0, 50.0, 128.0, 61.0],
        [64.0, 41.0, 64.0, 40.0],
        [128.0, 71.0, 128.0, 80.0],
        [101.0, 39.0, 99.0, 47.0],
        [128.0, 82.0, 128.0, 84.0],
        [37.0, 20.0, 37.0, 25.0],
        [128.0, 55.0, 128.0, 60.0],
    ];

    /// tau of the drafters.
    fn taus(drawn: impl Iterator<Item = usize>) -> [f64; 2] {
        let sum = drawn.fold([0.0; 4], |sum, i| std::array::from_fn(|c| sum[c] + RUNS[i][c]));
        [sum[0] / sum[1], sum[2] / sum[3]]
    }

    /// scipy.stats.bootstrap (1.16, a million resamples, percentile, paired) on these runs. The ends of ten
    /// thousand resamples scatter by about 0.005 around them.
    #[test]
    fn intervals_agree_with_scipy() {
        let found = intervals(&[10], 5, |drawn, values| {
            let [one, two] = taus(drawn[0].iter().copied());
            values.extend([one, one - two, one / two - 1.0]);
        });
        // The mean of two tasks' tau: six prompts of one, four of the other.
        let strata = intervals(&[6, 4], 5, |drawn, values| {
            let [first, _] = taus(drawn[0].iter().copied());
            let [second, _] = taus(drawn[1].iter().map(|i| i + 6));
            values.push((first + second) / 2.0);
        });
        let scipy = [[1.814745, 2.270089], [0.114489, 0.306855], [0.066096, 0.159313], [1.800025, 2.299166]];
        for (found, scipy) in found.iter().chain(&strata).zip(scipy) {
            let found = found.unwrap();
            let width = scipy[1] - scipy[0];
            approx::assert_abs_diff_eq!(found[0], scipy[0], epsilon = 0.04 * width);
            approx::assert_abs_diff_eq!(found[1], scipy[1], epsilon = 0.04 * width);
        }
    }

    /// Of three prompts, one resample in 27 is the lowest three times: more than a fortieth.
    #[test]
    fn the_ends_of_three_prompts_are_the_extremes() {
        let prompts = [(8.0, 4.0), (12.0, 4.0), (6.0, 4.0)];
        let tau = |sample: &[&(f64, f64)]| {
            sample.iter().map(|p| p.0).sum::<f64>() / sample.iter().map(|p| p.1).sum::<f64>()
        };
        assert_eq!(interval(&prompts, 11, tau).unwrap(), [1.5, 3.0]);
    }

    #[test]
    fn a_value_that_some_resample_does_not_have_has_no_interval() {
        let found = intervals(&[2], 0, |drawn, values| {
            let zeros = drawn[0].iter().filter(|&&i| i == 0).count() as f64;
            values.extend([zeros, 1.0 / zeros]);
        });
        assert_eq!(found, [Some([0.0, 2.0]), None]);
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
