//! Targets against the reference implementation: logits, hidden states, keys and values, padding, far
//! positions, greedy ids and rollback, from both layouts of the configuration.

#![allow(clippy::unwrap_used)] // a test may panic

use burn::tensor::{Tensor, backend::Backend};
use hspec_attn::{KvCache, Position};
use hspec_core::{
    TokenId,
    checkpoint::{Weights, read_json},
    config::TargetConfig,
    target::{Pass, Rows, Target, Want},
};
use hspec_goldens::{Golden, Tolerance, assert_close, assert_tensor};
use serde_json::Value;
use std::path::PathBuf;

type B = burn_flex::Flex;

/// Every folder of the fixtures that holds a model.
fn folders() -> Vec<PathBuf> {
    let root = hspec_goldens::root().join("targets");
    let mut found: Vec<PathBuf> = std::fs::read_dir(&root)
        .unwrap_or_else(|e| panic!("{}: {e}", root.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("golden.safetensors").exists())
        .collect();
    found.sort();
    assert!(!found.is_empty(), "no target fixtures in {}", root.display());
    found
}

fn name(folder: &std::path::Path) -> String {
    folder.file_name().unwrap().to_string_lossy().into_owned()
}

fn load<B: Backend>(folder: &std::path::Path, config: &str) -> Target<B> {
    let file = folder.join(config);
    let config = TargetConfig::from_value(&read_json::<Value>(&file).unwrap(), &file).unwrap();
    Target::from_weights(config, &Weights::open(folder).unwrap(), &Default::default()).unwrap()
}

fn tokens(ids: &[i64]) -> Vec<TokenId> {
    ids.iter().map(|&id| TokenId(id as u32)).collect()
}

fn ids(value: &Value) -> Vec<TokenId> {
    value.as_array().unwrap().iter().map(|id| TokenId(id.as_u64().unwrap() as u32)).collect()
}

fn all_hidden<B: Backend>(target: &Target<B>) -> Vec<usize> {
    (0..=target.config().num_hidden_layers).collect()
}

fn check_hidden<B: Backend>(
    golden: &Golden,
    case: &str,
    target: &Target<B>,
    pass: &Pass<B>,
    rows: &[bool],
    tolerance: Tolerance,
) {
    for (id, hidden) in pass.hidden.iter().enumerate() {
        let key =
            if id == 0 { format!("{case}.hidden.embed") } else { format!("{case}.hidden.layer_{}", id - 1) };
        if golden.has(&key) {
            compare_rows(&key, hidden.clone(), &golden.f32s(&key), rows, tolerance);
        }
    }
    let key = format!("{case}.hidden.final_norm");
    if golden.has(&key) {
        let last = pass.hidden.last().unwrap().clone();
        compare_rows(&key, target.norm().forward(last), &golden.f32s(&key), rows, tolerance);
    }
}

/// Compares the rows (tokens) that count.
fn compare_rows<B: Backend, const D: usize>(
    what: &str,
    found: Tensor<B, D>,
    reference: &[f32],
    rows: &[bool],
    tolerance: Tolerance,
) {
    let found: Vec<f32> = found.into_data().iter::<f32>().collect();
    assert_eq!(found.len(), reference.len(), "{what}");
    let width = found.len() / rows.len();
    for (row, _) in rows.iter().enumerate().filter(|(_, counts)| **counts) {
        let at = row * width..(row + 1) * width;
        assert_close(&format!("{what} row {row}"), &found[at.clone()], &reference[at], tolerance);
    }
}

fn check_cache<B: Backend>(
    golden: &Golden,
    case: &str,
    cache: &KvCache<B>,
    layers: usize,
    rows: &[bool],
    tolerance: Tolerance,
) {
    let (batch, len) = (cache.batch(), cache.len());
    for layer in 0..layers {
        for (letter, found) in [("k", cache.keys(layer, 0, len)), ("v", cache.values(layer, 0, len))] {
            let key = format!("{case}.{letter}.{layer}");
            if !golden.has(&key) {
                continue;
            }
            // [b, kv, t, d] -> [b, t, kv, d], so that tokens are rows.
            let [_, kv, _, d] = found.dims();
            let reference: Tensor<B, 4> = golden.float(&key, &Default::default());
            assert_eq!(reference.dims(), [batch, kv, len, d], "{key}");
            let reference: Vec<f32> = reference.swap_dims(1, 2).into_data().iter::<f32>().collect();
            compare_rows(&key, found.swap_dims(1, 2), &reference, rows, tolerance);
        }
    }
}

fn check<B: Backend>(config: &str) {
    const NEAR: Tolerance = Tolerance::Scaled(2e-5);
    for folder in folders() {
        let golden = Golden::open(&format!("targets/{}/golden", name(&folder)));
        let target: Target<B> = load(&folder, config);
        let layers = target.config().num_hidden_layers;
        let hidden = all_hidden(&target);
        let want = Want { logits: Rows::All, hidden: &hidden };
        if golden.has("rope.inv_freq") {
            let found = target.config().rope().unwrap();
            let reference = golden.f32s("rope.inv_freq");
            assert_close("rope.inv_freq", found.inv_freq(), &reference, Tolerance::Absolute(1e-7));
        }
        for case in ["full", "batch", "far"] {
            let input = golden.data(&format!("{case}.input_ids"));
            let (batch, t) = (input.shape[0], input.shape[1]);
            let ids = tokens(&input.iter::<i64>().collect::<Vec<_>>());
            let counts: Vec<bool> = if golden.has(&format!("{case}.attention_mask")) {
                golden.ints(&format!("{case}.attention_mask")).iter().map(|&m| m == 1).collect()
            } else {
                vec![true; batch * t]
            };
            let mut cache = target.cache(batch, t);
            cache.set_starts(counts.chunks(t).map(|row| row.iter().filter(|c| !**c).count()).collect());
            let positions = golden.ints(&format!("{case}.position_ids"));
            let positions: Vec<Position> = positions.iter().map(|&p| Position(p.max(0) as usize)).collect();
            let pass = target.forward_at(&ids, &positions, &mut cache, &want).unwrap();
            if case != "far" {
                // The positions that forward derives itself are those of the fixture.
                let mut again = target.cache(batch, t);
                again.set_starts((0..batch).map(|r| cache.start(r)).collect());
                let derived = target.forward(&ids, &mut again, &want).unwrap();
                let reference: Vec<f32> = pass.logits.clone().unwrap().into_data().iter::<f32>().collect();
                compare_rows(
                    "derived positions",
                    derived.logits.unwrap(),
                    &reference,
                    &counts,
                    Tolerance::Absolute(0.0),
                );
            }
            let tolerance = if case == "far" { Tolerance::Absolute(1e-3) } else { NEAR };
            let key = format!("{case}.logits");
            compare_rows(&key, pass.logits.clone().unwrap(), &golden.f32s(&key), &counts, tolerance);
            check_hidden(&golden, case, &target, &pass, &counts, tolerance);
            check_cache(&golden, case, &cache, layers, &counts, tolerance);
        }
        check_greedy(&target, &golden.notes, &name(&folder));
        check_rollback(&target, &golden);
    }
}

fn best<B: Backend>(logits: Tensor<B, 3>) -> TokenId {
    let [_, rows, v] = logits.dims();
    let last = logits.narrow(1, rows - 1, 1).reshape([v]);
    TokenId(last.argmax(0).into_data().iter::<i64>().next().unwrap() as u32)
}

fn greedy<B: Backend>(target: &Target<B>, prompt: Vec<TokenId>, n: usize) -> Vec<TokenId> {
    let mut cache = target.cache(1, prompt.len() + n);
    let mut input = prompt;
    let next = |_| {
        let want = Want { logits: Rows::Last, hidden: &[] };
        let token = best(target.forward(&input, &mut cache, &want).unwrap().logits.unwrap());
        input = vec![token];
        token
    };
    (0..n).map(next).collect()
}

fn check_greedy<B: Backend>(target: &Target<B>, notes: &Value, name: &str) {
    for case in notes["greedy"].as_array().unwrap() {
        let (prompt, expected) = (ids(&case["prompt_ids"]), ids(&case["new_ids"]));
        let found = greedy(target, prompt, expected.len());
        assert_eq!(found, expected, "{name}: greedy ids");
    }
}

/// Processing wrong tokens and taking them back leaves no trace, and chunks do not matter.
fn check_rollback<B: Backend>(target: &Target<B>, golden: &Golden) {
    const TOLERANCE: Tolerance = Tolerance::Absolute(2e-4);
    let input = tokens(&golden.ints("full.input_ids"));
    let reference = golden.f32s("full.logits");
    let want = Want { logits: Rows::All, hidden: &[] };
    let wrong = ids(&golden.notes["incremental"]["rollback_wrong_ids"]);
    let v = target.config().vocab_size;
    for cut in [1, input.len() / 2, input.len() - 1] {
        let mut cache = target.cache(1, input.len() + wrong.len());
        target.forward(&input[..cut], &mut cache, &want).unwrap();
        target.forward(&wrong, &mut cache, &want).unwrap();
        cache.truncate(cut);
        let rest = target.forward(&input[cut..], &mut cache, &want).unwrap().logits.unwrap();
        assert_tensor("after a rollback", rest, &reference[cut * v..], TOLERANCE);
        cache.truncate(cut);
        for (i, token) in input[cut..].iter().enumerate() {
            let row = target.forward(&[*token], &mut cache, &want).unwrap().logits.unwrap();
            let at = (cut + i) * v;
            assert_tensor("one by one", row, &reference[at..at + v], TOLERANCE);
        }
    }
}

#[test]
fn golden_targets_with_the_older_config_layout() {
    check::<B>("config.json");
}

#[test]
fn golden_targets_with_the_newer_config_layout() {
    check::<B>("config_transformers5.json");
}

#[test]
fn golden_targets_ndarray() {
    check::<burn_ndarray::NdArray>("config.json");
}

/// The real model's greedy ids, from the folder and from the GGUF it was made of.
#[test]
fn golden_smollm2_greedy_ids() {
    let file = hspec_goldens::root().join("targets/smollm2-135m-instruct.greedy.json");
    let notes: Value = read_json(&file).unwrap();
    let folder = hspec_goldens::model("smollm2-135m-instruct");
    let gguf = folder.with_extension("gguf");
    assert!(gguf.exists(), "{} is missing", gguf.display());
    for path in [folder, gguf] {
        let target = Target::<B>::load(&path, &Default::default()).unwrap();
        for case in notes["prompts"].as_array().unwrap() {
            let (prompt, expected) = (ids(&case["prompt_ids"]), ids(&case["greedy_64_ids_no_eos_stop"]));
            let found = greedy(&target, prompt, expected.len());
            assert_eq!(found, expected, "{}: {}", path.display(), case["prompt"]);
        }
    }
}
