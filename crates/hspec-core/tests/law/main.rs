//! The law of what [`Decoder`] emits at temperature 1 is the target's: exactly, by every branch of its random
//! choices over a tiny vocabulary, for every kind of drafter and head and for every schedule; and by counts
//! for the real random numbers. A schedule that looks ahead fails the same check.

#![allow(clippy::unwrap_used)] // a test may panic

mod counts;
#[path = "../dspark/scene.rs"]
#[allow(dead_code)] // parts that only its own tests need
mod dspark;
#[path = "../support/eagle.rs"]
mod eagle;
mod kinds;
mod schedules;
#[path = "../support/mod.rs"]
mod support;

use burn::tensor::TensorData;
use dspark::B;
use hspec_core::{
    TokenId,
    checkpoint::{StoreAs, Weights, read_json, write_safetensors},
    config::TargetConfig,
    decode::{Decoder, Request, SamplingParams},
    target::{Rows, Target, Want},
};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::ControlFlow,
    path::Path,
};
use support::Explorer;

/// Drafts per round.
const K: usize = 2;

const PROMPT: [TokenId; 2] = [TokenId(1), TokenId(0)];

/// A real target with the first `vocab` of its tokens and the first `layers` of its layers; its embeddings
/// are multiplied by `scale`.
fn target(vocab: usize, layers: usize, scale: f32) -> Target<B> {
    let dir = hspec_goldens::root().join("targets/llama31-tiny");
    let file = dir.join("config.json");
    let mut config: Value = read_json(&file).unwrap();
    let whole = config["vocab_size"].as_u64().unwrap() as usize;
    (config["vocab_size"], config["num_hidden_layers"]) = (vocab.into(), layers.into());
    let weights = Weights::open(&dir).unwrap();
    let cut = |name: String| {
        let data = weights.tensor(&name).unwrap().unwrap();
        let mut shape = data.shape.to_vec();
        let factor = if name.contains("embed_tokens") { scale } else { 1.0 };
        let mut values: Vec<f32> = data.iter::<f32>().map(|x| factor * x).collect();
        if shape[0] == whole {
            values.truncate(vocab * values.len() / whole);
            shape[0] = vocab;
        }
        (name, TensorData::new(values, shape))
    };
    let tensors: BTreeMap<_, _> = weights.names().into_iter().map(cut).collect();
    let folder = tempfile::tempdir().unwrap();
    write_safetensors(&folder.path().join("model.safetensors"), &tensors, StoreAs::F32).unwrap();
    let config = TargetConfig::from_value(&config, Path::new("test")).unwrap();
    Target::from_weights(config, &Weights::open(folder.path()).unwrap(), &Default::default()).unwrap()
}

/// The same kind of drafter for a target of `vocab` tokens.
fn shrunk(mut config: Value, vocab: usize) -> Value {
    fn walk(value: &mut Value, vocab: usize) {
        for (key, value) in value.as_object_mut().into_iter().flatten() {
            match key.as_str() {
                "vocab_size" => *value = vocab.into(),
                "draft_vocab_size" => *value = (vocab / 2).into(),
                "mask_token_id" => *value = 0.into(),
                "selector_top_k" => *value = (vocab - 1).into(),
                _ => walk(value, vocab),
            }
        }
    }
    walk(&mut config, vocab);
    config
}

/// The probability of every answer of 1 to `n` tokens, by the target alone.
fn reference(target: &Target<B>, n: usize) -> BTreeMap<Vec<TokenId>, f64> {
    let sampling = SamplingParams::new(1.0, None, None).unwrap();
    let mut all = BTreeMap::from([(vec![], 1.0)]);
    let mut last = all.clone();
    for _ in 0..n {
        let mut longer = BTreeMap::new();
        for (context, weight) in last {
            let ids = [&PROMPT, &context[..]].concat();
            let want = Want { logits: Rows::Last, hidden: &[] };
            let pass = target.forward(&ids, &mut target.cache(1, ids.len()), &want).unwrap();
            let logits: Vec<f32> = pass.logits.unwrap().into_data().to_vec().unwrap();
            for (token, p) in sampling.distribution(&logits, ids.len() as u64).unwrap().iter() {
                longer.insert([&context[..], &[token]].concat(), weight * p);
            }
        }
        all.extend(longer.clone());
        last = longer;
    }
    all
}

/// What a decoder does until some round ends.
struct Emitted {
    law: BTreeMap<Vec<TokenId>, f64>,
    /// Drafts verified in each round.
    verified: BTreeSet<Vec<usize>>,
}

/// Every branch of the prompt's pass and `rounds` rounds.
fn emitted(decoder: &Decoder<'_, B>, rounds: usize) -> Emitted {
    let request = Request {
        prompt: &PROMPT,
        sampling: SamplingParams::new(1.0, None, None).unwrap(),
        seed: 0,
        id: 0,
        // So many that no round drafts less.
        max_new_tokens: rounds * (K + 1) + 1,
        k: K,
        stop_tokens: &[],
    };
    let mut verified = BTreeSet::new();
    let law = Explorer::law(|chance| {
        let mut calls = 0;
        let emit = &mut |_: &[TokenId]| {
            calls += 1;
            if calls > rounds { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let generation = decoder.generate_with(&request, chance, emit).unwrap();
        assert_eq!(generation.rounds.len(), rounds);
        verified.insert(generation.rounds.iter().map(|round| round.proposed).collect());
        generation.tokens
    });
    Emitted { law, verified }
}

/// The largest difference between the target's law and that of what was emitted, with the target going on
/// from there.
fn deviation(found: &BTreeMap<Vec<TokenId>, f64>, reference: &BTreeMap<Vec<TokenId>, f64>) -> f64 {
    assert!((found.values().sum::<f64>() - 1.0).abs() < 1e-9);
    let longest = reference.keys().map(Vec::len).max().unwrap();
    assert!(found.keys().all(|tokens| reference.contains_key(tokens)));
    let off = |(tokens, p): (&Vec<TokenId>, &f64)| {
        // Emitted and going on as the target would: F(start) R(tokens) / R(start).
        let ratio = |n: usize| found.get(&tokens[..n]).map_or(0.0, |f| f / reference[&tokens[..n]]);
        p * ((1..=tokens.len()).map(ratio).sum::<f64>() - 1.0).abs()
    };
    reference.iter().filter(|(tokens, _)| tokens.len() == longest).map(off).fold(0.0, f64::max)
}
