//! Training DFlash and DSpark drafters against both reference implementations: masks, losses, whole forward
//! passes over packed rows, and the gradients of every parameter.

#![allow(clippy::unwrap_used)] // a test may panic

mod deepspec;
mod losses;
mod speculators;

use burn::{
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
        dspark::{DSpark, DSparkConfig, DSparkModel},
    },
};
use hspec_goldens::{Golden, Tolerance, assert_close, assert_tensor};
use hspec_nn::params;
use hspec_train::loss_deepspec::BlockLossConfig;
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
