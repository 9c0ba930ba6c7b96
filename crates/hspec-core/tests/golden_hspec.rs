//! The H-Spec drafter against the reference implementation: seed states, and single-request drafts
//! through the decoding path under both window rules.

#![allow(clippy::unwrap_used)] // a test may panic

use burn::tensor::{Tensor, TensorData, backend::Backend};
use hspec_attn::{Anchor, KvCache, Prefix, WindowRule};
use hspec_core::{
    TokenId,
    checkpoint::{StoreAs, Weights, read_json},
    config::HSpecConfig,
    drafter::{Blocks, Drafter, HSpec},
};
use hspec_goldens::{FORWARD, Golden, Tolerance, assert_close, assert_tensor};
use hspec_nn::{Linear, RmsNorm, params};
use serde_json::Value;

const LOGITS: Tolerance = Tolerance::Absolute(1e-4);

fn drafter<B: Backend>(window: Option<u64>) -> HSpec<B> {
    let dir = hspec_goldens::root().join("hspec/full_drafter");
    let file = dir.join("config.json");
    let mut config: Value = read_json(&file).unwrap();
    if let Some(window) = window {
        config["transformer_layer_config"]["sliding_window"] = window.into();
    }
    let config: HSpecConfig = serde_json::from_value(config).unwrap();
    config.validate(&file).unwrap();
    HSpec::from_weights(config, &Weights::open(&dir).unwrap(), &file, None, &Default::default()).unwrap()
}

/// `[1, T, layers, 2, kv, d]`-like fixtures (leading 1 dropped) as one prefix per layer.
fn prefixes<B: Backend>(kv: Tensor<B, 5>) -> Vec<Prefix<B>> {
    let [t, layers, _, heads, d] = kv.dims();
    let part = |l: usize, which: usize| {
        kv.clone().slice([0..t, l..l + 1, which..which + 1]).reshape([t, heads, d]).swap_dims(0, 1)
    };
    (0..layers).map(|l| Prefix { keys: part(l, 0), values: part(l, 1) }).collect()
}

fn drafts<B: Backend>() {
    let device: B::Device = Default::default();
    let golden = Golden::open("hspec/full_drafter_io");
    for case in golden.notes["infer_cases"].as_array().unwrap() {
        let name = case["case"].as_str().unwrap();
        let at = |t: &str| format!("{name}/{t}");
        let mut drafter = drafter::<B>(case["sliding_window"].as_u64());
        let serving = case["window_rule"].as_str().unwrap().starts_with("serving");
        drafter.window_rule = if serving { WindowRule::Serving } else { WindowRule::Training };
        let n = case["anchor_position"].as_u64().unwrap() as usize;
        let lent = prefixes::<B>(golden.float(&at("target_kv"), &device));
        let seeds = golden.float::<B, 2>(&at("seed_hidden_states"), &device);
        let [f, h] = seeds.dims();
        let seeds = seeds.reshape([1, f * h]);
        let anchor = TokenId(golden.ints(&at("anchor_token"))[0] as u32);
        let k = drafter.max_draft();

        let fused = drafter.fuse(seeds.clone()).unwrap();
        assert_tensor(&at("z"), fused.clone(), &golden.f32s(&at("z")), FORWARD);
        let state = drafter.seed_state(Some(&fused), 0).unwrap();
        assert_tensor(&at("seed_state"), state, &golden.f32s(&at("seed_state")), FORWARD);

        let hidden = drafter.forward(&Blocks {
            anchors: &[Anchor::at(n)],
            tokens: &[anchor],
            seeds: seeds.clone(),
            prefixes: &lent,
            slots: k + 1,
        });
        assert_tensor(&at("hidden"), hidden.clone(), &golden.f32s(&at("hidden")), LOGITS);
        let base = drafter.base_logits(hidden.clone());
        assert_tensor(&at("base_logits"), base, &golden.f32s(&at("base_logits")), LOGITS);
        let previous = golden.int::<B, 2>(&at("path_prev_token_ids"), &device);
        let corrected = drafter.corrected_logits(hidden.clone(), previous.clone());
        assert_tensor(&at("logits_path"), corrected, &golden.f32s(&at("logits_path")), LOGITS);
        let confidence = drafter.confidence_logits(hidden.clone(), previous).unwrap();
        assert_tensor(&at("confidence"), confidence, &golden.f32s(&at("confidence_logits_path")), LOGITS);

        // The decoding path, over a cache that holds the same keys.
        let layers = drafter.config.attn_kv_layer_ids.iter().max().unwrap() + 1;
        let [kv, _, d] = lent[0].keys.dims();
        let mut cache = KvCache::<B>::new(layers, 1, kv, n + k + 1, d, &device);
        for (layer, prefix) in drafter.config.attn_kv_layer_ids.iter().zip(&lent) {
            let entry = |t: &Tensor<B, 3>| t.clone().swap_dims(0, 1).unsqueeze::<4>();
            cache.write(*layer, entry(&prefix.keys), entry(&prefix.values));
        }
        cache.advance(n);
        let mut logits = Vec::new();
        let mut slots = Vec::new();
        let mut session = drafter.session(n + k + 1);
        // Of all rows that it sees, it keeps the last.
        session.observe(&[TokenId(1); 2], Tensor::cat(vec![seeds.clone() * 7, seeds.clone()], 0));
        let proposal = session
            .draft(anchor, &cache, k, &mut |slot, row| {
                slots.push(slot);
                logits.extend_from_slice(row);
                let best = (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
                Ok(drafter.vocabulary().unwrap()[best])
            })
            .unwrap();
        assert_eq!(slots, (1..=k).collect::<Vec<_>>());
        assert_close(&at("logits_greedy"), &logits, &golden.f32s(&at("logits_greedy")), LOGITS);
        let expected: Vec<TokenId> =
            golden.ints(&at("greedy_tokens")).iter().map(|&id| TokenId(id as u32)).collect();
        let tokens = proposal.tokens;
        assert_eq!(tokens, expected, "{name}: greedy tokens");
        let path: Vec<i64> = [&[anchor], &tokens[..k - 1]].concat().iter().map(|t| t.0.into()).collect();
        let path = Tensor::from_data(TensorData::new(path, [1, k]), &device);
        let confidence = drafter.confidence_logits(hidden.clone().narrow(1, 1, k), path).unwrap();
        let confidence: Vec<f32> = confidence.into_data().iter::<f32>().collect();
        assert_close(&at("confidence of the path"), &proposal.confidence, &confidence, FORWARD);

        // Fewer slots give the first of them (windowed sub-layers are causal inside the block).
        if drafter.config.window(0).is_some() {
            let mut short = Vec::new();
            session
                .draft(anchor, &cache, 3, &mut |slot, row| {
                    short.extend_from_slice(row);
                    Ok(tokens[slot - 1])
                })
                .unwrap();
            assert_close(&at("k=3"), &short, &logits[..short.len()], FORWARD);
        }
    }
}

#[test]
fn golden_single_request_drafts_flex() {
    drafts::<burn_flex::Flex>();
}

#[test]
fn golden_single_request_drafts_ndarray() {
    drafts::<burn_ndarray::NdArray>();
}

#[test]
fn golden_seed_states() {
    type B = burn_ndarray::NdArray;
    let device = Default::default();
    let golden = Golden::open("hspec/seed");
    for (name, case) in golden.cases() {
        let at = |t: &str| format!("{name}/{t}");
        let hidden = golden.float::<B, 3>(&at("hidden_states"), &device);
        let [n, f, h] = hidden.dims();
        let mut drafter = drafter::<B>(None);
        let eps = case["rms_norm_eps"].as_f64().unwrap();
        let norm = |t: String| RmsNorm::new(golden.float(&t, &device), eps);
        drafter.model.fc = Some(Linear::new(golden.float(&at("fc.weight"), &device), None));
        drafter.model.hidden_norm = Some(norm(at("hidden_norm.weight")));
        drafter.model.seed_projs = vec![Linear::new(golden.float(&at("seed_projs.0.weight"), &device), None)];
        let norms = if case["fc_norm"].as_bool().unwrap() { f } else { 0 };
        drafter.model.fc_norm = (0..norms).map(|i| norm(at(&format!("fc_norm.{i}.weight")))).collect();
        drafter.config.transformer_layer_config.hidden_size = h;
        drafter.config.mamba_num_heads = case["num_heads"].as_u64().unwrap() as usize;
        drafter.config.mamba_head_dim = case["head_dim"].as_u64().unwrap() as usize;
        drafter.config.mamba_d_state = case["d_state"].as_u64().unwrap() as usize;
        let z = drafter.fuse(hidden.reshape([n, f * h])).unwrap();
        assert_tensor(&at("z"), z.clone(), &golden.f32s(&at("z")), FORWARD);
        let state = drafter.seed_state(Some(&z), 0).unwrap();
        assert_tensor(&at("S_init"), state, &golden.f32s(&at("S_init")), FORWARD);
    }
}

/// Reading a checkpoint and writing it again gives equal tensors and an equal configuration.
#[test]
fn golden_checkpoint_round_trip() {
    type B = burn_ndarray::NdArray;
    let dir = tempfile::tempdir().unwrap();
    let drafter = drafter::<B>(None);
    drafter.save(dir.path(), StoreAs::F32, true).unwrap();
    let original = hspec_goldens::root().join("hspec/full_drafter");
    let (before, after) = (Weights::open(&original).unwrap(), Weights::open(dir.path()).unwrap());
    let mut names = before.names();
    names.sort();
    let mut written = after.names();
    written.sort();
    assert_eq!(names, written);
    for name in &names {
        assert_eq!(before.tensor(name).unwrap(), after.tensor(name).unwrap(), "{name}");
    }
    let json = |dir: &std::path::Path| numbers(read_json(&dir.join("config.json")).unwrap());
    assert_eq!(json(&original), json(dir.path()));
    let again = HSpec::<B>::load(dir.path(), None, &Default::default()).unwrap();
    assert_eq!(params::collect(&again.model), params::collect(&drafter.model));
}

/// 1000000 and 1000000.0 are one number.
fn numbers(value: Value) -> Value {
    match value {
        Value::Number(n) => n.as_f64().into(),
        Value::Array(items) => items.into_iter().map(numbers).collect(),
        Value::Object(fields) => fields.into_iter().map(|(k, v)| (k, numbers(v))).collect(),
        other => other,
    }
}

/// Drafting leaves the target's cache as it was, byte for byte.
#[test]
fn drafting_does_not_touch_the_cache() {
    type B = burn_flex::Flex;
    let device = Default::default();
    let drafter = drafter::<B>(None);
    let layers = drafter.config.attn_kv_layer_ids.iter().max().unwrap() + 1;
    let mut cache = KvCache::<B>::new(layers, 1, 2, 20, 16, &device);
    for layer in 0..layers {
        let values: Vec<f32> = (0..9 * 32).map(|i| ((i * 7 + layer) % 13) as f32 - 6.0).collect();
        let entry = Tensor::from_data(TensorData::new(values, [1, 9, 2, 16]), &device);
        cache.write(layer, entry.clone(), entry);
    }
    cache.advance(9);
    let bytes = |cache: &KvCache<B>| -> Vec<TensorData> {
        (0..layers)
            .flat_map(|l| [cache.keys(l, 0, 20).into_data(), cache.values(l, 0, 20).into_data()])
            .collect()
    };
    let before = bytes(&cache);
    let mut session = drafter.session(20);
    let mut pick = |slot: usize, _: &[f32]| Ok(TokenId(slot as u32));
    let error = session.draft(TokenId(5), &cache, 7, &mut pick).unwrap_err();
    assert_eq!(error.to_string(), "observed tokens: found 0, expected at least 1");
    session.observe(&[TokenId(3)], Tensor::ones([1, 3 * 64], &device));
    session.draft(TokenId(5), &cache, 7, &mut pick).unwrap();
    assert_eq!(before, bytes(&cache));
    assert_eq!(cache.len(), 9);
}
