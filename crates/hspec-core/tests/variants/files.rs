//! Configurations and checkpoints.

use crate::{B, Edit, VARIANTS, config, drafter, released, target, without_markov};
use hspec_core::{
    checkpoint::{StoreAs, read_json},
    config::HSpecConfig,
    drafter::{Drafter, HSpec},
};
use hspec_nn::params;
use serde_json::{Value, json};
use std::path::Path;

#[test]
fn a_written_drafter_is_read_as_it_was() {
    let target = target();
    for (name, edit) in VARIANTS {
        let written = drafter::<B>(config(target.config(), edit), false);
        let dir = tempfile::tempdir().unwrap();
        written.save(dir.path(), StoreAs::F32, true).unwrap();
        let read = HSpec::<B>::load(dir.path(), Some(&target), target.device()).unwrap();
        assert_eq!(params::collect(&read.model), params::collect(&written.model), "{name}");
        assert_eq!(read.vocab, written.vocab, "{name}");
        let mut file: Value = read_json(&dir.path().join("config.json")).unwrap();
        file.as_object_mut().unwrap().remove("dtype");
        assert_eq!(file, serde_json::to_value(&written.config).unwrap(), "{name}");
        let file = Path::new("test");
        assert_eq!(read.config.extensions(file).unwrap(), written.config.extensions(file).unwrap());
    }
}

#[test]
fn the_size_of_a_configuration_is_that_of_its_drafter() {
    let target = target();
    for (name, edit) in VARIANTS {
        let config = config(target.config(), edit);
        let stated = config.trainable_parameters();
        assert_eq!(stated, drafter::<B>(config, false).footprint().params_trainable, "{name}");
    }
}

#[test]
fn configurations_that_cannot_be_right_are_refused() {
    let domino =
        |prefix: usize| json!({ "emb_dim": 6, "gru_hidden_dim": 5, "pure_draft_prefix_len": prefix });
    let set = |key: &'static str, value: Value| move |c: &mut Value| c[key] = value.clone();
    let alone = |key: &'static str, value: Value| {
        move |c: &mut Value| {
            without_markov(c);
            c[key] = value.clone();
        }
    };
    type Case = (Box<dyn Fn(&mut Value)>, &'static str);
    let cases: Vec<Case> = vec![
        (Box::new(set("block_pattern", "mlp".into())), "block_pattern: found [Mlp], expected mamba or"),
        (Box::new(set("block_pattern", "mamba attention".into())), "block_pattern"),
        // Ablations are declared twice, so that a word forgotten in the pattern is not one.
        (
            Box::new(set("block_pattern", "attention mlp attention mlp".into())),
            "disable_mamba_init_state_injection: found false, expected true, or mamba in block_pattern",
        ),
        (
            Box::new(|c: &mut Value| {
                c["block_pattern"] = "mamba mlp".into();
                c["attn_kv_layer_ids"] = json!([]);
            }),
            "disable_target_kv_reuse: found false, expected true, or attention in block_pattern",
        ),
        (Box::new(set("attn_kv_head_ids", json!([[0, 1]]))), "attn_kv_head_ids"),
        (Box::new(set("attn_kv_head_ids", json!([[0, 1], [1]]))), "attn_kv_head_ids"),
        (Box::new(set("attn_kv_head_ids", json!([[0, 1], [1, 0]]))), "attn_kv_head_ids"),
        (Box::new(set("attn_kv_head_ids", json!([[0, 1], [1, 1]]))), "attn_kv_head_ids"),
        (Box::new(set("attn_kv_head_ids", json!("all"))), "attn_kv_head_ids: found \"all\""),
        (Box::new(set("domino", domino(0))), "domino: found it beside markov_rank"),
        (Box::new(alone("domino", domino(7))), "domino.pure_draft_prefix_len: found 7, expected at most 6"),
        (Box::new(alone("domino", json!({ "emb_dim": 0, "gru_hidden_dim": 5 }))), "domino.emb_dim: found 0"),
        (Box::new(alone("domino", json!({ "emb_dim": 6 }))), "domino: found {\"emb_dim\":6}"),
        (
            Box::new(alone("domino", json!({ "emb_dim": 6, "gru_hidden_dim": 5, "gru": 1 }))),
            "domino: found {\"emb_dim\":6",
        ),
        (
            Box::new(alone("domino", json!({ "emb_dim": 6, "gru_hidden_dim": 1u64 << 40 }))),
            "domino.gru_hidden_dim: found a matrix",
        ),
        (
            Box::new(alone("candidate_selector", json!({ "selector_rank": 6, "selector_top_k": 172 }))),
            "candidate_selector.selector_top_k: found 172, expected 1 to 171",
        ),
        (
            Box::new(alone("candidate_selector", json!({ "selector_rank": 0, "selector_top_k": 2 }))),
            "candidate_selector.selector_rank: found 0",
        ),
        (
            Box::new(set("block_conv", json!({ "conv_kernel_size": 9, "conv_group_size": 16 }))),
            "block_conv.conv_kernel_size: found 9, expected 1 to 8",
        ),
        (
            Box::new(set("block_conv", json!({ "conv_kernel_size": 2, "conv_group_size": 3 }))),
            "block_conv.conv_group_size: found 3, expected a divisor",
        ),
    ];
    let target = target();
    for (edit, message) in cases {
        let mut config = released(target.config());
        edit(&mut config);
        let config: HSpecConfig = serde_json::from_value(config).unwrap();
        let error = config.validate(Path::new("config.json")).unwrap_err().to_string();
        assert!(error.starts_with(&format!("config.json: {message}")), "{error}, expected {message}");
    }
}

#[test]
fn a_drafter_that_reads_heads_the_target_has_not_is_refused() {
    let target = target();
    let edit: Edit = |c| {
        c["attn_kv_head_ids"] = json!([[1], [2]]);
        c["transformer_layer_config"]["num_key_value_heads"] = 1.into();
    };
    let mut config = released(target.config());
    edit(&mut config);
    let config: HSpecConfig = serde_json::from_value(config).unwrap();
    config.validate(Path::new("test")).unwrap();
    let error = config.check_target(target.config()).unwrap_err().to_string();
    assert!(error.contains("its attn_kv_head_ids has 2, and the target has 2 key-value heads"), "{error}");
}
