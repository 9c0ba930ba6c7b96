//! The figures that get intervals, computed once for what was measured and once per resample.

use super::{CONTEXTS, sums::Sums};

/// The figures of one drafter over tasks.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Statistics {
    /// Tokens over rounds, all tasks together; then the unweighted mean of the tasks' tau.
    pub(crate) tau: f64,
    pub(crate) mean_tau: f64,
    /// The same of plain time per token over time per token.
    pub(crate) speedup: f64,
    pub(crate) mean_speedup: f64,
    pub(crate) seconds_per_token: f64,
    pub(crate) plain_seconds_per_token: f64,
    /// By slot, all tasks together.
    pub(crate) survival: Vec<f64>,
    pub(crate) conditional: Vec<f64>,
    /// tau by context length, all tasks together.
    pub(crate) contexts: Vec<f64>,
}

impl Statistics {
    /// Of the sums of each task. What nothing was counted of is not a number.
    pub(crate) fn new(tasks: &[Sums]) -> Self {
        let mut all = Sums::new(tasks.first().map_or(0, |sums| sums.acceptance.k()));
        tasks.iter().for_each(|sums| all.add(sums));
        let mean = |of: fn(&Sums) -> f64| tasks.iter().map(of).sum::<f64>() / tasks.len() as f64;
        let shares = |parts: &[u64], wholes: &[u64]| {
            parts.iter().zip(wholes).map(|(&part, &whole)| part as f64 / whole as f64).collect()
        };
        let counts = &all.acceptance;
        Self {
            tau: all.tau(),
            mean_tau: mean(Sums::tau),
            speedup: all.speedup(),
            mean_speedup: mean(Sums::speedup),
            seconds_per_token: all.seconds_per_token(),
            plain_seconds_per_token: all.plain_seconds_per_token(),
            survival: shares(counts.accepted(), counts.proposed()),
            conditional: shares(counts.accepted(), counts.reached()),
            contexts: all.contexts.iter().map(|&(tokens, rounds)| tokens as f64 / rounds as f64).collect(),
        }
    }

    /// All values in one row.
    pub(crate) fn row(&self, row: &mut Vec<f64>) {
        row.extend([self.tau, self.mean_tau, self.speedup, self.mean_speedup]);
        row.extend([self.seconds_per_token, self.plain_seconds_per_token]);
        for list in [&self.survival, &self.conditional, &self.contexts] {
            row.extend(list);
        }
    }

    /// Length of [`row`](Self::row) with k slots.
    pub(crate) const fn width(k: usize) -> usize {
        6 + 2 * k + CONTEXTS.len()
    }
}
