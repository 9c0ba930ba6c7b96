//! Training DFlash and DSpark drafters against both reference implementations: masks, losses, whole forward
//! passes over packed rows, and the gradients of every parameter.

#![allow(clippy::unwrap_used)] // a test may panic

use burn::{
    backend::Autodiff,
    module::{Module, ModuleVisitor, Param},
    tensor::{
        Int, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use hspec_core::{
    TokenId,
    checkpoint::{Weights, read_json},
    drafter::{
        DraftVocab,
        dspark::{BlockOutput, DSpark, DSparkConfig, DSparkModel, Kind, Layout, PackedRow},
    },
};
use hspec_goldens::{Golden, Tolerance, assert_close, assert_tensor};
use hspec_nn::{Linear, RmsNorm, params};
use hspec_train::{
    loss::elements,
    loss_deepspec::{
        BlockLossConfig, BlockTargets, anchor_candidates, contiguous_mask, deepspec, expected_lengths,
        slot_mask, speculators,
    },
};
use serde_json::Value;

const VALUES: Tolerance = Tolerance::Scaled(2e-5);
const LOSS: Tolerance = Tolerance::Scaled(1e-5);

/// Fixtures of a prefix that this family's checkpoints belong to.
fn fixtures(prefix: &str) -> Vec<Golden> {
    let folder = hspec_goldens::root().join("dspark");
    let names = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> =
        names.filter_map(|n| n.strip_suffix(".safetensors").map(str::to_owned)).collect();
    names.retain(|name| name.starts_with(prefix));
    names.sort();
    let mut found: Vec<Golden> = names.iter().map(|n| Golden::open(&format!("dspark/{n}"))).collect();
    found.retain(|golden| {
        let config = config(golden);
        let word = config.get("speculators_model_type").unwrap_or(&config["architectures"][0]);
        let speculators = prefix.starts_with("train_spec");
        let known = if speculators { &["dspark", "dflash"][..] } else { &["Qwen3DSparkModel"][..] };
        known.iter().any(|known| word == known)
    });
    assert!(!found.is_empty(), "no fixture {prefix}*");
    found
}

fn dir(golden: &Golden) -> std::path::PathBuf {
    hspec_goldens::root().join("dspark").join(golden.notes["checkpoint"].as_str().unwrap())
}

fn config(golden: &Golden) -> Value {
    read_json(&dir(golden).join("config.json")).unwrap()
}

/// The fixture's checkpoint, all of it trained but the frozen copies.
fn drafter<B: AutodiffBackend>(golden: &Golden) -> DSpark<B> {
    let (dir, device) = (dir(golden), Default::default());
    let file = dir.join("config.json");
    let config = DSparkConfig::from_value(&config(golden), &file).unwrap();
    let shape = config.shape(&file).unwrap();
    let weights = Weights::open(&dir).unwrap();
    let source = |name: &str| weights.tensor(name).unwrap();
    let fresh = DSparkModel::<B>::init(&shape, &device);
    let model = params::fill(fresh, &device, source, |n| !DSparkModel::<B>::frozen(n)).unwrap();
    let vocab = match weights.tensor("d2t").unwrap() {
        Some(d2t) => {
            DraftVocab::from_offsets(&d2t.iter::<i64>().collect::<Vec<_>>(), shape.vocab_size, &file).unwrap()
        }
        None => DraftVocab::full(shape.vocab_size),
    };
    DSpark::new(config, model, vocab, &file).unwrap()
}

fn usizes(golden: &Golden, name: &str) -> Vec<usize> {
    golden.ints(name).iter().map(|&i| i as usize).collect()
}

fn flags(golden: &Golden, name: &str) -> Vec<bool> {
    golden.ints(name).iter().map(|&f| f != 0).collect()
}

fn tokens(golden: &Golden, name: &str) -> Vec<TokenId> {
    golden.ints(name).iter().map(|&id| TokenId(id as u32)).collect()
}

fn floats<B: Backend>(flags: &[bool], shape: [usize; 2]) -> Tensor<B, 2> {
    let values: Vec<f32> = flags.iter().map(|&f| f32::from(u8::from(f))).collect();
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

fn int_tensor<B: Backend>(values: Vec<i64>, shape: [usize; 2]) -> Tensor<B, 2, Int> {
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

/// Some rows of a reference `[rows, width]`.
fn pick(reference: &[f32], width: usize, rows: &[usize]) -> Vec<f32> {
    rows.iter().flat_map(|&r| reference[r * width..(r + 1) * width].to_vec()).collect()
}

/// 1e-4 of the largest element of the reference.
fn assert_gradient(what: &str, found: &[f32], reference: &[f32]) {
    let largest = reference.iter().fold(0f32, |m, r| m.max(r.abs()));
    assert_close(what, found, reference, Tolerance::Absolute(1e-4 * largest + 1e-8));
}

/// Compares the gradient of every parameter with `grad/NAME`.
struct Gradients<'a, B: AutodiffBackend> {
    golden: &'a Golden,
    what: &'a str,
    grads: &'a B::Gradients,
    path: Vec<String>,
    seen: usize,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Gradients<'_, B> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let name = self.path.join(".");
        let key = format!("grad/{name}");
        if DSparkModel::<B>::frozen(&name) {
            assert!(!self.golden.has(&key), "{name} is frozen");
            return;
        }
        // Without a gradient in the reference, there is none or it is zero.
        let grad = param.val().grad(self.grads);
        let what = format!("{} {key}", self.what);
        match (grad, self.golden.has(&key)) {
            (Some(grad), true) => {
                let found: Vec<f32> = grad.into_data().iter::<f32>().collect();
                assert_gradient(&what, &found, &self.golden.f32s(&key));
                self.seen += 1;
            }
            (Some(grad), false) => assert_eq!(grad.abs().max().into_scalar().to_string(), "0", "{what}"),
            (None, there) => assert!(!there, "no gradient: {what}"),
        }
    }
}

fn gradients<B: AutodiffBackend>(what: &str, golden: &Golden, drafter: &DSpark<B>, loss: &Tensor<B, 1>) {
    let grads = loss.backward();
    let mut visitor = Gradients { golden, what, grads: &grads, path: Vec::new(), seen: 0 };
    drafter.model.visit(&mut visitor);
    let all = golden.names().filter(|name| name.starts_with("grad/")).count();
    assert_eq!(visitor.seen, all, "{what}: every gradient of the fixture was compared");
}

fn scalar<B: Backend>(what: &str, found: &Tensor<B, 1>, reference: f32) {
    assert_tensor(what, found.clone(), &[reference], LOSS);
}

fn alphas(notes: &Value) -> BlockLossConfig {
    BlockLossConfig {
        ce: notes["ce_loss_alpha"].as_f64().unwrap(),
        distance: notes["l1_loss_alpha"].as_f64().unwrap(),
        confidence: notes["confidence_head_alpha"].as_f64().unwrap(),
        gamma: notes["loss_decay_gamma"].as_f64(),
    }
}

#[test]
fn golden_supervision_masks_of_deepspec() {
    let golden = Golden::open("dspark/eval_mask");
    let [rows, block] = {
        let shape = golden.data("eval_mask").shape.to_vec();
        [shape[0] * shape[1], shape[2]]
    };
    let batch = golden.data("loss_mask").shape.to_vec()[0];
    let (blocks, masks) = (rows / batch, flags(&golden, "loss_mask"));
    let (anchors, keep) = (usizes(&golden, "anchor_positions"), flags(&golden, "block_keep_mask"));
    let seq = masks.len() / batch;
    let candidates = flags(&golden, "anchor_candidates");
    let mut found = Vec::new();
    for b in 0..batch {
        let (loss_mask, documents) = (&masks[b * seq..(b + 1) * seq], vec![0; seq]);
        // The last token can be no anchor; the reference leaves it out.
        let own = anchor_candidates(loss_mask, &documents);
        assert!(!own[seq - 1]);
        let width = candidates.len() / batch;
        assert_eq!(own[..width], candidates[b * width..(b + 1) * width]);
        for n in b * blocks..(b + 1) * blocks {
            found.extend(match keep[n] {
                true => {
                    contiguous_mask(Layout::AnchorPredicts, block, &anchors[n..=n], loss_mask, &documents)
                }
                false => vec![false; block],
            });
        }
    }
    assert_eq!(found, flags(&golden, "eval_mask"));
}

fn deepspec_losses<B: AutodiffBackend>() {
    let device = Default::default();
    let golden = Golden::open("dspark/loss_dspark");
    let shape = golden.data("draft_logits").shape.to_vec();
    let (n, k, v) = (shape[0] * shape[1], shape[2], shape[3]);
    for (name, case) in golden.notes["cases"].as_object().unwrap() {
        let at = |t: &str| format!("{name}/{t}");
        let logits = golden.float::<B, 4>("draft_logits", &device).reshape([n, k, v]).require_grad();
        let confidence = golden.float::<B, 3>("confidence_logits", &device).reshape([n, k]).require_grad();
        let masked = name == "all_masked";
        let mask: Vec<bool> = flags(&golden, "eval_mask").iter().map(|&m| m && !masked).collect();
        let config = alphas(case);
        let loss = deepspec(
            BlockTargets {
                logits: logits.clone(),
                targets: golden.float::<B, 4>("target_logits", &device).reshape([n, k, v]),
                labels: golden.int::<B, 3>("target_ids", &device).reshape([n, k]),
                confidence: Some(confidence.clone()),
                mask: floats(&mask, [n, k]),
            },
            Layout::AnchorPredicts,
            &config,
        );
        scalar(&at("loss"), &loss.total, golden.f32s(&at("loss"))[0]);
        // A term of weight 0 is not computed by the reference.
        for (term, weight, found) in [
            ("ce_loss", config.ce, &loss.ce),
            ("l1_loss", config.distance, &loss.l1),
            ("confidence_loss", config.confidence, &loss.confidence),
        ] {
            if weight != 0.0 {
                scalar(&at(term), found, golden.f32s(&at(&format!("{term}_num")))[0]);
                scalar(&at(term), &loss.weight, golden.f32s(&at(&format!("{term}_den")))[0]);
            }
        }
        if !masked {
            let mask: Vec<f32> = mask.iter().map(|&m| f32::from(u8::from(m))).collect();
            let acceptance: Vec<f32> = loss.acceptance.clone().into_data().iter::<f32>().collect();
            let tau = expected_lengths(Layout::AnchorPredicts, k, &acceptance, &mask);
            let tau: Vec<f32> = tau.iter().map(|&t| t as f32).collect();
            assert_close(&at("tau"), &tau, &golden.f32s("tau_prob_per_block"), VALUES);
        }
        let grads = loss.total.backward();
        let values = |t: Tensor<B::InnerBackend, 1>| t.into_data().iter::<f32>().collect::<Vec<f32>>();
        let found = values(logits.grad(&grads).unwrap().reshape([n * k * v]));
        assert_gradient(&at("draft"), &found, &golden.f32s(&at("grad_draft_logits")));
        let found = values(confidence.grad(&grads).unwrap().reshape([n * k]));
        assert_gradient(&at("confidence"), &found, &golden.f32s(&at("grad_confidence_logits")));
    }
}

/// Each row of the reference's batch is a packed row of its own.
fn deepspec_training<B: AutodiffBackend>() {
    let device: B::Device = Default::default();
    for golden in fixtures("train_") {
        let what = golden.notes["checkpoint"].as_str().unwrap().to_owned();
        let at = |t: &str| format!("{what} {t}");
        let drafter = drafter::<B>(&golden);
        let (layout, k) = (drafter.shape().layout, drafter.shape().block_size);
        let shape = golden.data("target_hidden_states").shape.to_vec();
        let (batch, seq, width) = (shape[0], shape[1], shape[2]);
        let ids = tokens(&golden, "input_ids");
        let (anchors, keep) = (usizes(&golden, "anchor_positions"), flags(&golden, "block_keep_mask"));
        let blocks = anchors.len() / batch;
        let features = golden.float::<B, 3>("target_hidden_states", &device);
        let last = golden.float::<B, 3>("target_last_hidden_states", &device);
        let (positions, documents) = ((0..seq).collect::<Vec<_>>(), vec![0; seq]);
        let masks = flags(&golden, "loss_mask");

        let mut outputs: Vec<BlockOutput<B>> = Vec::new();
        // Dropped blocks are not computed at all.
        let (mut kept, mut mask, mut labels, mut targets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for b in 0..batch {
            let features = features.clone().narrow(0, b, 1).reshape([seq, width]);
            let fused = drafter.fuse(features.clone());
            let h = fused.dims()[1];
            let reference = golden.f32s("context_feature");
            let reference = &reference[b * seq * h..(b + 1) * seq * h];
            assert_tensor(&at("context_feature"), fused, reference, VALUES);
            let ids = &ids[b * seq..(b + 1) * seq];
            let row = PackedRow { ids, positions: &positions, documents: &documents, features };
            let own: Vec<usize> = (b * blocks..(b + 1) * blocks).filter(|&n| keep[n]).collect();
            let places: Vec<usize> = own.iter().map(|&n| anchors[n]).collect();
            outputs.push(drafter.blocks(&row, &places));
            mask.extend(contiguous_mask(layout, k, &places, &masks[b * seq..(b + 1) * seq], &documents));
            let label = |(&a, slot): (&usize, usize)| layout.label(a, slot).min(seq - 1);
            let slots = places.iter().flat_map(|a| (0..k).map(move |slot| (a, slot)));
            let wanted: Vec<usize> = slots.map(label).collect();
            labels.extend(wanted.iter().map(|&i| i64::from(ids[i].0)));
            let before: Vec<i64> = wanted.iter().map(|&i| i as i64 - 1).collect();
            let rows = Tensor::from_data(TensorData::new(before, [wanted.len()]), &device);
            targets.push(last.clone().narrow(0, b, 1).squeeze_dim::<2>(0).select(0, rows));
            kept.extend(own);
        }
        let n = kept.len();
        let cat = |part: fn(&BlockOutput<B>) -> Tensor<B, 3>| {
            Tensor::cat(outputs.iter().map(part).collect::<Vec<_>>(), 0)
        };
        let (hidden, base, logits) =
            (cat(|o| o.hidden.clone()), cat(|o| o.base.clone()), cat(|o| o.logits.clone()));
        for (key, found) in [("hidden", &hidden), ("base_logits", &base), ("draft_logits", &logits)] {
            let reference = pick(&golden.f32s(key), k * found.dims()[2], &kept);
            assert_tensor(&at(key), found.clone(), &reference, VALUES);
        }
        let confidence: Vec<Tensor<B, 2>> = outputs.iter().filter_map(|o| o.confidence.clone()).collect();
        let confidence = (!confidence.is_empty()).then(|| Tensor::cat(confidence, 0));
        assert_eq!(confidence.is_some(), golden.has("confidence_logits"));
        if let Some(confidence) = &confidence {
            let reference = pick(&golden.f32s("confidence_logits"), k, &kept);
            assert_tensor(&at("confidence"), confidence.clone(), &reference, VALUES);
        }
        let ints = |key: &str| -> Vec<i64> {
            let all = golden.ints(key);
            kept.iter().flat_map(|&r| all[r * k..(r + 1) * k].to_vec()).collect()
        };
        assert_eq!(mask.iter().map(|&m| i64::from(m)).collect::<Vec<_>>(), ints("eval_mask"), "{what}");
        assert_eq!(labels, ints("target_ids"), "{what}");

        // The reference's last hidden states are behind the final norm already.
        let targets = drafter.model.lm_head.forward(Tensor::cat(targets, 0));
        let v = targets.dims()[1];
        let loss = deepspec(
            BlockTargets {
                logits,
                targets: targets.reshape([n, k, v]),
                labels: int_tensor(labels, [n, k]),
                confidence,
                mask: floats(&mask, [n, k]),
            },
            layout,
            &alphas(&golden.notes["alphas"]),
        );
        scalar(&at("loss"), &loss.total, golden.f32s("loss")[0]);
        gradients(&what, &golden, &drafter, &loss.total);
    }
}

fn speculators_training<B: AutodiffBackend>() {
    let device: B::Device = Default::default();
    for golden in fixtures("train_spec_") {
        let what = golden.notes["checkpoint"].as_str().unwrap().to_owned();
        let at = |t: &str| format!("{what} {t}");
        let drafter = drafter::<B>(&golden);
        let (layout, k) = (drafter.shape().layout, drafter.shape().block_size);
        let ids = tokens(&golden, "input_ids");
        let t = ids.len();
        let owners = golden.ints("document_ids");
        let documents: Vec<usize> =
            (0..t).map(|i| (0..=i).rev().take_while(|&j| owners[j] == owners[i]).last().unwrap()).collect();
        let positions = usizes(&golden, "position_ids");
        let features = golden.float::<B, 3>("hidden_states", &device).squeeze_dim::<2>(0);
        let row = PackedRow { ids: &ids, positions: &positions, documents: &documents, features };
        let anchors = usizes(&golden, "anchor_positions");
        let n = anchors.len();
        let output = drafter.blocks(&row, &anchors);
        for (key, found) in
            [("hidden", &output.hidden), ("base_logits", &output.base), ("final_logits", &output.logits)]
        {
            assert_tensor(&at(key), found.clone(), &golden.f32s(key), VALUES);
        }
        assert_eq!(output.confidence.is_some(), golden.has("confidence_logits"));
        if let Some(confidence) = &output.confidence {
            assert_tensor(&at("confidence"), confidence.clone(), &golden.f32s("confidence_logits"), VALUES);
        }
        let valid = flags(&golden, "anchor_valid");
        let loss_mask: Vec<bool> = golden.f32s("loss_mask").iter().map(|&m| m != 0.0).collect();
        let mask = slot_mask(layout, k, &anchors, &valid, &loss_mask);
        let mask = floats::<B>(&mask, [n, k]);
        let exact = Tolerance::Absolute(0.0);
        assert_tensor(&at("mask"), mask.clone(), &golden.f32s("aligned_loss_mask"), exact);

        // The reference's last hidden states are before the final norm.
        let eps = drafter.shape().rms_norm_eps;
        let norm = RmsNorm::new(golden.float::<B, 1>("verifier_norm", &device), eps);
        let head = Linear::new(golden.float::<B, 2>("verifier_lm_head", &device), None);
        let last = golden.float::<B, 3>("verifier_last_hidden_states", &device).squeeze_dim::<2>(0);
        let wanted: Vec<i64> = anchors
            .iter()
            .flat_map(|&a| (0..k).map(move |slot| ((layout.label(a, slot) + t - 1) % t) as i64))
            .collect();
        let rows = Tensor::from_data(TensorData::new(wanted, [n * k]), &device);
        let targets = head.forward(norm.forward(last)).select(0, rows);
        assert_tensor(&at("targets"), targets.clone(), &golden.f32s("targets"), VALUES);

        let v = targets.dims()[1];
        let terms = elements(output.logits, targets.reshape([n, k, v]), output.confidence);
        let dspark = drafter.shape().kind == Kind::DSpark;
        let config = BlockLossConfig {
            ce: 0.1,
            distance: 0.9,
            confidence: f64::from(u8::from(dspark)),
            gamma: Some(4.0),
        };
        let flags: Vec<f32> = mask.clone().into_data().iter::<f32>().collect();
        let loss = speculators(terms, mask.clone(), layout, &config);
        scalar(&at("loss"), &loss.total, golden.f32s("loss")[0]);
        for (key, found) in [("ce", &loss.ce), ("tv", &loss.tv), ("confidence", &loss.confidence)] {
            let key = format!("metric/{key}_loss_sum");
            if golden.has(&key) {
                scalar(&at(&key), found, golden.f32s(&key)[0]);
            }
        }
        if dspark {
            let rate = (loss.elements.acceptance.clone() * mask).sum();
            scalar(&at("accept_rate"), &rate, golden.f32s("metric/accept_rate_sum")[0]);
            let acceptance: Vec<f32> = loss.elements.acceptance.clone().into_data().iter::<f32>().collect();
            let lengths = expected_lengths(layout, k, &acceptance, &flags);
            let valid = lengths.iter().zip(&valid).filter(|(_, valid)| **valid);
            let total: f64 = valid.map(|(length, _)| length).sum();
            let reference = golden.f32s("metric/accept_len_sum");
            assert_close(&at("accept_len"), &[total as f32], &reference, LOSS);
        }
        gradients(&what, &golden, &drafter, &loss.total);
    }
}

#[test]
fn golden_losses_of_deepspec_flex() {
    deepspec_losses::<Autodiff<burn_flex::Flex>>();
}

#[test]
fn golden_losses_of_deepspec_ndarray() {
    deepspec_losses::<Autodiff<burn_ndarray::NdArray>>();
}

#[test]
fn golden_training_of_deepspec_flex() {
    deepspec_training::<Autodiff<burn_flex::Flex>>();
}

#[test]
fn golden_training_of_deepspec_ndarray() {
    deepspec_training::<Autodiff<burn_ndarray::NdArray>>();
}

#[test]
fn golden_training_of_speculators_flex() {
    speculators_training::<Autodiff<burn_flex::Flex>>();
}

#[test]
fn golden_training_of_speculators_ndarray() {
    speculators_training::<Autodiff<burn_ndarray::NdArray>>();
}
