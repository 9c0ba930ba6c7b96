//! EAGLE-3 and P-EAGLE through the decoding path against the reference implementations: the drafts of the
//! fixtures, the steps of training drawn one by one, and files read and written again.

#![allow(clippy::unwrap_used)] // a test may panic

use burn::tensor::{Tensor, backend::Backend};
use hspec_core::{
    TokenId,
    checkpoint::{StoreAs, Weights, read_json},
    drafter::{Drafter, eagle3::Eagle3, peagle::PEagle},
    target::KvCache,
};
use hspec_goldens::{Golden, Tolerance, assert_close};
use serde_json::Value;
use std::path::PathBuf;

fn dir(name: &str) -> PathBuf {
    hspec_goldens::root().join("dspark").join(name)
}

fn close(what: &str, found: &[f32], reference: &[f32]) {
    let largest = reference.iter().fold(1f32, |m, r| m.max(r.abs()));
    assert_close(what, found, reference, Tolerance::Absolute(2e-5 * largest));
}

/// `[1, T, W]` or `[B, T, W]` fixtures: the rows `from..to` of batch row `b`.
fn rows<B: Backend>(golden: &Golden, name: &str, b: usize, from: usize, to: usize) -> Tensor<B, 2> {
    let x = golden.float::<B, 3>(name, &Default::default());
    let width = x.dims()[2];
    x.slice([b..b + 1, from..to]).reshape([to - from, width])
}

fn ids(golden: &Golden, name: &str) -> Vec<TokenId> {
    golden.ints(name).iter().map(|&id| TokenId(id as u32)).collect()
}

/// A session that has seen features `0..n`, the tokens that follow them, and then drafts with the tokens of
/// `path` picked, whatever the logits: the logits of every slot.
fn drafted<B: Backend>(
    drafter: &dyn Drafter<B>,
    features: Tensor<B, 2>,
    next: &[TokenId],
    path: &[TokenId],
) -> Vec<Vec<f32>> {
    let n = features.dims()[0];
    let mut session = drafter.session(n + path.len());
    // The first token completes no pair: it may be any.
    let tokens: Vec<TokenId> = std::iter::once(TokenId(0)).chain(next[..n - 1].iter().copied()).collect();
    session.observe(&tokens, features);
    let cache = KvCache::new(1, 1, 1, 1, 1, &Default::default());
    let mut logits = Vec::new();
    let proposal = session.draft(next[n - 1], &cache, path.len(), &mut |slot, row| {
        assert_eq!(slot, logits.len() + 1);
        logits.push(row.to_vec());
        Ok(path[slot - 1])
    });
    assert_eq!(proposal.unwrap().tokens, path);
    logits
}

fn best(logits: &[f32]) -> usize {
    (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap()
}

fn deepspec_draft<B: Backend>() {
    let golden = Golden::open("dspark/train_eagle3");
    let drafter = Eagle3::<B>::load(&dir("ckpt_eagle3"), None, &Default::default()).unwrap();
    let tokens = ids(&golden, "infer/prompt_plus_anchor");
    let path = ids(&golden, "infer/tokens");
    assert_eq!(path.len(), drafter.max_draft());
    let n = tokens.len() - 1;
    let found = drafted(&drafter, rows(&golden, "infer/features", 0, 0, n), &tokens[1..], &path);
    close("infer/logits", &found.concat(), &golden.f32s("infer/logits"));
    let greedy: Vec<usize> = found.iter().map(|row| best(row)).collect();
    assert_eq!(greedy, path.iter().map(|t| t.index()).collect::<Vec<_>>());
}

/// Every pair of every document from which all steps stay inside it: what a session drafts along the true
/// tokens is what the reference's unrolled steps computed there.
fn steps_one_by_one<B: Backend>(name: &str, checkpoint: &str, features: &str) {
    let golden = Golden::open(&format!("dspark/{name}"));
    let drafter = Eagle3::<B>::load(&dir(checkpoint), None, &Default::default()).unwrap();
    let steps = (0..).take_while(|i| golden.has(&format!("step{i}/logits"))).count();
    let shape = golden.data("input_ids").shape.to_vec();
    let (batch, t) = (shape[0], shape[1]);
    let tokens = ids(&golden, "input_ids");
    // The document of each pair, and the token that follows its feature.
    let padded = golden.has("attention_mask");
    let document = |b: usize, at: usize| {
        if padded { golden.ints("attention_mask")[b * t + at] - 1 } else { golden.ints("document_ids")[at] }
    };
    let mut compared = 0;
    for b in 0..batch {
        let row = &tokens[b * t..(b + 1) * t];
        let next: Vec<TokenId> = if padded { row[1..].to_vec() } else { row.to_vec() };
        let documents: Vec<i64> = (0..next.len()).map(|at| document(b, at + usize::from(padded))).collect();
        for at in (0..next.len()).filter(|&at| documents[at] >= 0) {
            let from = documents.iter().position(|&d| d == documents[at]).unwrap();
            let end = documents.iter().rposition(|&d| d == documents[at]).unwrap();
            // The token picked last is not read.
            let Some(path) = (at + steps - 1 <= end).then(|| &next[at + 1..at + steps]) else { continue };
            let path: Vec<TokenId> = path.iter().copied().chain([TokenId(0)]).collect();
            let seen = rows(&golden, features, b, from, at + 1);
            let found = drafted(&drafter, seen, &next[from..], &path);
            for (i, found) in found.iter().enumerate() {
                let what = format!("step{i}/logits");
                let reference = rows::<B>(&golden, &what, b, at, at + 1);
                let reference: Vec<f32> = reference.into_data().iter::<f32>().collect();
                close(&format!("{name} {what} of pair {at} in row {b}"), found, &reference);
                compared += 1;
            }
        }
    }
    assert!(compared > 20, "{compared} rows compared");
}

/// Every chain of the fixture that starts at depth 0 and is whole: the slots of a draft are its depths.
fn depths_in_one_pass<B: Backend>() {
    let golden = Golden::open("dspark/train_spec_peagle");
    let drafter = PEagle::<B>::load(&dir("ckpt_spec_peagle"), None, &Default::default()).unwrap();
    let next = ids(&golden, "input_ids");
    let documents = golden.ints("document_ids");
    let (anchors, depths) = (golden.ints("anchor_pos"), golden.ints("depth"));
    let logits = golden.f32s("logits");
    let width = logits.len() / anchors.len();
    let mut compared = 0;
    for anchor in (0..next.len()).filter(|&a| documents[a] >= 0) {
        let from = documents.iter().position(|&d| d == documents[anchor]).unwrap();
        let seen = rows(&golden, "hidden_states", 0, from, anchor + 1);
        let path = vec![TokenId(0); drafter.max_draft()];
        let found = drafted(&drafter, seen, &next[from..], &path);
        for (row, _) in anchors.iter().enumerate().filter(|&(_, &a)| a == anchor as i64) {
            let depth = depths[row] as usize;
            let reference = &logits[row * width..(row + 1) * width];
            close(&format!("anchor {anchor}, depth {depth}"), &found[depth], reference);
            compared += 1;
        }
    }
    assert_eq!(compared, anchors.iter().filter(|&&a| documents[a as usize] >= 0).count());
}

#[test]
fn golden_drafts_flex() {
    type B = burn_flex::Flex;
    deepspec_draft::<B>();
    steps_one_by_one::<B>("train_eagle3", "ckpt_eagle3", "target_hidden_states");
    steps_one_by_one::<B>("train_spec_eagle3", "ckpt_spec_eagle3", "hidden_states");
    depths_in_one_pass::<B>();
}

#[test]
fn golden_drafts_ndarray() {
    type B = burn_ndarray::NdArray;
    deepspec_draft::<B>();
    steps_one_by_one::<B>("train_eagle3", "ckpt_eagle3", "target_hidden_states");
    steps_one_by_one::<B>("train_spec_eagle3", "ckpt_spec_eagle3", "hidden_states");
    depths_in_one_pass::<B>();
}

/// Configuration and tensors of the released layouts survive reading and writing; the vocabulary's maps too.
#[test]
fn golden_files_round_trip() {
    type B = burn_flex::Flex;
    let device = Default::default();
    for name in ["ckpt_eagle3", "ckpt_spec_eagle3", "ckpt_spec_peagle"] {
        let (from, to) = (dir(name), tempfile::tempdir().unwrap());
        if name.ends_with("peagle") {
            PEagle::<B>::load(&from, None, &device).unwrap().save(to.path(), StoreAs::F32, true).unwrap();
        } else {
            Eagle3::<B>::load(&from, None, &device).unwrap().save(to.path(), StoreAs::F32, true).unwrap();
        }
        let json = |dir: &std::path::Path| read_json::<Value>(&dir.join("config.json")).unwrap();
        assert_eq!(json(to.path()), json(&from), "{name}");
        let (before, after) = (Weights::open(&from).unwrap(), Weights::open(to.path()).unwrap());
        assert_eq!(before.names(), after.names(), "{name}");
        for tensor in before.names() {
            let (a, b) = (before.tensor(&tensor).unwrap().unwrap(), after.tensor(&tensor).unwrap().unwrap());
            assert_eq!((a.shape.to_vec(), a.as_bytes()), (b.shape.to_vec(), b.as_bytes()), "{name} {tensor}");
        }
    }
}
