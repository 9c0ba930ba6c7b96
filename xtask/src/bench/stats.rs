//! Least, median and greatest of repeated measurements, and ratios pair by pair.

use serde::Serialize;

/// Least, median and greatest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(transparent)]
pub(crate) struct Spread([f64; 3]);

impl Spread {
    /// Of at least one measurement.
    pub(crate) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let n = values.len();
        Self([values[0], (values[(n - 1) / 2] + values[n / 2]) / 2.0, values[n - 1]])
    }

    pub(crate) fn least(&self) -> f64 {
        self.0[0]
    }

    pub(crate) fn median(&self) -> f64 {
        self.0[1]
    }

    pub(crate) fn greatest(&self) -> f64 {
        self.0[2]
    }
}

/// The peer's time over ours in each pair of neighbouring runs: above 1 we are faster. A machine that slows
/// down for a while slows both of a pair.
pub(crate) fn ratios(ours: &[f64], peer: &[f64]) -> Spread {
    Spread::of(ours.iter().zip(peer).map(|(ours, peer)| peer / ours).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_of_odd_and_even_numbers_of_values() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Spread([1.0, 2.0, 3.0]));
        assert_eq!(Spread::of(vec![4.0, 1.0, 2.0, 3.0]), Spread([1.0, 2.5, 4.0]));
        assert_eq!(Spread::of(vec![7.0]), Spread([7.0; 3]));
    }

    /// The ratio of medians would be 15 / 20 here.
    #[test]
    fn ratios_are_taken_within_a_pair() {
        let spread = ratios(&[10.0, 20.0, 40.0], &[20.0, 15.0, 10.0]);
        assert_eq!(spread, Spread([0.25, 0.75, 2.0]));
        let slowed = ratios(&[10.0, 100.0, 30.0], &[20.0, 200.0, 60.0]);
        assert_eq!(slowed, Spread([2.0; 3]), "both of a pair were slowed alike");
    }
}
