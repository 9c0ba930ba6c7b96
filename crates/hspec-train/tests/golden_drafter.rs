//! The training forward of a whole drafter against the reference implementation: every sub-layer,
//! logits, loss, all gradients, and the configuration variants on the same weights.

#![allow(clippy::unwrap_used)] // a test may panic

use burn::{
    backend::Autodiff,
    module::{Module, ModuleVisitor, Param},
    tensor::{Tensor, TensorData, backend::AutodiffBackend},
};
use hspec_attn::{Anchor, Prefix};
use hspec_core::{
    TokenId,
    checkpoint::{Weights, read_json},
    config::HSpecConfig,
    drafter::{Blocks, DraftVocab, HSpec, HSpecModel},
};
use hspec_goldens::{GRADIENT, Golden, Tolerance, assert_close, assert_tensor};
use hspec_nn::{Linear, RmsNorm, params};
use hspec_train::{
    loss::{LossConfig, Weighting},
    objective::objective,
    pack::{Anchors, Judge, Packed},
};
use serde_json::Value;

const LOGITS: Tolerance = Tolerance::Absolute(1e-4);
const LOSS: Tolerance = Tolerance::Scaled(1e-5);

struct Fixture<B: AutodiffBackend> {
    io: Golden,
    packed: Packed<B>,
    anchors: Anchors,
    judge: Judge<B::InnerBackend>,
}

impl<B: AutodiffBackend> Fixture<B> {
    fn open() -> Self {
        let device = Default::default();
        let io = Golden::open("hspec/full_drafter_io");
        let kv = io.float::<B, 6>("train/kv_caches", &device);
        let [_, t, layers, _, heads, d] = kv.dims();
        let part = |l: usize, which: usize| {
            let part = kv.clone().slice([0..1, 0..t, l..l + 1, which..which + 1]);
            part.reshape([t, heads, d]).swap_dims(0, 1)
        };
        let two_d = |name: &str| {
            let x = io.float::<B, 3>(name, &device);
            let [_, t, w] = x.dims();
            x.reshape([t, w])
        };
        let usizes = |name: &str| io.ints(name).iter().map(|&i| i.max(0) as usize).collect::<Vec<_>>();
        let flags = |name: &str| io.ints(name).iter().map(|&f| f == 1).collect::<Vec<_>>();
        let config: Value = read_json(&hspec_goldens::root().join("hspec/full_drafter/config.json")).unwrap();
        let eps = config["transformer_layer_config"]["rms_norm_eps"].as_f64().unwrap();
        let packed = Packed {
            ids: io.ints("train/input_ids").iter().map(|&i| TokenId(i as u32)).collect(),
            loss_mask: flags("train/loss_mask"),
            positions: usizes("train/position_ids"),
            fused: two_d("train/verifier_hidden_states"),
            last: two_d("train/verifier_last_hidden_states"),
            prefixes: (0..layers).map(|l| Prefix { keys: part(l, 0), values: part(l, 1) }).collect(),
        };
        let anchors = Anchors { index: usizes("train/anchor_positions"), valid: flags("train/anchor_valid") };
        let norm = RmsNorm::new(io.float("train/verifier_norm.weight", &device), eps);
        let head = Linear::new(io.float("train/verifier_lm_head.weight", &device), None);
        Self { io, packed, anchors, judge: Judge { norm, head } }
    }

    fn seeds(&self, device: &B::Device) -> Tensor<B, 2> {
        let before: Vec<i64> = self.anchors.index.iter().map(|&a| a.saturating_sub(1) as i64).collect();
        let n = before.len();
        self.packed.fused.clone().select(0, Tensor::from_data(TensorData::new(before, [n]), device))
    }

    fn places(&self) -> (Vec<Anchor>, Vec<TokenId>) {
        let tokens = self.anchors.index.iter().map(|&a| self.packed.ids[a]).collect();
        (self.packed.anchors(&self.anchors), tokens)
    }

    fn blocks<'a>(
        &'a self,
        drafter: &HSpec<B>,
        anchors: &'a [Anchor],
        tokens: &'a [TokenId],
    ) -> Blocks<'a, B> {
        let (seeds, slots) = (self.seeds(&Default::default()), drafter.config.block_size);
        Blocks { anchors, tokens, seeds, prefixes: &self.packed.prefixes, slots }
    }

    fn hidden(&self, drafter: &HSpec<B>) -> Tensor<B, 3> {
        let (places, tokens) = self.places();
        drafter.forward(&self.blocks(drafter, &places, &tokens))
    }
}

/// The fixture's checkpoint under `overrides`, with `extra` tensors added or replaced, all of it
/// trained but the frozen copies.
fn drafter<B: AutodiffBackend>(
    edit: impl FnOnce(&mut Value),
    extra: impl Fn(&str) -> Option<TensorData>,
) -> HSpec<B> {
    let dir = hspec_goldens::root().join("hspec/full_drafter");
    let file = dir.join("config.json");
    let mut config: Value = read_json(&file).unwrap();
    edit(&mut config);
    let config: HSpecConfig = serde_json::from_value(config).unwrap();
    config.validate(&file).unwrap();
    let weights = Weights::open(&dir).unwrap();
    let device = Default::default();
    let source = |name: &str| extra(name).or_else(|| weights.tensor(name).unwrap());
    let model = HSpecModel::<B>::init(&config, &device);
    let model = params::fill(model, &device, source, |n| !HSpecModel::<B>::frozen(n)).unwrap();
    let d2t: Vec<i64> = weights.tensor("d2t").unwrap().unwrap().iter::<i64>().collect();
    let vocab = DraftVocab::from_offsets(&d2t, config.transformer_layer_config.vocab_size, &file).unwrap();
    HSpec::new(config, model, vocab, &file).unwrap()
}

fn weights(notes: &Value, weighting: Weighting) -> LossConfig {
    LossConfig {
        ce: notes["loss"]["ce"].as_f64().unwrap(),
        tv: notes["loss"]["tv"].as_f64().unwrap(),
        kl: 0.0,
        confidence: notes["confidence_alpha"].as_f64().unwrap(),
        weighting,
    }
}

fn training_forward<B: AutodiffBackend>() {
    let f = Fixture::<B>::open();
    let drafter = drafter::<B>(|_| {}, |_| None);
    let device = Default::default();
    let seeds = f.seeds(&device);
    let (places, tokens) = f.places();
    let blocks = f.blocks(&drafter, &places, &tokens);
    drafter.run(&blocks, &mut |i, h| {
        let key = format!("train/sublayer_output.{i}");
        assert_tensor(&key, h.clone(), &f.io.f32s(&key), LOGITS);
    });
    let z = drafter.fuse(seeds).unwrap();
    assert_tensor("z", z, &f.io.f32s("train/z"), LOSS);

    let hidden = f.hidden(&drafter);
    assert_tensor("hidden", hidden.clone(), &f.io.f32s("train/hidden"), LOGITS);
    let forward = f.packed.forward(&drafter, &f.anchors, &f.judge);
    let base = drafter.base_logits(hidden);
    assert_tensor("base_logits", base, &f.io.f32s("train/base_logits"), LOGITS);
    assert_tensor("logits", forward.logits.whole(), &f.io.f32s("train/logits"), LOGITS);
    let confidence = forward.confidence.clone().unwrap();
    assert_tensor("confidence_logits", confidence, &f.io.f32s("train/confidence_logits"), LOGITS);
    assert_tensor("targets", forward.targets(), &f.io.f32s("train/targets"), LOGITS);
    assert_tensor(
        "mask",
        forward.mask.clone(),
        &f.io.f32s("train/aligned_loss_mask"),
        Tolerance::Absolute(0.0),
    );
    let notes = &f.io.notes["train"];
    let config = weights(notes, Weighting::Decay { gamma: notes["gamma"].as_f64().unwrap() });
    let found = objective(forward, &config);
    let eal = found.agreement.expected_length(1);
    assert!((eal as f32 - f.io.f32s("train/eal")[0]).abs() < 1e-5, "eal {eal}");
    for (key, value) in
        [("ce", found.ce), ("tv", found.tv), ("confidence_loss", found.confidence), ("loss", found.total)]
    {
        assert_close(key, &[value as f32], &f.io.f32s(&format!("train/{key}")), LOSS);
    }

    let golden = Golden::open("hspec/full_drafter_grads");
    let grads = found.differentiable.backward();
    let mut visitor = Gradients { golden: &golden, grads: &grads, path: Vec::new(), seen: 0 };
    drafter.model.visit(&mut visitor);
    assert_eq!(visitor.seen, golden.names().count(), "every gradient of the fixture was compared");
}

struct Gradients<'a, B: AutodiffBackend> {
    golden: &'a Golden,
    grads: &'a B::Gradients,
    path: Vec<String>,
    seen: usize,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Gradients<'_, B> {
    fn enter_module(&mut self, name: &str, container: &str) {
        if !container.starts_with("Enum") {
            self.path.push(name.to_owned());
        }
    }
    fn exit_module(&mut self, _: &str, container: &str) {
        if !container.starts_with("Enum") {
            self.path.pop();
        }
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let name = self.path.join(".");
        let key = format!("grad.{name}");
        if HSpecModel::<B>::frozen(&name) {
            assert!(!self.golden.has(&key), "{name} is frozen");
            return;
        }
        let grad = param.val().grad(self.grads).unwrap_or_else(|| panic!("no gradient of {name}"));
        assert_tensor(&key, grad, &self.golden.f32s(&key), GRADIENT);
        self.seen += 1;
    }
}

fn variants<B: AutodiffBackend>() {
    let f = Fixture::<B>::open();
    let golden = Golden::open("hspec/full_drafter_variants");
    for (name, case) in golden.cases() {
        let at = |t: &str| format!("{name}/{t}");
        let edit = |config: &mut Value| {
            for (key, value) in case["config_overrides"].as_object().unwrap() {
                config[key] = value.clone();
            }
            let layer = &mut config["transformer_layer_config"];
            layer["sliding_window"] = case["sliding_window"].clone();
            for kind in layer["layer_types"].as_array_mut().unwrap() {
                *kind = case["layer_types"].clone();
            }
        };
        let extra = |tensor: &str| {
            let key = at(&format!("extra_weights.{tensor}"));
            golden.has(&key).then(|| golden.data(&key))
        };
        let drafter = drafter::<B>(edit, extra);
        let forward = f.packed.forward(&drafter, &f.anchors, &f.judge);
        for (key, found) in [("hidden", f.hidden(&drafter)), ("logits", forward.logits.whole())] {
            if golden.has(&at(key)) {
                assert_tensor(&at(key), found, &golden.f32s(&at(key)), LOGITS);
            }
        }
        let confidence = forward.confidence.clone().unwrap();
        assert_tensor(&at("confidence"), confidence, &golden.f32s(&at("confidence_logits")), LOGITS);
        let notes = &f.io.notes["train"];
        let weighting = match case["run"]["dpace_alpha"].as_f64() {
            Some(alpha) => Weighting::Dpace { alpha },
            None => Weighting::Decay { gamma: notes["gamma"].as_f64().unwrap() },
        };
        let found = objective(forward, &weights(notes, weighting));
        assert_close(&at("loss"), &[found.total as f32], &golden.f32s(&at("loss")), LOSS);
    }
}

#[test]
fn golden_training_forward_and_gradients_flex() {
    training_forward::<Autodiff<burn_flex::Flex>>();
}

#[test]
fn golden_training_forward_and_gradients_ndarray() {
    training_forward::<Autodiff<burn_ndarray::NdArray>>();
}

#[test]
fn golden_variants() {
    variants::<Autodiff<burn_flex::Flex>>();
}
