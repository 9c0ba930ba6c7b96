//! How much better one drafter is than others.

use super::figures::Estimate;
use serde::{Deserialize, Serialize};

/// Which of the other drafters one is held against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rival {
    /// The best of the others.
    Best,
    /// The second best of the others.
    RunnerUp,
}

/// A difference between two drafters on the same prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gain {
    /// The other drafter's name.
    pub against: String,
    /// What it is among the others.
    pub rival: Rival,
    /// This one's figure less the other's.
    pub difference: Estimate,
    /// This one's figure over the other's, less 1.
    pub relative: Estimate,
}

impl Gain {
    /// Whether the interval of the difference leaves out 0.
    pub fn is_clear(&self) -> bool {
        self.difference.ci.is_some_and(|[low, high]| low > 0.0 || high < 0.0)
    }
}

/// Of each drafter, the best and the second best of the others by `values`; the first of equals wins.
pub(crate) fn rivals(values: &[f64]) -> Vec<Vec<(usize, Rival)>> {
    // What nothing was measured of is nobody's rival.
    let mut order: Vec<usize> = (0..values.len()).filter(|&d| values[d].is_finite()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    let of = |drafter: usize| {
        let others = order.iter().copied().filter(move |&other| other != drafter);
        others.zip([Rival::Best, Rival::RunnerUp]).collect()
    };
    (0..values.len()).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_is_held_against_the_second_and_the_others_against_the_best() {
        let found = rivals(&[1.5, 2.0, 1.0]);
        assert_eq!(found[1], [(0, Rival::Best), (2, Rival::RunnerUp)]);
        assert_eq!(found[0], [(1, Rival::Best), (2, Rival::RunnerUp)]);
        assert_eq!(found[2], [(1, Rival::Best), (0, Rival::RunnerUp)]);
        assert_eq!(rivals(&[1.0]), [vec![]]);
        assert_eq!(rivals(&[1.0, 1.0]), [vec![(1, Rival::Best)], vec![(0, Rival::Best)]]);
    }

    #[test]
    fn a_gain_is_clear_where_its_interval_leaves_out_zero() {
        let gain = |ci| Gain {
            against: String::new(),
            rival: Rival::Best,
            difference: Estimate { value: 0.1, ci },
            relative: Estimate { value: 0.1, ci: None },
        };
        let told =
            [Some([0.01, 0.2]), Some([-0.2, -0.1]), Some([0.0, 0.1]), None].map(|ci| gain(ci).is_clear());
        assert_eq!(told, [true, true, false, false]);
    }
}
