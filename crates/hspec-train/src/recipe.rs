//! What to train and how, as a TOML file.

use crate::schedule::Schedule;
use hspec_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// A training run. Unknown keys are refused; defaults are what the field comments say, and the
/// resolved copy beside a checkpoint shows every one of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Responses to learn from.
    #[serde(default)]
    pub data: Data,
    /// The drafter's shape.
    pub drafter: Shape,
    /// The loop.
    pub train: Loop,
}

/// Which responses the target writes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Data {
    /// Prompt files, used where the command names none; relative to the current folder.
    pub prompts: Vec<PathBuf>,
    /// Prompts used, drawn at random; 0 for all.
    pub max_prompts: usize,
    /// Prompts longer than this are left out, in tokens.
    pub max_prompt_tokens: usize,
    /// Longest response, in tokens.
    pub max_new_tokens: usize,
    /// Prompts answered at once.
    pub batch: usize,
    /// Temperature of the responses.
    pub temperature: f64,
    /// Responses kept out of training, for simulated acceptance.
    pub validation: usize,
}

impl Default for Data {
    fn default() -> Self {
        Self {
            prompts: Vec::new(),
            max_prompts: 0,
            max_prompt_tokens: 512,
            max_new_tokens: 256,
            batch: 32,
            temperature: 0.0,
            validation: 8,
        }
    }
}

/// The drafter's shape; sizes that must equal the target's are taken from it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Sub-layers, separated by spaces.
    pub block_pattern: String,
    /// Slots of a block, the anchor's included.
    #[serde(default = "default_block")]
    pub block_size: usize,
    /// Target layers whose input makes the seed.
    pub fusion_layers: Vec<usize>,
    /// Target layers whose cache is read, one per attention sub-layer.
    pub kv_layers: Vec<usize>,
    /// Width of the feed-forward sub-layers.
    pub intermediate_size: usize,
    /// Mamba heads.
    pub mamba_heads: usize,
    /// Width of a Mamba head.
    #[serde(default = "default_head")]
    pub mamba_head_dim: usize,
    /// Mamba state size.
    #[serde(default = "default_state")]
    pub mamba_state: usize,
    /// Mamba groups.
    pub mamba_groups: usize,
    /// Kernel of the Mamba convolution.
    #[serde(default = "default_state")]
    pub mamba_conv: usize,
    /// Ids of the pruned vocabulary.
    pub draft_vocab: usize,
    /// Rank of the Markov head.
    pub markov_rank: usize,
    /// Window over the prefix.
    #[serde(default = "default_window")]
    pub sliding_window: usize,
    /// Token placed in the slots to predict.
    pub mask_token: u32,
}

fn default_block() -> usize {
    8
}
fn default_head() -> usize {
    64
}
fn default_state() -> usize {
    4
}
fn default_window() -> usize {
    2048
}

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

impl Recipe {
    /// Reads and checks a recipe.
    ///
    /// # Errors
    /// A file that cannot be read, an unknown or missing key, a value out of range.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
        let recipe: Self = toml::from_str(&text).map_err(|e| {
            Error::invalid(path, "recipe", e.to_string().trim().to_owned(), "a training recipe")
        })?;
        recipe.validate(path)?;
        Ok(recipe)
    }

    fn validate(&self, path: &Path) -> Result<()> {
        let t = &self.train;
        for (field, n) in [
            ("train.steps", t.steps),
            ("train.tokens_per_step", t.tokens_per_step),
            ("train.anchors_per_step", t.anchors_per_step),
            ("train.checkpoint_every", t.checkpoint_every),
            ("train.evaluate_every", t.evaluate_every),
            ("train.evaluate_tokens", t.evaluate_tokens),
            ("data.max_prompt_tokens", self.data.max_prompt_tokens),
            ("data.max_new_tokens", self.data.max_new_tokens),
            ("data.batch", self.data.batch),
            ("data.validation", self.data.validation),
        ] {
            if n == 0 {
                return Err(Error::invalid(path, field, "0", "at least 1"));
            }
        }
        for (field, x, low, high) in [
            ("train.lr", t.lr, 0.0, 1.0),
            ("train.muon_lr", t.muon_lr, 0.0, 1.0),
            ("train.weight_decay", t.weight_decay, 0.0, 10.0),
            ("train.muon_weight_decay", t.muon_weight_decay, 0.0, 10.0),
            ("train.warmup", t.warmup, 0.0, 1.0),
            ("train.clip", t.clip, f64::MIN_POSITIVE, f64::MAX),
            ("train.ce", t.ce, 0.0, f64::MAX),
            ("train.tv", t.tv, 0.0, f64::MAX),
            ("train.confidence", t.confidence, 0.0, f64::MAX),
            ("train.gamma", t.gamma, f64::MIN_POSITIVE, f64::MAX),
            ("data.temperature", self.data.temperature, 0.0, f64::MAX),
        ] {
            // Written so that NaN is refused.
            if !(low <= x && x <= high) {
                return Err(Error::invalid(
                    path,
                    field,
                    x.to_string(),
                    format!("a number from {low} to {high}"),
                ));
            }
        }
        Ok(())
    }

    /// The recipe with every default spelled out.
    pub fn resolved(&self) -> String {
        toml::to_string_pretty(self).expect("a recipe holds only numbers, words and lists of them")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = r#"
        [drafter]
        block_pattern = "mamba attention mlp"
        fusion_layers = [1]
        kv_layers = [1]
        intermediate_size = 8
        mamba_heads = 2
        mamba_groups = 1
        draft_vocab = 16
        markov_rank = 4
        mask_token = 3
        [train]
        steps = 4
        tokens_per_step = 64
        anchors_per_step = 4
        warm_start = "attention"
        optimizer = "adamw"
        lr = 1e-3
        ce = 0.1
        tv = 0.9
    "#;

    fn read(text: &str) -> Result<Recipe> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("recipe.toml");
        std::fs::write(&path, text).unwrap();
        Recipe::read(&path)
    }

    #[test]
    fn a_resolved_recipe_is_the_same_recipe() {
        let recipe = read(MINIMAL).unwrap();
        assert_eq!(recipe.train.gamma, 4.0);
        assert_eq!(read(&recipe.resolved()).unwrap(), recipe);
    }

    #[test]
    fn unknown_keys_and_bad_numbers_are_named() {
        for (from, to, part) in [
            ("steps = 4", "steps = 4\nsteppes = 5", "steppes"),
            ("steps = 4", "steps = 0", "train.steps: found 0"),
            ("lr = 1e-3", "lr = nan", "train.lr: found NaN"),
            ("\"adamw\"", "\"adam\"", "adam"),
        ] {
            let error = read(&MINIMAL.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
