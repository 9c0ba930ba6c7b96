//! The pieces of work that are timed, by name.

use std::{fmt, str::FromStr};

/// A piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// One token behind a context of so many, greedily.
    Decode(usize),
    /// Eight tokens behind a context in one pass, with the hidden states that the drafter reads.
    Verify(usize),
    /// A prompt of so many tokens.
    Prefill(usize),
    /// Seven proposals behind a context of 256.
    DraftStep,
    /// Forward, loss, backward and optimisers of 512 anchors in 1024 tokens; the target has run before.
    TrainStep,
    /// The scan of 512 blocks of eight slots, forward.
    SsdScan,
}

/// Rows that a pass verifies.
pub(crate) const ROWS: usize = 8;
/// Context of a draft step.
pub(crate) const DRAFT_CONTEXT: usize = 256;

impl Work {
    pub(crate) const ALL: [Self; 8] = [
        Self::Decode(256),
        Self::Decode(1024),
        Self::Verify(256),
        Self::Verify(1024),
        Self::Prefill(512),
        Self::DraftStep,
        Self::TrainStep,
        Self::SsdScan,
    ];
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Decode(context) => write!(f, "decode@{context}"),
            Self::Verify(context) => write!(f, "verify8@{context}"),
            Self::Prefill(tokens) => write!(f, "prefill{tokens}"),
            Self::DraftStep => f.write_str("draft_step"),
            Self::TrainStep => f.write_str("train_step"),
            Self::SsdScan => f.write_str("ssd_scan"),
        }
    }
}

impl FromStr for Work {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = || Self::ALL.map(|work| work.to_string()).join(", ");
        Self::ALL
            .into_iter()
            .find(|work| work.to_string() == text)
            .ok_or_else(|| format!("known are {}", known()))
    }
}
