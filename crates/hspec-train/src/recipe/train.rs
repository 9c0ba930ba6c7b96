//! The loop's settings.

use super::{at_least_one, between};
use crate::{
    loss::{LossConfig, Weighting},
    schedule::Schedule,
};
use hspec_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Which weights of the target a fresh drafter starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WarmStart {
    /// None but the embedding and the output head.
    None,
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

/// How slots are weighted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SlotWeights {
    /// Falling with the distance from the anchor, by `gamma`.
    #[default]
    Decay,
    /// By the drafter's own chance of getting that far (D-PACE), smoothed by `dpace_alpha`.
    Dpace,
}

/// The loop. Learning rates warm up linearly over `warmup` of the steps and fall as `schedule` says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Loop {
    /// Optimiser steps; either these or `epochs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<usize>,
    /// Times that every document is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs: Option<u64>,
    /// Tokens packed into a step.
    pub tokens_per_step: usize,
    /// Anchors drawn in a step. EAGLE-3 and P-EAGLE draft from every token.
    #[serde(default = "default_anchors")]
    pub anchors_per_step: usize,
    /// Rows that a step's tokens and anchors are split into; their gradients are summed, so that memory is
    /// needed for one row only. Several devices share the rows.
    #[serde(default = "one_row")]
    pub accumulate: usize,
    /// Start.
    pub warm_start: WarmStart,
    /// Target layers that H-Spec's feed-forward sub-layers start from, with `warm_start = "layers"`.
    #[serde(default)]
    pub mlp_layers: Vec<usize>,
    /// Target layers that the layers of DFlash and its relatives start from.
    #[serde(default)]
    pub start_layers: Vec<usize>,
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
    #[serde(default)]
    pub ce: f64,
    /// Weight of the total variation distance.
    #[serde(default)]
    pub tv: f64,
    /// Weight of the divergence of the drafter's law from the target's.
    #[serde(default)]
    pub kl: f64,
    /// Weight of the confidence loss.
    #[serde(default = "one")]
    pub confidence: f64,
    /// How slots are weighted.
    #[serde(default)]
    pub weighting: SlotWeights,
    /// Decay length of the slots' weights; `inf` weighs them alike.
    #[serde(default = "default_gamma")]
    pub gamma: f64,
    /// Smoothing of D-PACE's weights towards 1.
    #[serde(default = "half")]
    pub dpace_alpha: f64,
    /// Seed of everything random.
    #[serde(default)]
    pub seed: u64,
    /// Steps between checkpoints.
    #[serde(default = "default_checkpoint")]
    pub checkpoint_every: usize,
    /// Checkpoints kept, beside the best drafter.
    #[serde(default = "default_keep")]
    pub keep: usize,
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
fn half() -> f64 {
    0.5
}
fn one_row() -> usize {
    1
}
fn default_anchors() -> usize {
    256
}
fn default_keep() -> usize {
    2
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
                ("train.steps", self.steps.unwrap_or(1)),
                ("train.epochs", self.epochs.map_or(1, |n| n as usize)),
                ("train.tokens_per_step", self.tokens_per_step),
                ("train.anchors_per_step", self.anchors_per_step),
                ("train.accumulate", self.accumulate),
                ("train.checkpoint_every", self.checkpoint_every),
                ("train.keep", self.keep),
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
                ("train.kl", self.kl, 0.0, f64::MAX),
                ("train.confidence", self.confidence, 0.0, f64::MAX),
                ("train.gamma", self.gamma, f64::MIN_POSITIVE, f64::INFINITY),
                ("train.dpace_alpha", self.dpace_alpha, 0.0, 1.0),
            ],
        )?;
        let refuse = |field: &str, found: String, expected: &str| {
            Err(Error::invalid(file, format!("train.{field}"), found, expected))
        };
        match (self.steps, self.epochs) {
            (None, None) => return refuse("steps", "nothing".into(), "steps or epochs"),
            (Some(steps), Some(_)) => return refuse("steps", steps.to_string(), "none beside epochs"),
            _ => {}
        }
        if self.ce + self.tv + self.kl == 0.0 {
            return refuse("ce", "0".into(), "a positive weight of ce, tv or kl");
        }
        Ok(())
    }

    /// Tokens packed into a row.
    pub fn row_tokens(&self) -> usize {
        self.tokens_per_step / self.accumulate
    }

    /// Anchors drawn in a row.
    pub fn row_anchors(&self) -> usize {
        (self.anchors_per_step / self.accumulate).max(1)
    }

    /// The objective.
    pub fn objective(&self) -> LossConfig {
        let weighting = match self.weighting {
            SlotWeights::Decay => Weighting::Decay { gamma: self.gamma },
            SlotWeights::Dpace => Weighting::Dpace { alpha: self.dpace_alpha },
        };
        LossConfig { ce: self.ce, tv: self.tv, kl: self.kl, confidence: self.confidence, weighting }
    }
}
