//! The loop's settings.

use super::{at_least_one, between};
use crate::schedule::Schedule;
use hspec_core::Result;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Which weights of the target a fresh drafter starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WarmStart {
    /// Query, key and value projections, as the released recipe does.
    Attention,
    /// The whole attention and feed-forward sub-layers with their norms, and the final norm.
    Layers,
}

/// Which optimiser moves the matrices; AdamW moves the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// AdamW.
    Adamw,
    /// Muon, except for the Markov embedding and the confidence head.
    Muon,
}

/// The loop. Learning rates warm up linearly over `warmup` of the steps and fall as `schedule` says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Loop {
    /// Optimiser steps.
    pub steps: usize,
    /// Tokens packed into a step.
    pub tokens_per_step: usize,
    /// Anchors drawn in a step.
    pub anchors_per_step: usize,
    /// Start.
    pub warm_start: WarmStart,
    /// Target layers that the feed-forward sub-layers start from, with `warm_start = "layers"`.
    #[serde(default)]
    pub mlp_layers: Vec<usize>,
    /// Optimiser of the matrices.
    pub optimizer: OptimizerKind,
    /// Peak learning rate of AdamW.
    pub lr: f64,
    /// Peak learning rate of Muon.
    #[serde(default = "default_muon_lr")]
    pub muon_lr: f64,
    /// Weight decay of AdamW; norms and biases have none.
    #[serde(default = "default_decay")]
    pub weight_decay: f64,
    /// Weight decay of Muon.
    #[serde(default = "default_muon_decay")]
    pub muon_weight_decay: f64,
    /// Share of the steps that warm up.
    #[serde(default = "default_warmup")]
    pub warmup: f64,
    /// How the learning rates fall after that.
    #[serde(default)]
    pub schedule: Schedule,
    /// Largest global gradient norm.
    #[serde(default = "one")]
    pub clip: f64,
    /// Weight of the cross-entropy.
    pub ce: f64,
    /// Weight of the total variation distance.
    pub tv: f64,
    /// Weight of the confidence loss.
    #[serde(default = "one")]
    pub confidence: f64,
    /// Decay length of the slots' weights.
    #[serde(default = "default_gamma")]
    pub gamma: f64,
    /// Seed of everything random.
    #[serde(default)]
    pub seed: u64,
    /// Steps between checkpoints.
    #[serde(default = "default_checkpoint")]
    pub checkpoint_every: usize,
    /// Steps between measurements of simulated acceptance.
    #[serde(default = "default_evaluate")]
    pub evaluate_every: usize,
    /// Tokens decoded per validation prompt.
    #[serde(default = "default_evaluate_tokens")]
    pub evaluate_tokens: usize,
    /// Memory for target features that are kept between epochs, MiB.
    #[serde(default = "default_cache")]
    pub feature_cache_mib: usize,
}

fn default_muon_lr() -> f64 {
    6e-3
}
fn default_decay() -> f64 {
    0.01
}
fn default_muon_decay() -> f64 {
    0.1
}
fn default_warmup() -> f64 {
    0.01
}
fn one() -> f64 {
    1.0
}
fn default_gamma() -> f64 {
    4.0
}
fn default_checkpoint() -> usize {
    100
}
fn default_evaluate() -> usize {
    200
}
fn default_evaluate_tokens() -> usize {
    32
}
fn default_cache() -> usize {
    4096
}

impl Loop {
    /// Checks the numbers.
    pub(super) fn validate(&self, file: &Path) -> Result<()> {
        at_least_one(
            file,
            &[
                ("train.steps", self.steps),
                ("train.tokens_per_step", self.tokens_per_step),
                ("train.anchors_per_step", self.anchors_per_step),
                ("train.checkpoint_every", self.checkpoint_every),
                ("train.evaluate_every", self.evaluate_every),
                ("train.evaluate_tokens", self.evaluate_tokens),
            ],
        )?;
        between(
            file,
            &[
                ("train.lr", self.lr, 0.0, 1.0),
                ("train.muon_lr", self.muon_lr, 0.0, 1.0),
                ("train.weight_decay", self.weight_decay, 0.0, 10.0),
                ("train.muon_weight_decay", self.muon_weight_decay, 0.0, 10.0),
                ("train.warmup", self.warmup, 0.0, 1.0),
                ("train.clip", self.clip, f64::MIN_POSITIVE, f64::MAX),
                ("train.ce", self.ce, 0.0, f64::MAX),
                ("train.tv", self.tv, 0.0, f64::MAX),
                ("train.confidence", self.confidence, 0.0, f64::MAX),
                ("train.gamma", self.gamma, f64::MIN_POSITIVE, f64::MAX),
            ],
        )
    }
}
