//! Random drafters of every kind and layout for a tiny real target.

use burn::tensor::{Tensor, TensorData};
use hspec_core::{
    TokenId,
    checkpoint::{StoreAs, Weights, read_json},
    config::TargetConfig,
    drafter::{
        DraftVocab,
        dspark::{DSpark, DSparkConfig, DSparkModel},
    },
    target::Target,
};
use hspec_nn::params;
use serde_json::{Value, json};
use std::path::Path;

pub type B = burn_flex::Flex;

pub const VOCAB: usize = 512;
pub const HIDDEN: usize = 64;

pub fn target() -> Target<B> {
    let dir = hspec_goldens::root().join("targets/llama31-tiny");
    let file = dir.join("config.json");
    let config = TargetConfig::from_value(&read_json(&file).unwrap(), &file).unwrap();
    Target::from_weights(config, &Weights::open(&dir).unwrap(), &Default::default()).unwrap()
}

fn layer() -> Value {
    json!({
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "layer_types": ["full_attention", "full_attention"], "sliding_window": null,
    })
}

fn with(mut base: Value, more: Value) -> Value {
    let (Value::Object(base_fields), Value::Object(more)) = (&mut base, more) else { panic!("two objects") };
    base_fields.extend(more);
    base
}

/// The layout of DeepSpec: the anchor's slot predicts.
pub fn deepspec(markov: &str) -> Value {
    with(
        layer(),
        json!({
            "architectures": ["Qwen3DSparkModel"], "attention_bias": true, "block_size": 5,
            "mask_token_id": 500, "target_layer_ids": [-1, 2], "num_target_layers": 4, "markov_rank": 8,
            "markov_head_type": markov, "enable_confidence_head": true,
            "confidence_head_with_markov": true,
        }),
    )
}

/// The layout of speculators: pruned vocabulary, windowed layers.
pub fn speculators(kind: &str, window: usize, non_causal: bool) -> Value {
    let sliding = json!({
        "layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": window,
    });
    let config = json!({
        "speculators_model_type": kind, "architectures": [], "aux_hidden_state_layer_ids": [0, 2],
        "block_size": 6, "mask_token_id": 500, "draft_vocab_size": 171,
        "sliding_window_non_causal": non_causal, "transformer_layer_config": with(layer(), sliding),
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [],
            "verifier": { "name_or_path": null },
        },
    });
    let heads = json!({ "markov_rank": 8, "markov_head_type": "rnn", "enable_confidence_head": true });
    if kind == "dspark" { with(config, heads) } else { config }
}

/// The layout of z-lab.
pub fn zlab(architecture: &str, own: Value) -> Value {
    let fields = json!({ "target_layer_ids": [0, 1, 2], "mask_token_id": 500, "block_size": 5 });
    let config = json!({ "architectures": [architecture], "dflash_config": with(fields, own) });
    with(layer(), config)
}

pub fn dflash2() -> Value {
    let own = json!({
        "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 7,
        "output_multiplier": 0.5, "final_logit_softcapping": 20.0, "input_embedding_scale": 2.0,
    });
    zlab("DFlash2DraftModel", own)
}

pub fn domino(shift_label: bool) -> Value {
    let own = json!({
        "projector_type": "domino", "emb_dim": 12, "gru_hidden_dim": 10, "pure_draft_prefix_len": 1,
        "shift_label": shift_label,
    });
    zlab("DominoDraftModel", own)
}

/// One configuration of every kind, layout and head.
pub fn all() -> Vec<Value> {
    let mut all: Vec<Value> = ["vanilla", "gated", "rnn"].map(deepspec).to_vec();
    all.push(with(deepspec("vanilla"), json!({ "markov_rank": 0, "enable_confidence_head": false })));
    all.push(speculators("dspark", 3, false));
    all.push(with(speculators("dspark", 3, true), json!({ "sample_from_anchor": false })));
    all.push(speculators("dflash", 3, false));
    all.push(zlab("DFlashDraftModel", json!({})));
    all.push(with(
        zlab("DFlashDraftModel", json!({})),
        json!({
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
        }),
    ));
    all.extend([dflash2(), domino(false), domino(true)]);
    all
}

/// Numbers that look random, the same every time.
pub fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// A drafter of a configuration with weights that leave no part without effect.
pub fn drafter(config: &Value) -> DSpark<B> {
    let (file, device) = (Path::new("config.json"), Default::default());
    let config = DSparkConfig::from_value(config, file).unwrap();
    let shape = config.shape(file).unwrap();
    let kept: Vec<TokenId> = (0..shape.draft_vocab_size as u32).map(|i| TokenId(2 * i + 1)).collect();
    let vocab = match shape.draft_vocab_size {
        whole if whole == shape.vocab_size => DraftVocab::full(whole),
        _ => DraftVocab::new(kept, shape.vocab_size, file).unwrap(),
    };
    let fresh = DSparkModel::<B>::init(&shape, &device);
    let shapes = params::list(&fresh);
    let source = |name: &str| {
        let (i, found) = shapes.iter().enumerate().find(|(_, p)| p.name == name)?;
        let n = found.shape.iter().product();
        let scale = if found.shape.len() == 1 { 1.0 } else { 0.3 };
        let values = numbers(n, i as u64 + 1).iter().map(|x| x * scale + 0.01).collect::<Vec<f32>>();
        Some(TensorData::new(values, found.shape.clone()))
    };
    let model = params::fill(fresh, &device, source, |_| false).unwrap();
    DSpark::new(config, model, vocab, file).unwrap()
}

/// Features of `n` tokens.
pub fn features(drafter: &DSpark<B>, n: usize, seed: u64) -> Tensor<B, 2> {
    let width = drafter.shape().feature_layers.len() * HIDDEN;
    Tensor::from_data(TensorData::new(numbers(n * width, seed), [n, width]), &Default::default())
}

/// Saves into a fresh folder, frozen tensors included.
pub fn saved(drafter: &DSpark<B>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    drafter.save(dir.path(), StoreAs::F32, true).unwrap();
    dir
}
