//! DFlash and DSpark drafters against the reference implementations: drafting over two rounds with the
//! drafter's cache, DFlash-2's backbone and selector, and checkpoints read and written again.

#![allow(clippy::unwrap_used)] // a test may panic

use burn::tensor::{Tensor, TensorData, backend::Backend};
use hspec_attn::{Anchor, KvCache, Prefix};
use hspec_core::{
    TokenId,
    checkpoint::{StoreAs, Weights, read_json, write_safetensors},
    drafter::{
        Drafter, Session,
        dspark::{DSpark, DSparkSession, Layout},
    },
    target::Target,
};
use hspec_goldens::{Golden, Tolerance, assert_close, assert_tensor};
use hspec_nn::params;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

const VALUES: Tolerance = Tolerance::Scaled(2e-5);

/// Fixtures of a prefix, by name without extension.
fn fixtures(prefix: &str) -> Vec<String> {
    let folder = hspec_goldens::root().join("dspark");
    let names = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> =
        names.filter_map(|n| n.strip_suffix(".safetensors").map(str::to_owned)).collect();
    names.retain(|name| name.starts_with(prefix));
    names.sort();
    assert!(!names.is_empty(), "no fixture {prefix}*");
    names
}

fn checkpoint(name: &str) -> PathBuf {
    hspec_goldens::root().join("dspark").join(name)
}

/// Folders with a checkpoint of this family.
fn checkpoints() -> Vec<PathBuf> {
    let folders = std::fs::read_dir(hspec_goldens::root().join("dspark")).unwrap();
    let mut folders: Vec<PathBuf> =
        folders.map(|e| e.unwrap().path()).filter(|p| p.join("config.json").is_file()).collect();
    folders.retain(|dir| {
        let config: Value = read_json(&dir.join("config.json")).unwrap();
        let word = config.get("speculators_model_type").unwrap_or(&config["architectures"][0]);
        ["Qwen3DSparkModel", "dspark", "dflash"].iter().any(|known| word == known)
    });
    assert!(!folders.is_empty(), "no checkpoints");
    folders
}

fn host<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

/// A target's cache of that length, of which these drafters read the length only.
fn lengths<B: Backend>(n: usize) -> KvCache<B> {
    let mut cache = KvCache::new(1, 1, 1, n, 1, &Default::default());
    cache.advance(n);
    cache
}

fn cached<B: Backend>(session: &DSparkSession<'_, B>, layers: usize) -> Vec<(Vec<f32>, Vec<f32>)> {
    let (cache, n) = (session.context(), session.context().len());
    (0..layers).map(|l| (host(cache.keys(l, 0, n)), host(cache.values(l, 0, n)))).collect()
}

fn drafting<B: Backend>() {
    let device: B::Device = Default::default();
    for name in fixtures("infer_") {
        let golden = Golden::open(&format!("dspark/{name}"));
        let dir = checkpoint(golden.notes["checkpoint"].as_str().unwrap());
        let drafter = DSpark::<B>::load(&dir, None, &device).unwrap();
        let layers = drafter.shape().rules.len();
        let rounds = (0..).map(|r| format!("r{r}/start")).take_while(|start| golden.has(start));
        let capacity = golden.ints(&rounds.last().unwrap())[0] as usize;
        let mut session = drafter.start(capacity);
        for round in 0.. {
            let at = |t: &str| format!("r{round}/{t}");
            if !golden.has(&at("start")) {
                assert!(round > 1, "{name}: a second round shows what the first left");
                break;
            }
            let context = |t: &str| format!("{name} r{round} {t}");
            let features = golden.float::<B, 3>(&at("context_features"), &device);
            let [_, n, width] = features.dims();
            session.observe(&vec![TokenId(0); n], features.reshape([n, width]));
            let start = golden.ints(&at("start"))[0] as usize;
            assert_eq!(session.context().len(), start);
            let before = cached(&session, layers);
            for (layer, (keys, values)) in before.iter().enumerate() {
                for (what, found) in [("k", keys), ("v", values)] {
                    let key = at(&format!("cache_{what}_{layer}"));
                    assert_close(&context(&key), found, &golden.f32s(&key), VALUES);
                }
            }

            let anchor = TokenId(golden.ints(&at("draft_input_ids"))[0] as u32);
            let prefixes: Vec<Prefix<B>> = (0..layers).map(|l| session.context().lend(l)).collect();
            let hidden = drafter.forward(&[Anchor::at(start)], &[anchor], &prefixes);
            assert_tensor(&context("hidden"), hidden.clone(), &golden.f32s(&at("hidden")), VALUES);
            let base = drafter.base_logits(hidden);
            assert_tensor(&context("base"), base, &golden.f32s(&at("base_logits")), VALUES);

            let k = drafter.max_draft();
            let mut draft = |path: Option<Vec<i64>>, logits: &str, confidence: &str| {
                let mut seen = Vec::new();
                let proposal = session
                    .draft(anchor, &lengths(start), k, &mut |slot, row| {
                        seen.extend_from_slice(row);
                        let best = (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
                        Ok(TokenId(path.as_ref().map_or(best as u32, |p| p[slot - 1] as u32)))
                    })
                    .unwrap();
                assert_close(&context(logits), &seen, &golden.f32s(&at(logits)), VALUES);
                let expected =
                    if golden.has(&at(confidence)) { golden.f32s(&at(confidence)) } else { Vec::new() };
                assert_close(&context(confidence), &proposal.confidence, &expected, VALUES);
                proposal.tokens.iter().map(|t| i64::from(t.0)).collect::<Vec<_>>()
            };
            let tokens = draft(None, "corrected_logits", "confidence_logits");
            assert_eq!(tokens, golden.ints(&at("greedy_tokens")), "{}", context("greedy tokens"));
            // Without a head, the path changes nothing.
            if golden.has(&at("path_tokens")) {
                let path = golden.ints(&at("path_tokens"));
                assert_eq!(draft(Some(path.clone()), "path_logits", "path_confidence_logits"), path);
            }
            assert_eq!(before, cached(&session, layers), "a block leaves nothing in the cache");
        }
    }
}

#[test]
fn golden_two_rounds_of_drafting_flex() {
    drafting::<burn_flex::Flex>();
}

#[test]
fn golden_two_rounds_of_drafting_ndarray() {
    drafting::<burn_ndarray::NdArray>();
}

/// DFlash-2 in its own layout, with the target's embedding and head in the file.
#[test]
fn golden_dflash2_drafts_along_the_selected_path() {
    type B = burn_flex::Flex;
    let device = Default::default();
    let golden = Golden::open("dspark/dflash2");
    let notes = &golden.notes["config"];
    let mut tensors: BTreeMap<String, TensorData> = golden
        .names()
        .filter_map(|name| Some((name.strip_prefix("weight/")?.to_owned(), golden.data(name))))
        .collect();
    // Files have the codebooks without a field.
    for name in ["predecessor_codebook", "successor_codebook"] {
        let table = tensors.remove(&format!("candidate_selector.{name}.weight")).unwrap();
        tensors.insert(format!("candidate_selector.{name}"), table);
    }
    tensors.insert("embed_tokens.weight".into(), golden.data("embed"));
    tensors.insert("lm_head.weight".into(), golden.data("lm_head"));
    let mut config = json!({
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {},
        "vocab_size": notes["vocab"], "hidden_size": notes["hidden_size"],
        "intermediate_size": tensors["layers.0.mlp.up_proj.weight"].shape.to_vec()[0],
        "num_hidden_layers": notes["layers"], "num_attention_heads": notes["heads"],
        "num_key_value_heads": notes["kv_heads"], "head_dim": notes["head_dim"], "rms_norm_eps": 1e-6,
        "rope_theta": notes["rope_theta"], "is_causal": notes["is_causal"],
    });
    for (key, value) in notes.as_object().unwrap() {
        let own = ["block", "conv_", "mask", "selector_", "target_layer", "output_", "final_"];
        if own.iter().any(|word| key.starts_with(word)) {
            config["dflash_config"][key] = value.clone();
        }
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    write_safetensors(&dir.path().join("model.safetensors"), &tensors, StoreAs::F32).unwrap();
    let drafter = DSpark::<B>::load(dir.path(), None, &device).unwrap();
    assert_eq!(drafter.kind(), "dflash2");

    let features = golden.float::<B, 3>("context_features", &device);
    let [_, n, width] = features.dims();
    let mut session = drafter.start(n);
    session.observe(&vec![TokenId(0); n], features.reshape([n, width]));
    let block = golden.ints("block_ids");
    let anchor = TokenId(block[0] as u32);
    assert_eq!(golden.ints("anchor"), block[..1]);
    let prefixes: Vec<Prefix<B>> =
        (0..drafter.shape().rules.len()).map(|l| session.context().lend(l)).collect();
    let hidden = drafter.forward(&[Anchor::at(n)], &[anchor], &prefixes);
    assert_tensor("hidden", hidden.clone(), &golden.f32s("hidden"), VALUES);
    let base = drafter.base_logits(hidden.narrow(1, 1, block.len() - 1));
    assert_tensor("logits", base, &golden.f32s("logits"), VALUES);

    let mut rows = Vec::new();
    let proposal = session
        .draft(anchor, &lengths(n), drafter.max_draft(), &mut |_, row| {
            rows.push(row.to_vec());
            let best = (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
            Ok(TokenId(best as u32))
        })
        .unwrap();
    let path: Vec<i64> = proposal.tokens.iter().map(|t| i64::from(t.0)).collect();
    assert_eq!(path, golden.ints("greedy_path"));
    // Along that path: the scores of the candidates behind the one that was chosen, and nothing else.
    let candidates = golden.ints("candidate_ids");
    let edges = golden.f32s("edge_scores");
    let top = candidates.len() / path.len();
    for (slot, row) in rows.iter().enumerate() {
        let ids = &candidates[slot * top..(slot + 1) * top];
        let before = match slot {
            0 => 0,
            _ => candidates[(slot - 1) * top..slot * top].iter().position(|&c| c == path[slot - 1]).unwrap(),
        };
        let scores = &edges[(slot * top + before) * top..][..top];
        let found: Vec<f32> = ids.iter().map(|&id| row[id as usize]).collect();
        assert_close(&format!("slot {slot}"), &found, scores, VALUES);
        let others = (0..row.len()).filter(|&id| !ids.contains(&(id as i64)));
        assert!(others.into_iter().all(|id| row[id] == f32::NEG_INFINITY), "slot {slot}");
    }
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

fn all(dir: &Path) -> BTreeMap<String, TensorData> {
    let weights = Weights::open(dir).unwrap();
    let names = weights.names();
    names.into_iter().map(|name| (name.clone(), weights.tensor(&name).unwrap().unwrap())).collect()
}

/// A target whose embedding and head are those that the drafter froze.
fn lender<B: Backend>(drafter: &DSpark<B>) -> Target<B> {
    let (v, h) = (drafter.shape().vocab_size, drafter.shape().hidden_size);
    let frozen = params::collect(&drafter.model);
    let kept: Vec<f32> = frozen["lm_head.weight"].iter::<f32>().collect();
    let mut head = vec![9f32; v * h];
    for (row, id) in kept.chunks_exact(h).zip(drafter.vocab().targets()) {
        head[id.index() * h..][..h].copy_from_slice(row);
    }
    let ones = |n: usize| TensorData::new(vec![1f32; n], [n]);
    let square = || TensorData::new(vec![0.5f32; h * h], [h, h]);
    let mut tensors = BTreeMap::from([
        ("model.embed_tokens.weight".to_owned(), frozen["embed_tokens.weight"].clone()),
        ("lm_head.weight".to_owned(), TensorData::new(head, [v, h])),
        ("model.norm.weight".to_owned(), ones(h)),
    ]);
    let layers = drafter.feature_layers().last().unwrap() + 1;
    for i in 0..layers {
        let at = |name: &str| format!("model.layers.{i}.{name}.weight");
        for name in ["input_layernorm", "post_attention_layernorm"] {
            tensors.insert(at(name), ones(h));
        }
        let projections = ["q_proj", "k_proj", "v_proj", "o_proj"].map(|p| format!("self_attn.{p}"));
        let gates = ["gate_proj", "up_proj", "down_proj"].map(|p| format!("mlp.{p}"));
        for name in projections.iter().chain(&gates) {
            tensors.insert(at(name), square());
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let config = json!({
        "model_type": "llama", "vocab_size": v, "hidden_size": h, "intermediate_size": h,
        "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "rope_theta": 10000.0,
        "tie_word_embeddings": false,
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    write_safetensors(&dir.path().join("model.safetensors"), &tensors, StoreAs::F32).unwrap();
    Target::load(dir.path(), &Default::default()).unwrap()
}

/// Reading a checkpoint and writing it again gives the same tensors and the same configuration; without the
/// frozen tensors, a target lends them.
#[test]
fn golden_checkpoints_read_and_written() {
    type B = burn_ndarray::NdArray;
    let device = Default::default();
    for original in checkpoints() {
        let name = original.display().to_string();
        let drafter = DSpark::<B>::load(&original, None, &device).unwrap();
        let dir = tempfile::tempdir().unwrap();
        drafter.save(dir.path(), StoreAs::F32, true).unwrap();
        assert_eq!(all(&original), all(dir.path()), "{name}");
        let json = |dir: &Path| numbers(read_json(&dir.join("config.json")).unwrap());
        assert_eq!(json(&original), json(dir.path()), "{name}");

        drafter.save(dir.path(), StoreAs::F32, false).unwrap();
        let mut left = all(&original);
        left.remove("embed_tokens.weight").unwrap();
        left.remove("lm_head.weight").unwrap();
        assert_eq!(left, all(dir.path()), "{name}");
        let error = DSpark::<B>::load(dir.path(), None, &device).unwrap_err().to_string();
        assert!(error.contains("embed_tokens.weight is missing"), "{error}");
        let target = lender(&drafter);
        let whole = DSpark::<B>::load(dir.path(), Some(&target), &device).unwrap();
        assert_eq!(params::collect(&whole.model), params::collect(&drafter.model), "{name}");
        let any = hspec_core::drafter::load(dir.path(), &target, &device).unwrap();
        assert_eq!((any.kind(), any.max_draft()), (drafter.kind(), drafter.max_draft()));
    }
}

/// The two conventions for layer ids and for slots end at the checkpoint's edge.
#[test]
fn golden_conventions_end_at_the_checkpoint() {
    type B = burn_ndarray::NdArray;
    for dir in checkpoints() {
        let config: Value = read_json(&dir.join("config.json")).unwrap();
        let drafter = DSpark::<B>::load(&dir, None, &Default::default()).unwrap();
        let ids = |key: &str, add: u64| -> Option<Vec<usize>> {
            let ids = config.get(key)?.as_array()?;
            Some(ids.iter().map(|id| (id.as_u64().unwrap() + add) as usize).collect())
        };
        let expected = ids("target_layer_ids", 1).or_else(|| ids("aux_hidden_state_layer_ids", 0)).unwrap();
        assert_eq!(drafter.feature_layers(), expected);
        let anchored = config["sample_from_anchor"].as_bool().unwrap_or(true);
        let block = config["block_size"].as_u64().unwrap() as usize;
        let (layout, k) = match anchored {
            true => (Layout::AnchorPredicts, block),
            false => (Layout::SlotPredictsItself, block - 1),
        };
        assert_eq!((drafter.shape().layout, drafter.max_draft()), (layout, k));
        if let Some(methods) = config.pointer("/speculators_config/proposal_methods/0/speculative_tokens") {
            assert_eq!(methods.as_u64().unwrap() as usize, k);
        }
    }
}
