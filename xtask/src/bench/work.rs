//! The pieces of work that are timed, by name.

use hspec_nn::Compute;
use std::{fmt, str::FromStr};

/// A piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// A pass of the target whose weights are stored as `--weights` says.
    Pass(Pass),
    /// A pass of the target with its weights rounded to bf16.
    Rounded(Pass),
    /// Seven proposals behind a context of 256.
    DraftStep,
    /// Forward, loss, backward and optimisers of 512 anchors in 1024 tokens, products in this type; the target has
    /// run before.
    TrainStep(Compute),
    /// The scan of 512 blocks of eight slots, forward.
    SsdScan,
}

/// A pass of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    /// One token behind a context of so many, greedily.
    Decode(usize),
    /// Eight tokens behind a context in one pass, with the hidden states that the drafter reads.
    Verify(usize),
    /// A prompt of so many tokens.
    Prefill(usize),
}

/// Rows that a pass verifies.
pub(crate) const ROWS: usize = 8;
/// Context of a draft step.
pub(crate) const DRAFT_CONTEXT: usize = 256;
/// Behind the name of a pass with rounded weights, and of a step with rounded factors.
const ROUNDED: &str = ":bf16";

impl Work {
    pub(crate) const ALL: [Self; 14] = [
        Self::Pass(Pass::Decode(256)),
        Self::Pass(Pass::Decode(1024)),
        Self::Pass(Pass::Verify(256)),
        Self::Pass(Pass::Verify(1024)),
        Self::Pass(Pass::Prefill(512)),
        Self::Rounded(Pass::Decode(256)),
        Self::Rounded(Pass::Decode(1024)),
        Self::Rounded(Pass::Verify(256)),
        Self::Rounded(Pass::Verify(1024)),
        Self::Rounded(Pass::Prefill(512)),
        Self::DraftStep,
        Self::TrainStep(Compute::F32),
        Self::TrainStep(Compute::Bf16),
        Self::SsdScan,
    ];

    /// Whether it needs the target with rounded weights.
    pub(crate) fn is_rounded(&self) -> bool {
        matches!(self, Self::Rounded(_))
    }

    /// The same work without a word about what we round: what a peer is asked for.
    pub(crate) fn rounded_anyhow(self) -> Self {
        match self {
            Self::Rounded(pass) => Self::Pass(pass),
            Self::TrainStep(_) => Self::TrainStep(Compute::F32),
            other => other,
        }
    }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Decode(context) => write!(f, "decode@{context}"),
            Self::Verify(context) => write!(f, "verify8@{context}"),
            Self::Prefill(tokens) => write!(f, "prefill{tokens}"),
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pass(pass) => pass.fmt(f),
            Self::Rounded(pass) => write!(f, "{pass}{ROUNDED}"),
            Self::DraftStep => f.write_str("draft_step"),
            Self::TrainStep(Compute::F32) => f.write_str("train_step"),
            Self::TrainStep(Compute::Bf16) => write!(f, "train_step{ROUNDED}"),
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
