//! Every name, shape and type of what is written, against the layouts as published.

use super::scene::{self, HIDDEN, VOCAB};
use hspec_core::{
    TokenId,
    checkpoint::{StoreAs, read_json},
    config::HSpecConfig,
    drafter::{DraftVocab, HSpec, HSpecModel},
};
use serde_json::{Value, json};
use std::path::Path;

/// `name dtype shape` of a file's tensors, sorted.
fn tensors(dir: &Path) -> Vec<String> {
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
    let mut all: Vec<String> =
        header.tensors().iter().map(|(n, t)| format!("{n} {:?} {:?}", t.dtype, t.shape)).collect();
    all.sort();
    all
}

/// The same of a list of names and shapes, floats in bf16.
fn expected(floats: &[(&str, Vec<usize>)], maps: Option<usize>) -> Vec<String> {
    let mut all: Vec<String> = floats.iter().map(|(name, shape)| format!("{name} BF16 {shape:?}")).collect();
    if let Some(kept) = maps {
        all.extend([format!("d2t I64 [{kept}]"), format!("t2d BOOL [{VOCAB}]")]);
    }
    all.sort();
    all
}

/// The tensors of a layer of 4 query heads and 2 key-value heads of width 16.
fn layers(n: usize, bias: bool) -> Vec<(String, Vec<usize>)> {
    let mut all = Vec::new();
    for i in 0..n {
        let mut add = |name: &str, shape: Vec<usize>| all.push((format!("layers.{i}.{name}"), shape));
        for name in ["input_layernorm", "post_attention_layernorm"] {
            add(&format!("{name}.weight"), vec![HIDDEN]);
        }
        for (name, output, input) in
            [("q", 64, HIDDEN), ("k", 32, HIDDEN), ("v", 32, HIDDEN), ("o", HIDDEN, 64)]
        {
            add(&format!("self_attn.{name}_proj.weight"), vec![output, input]);
            if bias {
                add(&format!("self_attn.{name}_proj.bias"), vec![output]);
            }
        }
        for name in ["q", "k"] {
            add(&format!("self_attn.{name}_norm.weight"), vec![16]);
        }
        for (name, shape) in [("gate", [48, HIDDEN]), ("up", [48, HIDDEN]), ("down", [HIDDEN, 48])] {
            add(&format!("mlp.{name}_proj.weight"), shape.to_vec());
        }
    }
    all
}

fn check(config: &Value, bias: bool, more: &[(&str, Vec<usize>)], frozen: bool, maps: Option<usize>) {
    let drafter = scene::drafter(config);
    let dir = tempfile::tempdir().unwrap();
    drafter.save(dir.path(), StoreAs::Bf16, frozen).unwrap();
    let layers = layers(2, bias);
    let mut all: Vec<(&str, Vec<usize>)> = layers.iter().map(|(n, s)| (n.as_str(), s.clone())).collect();
    let features = drafter.shape().feature_layers.len();
    all.extend([
        ("fc.weight", vec![HIDDEN, features * HIDDEN]),
        ("hidden_norm.weight", vec![HIDDEN]),
        ("norm.weight", vec![HIDDEN]),
    ]);
    if frozen {
        let kept = maps.unwrap_or(VOCAB);
        all.extend([("embed_tokens.weight", vec![VOCAB, HIDDEN]), ("lm_head.weight", vec![kept, HIDDEN])]);
    }
    all.extend(more.iter().cloned());
    assert_eq!(tensors(dir.path()), expected(&all, maps));
    // Every key that was read is written, with its value; the only new ones say how it is stored.
    let mut written: Value = read_json(&dir.path().join("config.json")).unwrap();
    assert_eq!(written.as_object_mut().unwrap().remove("dtype").unwrap(), "bfloat16");
    let added = ["target_hidden_size"];
    written.as_object_mut().unwrap().retain(|key, _| config.get(key).is_some() || !added.contains(&&**key));
    for key in config.as_object().unwrap().keys() {
        assert!(written.get(key).is_some(), "{key} is lost");
    }
    for (key, value) in written.as_object().unwrap() {
        assert!(config.get(key).is_some(), "{key} was not there: {value}");
    }
}

#[test]
fn deepspec_files_hold_what_is_published() {
    let mut config = scene::deepspec("rnn");
    config["a_key_of_another_program"] = json!({ "kept": [1, null] });
    let heads = [
        ("markov_head.markov_w1.weight", vec![VOCAB, 8]),
        ("markov_head.markov_w2.weight", vec![VOCAB, 8]),
        ("markov_head.joint_proj.weight", vec![24, 16 + HIDDEN]),
        ("markov_head.joint_proj.bias", vec![24]),
        ("confidence_head.proj.weight", vec![1, HIDDEN + 8]),
        ("confidence_head.proj.bias", vec![1]),
    ];
    check(&config, true, &heads, true, None);
}

#[test]
fn speculators_files_hold_what_is_published() {
    let mut config = scene::speculators("dspark", 3, false);
    config["markov_head_type"] = json!("gated");
    config["confidence_head_with_markov"] = json!(false);
    let heads = [
        ("markov_head.markov_w1.weight", vec![VOCAB, 8]),
        ("markov_head.markov_w2.weight", vec![171, 8]),
        ("markov_head.gate_proj.weight", vec![8, HIDDEN + 8]),
        ("markov_head.gate_proj.bias", vec![8]),
        ("confidence_head.proj.weight", vec![1, HIDDEN]),
        ("confidence_head.proj.bias", vec![1]),
    ];
    check(&config, false, &heads, true, Some(171));
    check(&scene::speculators("dflash", 3, false), false, &[], false, Some(171));
}

#[test]
fn zlab_files_hold_the_drafters_own_tensors() {
    check(&scene::zlab("DFlashDraftModel", json!({})), false, &[], false, None);
    let conv = |layer: usize, part: &str| {
        [
            (format!("layers.{layer}.{part}_conv.base_kernel"), vec![2, 2, HIDDEN]),
            (format!("layers.{layer}.{part}_conv.kernel_projection.weight"), vec![2 * 2 * 8, HIDDEN]),
        ]
    };
    let convs: Vec<(String, Vec<usize>)> =
        [0, 1].into_iter().flat_map(|i| [conv(i, "attention"), conv(i, "mlp")]).flatten().collect();
    let mut own: Vec<(&str, Vec<usize>)> = convs.iter().map(|(n, s)| (n.as_str(), s.clone())).collect();
    own.extend([
        ("candidate_selector.predecessor_codebook", vec![VOCAB, 6]),
        ("candidate_selector.successor_codebook", vec![VOCAB, 6]),
        ("candidate_selector.hidden_projection.weight", vec![6, HIDDEN]),
    ]);
    check(&scene::dflash2(), false, &own, false, None);
    let own = [
        ("prefix_gru.weight_ih_l0", vec![30, HIDDEN]),
        ("prefix_gru.weight_hh_l0", vec![30, 10]),
        ("embed_proj.0.weight", vec![12, HIDDEN + 10]),
        ("embed_proj.2.weight", vec![VOCAB, 12]),
    ];
    check(&scene::domino(true), false, &own, false, None);
}

/// The released H-Spec layout: partial layer first, shared seed, Markov and confidence head.
#[test]
fn hspec_files_hold_what_is_published() {
    let config: Value = serde_json::from_str(
        r#"{
        "speculators_model_type": "mamba_attn_hybrid", "speculators_version": "0.0.0",
        "architectures": ["MambaAttnHybridDraftModel"],
        "draft_vocab_size": 171, "block_size": 8, "max_anchors": 256, "mask_token_id": 500,
        "aux_hidden_state_layer_ids": [2, 3], "latent_fusion_layer_ids": [1, 3], "attn_kv_layer_ids": [2, 3],
        "block_pattern": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba", "attention", "mlp"],
        "attn_rope": null, "use_qk_norm": true, "mamba_d_state": 4, "mamba_num_heads": 4,
        "mamba_head_dim": 8, "mamba_n_groups": 2, "mamba_conv_kernel": 4, "mamba_expand": 1,
        "mamba_seed_mode": "shared", "fc_norm": true, "disable_mamba_init_state_injection": false,
        "disable_target_kv_reuse": false, "markov_rank": 8, "markov_head_type": "vanilla",
        "enable_confidence_head": true, "confidence_head_with_markov": true,
        "sliding_window_non_causal": false, "sliding_window_prefix": 0, "tie_word_embeddings": false,
        "transformer_layer_config": {
            "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
            "rms_norm_eps": 1e-5, "layer_types": ["sliding_attention", "sliding_attention"],
            "sliding_window": 16, "hidden_act": "silu", "attention_bias": false,
            "rope_parameters": { "rope_theta": 500000.0, "rope_type": "default" }
        },
        "speculators_config": {
            "algorithm": "mamba_attn_hybrid", "default_proposal_method": "greedy",
            "proposal_methods": [{
                "proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1,
                "accept_tolerance": 0.0
            }],
            "verifier": { "name_or_path": "some/target", "architectures": [] }
        }
    }"#,
    )
    .unwrap();
    let parsed: HSpecConfig = serde_json::from_value(config.clone()).unwrap();
    let file = Path::new("config.json");
    let kept = (0..171).map(TokenId).collect();
    let model = HSpecModel::<scene::B>::init(&parsed, &Default::default());
    let drafter = HSpec::new(parsed, model, DraftVocab::new(kept, VOCAB, file).unwrap(), file).unwrap();
    let dir = tempfile::tempdir().unwrap();
    drafter.save(dir.path(), StoreAs::Bf16, true).unwrap();

    let (di, conv) = (32, 32 + 2 * 2 * 4);
    let mut all: Vec<(String, Vec<usize>)> = [
        ("embed_tokens.weight", vec![VOCAB, HIDDEN]),
        ("lm_head.weight", vec![171, HIDDEN]),
        ("norm.weight", vec![HIDDEN]),
        ("fc.weight", vec![HIDDEN, 2 * HIDDEN]),
        ("fc_norm.0.weight", vec![HIDDEN]),
        ("fc_norm.1.weight", vec![HIDDEN]),
        ("hidden_norm.weight", vec![HIDDEN]),
        ("seed_projs.0.weight", vec![4 * 8 * 4, HIDDEN]),
        ("markov_head.markov_w1.weight", vec![VOCAB, 8]),
        ("markov_head.markov_w2.weight", vec![171, 8]),
        ("confidence_head.proj.weight", vec![1, HIDDEN + 8]),
        ("confidence_head.proj.bias", vec![1]),
    ]
    .map(|(name, shape)| (name.to_owned(), shape))
    .to_vec();
    let mut add = |i: usize, of: &[(&str, Vec<usize>)]| {
        all.extend(of.iter().map(|(name, shape)| (format!("layers.{i}.{name}"), shape.clone())));
    };
    for i in [0, 2, 5] {
        add(
            i,
            &[
                ("ssm_norm.weight", vec![HIDDEN]),
                ("ssm.in_proj.weight", vec![di + conv + 4, HIDDEN]),
                ("ssm.conv1d.weight", vec![conv, 1, 4]),
                ("ssm.conv1d.bias", vec![conv]),
                ("ssm.A_log", vec![4]),
                ("ssm.D", vec![4]),
                ("ssm.dt_bias", vec![4]),
                ("ssm.norm.weight", vec![di]),
                ("ssm.out_proj.weight", vec![HIDDEN, di]),
            ],
        );
    }
    for i in [3, 6] {
        add(
            i,
            &[
                ("input_layernorm.weight", vec![HIDDEN]),
                ("self_attn.q_proj.weight", vec![64, HIDDEN]),
                ("self_attn.k_proj.weight", vec![16, HIDDEN]),
                ("self_attn.v_proj.weight", vec![16, HIDDEN]),
                ("self_attn.o_proj.weight", vec![HIDDEN, 64]),
                ("self_attn.q_norm.weight", vec![16]),
                ("self_attn.k_norm.weight", vec![16]),
            ],
        );
    }
    for i in [1, 4, 7] {
        add(
            i,
            &[
                ("mlp_norm.weight", vec![HIDDEN]),
                ("mlp.gate_proj.weight", vec![48, HIDDEN]),
                ("mlp.up_proj.weight", vec![48, HIDDEN]),
                ("mlp.down_proj.weight", vec![HIDDEN, 48]),
            ],
        );
    }
    let all: Vec<(&str, Vec<usize>)> = all.iter().map(|(n, s)| (n.as_str(), s.clone())).collect();
    assert_eq!(tensors(dir.path()), expected(&all, Some(171)));

    let mut written: Value = read_json(&dir.path().join("config.json")).unwrap();
    assert_eq!(written.as_object_mut().unwrap().remove("dtype").unwrap(), "bfloat16");
    assert_eq!(written, config);
}
