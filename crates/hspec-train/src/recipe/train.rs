//! The loop's settings.

use super::{at_least_one, between};
use crate::{
    loss::{LossConfig, Weighting},
    schedule::Schedule,
};
use hspec_core::{Error, Result};
use hspec_nn::Compute;
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

/// The type in which a step's products are computed; parameters and optimiser states are f32 in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", remote = "Compute")]
enum ComputeName {
    F32,
    Bf16,
}

/// Weights of the loss's terms for the first steps, in the place of the loop's own.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FirstPhase {
    /// Share of the steps, more than none of them and less than all.
    pub share: f64,
    /// Weight of the cross-entropy.
    #[serde(default)]
    pub ce: f64,
    /// Weight of the total variation distance.
    #[serde(default)]
    pub tv: f64,
    /// Weight of the divergence of the drafter's law from the target's.
    #[serde(default)]
    pub kl: f64,
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
    /// Type in which linear layers, the loss's head and, on flex, Muon compute their products.
    #[serde(default, with = "ComputeName")]
    pub compute: Compute,
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
    /// Other weights of these three, to begin with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_phase: Option<FirstPhase>,
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
        let Some(first) = &self.first_phase else { return Ok(()) };
        if !(first.share > 0.0 && first.share < 1.0) {
            return refuse("first_phase.share", first.share.to_string(), "more than 0 and less than 1");
        }
        let weights = [first.ce, first.tv, first.kl];
        if weights.iter().any(|w| !w.is_finite() || *w < 0.0) || weights.iter().sum::<f64>() == 0.0 {
            let found = format!("ce {}, tv {}, kl {}", first.ce, first.tv, first.kl);
            return refuse("first_phase", found, "weights of at least 0, one of them positive");
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

    /// The objective when this share of the steps is done.
    pub fn objective(&self, progress: f64) -> LossConfig {
        let weighting = match self.weighting {
            SlotWeights::Decay => Weighting::Decay { gamma: self.gamma },
            SlotWeights::Dpace => Weighting::Dpace { alpha: self.dpace_alpha },
        };
        let (ce, tv, kl) = match self.first_phase {
            Some(FirstPhase { share, ce, tv, kl }) if progress < share => (ce, tv, kl),
            _ => (self.ce, self.tv, self.kl),
        };
        LossConfig { ce, tv, kl, confidence: self.confidence, weighting }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(more: &str) -> Result<Loop> {
        let text = format!(
            "steps = 10\ntokens_per_step = 64\nwarm_start = \"none\"\noptimizer = \"adamw\"\nlr = 1e-3\nce = 0.1\n\
             tv = 0.9\n{more}"
        );
        let recipe: Loop = toml::from_str(&text).expect("a loop");
        recipe.validate(Path::new("recipe.toml")).map(|()| recipe)
    }

    #[test]
    fn the_first_phase_has_weights_of_its_own() {
        let recipe = recipe("first_phase = { share = 0.3, ce = 1.0, kl = 0.5 }").unwrap();
        let at = |progress| {
            let LossConfig { ce, tv, kl, .. } = recipe.objective(progress);
            (ce, tv, kl)
        };
        assert_eq!(
            (at(0.0), at(0.2), at(0.3), at(0.9)),
            ((1.0, 0.0, 0.5), (1.0, 0.0, 0.5), (0.1, 0.9, 0.0), (0.1, 0.9, 0.0))
        );
    }

    #[test]
    fn a_first_phase_without_end_or_weights_is_refused() {
        for (phase, field) in [
            ("share = 1.0, ce = 1.0", "first_phase.share"),
            ("share = nan, ce = 1.0", "first_phase.share"),
            ("share = 0.5", "first_phase"),
            ("share = 0.5, ce = inf", "first_phase"),
            ("share = 0.5, ce = 2.0, tv = -1.0", "first_phase"),
        ] {
            let error = recipe(&format!("first_phase = {{ {phase} }}")).unwrap_err().to_string();
            assert!(error.contains(&format!("recipe.toml: train.{field}: found")), "{error}");
        }
    }
}
