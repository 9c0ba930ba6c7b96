//! The variants and their random drafters, for any target.

use burn::tensor::{TensorData, backend::Backend};
use hspec_core::{
    TokenId,
    config::{HSpecConfig, TargetConfig},
    drafter::{DraftVocab, HSpec, HSpecModel},
};
use hspec_nn::params;
use serde_json::{Value, json};
use std::{collections::BTreeMap, path::Path};

/// The released form for a target, with a draft vocabulary of every third id.
pub fn released(target: &TargetConfig) -> Value {
    json!({
        "speculators_model_type": "mamba_attn_hybrid",
        "draft_vocab_size": target.vocab_size.div_ceil(3), "block_size": 8, "mask_token_id": 500,
        "aux_hidden_state_layer_ids": [2, 3], "latent_fusion_layer_ids": [1, 3], "attn_kv_layer_ids": [2, 3],
        "block_pattern": "mamba mlp mamba attention mlp mamba attention mlp",
        "mamba_d_state": 4, "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_n_groups": 2,
        "mamba_seed_mode": "shared", "markov_rank": 8,
        "enable_confidence_head": true, "confidence_head_with_markov": true,
        "transformer_layer_config": {
            "vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": target.num_attention_heads,
            "num_key_value_heads": target.num_key_value_heads, "head_dim": target.head_dim,
            "rms_norm_eps": 1e-5, "layer_types": ["sliding_attention", "sliding_attention"],
            "sliding_window": 16, "rope_theta": target.rope_parameters.rope_theta,
        },
        "speculators_config": {
            "algorithm": "mamba_attn_hybrid", "default_proposal_method": "greedy", "proposal_methods": [],
            "verifier": { "name_or_path": null },
        },
    })
}

/// Removes the Markov head, so that something else can stand in its place.
pub fn without_markov(config: &mut Value) {
    config["markov_rank"] = 0.into();
    config["confidence_head_with_markov"] = false.into();
}

pub type Edit = fn(&mut Value);

/// What makes a variant of the released form.
pub const VARIANTS: [(&str, Edit); 15] = [
    ("as released", |_| {}),
    ("gated head, a seed per sub-layer, normed", |c| {
        c["markov_head_type"] = "gated".into();
        c["mamba_seed_mode"] = "per_layer".into();
        c["fc_norm"] = true.into();
    }),
    ("recurrent head, one seed", |c| {
        c["markov_head_type"] = "rnn".into();
        c["mamba_seed_mode"] = "once".into();
        c["use_qk_norm"] = false.into();
    }),
    ("no heads", |c| {
        without_markov(c);
        c["enable_confidence_head"] = false.into();
    }),
    ("no seed", |c| c["disable_mamba_init_state_injection"] = true.into()),
    ("no target cache", |c| c["disable_target_kv_reuse"] = true.into()),
    ("target cache alone", |c| {
        c["block_pattern"] = "attention mlp attention mlp".into();
        c["disable_mamba_init_state_injection"] = true.into();
    }),
    ("mamba alone", |c| {
        c["block_pattern"] = "mamba mlp mamba mlp".into();
        c["disable_target_kv_reuse"] = true.into();
        (c["attn_kv_layer_ids"], c["aux_hidden_state_layer_ids"]) = (json!([]), json!([]));
        c["transformer_layer_config"]["layer_types"] = json!([]);
    }),
    ("full attention", |c| {
        c["transformer_layer_config"]["layer_types"] = json!(["full_attention", "full_attention"]);
    }),
    ("one head of the cache per sub-layer", |c| {
        c["attn_kv_head_ids"] = json!([[1], [0]]);
        c["transformer_layer_config"]["num_key_value_heads"] = 1.into();
    }),
    ("domino", |c| {
        without_markov(c);
        c["domino"] = json!({ "emb_dim": 6, "gru_hidden_dim": 5 });
    }),
    ("domino behind two plain slots", |c| {
        without_markov(c);
        c["domino"] = json!({ "emb_dim": 6, "gru_hidden_dim": 5, "pure_draft_prefix_len": 2 });
    }),
    ("selector", |c| {
        without_markov(c);
        c["candidate_selector"] = json!({ "selector_rank": 6, "selector_top_k": 3 });
    }),
    ("convolutions", |c| c["block_conv"] = json!({ "conv_kernel_size": 2, "conv_group_size": 16 })),
    ("selector and convolutions", |c| {
        without_markov(c);
        c["candidate_selector"] = json!({ "selector_rank": 6, "selector_top_k": 3 });
        c["block_conv"] = json!({ "conv_kernel_size": 2, "conv_group_size": 8 });
    }),
];

pub fn config(target: &TargetConfig, edit: Edit) -> HSpecConfig {
    let mut config = released(target);
    edit(&mut config);
    let config: HSpecConfig = serde_json::from_value(config).unwrap();
    config.validate(Path::new("test")).unwrap();
    config.check_target(target).unwrap();
    config
}

/// A drafter with random weights everywhere: fresh ones leave some parts without effect. A parameter that
/// two variants share has the same values in both.
pub fn drafter<B: Backend>(config: HSpecConfig, trained: bool) -> HSpec<B> {
    let device = Default::default();
    let model = HSpecModel::<B>::init(&config, &device);
    let shapes: BTreeMap<_, _> = params::list(&model).into_iter().map(|p| (p.name, p.shape)).collect();
    let source = |name: &str| {
        let shape = &shapes[name];
        let mut state = params::fingerprint(name.bytes());
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let centre = if name.ends_with("norm.weight") { 1.0 } else { 0.0 };
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| centre + 0.3 * uniform()).collect();
        Some(TensorData::new(values, shape.clone()))
    };
    let model = params::fill(model, &device, source, |n| trained && !HSpecModel::<B>::frozen(n)).unwrap();
    let file = Path::new("test");
    let vocab = config.transformer_layer_config.vocab_size;
    let kept = (0..config.draft_vocab_size as u32).map(|i| TokenId(3 * i)).collect();
    HSpec::new(config, model, DraftVocab::new(kept, vocab, file).unwrap(), file).unwrap()
}
