//! What the configurations of kinds have in common: layers of the target's shape, and how drafts are used.

use crate::recipe::{Loop, WarmStart};
use hspec_core::{
    Error, Result,
    config::{Family, TargetConfig},
};
use serde_json::{Map, Value, json};
use std::path::Path;

/// A layer configuration of the target's width and heads.
pub(super) fn layer(
    target: &TargetConfig,
    model_type: &str,
    layers: usize,
    intermediate_size: usize,
    window: Option<usize>,
) -> Map<String, Value> {
    let kind = if window.is_some() { "sliding_attention" } else { "full_attention" };
    let rope = &target.rope_parameters;
    let value = json!({
        "model_type": model_type,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "layer_types": vec![kind; layers],
        "sliding_window": window,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_position_embeddings,
        "attention_bias": target.attention_bias,
        "rope_parameters": rope,
        "partial_rotary_factor": rope.partial_rotary_factor.unwrap_or(1.0),
        "tie_word_embeddings": false,
    });
    value.as_object().cloned().unwrap_or_default()
}

/// How a drafter of `k` tokens is meant to be used, in the layout of speculators.
pub(super) fn usage(algorithm: &str, k: usize, name: &str, target: &TargetConfig) -> Value {
    json!({
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{
            "proposal_type": "greedy", "speculative_tokens": k, "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }],
        "verifier": { "name_or_path": name, "architectures": [architecture(target.family)] },
    })
}

/// The class of a target.
pub(super) fn architecture(family: Family) -> &'static str {
    match family {
        Family::Qwen3 => "Qwen3ForCausalLM",
        _ => "LlamaForCausalLM",
    }
}

/// Refuses a warm start without as many layers of the target as the drafter has.
pub(super) fn check_warm_start(layers: usize, train: &Loop, file: &Path) -> Result<()> {
    let given = &train.start_layers;
    let expected = match train.warm_start {
        WarmStart::None if given.is_empty() => return Ok(()),
        WarmStart::None => "none, with warm_start = \"none\"".into(),
        _ if given.len() == layers => return Ok(()),
        _ => format!("{layers} layers of the target, one per layer"),
    };
    Err(Error::invalid(file, "train.start_layers", format!("{given:?}"), expected))
}

/// What is wrong with a checkpoint's field, told of the recipe's field that gave its value.
pub(super) fn in_recipe(error: Error) -> Error {
    let Error::Invalid { file, field, found, expected } = error else { return error };
    let own = match field.strip_prefix("transformer_layer_config.").unwrap_or(&field) {
        "latent_fusion_layer_ids" => "fusion_layers",
        "attn_kv_layer_ids" => "kv_layers",
        "mamba_num_heads" => "mamba_heads",
        "mamba_d_state" => "mamba_state",
        "mamba_n_groups" => "mamba_groups",
        "mamba_conv_kernel" => "mamba_conv",
        "draft_vocab_size" => "draft_vocab",
        "mask_token_id" => "mask_token",
        same => same,
    };
    Error::Invalid { file, field: format!("drafter.{own}"), found, expected }
}
