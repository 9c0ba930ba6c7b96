//! What is refused, and with which words.

use super::scene::{self, B, deepspec, dflash2, domino, speculators, zlab};
use burn::tensor::TensorData;
use hspec_core::{
    checkpoint::{StoreAs, Weights, write_safetensors},
    drafter::dspark::DSpark,
};
use serde_json::{Value, json};
use std::{collections::BTreeMap, path::Path};

/// The error of a checkpoint after an edit of its configuration and its tensors.
fn refused(
    config: &Value,
    edit: impl FnOnce(&mut Value),
    tensors: impl FnOnce(&mut BTreeMap<String, TensorData>),
) -> String {
    let dir = scene::saved(&scene::drafter(config));
    let mut edited = config.clone();
    edit(&mut edited);
    std::fs::write(dir.path().join("config.json"), edited.to_string()).unwrap();
    let weights = Weights::open(dir.path()).unwrap();
    let mut all: BTreeMap<String, TensorData> =
        weights.names().into_iter().map(|n| (n.clone(), weights.tensor(&n).unwrap().unwrap())).collect();
    drop(weights);
    tensors(&mut all);
    write_safetensors(&dir.path().join("model.safetensors"), &all, StoreAs::F32).unwrap();
    let target = scene::target();
    let error = hspec_core::drafter::load(dir.path(), &target, target.device()).err();
    let error = error.expect("the checkpoint must be refused").to_string();
    assert!(error.starts_with(&dir.path().display().to_string()) || error.contains("target"), "{error}");
    error
}

#[test]
fn fields_that_cannot_be_right() {
    let cases: Vec<(Value, &str, Value, &str)> = vec![
        (deepspec("rnn"), "/architectures/0", json!("Qwen3ForCausalLM"), "architectures: found \"Qwen3ForC"),
        (speculators("dspark", 3, false), "/speculators_model_type", json!("medusa"), "found \"medusa\""),
        (deepspec("rnn"), "/mask_token_id", json!(-1), "invalid value: integer `-1`, expected u32"),
        (deepspec("rnn"), "/mask_token_id", json!(512), "mask_token_id: found 512, expected below 512"),
        (deepspec("rnn"), "/markov_head_type", json!("gru"), "markov_head_type: found gru, expected vanilla"),
        (
            deepspec("rnn"),
            "/target_layer_ids",
            json!([0, 3]),
            "target_layer_ids: found 3, expected -1 up to below 3",
        ),
        (deepspec("rnn"), "/target_layer_ids", json!([-2]), "target_layer_ids: found -2"),
        (deepspec("rnn"), "/target_layer_ids", json!([1, 1]), "features: found [2, 2] as layers entered"),
        (deepspec("rnn"), "/target_layer_ids", json!([]), "features: found [] as layers entered"),
        (
            deepspec("rnn"),
            "/layer_types/0",
            json!("sliding_attention"),
            "layer_types: found sliding_attention",
        ),
        (deepspec("rnn"), "/block_size", json!(0), "block_size: found 0, expected 1 to"),
        (deepspec("rnn"), "/num_hidden_layers", json!(3), "layer_types: found 2 entries, expected 3"),
        (deepspec("rnn"), "/num_hidden_layers", json!(0), "num_hidden_layers: found 0"),
        (deepspec("rnn"), "/attention_bias", json!("yes"), "attention_bias: found \"yes\", expected true"),
        (deepspec("rnn"), "/intermediate_size", json!(1u64 << 40), "intermediate_size: found a matrix of"),
        (deepspec("rnn"), "/hidden_size", json!(1u64 << 62), "a matrix of"),
        (deepspec("rnn"), "/markov_rank", json!(1u64 << 40), "markov_rank: found a matrix of"),
        (speculators("dflash", 3, false), "/block_size", json!(1), "block_size: found 1, expected 2 to"),
        (speculators("dflash", 3, false), "/draft_vocab_size", json!(513), "draft_vocab_size: found 513"),
        (speculators("dflash", 3, false), "/target_hidden_size", json!(32), "target_hidden_size: found 32"),
        (
            speculators("dflash", 3, false),
            "/transformer_layer_config/sliding_window",
            json!(0),
            "transformer_layer_config.sliding_window: found 0",
        ),
        (
            dflash2(),
            "/dflash_config/conv_kernel_size",
            json!(6),
            "conv_kernel_size: found 6, expected 1 to 5",
        ),
        (
            dflash2(),
            "/dflash_config/conv_group_size",
            json!(7),
            "conv_group_size: found 7, expected a divisor",
        ),
        (dflash2(), "/dflash_config/selector_top_k", json!(513), "selector_top_k: found 513"),
        (dflash2(), "/dflash_config/output_multiplier", json!(0), "output_multiplier: found 0"),
        (dflash2(), "/dflash_config/selector_rank", json!("a"), "dflash_config.selector_rank: found invalid"),
        (domino(true), "/dflash_config/emb_dim", json!(0), "emb_dim and gru_hidden_dim"),
    ];
    for (config, field, value, message) in cases {
        let edit = |config: &mut Value| {
            let (parent, key) = field.rsplit_once('/').unwrap();
            let parent = if parent.is_empty() { config } else { config.pointer_mut(parent).unwrap() };
            match parent {
                Value::Array(items) => items[key.parse::<usize>().unwrap()] = value.clone(),
                parent => parent[key] = value.clone(),
            }
        };
        let error = refused(&config, edit, |_| {});
        assert!(error.contains(message), "{field}: {error}");
    }
}

/// Absent, the mask token once became id -1.
#[test]
fn a_missing_mask_token_is_found_at_load() {
    let remove = |config: &mut Value| drop(config.as_object_mut().unwrap().remove("mask_token_id"));
    for config in [deepspec("rnn"), speculators("dspark", 3, false)] {
        let error = refused(&config, remove, |_| {});
        assert!(error.contains("config.json: config: found missing field `mask_token_id`"), "{error}");
    }
    let config = zlab("DFlashDraftModel", json!({}));
    let remove = |c: &mut Value| drop(c["dflash_config"].as_object_mut().unwrap().remove("mask_token_id"));
    let error = refused(&config, remove, |_| {});
    assert!(error.contains("dflash_config.mask_token_id: found nothing"), "{error}");
}

/// A confidence head that reads the features of a Markov head of rank 0 once failed at its first use.
#[test]
fn a_confidence_head_on_markov_features_needs_a_markov_head() {
    for config in [deepspec("vanilla"), speculators("dspark", 3, false)] {
        let edit = |config: &mut Value| {
            config["markov_rank"] = json!(0);
            config["confidence_head_with_markov"] = json!(true);
        };
        let error = refused(&config, edit, |_| {});
        let expected = "markov_rank: found 0, expected above 0 with confidence_head_with_markov";
        assert!(error.contains(expected), "{error}");
    }
}

fn odd() -> TensorData {
    TensorData::new(vec![0f32; 6], [2, 3])
}

#[test]
fn tensors_that_are_missing_or_have_another_shape() {
    for (config, name, shape) in [
        (deepspec("rnn"), "fc.weight", "[64, 128]"),
        (deepspec("rnn"), "layers.1.self_attn.q_proj.bias", "[64]"),
        (deepspec("rnn"), "layers.0.self_attn.k_norm.weight", "[16]"),
        (deepspec("rnn"), "markov_head.joint_proj.weight", "[24, 80]"),
        (deepspec("rnn"), "confidence_head.proj.weight", "[1, 72]"),
        (speculators("dspark", 3, false), "confidence_head.proj.weight", "[1, 64]"),
        (speculators("dspark", 3, false), "markov_head.markov_w1.weight", "[512, 8]"),
        (dflash2(), "layers.0.attention_conv.base_kernel", "[2, 2, 64]"),
        (dflash2(), "candidate_selector.successor_codebook", "[512, 6]"),
        (domino(false), "prefix_gru.weight_ih_l0", "[30, 64]"),
        (domino(false), "embed_proj.2.weight", "[512, 12]"),
    ] {
        let error = refused(&config, |_| {}, |t| drop(t.remove(name).unwrap()));
        assert!(error.contains(&format!("tensor {name} is missing (expected shape {shape})")), "{error}");
        let error = refused(&config, |_| {}, |t| drop(t.insert(name.into(), odd())));
        assert!(error.contains(&format!("tensor {name} has shape [2, 3], expected {shape}")), "{error}");
    }
}

/// A pruned drafter was once given the target's whole head, and its Markov head the wrong vocabularies.
#[test]
fn vocabularies_of_a_pruned_drafter() {
    let config = speculators("dspark", 3, false);
    let whole = |width: usize| TensorData::new(vec![0f32; 512 * width], [512, width]);
    for (name, width, expected) in
        [("lm_head.weight", 64, "[171, 64]"), ("markov_head.markov_w2.weight", 8, "[171, 8]")]
    {
        let error = refused(&config, |_| {}, |t| drop(t.insert(name.into(), whole(width))));
        let message = format!("tensor {name} has shape [512, {width}], expected {expected}");
        assert!(error.contains(&message), "{error}");
    }
    let error = refused(&config, |_| {}, |t| t.retain(|name, _| name != "d2t" && name != "t2d"));
    assert!(error.contains("d2t: found no such tensor"), "{error}");
    // Without a head in the file, the target lends the kept rows of its own.
    let drafter = scene::drafter(&config);
    let dir = tempfile::tempdir().unwrap();
    drafter.save(dir.path(), StoreAs::F32, false).unwrap();
    let target = scene::target();
    let lent = DSpark::<B>::load(dir.path(), Some(&target), target.device()).unwrap();
    let row = |t: &burn::tensor::Tensor<B, 2>, i: usize| t.clone().narrow(0, i, 1).into_data();
    for (i, id) in drafter.vocab().targets().iter().enumerate() {
        let head = lent.model.lm_head.weight.val();
        assert_eq!(row(&head, i), row(&target.head().weight.val(), id.index()));
    }
}

#[test]
fn a_drafter_of_another_target() {
    let target = scene::target();
    for (field, value, message) in [
        ("hidden_size", json!(32), "its hidden_size is 32, the target's is 64"),
        ("vocab_size", json!(510), "its vocab_size is 510, the target's is 512"),
        ("target_layer_ids", json!([0, 3]), "it reads what enters layer 4, and the target has 4 layers"),
    ] {
        let mut config = deepspec("rnn");
        config["num_target_layers"] = Value::Null;
        config[field] = value;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let error = hspec_core::drafter::load(dir.path(), &target, target.device()).err().unwrap();
        let expected = format!("the drafter was made for another target: {message}");
        assert!(error.to_string().starts_with(&expected), "{error}");
    }
}

/// A target of the right width and of another depth was once accepted, whose layers of these numbers mean
/// something else.
#[test]
fn a_target_of_another_depth() {
    for mut config in [deepspec("rnn"), speculators("dspark", 3, false), zlab("DFlashDraftModel", json!({}))]
    {
        config["num_target_layers"] = json!(9);
        let error = refused(&config, |_| {}, |_| {});
        let message = "the drafter was made for another target: its num_target_layers is 9, the target has 4";
        assert_eq!(error, message);
        config["num_target_layers"] = json!(4);
        let dir = scene::saved(&scene::drafter(&config));
        let target = scene::target();
        hspec_core::drafter::load(dir.path(), &target, target.device()).unwrap();
    }
}

#[test]
fn a_folder_without_a_configuration() {
    let target = scene::target();
    let error = hspec_core::drafter::load::<B>(Path::new("nowhere"), &target, target.device()).err().unwrap();
    assert!(error.to_string().starts_with("nowhere/config.json: "), "{error}");
}
