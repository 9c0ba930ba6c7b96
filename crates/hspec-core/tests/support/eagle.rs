//! EAGLE-3 and P-EAGLE drafters with random weights.

use hspec_core::{
    TokenId,
    drafter::{
        DraftVocab, Drafter,
        eagle3::{Eagle3, Eagle3Config, Eagle3Model},
        peagle::PEagle,
    },
};
use serde_json::{Value, json};
use std::path::Path;

pub type B = burn_flex::Flex;

fn layer(layers: usize, model_type: &str, bias: bool) -> Value {
    json!({
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5,
        "model_type": model_type, "attention_bias": bias, "rope_theta": 10000.0,
    })
}

/// Every variant: the two layouts, one and two layers, every flag, pruned and whole vocabularies.
pub fn configurations() -> Vec<(&'static str, Value)> {
    let mut deepspec = layer(1, "qwen3", false);
    for (field, value) in [
        ("architectures", json!(["Qwen3Eagle3Model"])),
        ("target_layer_ids", json!([0, 1, 2])),
        ("num_target_layers", json!(4)),
        ("ttt_length", json!(5)),
    ] {
        deepspec[field] = value;
    }
    let speculators = |kind: &str, layers: usize, family: &str, flags: &[&str]| {
        let mut config = json!({
            "speculators_model_type": kind, "draft_vocab_size": 171,
            "eagle_aux_hidden_state_layer_ids": [1, 3],
            "transformer_layer_config": layer(layers, family, flags.contains(&"bias")),
            "speculators_config": {
                "algorithm": kind, "default_proposal_method": "greedy",
                "proposal_methods": [{ "proposal_type": "greedy", "speculative_tokens": 5 }],
                "verifier": { "name_or_path": null },
            },
        });
        if kind == "peagle" {
            config["mask_token_id"] = 500.into();
        }
        for flag in flags.iter().filter(|flag| **flag != "bias") {
            config[*flag] = true.into();
        }
        config
    };
    vec![
        ("deepspec", deepspec),
        ("plain", speculators("eagle3", 1, "llama", &[])),
        (
            "flags",
            speculators("eagle3", 2, "llama", &["norm_before_residual", "fc_norm", "norm_output", "bias"]),
        ),
        ("peagle", speculators("peagle", 2, "qwen3", &["norm_before_fc"])),
    ]
}

/// A drafter with random weights, large enough to make every input matter.
pub fn trunk(config: &Value) -> Eagle3<B> {
    let (file, device) = (Path::new("test"), Default::default());
    let config = Eagle3Config::from_value(config, file).unwrap();
    let shape = config.shape(Some(4), file).unwrap();
    let model = Eagle3Model::init(&shape, &device);
    let kept = (0..shape.draft_vocab_size as u32).map(|i| TokenId(3 * i)).collect();
    let vocab = if shape.draft_vocab_size < shape.vocab_size {
        DraftVocab::new(kept, shape.vocab_size, file).unwrap()
    } else {
        DraftVocab::full(shape.vocab_size)
    };
    let values = hspec_nn::params::collect(&model);
    let scaled = |name: &str| {
        let x = values.get(name)?.clone();
        let scale = if name.contains("norm") { 1.0 } else { 6.0 };
        Some(burn::tensor::TensorData::new(
            x.iter::<f32>().map(|x| x * scale).collect::<Vec<_>>(),
            x.shape.to_vec(),
        ))
    };
    let model = hspec_nn::params::fill(model, &device, scaled, |_| false).unwrap();
    Eagle3 { config, shape, model, vocab }
}

pub fn random_drafter(config: &Value) -> Box<dyn Drafter<B>> {
    let trunk = trunk(config);
    match trunk.shape.mask_token {
        Some(_) => Box::new(PEagle::new(trunk, Path::new("test")).unwrap()),
        None => Box::new(trunk),
    }
}
