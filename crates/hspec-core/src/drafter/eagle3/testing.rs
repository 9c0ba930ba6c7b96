//! Small configurations for the tests of this folder.

use super::Eagle3Config;
use serde_json::{Value, json};
use std::path::Path;

fn layer() -> Value {
    json!({
        "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-6,
        "layer_types": ["full_attention"], "sliding_window": null, "model_type": "qwen3",
        "hidden_act": "silu", "attention_bias": false, "rope_theta": 10000.0,
    })
}

/// In the layout of DeepSpec, for a target of 8 layers.
pub(in crate::drafter) fn deepspec() -> Value {
    let mut config = layer();
    for (field, value) in [
        ("architectures", json!(["Qwen3Eagle3Model"])),
        ("target_layer_ids", json!([0, 2, 3])),
        ("num_target_layers", json!(8)),
        ("ttt_length", json!(3)),
        ("draft_num_hidden_layers", json!(1)),
    ] {
        config[field] = value;
    }
    config
}

/// In the layout of speculators.
pub(in crate::drafter) fn speculators() -> Value {
    json!({
        "speculators_model_type": "eagle3", "draft_vocab_size": 16,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5], "norm_before_residual": true,
        "norm_before_fc": false, "fc_norm": false, "norm_output": false, "target_hidden_size": null,
        "transformer_layer_config": layer(),
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{
                "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }],
            "verifier": { "name_or_path": null, "architectures": [] },
        },
    })
}

/// The message with which a configuration is refused.
pub(in crate::drafter) fn refused(config: &Value) -> String {
    let file = Path::new("config.json");
    let shape = Eagle3Config::from_value(config, file).and_then(|config| config.shape(None, file));
    shape.unwrap_err().to_string()
}
