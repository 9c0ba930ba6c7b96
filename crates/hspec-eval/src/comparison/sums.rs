//! Sums over records, of which all figures are made.

use super::{Record, Timing};
use crate::Acceptance;

/// Lower ends of the ranges of context lengths that acceptance is told by.
pub const CONTEXTS: [usize; 8] = [0, 128, 256, 512, 1024, 2048, 4096, 8192];

/// Sums over the records of a prompt, or of many.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sums {
    pub(crate) acceptance: Acceptance,
    /// Tokens and rounds by context length.
    pub(crate) contexts: [(u64, u64); CONTEXTS.len()],
    /// Over answers longer than one token either way: what has a time per token.
    pub(crate) tokens: u64,
    pub(crate) rounds: u64,
    pub(crate) plain_tokens: u64,
    pub(crate) drafted: Timing,
    pub(crate) plain: Timing,
}

impl Sums {
    pub(crate) fn new(k: usize) -> Self {
        Self {
            acceptance: Acceptance::new(k),
            contexts: Default::default(),
            tokens: 0,
            rounds: 0,
            plain_tokens: 0,
            drafted: Timing::default(),
            plain: Timing::default(),
        }
    }

    pub(crate) fn of(record: &Record) -> Self {
        let mut sums = Self { acceptance: record.acceptance(), ..Self::new(record.cell.k) };
        record.each_round(|_, accepted, stopped, context| {
            let range = CONTEXTS.partition_point(|&low| low <= context) - 1;
            sums.contexts[range].0 += accepted as u64 + u64::from(!stopped);
            sums.contexts[range].1 += 1;
        });
        if sums.acceptance.tokens() > 0 && record.plain_tokens > 0 {
            sums.tokens = sums.acceptance.tokens();
            sums.rounds = sums.acceptance.rounds();
            sums.plain_tokens = record.plain_tokens;
            sums.drafted = record.drafted;
            sums.plain = record.plain;
        }
        sums
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.acceptance.merge(&other.acceptance);
        for (a, b) in self.contexts.iter_mut().zip(other.contexts) {
            *a = (a.0 + b.0, a.1 + b.1);
        }
        self.tokens += other.tokens;
        self.rounds += other.rounds;
        self.plain_tokens += other.plain_tokens;
        for (a, b) in [(&mut self.drafted, other.drafted), (&mut self.plain, other.plain)] {
            a.total += b.total;
            a.draft += b.draft;
            a.target += b.target;
            a.sampling += b.sampling;
        }
    }

    /// Mean accepted length; not a number without rounds.
    pub(crate) fn tau(&self) -> f64 {
        self.acceptance.tokens() as f64 / self.acceptance.rounds() as f64
    }

    pub(crate) fn seconds_per_token(&self) -> f64 {
        self.drafted.total / self.tokens as f64
    }

    pub(crate) fn plain_seconds_per_token(&self) -> f64 {
        self.plain.total / self.plain_tokens as f64
    }

    pub(crate) fn speedup(&self) -> f64 {
        self.plain_seconds_per_token() / self.seconds_per_token()
    }
}
