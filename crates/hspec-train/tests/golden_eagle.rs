//! The training passes of EAGLE-3 and P-EAGLE against the reference implementations: steps, losses and all
//! gradients, in both layouts.

#![allow(clippy::unwrap_used)] // a test may panic

use burn::{
    backend::Autodiff,
    module::{Module, ModuleVisitor, Param},
    tensor::{Tensor, backend::AutodiffBackend},
};
use hspec_core::{
    TokenId,
    drafter::{
        eagle3::{Context, Eagle3, Pairs, TttStep},
        peagle::{PEagle, PackedPairs, Samples},
    },
};
use hspec_goldens::{Golden, Tolerance, assert_close};
use hspec_nn::{Linear, RmsNorm, params};
use hspec_train::loss_eagle::{TttLoss, parallel_divergence, ttt_cross_entropy, ttt_divergence};
use std::path::{Path, PathBuf};

fn dir(name: &str) -> PathBuf {
    hspec_goldens::root().join("dspark").join(name)
}

fn largest(reference: &[f32]) -> f32 {
    reference.iter().fold(0f32, |m, r| m.max(r.abs()))
}

fn close<B: AutodiffBackend, const D: usize>(what: &str, found: Tensor<B, D>, golden: &Golden) {
    let (found, reference) = (found.into_data().iter::<f32>().collect::<Vec<_>>(), golden.f32s(what));
    let limit = 2e-5 * largest(&reference).max(1.0);
    assert_close(what, &found, &reference, Tolerance::Absolute(limit));
}

/// The same drafter with gradients for what training changes.
fn trained<B: AutodiffBackend>(mut drafter: Eagle3<B>) -> Eagle3<B> {
    let values = params::collect(&drafter.model);
    let (device, shape) = (Default::default(), drafter.shape.clone());
    let source = |name: &str| values.get(name).cloned();
    drafter.model = params::fill(drafter.model, &device, source, |name| !shape.frozen(name)).unwrap();
    drafter
}

/// Compares every gradient of the fixture, and finds none where it has none.
fn gradients<B: AutodiffBackend>(drafter: &Eagle3<B>, loss: Tensor<B, 1>, golden: &Golden) {
    let grads = loss.backward();
    let mut visitor = Gradients { golden, grads: &grads, path: Vec::new(), seen: 0 };
    drafter.model.visit(&mut visitor);
    assert_eq!(visitor.seen, golden.names().filter(|name| name.starts_with("grad/")).count());
}

struct Gradients<'a, B: AutodiffBackend> {
    golden: &'a Golden,
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
        let key = format!("grad/{}", self.path.join("."));
        let Some(found) = param.val().grad(self.grads) else {
            assert!(!self.golden.has(&key), "no gradient for {key}");
            return;
        };
        let reference = self.golden.f32s(&key);
        let limit = 1e-4 * largest(&reference);
        let found: Vec<f32> = found.into_data().iter::<f32>().collect();
        assert_close(&key, &found, &reference, Tolerance::Absolute(limit));
        self.seen += 1;
    }
}

fn ids(golden: &Golden) -> Vec<TokenId> {
    golden.ints("input_ids").iter().map(|&id| TokenId(id as u32)).collect()
}

fn flags(golden: &Golden) -> Vec<bool> {
    golden.data("loss_mask").iter::<f32>().map(|m| m > 0.0).collect()
}

/// Number behind a word in what the fixture says of itself, as in "step decay 0.8".
fn stated(golden: &Golden, word: &str) -> f64 {
    let what = golden.notes["what"].as_str().unwrap();
    let number = what.split(word).nth(1).unwrap().trim_start().split([',', ')', ' ']).next().unwrap();
    number.parse().unwrap()
}

fn compare_steps<B: AutodiffBackend>(steps: &[TttStep<B>], golden: &Golden) {
    for (i, step) in steps.iter().enumerate() {
        close(&format!("step{i}/logits"), step.logits.clone(), golden);
        let hidden = format!("step{i}/hidden");
        if golden.has(&hidden) {
            close(&hidden, step.hidden.clone(), golden);
        }
    }
}

fn steps(golden: &Golden) -> usize {
    (0..).take_while(|i| golden.has(&format!("step{i}/logits"))).count()
}

fn finish<B: AutodiffBackend>(drafter: &Eagle3<B>, loss: TttLoss<B>, golden: &Golden) {
    assert_eq!(loss.steps.len(), steps(golden));
    close("loss", loss.total.clone(), golden);
    gradients(drafter, loss.total, golden);
}

fn deepspec<B: AutodiffBackend>() {
    let (golden, device) = (Golden::open("dspark/train_eagle3"), Default::default());
    let drafter = trained(Eagle3::<B>::load(&dir("ckpt_eagle3"), None, &device).unwrap());
    let features = golden.float::<B, 3>("target_hidden_states", &device);
    let [batch, t, _] = features.dims();
    let valid = golden.ints("attention_mask");
    let lengths: Vec<usize> = valid.chunks(t).map(|row| row.iter().sum::<i64>() as usize).collect();
    // Pair t holds the token after position t.
    let moved = |row: &[TokenId]| row[1..].iter().copied().chain([TokenId(0)]).collect::<Vec<_>>();
    let next: Vec<TokenId> = ids(&golden).chunks(t).flat_map(moved).collect();
    let positions: Vec<usize> = (0..batch).flat_map(|_| 0..t).collect();
    let context = Context::Padded(&lengths);
    let unrolled =
        drafter.ttt(&Pairs { features, next: &next, positions: &positions, context }, steps(&golden));
    compare_steps(&unrolled, &golden);
    let targets = drafter.model.lm_head.forward(golden.float::<B, 3>("target_last_hidden_states", &device));
    let decay = stated(&golden, "step decay");
    let loss = ttt_cross_entropy(&unrolled, targets, &flags(&golden), &lengths, decay);
    finish(&drafter, loss, &golden);
}

/// The target's logits for every pair.
fn verifier<B: AutodiffBackend>(golden: &Golden, config: &Path) -> Tensor<B, 3> {
    let device = Default::default();
    let config: serde_json::Value = serde_json::from_slice(&std::fs::read(config).unwrap()).unwrap();
    let eps = config["transformer_layer_config"]["rms_norm_eps"].as_f64().unwrap();
    let norm = RmsNorm::new(golden.float::<B, 1>("verifier_norm", &device), eps);
    let head = Linear::new(golden.float::<B, 2>("verifier_lm_head", &device), None);
    head.forward(norm.forward(golden.float::<B, 3>("verifier_last_hidden_states", &device)))
}

fn speculators<B: AutodiffBackend>() {
    let (golden, device) = (Golden::open("dspark/train_spec_eagle3"), Default::default());
    let drafter = trained(Eagle3::<B>::load(&dir("ckpt_spec_eagle3"), None, &device).unwrap());
    let features = golden.float::<B, 3>("hidden_states", &device);
    let t = features.dims()[1];
    // This pipeline has moved ids, masks and targets along before.
    let (next, documents) = (ids(&golden), golden.ints("document_ids"));
    let positions: Vec<usize> = (1..=t).collect();
    let context = Context::Packed(&documents);
    let unrolled =
        drafter.ttt(&Pairs { features, next: &next, positions: &positions, context }, steps(&golden));
    compare_steps(&unrolled, &golden);
    let targets = verifier(&golden, &dir("ckpt_spec_eagle3/config.json"));
    close("targets", targets.clone(), &golden);
    let loss = ttt_divergence(&unrolled, targets, &flags(&golden), stated(&golden, "steps, decay"));
    finish(&drafter, loss, &golden);
}

fn parallel<B: AutodiffBackend>() {
    let (golden, device) = (Golden::open("dspark/train_spec_peagle"), Default::default());
    let mut drafter = PEagle::<B>::load(&dir("ckpt_spec_peagle"), None, &device).unwrap();
    drafter.trunk = trained(drafter.trunk);
    let features = golden.float::<B, 3>("hidden_states", &device);
    let [_, t, width] = features.dims();
    let (next, documents) = (ids(&golden), golden.ints("document_ids"));
    let positions: Vec<usize> = (0..t).collect();
    let pairs = PackedPairs {
        features: features.reshape([t, width]),
        next: &next,
        positions: &positions,
        documents: &documents,
    };
    let usizes = |name: &str| golden.ints(name).iter().map(|&i| i as usize).collect::<Vec<_>>();
    let samples = Samples { anchors: usizes("anchor_pos"), depths: usizes("depth") };
    let logits = drafter.forward(&pairs, &samples);
    close("logits", logits.clone(), &golden);
    let targets = verifier(&golden, &dir("ckpt_spec_peagle/config.json"));
    let targets = targets.squeeze_dim::<2>(0);
    let loss = parallel_divergence(logits, targets, &flags(&golden), &samples);
    close("loss", loss.clone(), &golden);
    gradients(&drafter.trunk, loss, &golden);
}

#[test]
fn golden_eagle_training_flex() {
    deepspec::<Autodiff<burn_flex::Flex>>();
    speculators::<Autodiff<burn_flex::Flex>>();
    parallel::<Autodiff<burn_flex::Flex>>();
}

#[test]
fn golden_eagle_training_ndarray() {
    deepspec::<Autodiff<burn_ndarray::NdArray>>();
    speculators::<Autodiff<burn_ndarray::NdArray>>();
    parallel::<Autodiff<burn_ndarray::NdArray>>();
}
