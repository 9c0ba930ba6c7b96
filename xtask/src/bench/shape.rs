//! Shapes of targets and of the drafters that go with them.

use anyhow::Context;
use hspec_core::config::{Family, TargetConfig};
use hspec_train::recipe::{HSpecShape, Recipe, Shape as Drafter};
use serde_json::{Value, json};
use std::path::Path;

/// A published model whose shape random weights take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Shape {
    /// SmolLM2-135M: 576 wide, 30 layers.
    Smollm2,
    /// Qwen3-8B: 4096 wide, 36 layers.
    #[value(name = "qwen3-8b")]
    Qwen3_8b,
}

impl Shape {
    pub(crate) fn config(self) -> anyhow::Result<TargetConfig> {
        let config = match self {
            Self::Smollm2 => json!({
                "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
                "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
                "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 100000.0,
                "tie_word_embeddings": true,
            }),
            Self::Qwen3_8b => json!({
                "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
                "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
                "tie_word_embeddings": false,
            }),
        };
        Ok(TargetConfig::from_value(&config, Path::new("config.json"))?)
    }
}

/// Bytes of a target's weights in f32.
pub(crate) fn bytes(target: &TargetConfig) -> u64 {
    let (h, d) = (target.hidden_size, target.head_dim);
    let attention = 2 * h * d * (target.num_attention_heads + target.num_key_value_heads);
    let layer = attention + 3 * h * target.intermediate_size;
    let tables = target.vocab_size * h * if target.tie_word_embeddings { 1 } else { 2 };
    ((target.num_hidden_layers * layer + tables) * size_of::<f32>()) as u64
}

/// Tokens packed into a training step, as in recipes/study, and those of each document in it.
pub(crate) const PACKED: usize = 1024;
pub(crate) const DOCUMENT: usize = 256;

/// The training of a drafter for a target: the paper's drafter (section 3, released sizes) for wide targets,
/// for others that of recipes/smollm2-135m.toml.
pub(crate) fn recipe(target: &TargetConfig) -> anyhow::Result<Recipe> {
    let wide = target.hidden_size >= 2048;
    let layers = target.num_hidden_layers;
    let last = layers.saturating_sub(2);
    let mut fusion: Vec<usize> = (0..5).map(|i| 1 + last.saturating_sub(1) * i / 4).collect();
    fusion.dedup();
    fusion.retain(|&layer| layer < layers);
    let kv = if wide { fusion[fusion.len() - 3..].to_vec() } else { fusion[fusion.len() - 1..].to_vec() };
    let (pattern, heads, groups, vocab, rank) = match wide {
        true => ("mamba mlp mamba attention mlp mamba attention mlp mamba attention mlp", 48, 4, 32_000, 256),
        false => ("mamba mlp mamba attention mlp", 6, 3, 12_288, 32),
    };
    let recipe = json!({
        "drafter": {
            "block_pattern": pattern, "fusion_layers": fusion, "kv_layers": kv,
            "intermediate_size": target.intermediate_size, "mamba_heads": heads, "mamba_groups": groups,
            "draft_vocab": target.vocab_size.min(vocab), "markov_rank": rank,
            "mask_token": target.vocab_size.min(17) - 1,
        },
        "train": {
            "steps": 700, "tokens_per_step": PACKED, "anchors_per_step": 512, "warm_start": "attention",
            "optimizer": "muon", "lr": 2e-3, "muon_lr": 6e-3, "ce": 0.5, "tv": 0.5,
        },
    });
    serde_json::from_value(recipe).context("the recipe of a benchmark")
}

/// The drafter's shape in a benchmark's recipe.
pub(crate) fn hspec(recipe: &Recipe) -> &HSpecShape {
    match &recipe.drafter {
        Drafter::HSpec(shape) => shape,
        other => unreachable!("the recipe above is H-Spec's, not {other:?}"),
    }
}

/// `config.json` of a DSpark drafter for a target as published: five layers of the target's shape that see the
/// whole context, seven proposals (DSpark section 2); with H-Spec's vocabulary and rank, so that the two differ
/// in what the paper compares.
pub(crate) fn dspark(target: &TargetConfig, recipe: &Recipe) -> Value {
    let drafter = hspec(recipe);
    let k = drafter.block_size - 1;
    json!({
        "speculators_model_type": "dspark", "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": drafter.fusion_layers, "block_size": k, "sample_from_anchor": true,
        "draft_vocab_size": drafter.draft_vocab, "mask_token_id": drafter.mask_token,
        "markov_head_type": "vanilla", "markov_rank": drafter.markov_rank,
        "enable_confidence_head": true, "confidence_head_with_markov": true,
        "sliding_window_non_causal": false, "target_hidden_size": null, "tie_word_embeddings": false,
        "speculators_config": {
            "algorithm": "dspark", "default_proposal_method": "greedy",
            "proposal_methods": [{
                "proposal_type": "greedy", "speculative_tokens": k, "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }],
            "verifier": { "architectures": [], "name_or_path": null },
        },
        "transformer_layer_config": {
            "model_type": "qwen3", "vocab_size": target.vocab_size, "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size, "num_hidden_layers": 5,
            "num_attention_heads": target.num_attention_heads,
            "num_key_value_heads": target.num_key_value_heads, "head_dim": target.head_dim,
            "rms_norm_eps": target.rms_norm_eps, "attention_bias": false,
            "max_position_embeddings": target.max_position_embeddings,
            "layer_types": vec!["full_attention"; 5], "sliding_window": null, "use_sliding_window": false,
            "rope_parameters": target.rope_parameters, "tie_word_embeddings": false,
        },
    })
}

/// What a peer must know to build the same modules.
pub(crate) fn facts(target: &TargetConfig, recipe: &Recipe) -> Value {
    let drafter = hspec(recipe);
    json!({
        "vocab": target.vocab_size, "hidden": target.hidden_size, "intermediate": target.intermediate_size,
        "layers": target.num_hidden_layers, "heads": target.num_attention_heads,
        "kv_heads": target.num_key_value_heads, "head_dim": target.head_dim, "eps": target.rms_norm_eps,
        "qk_norm": target.family == Family::Qwen3, "tied": target.tie_word_embeddings,
        "draft": {
            "pattern": drafter.block_pattern.split_whitespace().collect::<Vec<_>>(),
            "fusion": drafter.fusion_layers.len(), "intermediate": drafter.intermediate_size,
            "heads": drafter.mamba_heads, "head_dim": drafter.mamba_head_dim, "state": drafter.mamba_state,
            "groups": drafter.mamba_groups, "conv": drafter.mamba_conv, "block": drafter.block_size,
            "vocab": drafter.draft_vocab, "rank": drafter.markov_rank, "mask": drafter.mask_token,
            "window": drafter.sliding_window,
        },
        "train": {
            "tokens": PACKED, "document": DOCUMENT, "anchors": recipe.train.anchors_per_step,
            "ce": recipe.train.ce, "tv": recipe.train.tv, "gamma": recipe.train.gamma,
            "lr": recipe.train.lr, "muon_lr": recipe.train.muon_lr,
            "weight_decay": recipe.train.weight_decay, "muon_weight_decay": recipe.train.muon_weight_decay,
            "clip": recipe.train.clip,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A benchmark of other sizes than those that are trained would mislead.
    #[test]
    fn the_small_drafter_is_that_of_the_shipped_recipe() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../recipes/smollm2-135m.toml");
        let shipped = Recipe::read(Path::new(file)).unwrap();
        let ours = recipe(&Shape::Smollm2.config().unwrap()).unwrap();
        // Which layers are read changes no size.
        let (mut drafter, theirs) = (hspec(&ours).clone(), hspec(&shipped));
        assert_eq!(drafter.fusion_layers.len(), theirs.fusion_layers.len());
        assert_eq!(drafter.kv_layers.len(), theirs.kv_layers.len());
        drafter.fusion_layers.clone_from(&theirs.fusion_layers);
        drafter.kv_layers.clone_from(&theirs.kv_layers);
        assert_eq!(&drafter, theirs);
        let loop_of = |r: &Recipe| (r.train.anchors_per_step, r.train.optimizer);
        assert_eq!(loop_of(&ours), loop_of(&shipped));
        assert_eq!((ours.train.ce, ours.train.tv), (shipped.train.ce, shipped.train.tv));
    }

    /// 134.5 M and 8.19 B parameters, as published.
    #[test]
    fn weights_are_counted() {
        let millions = |shape: Shape| bytes(&shape.config().unwrap()) as f64 / 4e6;
        assert!((millions(Shape::Smollm2) - 134.5).abs() < 0.1);
        assert!((millions(Shape::Qwen3_8b) - 8190.0).abs() < 2.0);
    }

    #[test]
    fn the_wide_drafter_is_the_paper_s() {
        let target = Shape::Qwen3_8b.config().unwrap();
        let recipe = recipe(&target).unwrap();
        let drafter = hspec(&recipe);
        assert_eq!(drafter.fusion_layers, [1, 9, 17, 25, 34]);
        assert_eq!(drafter.kv_layers, [17, 25, 34]);
        assert_eq!((drafter.mamba_heads, drafter.draft_vocab), (48, 32_000));
        let file = Path::new("config.json");
        let config = hspec_core::drafter::dspark::DSparkConfig::from_value(&dspark(&target, &recipe), file);
        let shape = config.unwrap().shape(file).unwrap();
        assert_eq!((shape.max_draft(), shape.rules.len(), shape.head_dim), (7, 5, 128));
    }
}
