//! Whole drafters: H-Spec's and DSpark's drafts of the fixtures' requests, and H-Spec's training step.

use super::{
    findings::Findings,
    fixture::{Fixture, names},
};
use anyhow::Context;
use burn::{
    backend::Autodiff,
    module::{Module, ModuleVisitor, Param},
    tensor::{
        Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use hspec_attn::{Anchor, KvCache, Prefix, WindowRule};
use hspec_core::{
    TokenId,
    checkpoint::{Weights, read_json},
    config::HSpecConfig,
    drafter::{Blocks, DraftVocab, Drafter, HSpec, HSpecModel, Session, dspark::DSpark},
};
use hspec_nn::{Linear, RmsNorm, params};
use hspec_train::{
    loss::{LossConfig, Weighting},
    objective::objective,
    pack::{Anchors, Judge, Packed},
};
use serde_json::Value;
use std::path::Path;

/// Gradients go through more sums than values do.
const GRADIENTS: f64 = 2.0;

/// H-Spec where there is its fixture, then every DSpark drafter.
pub(super) fn all<B: Backend>(root: &Path, device: &B::Device, to: &mut Findings) -> anyhow::Result<()> {
    let name = "hspec/full_drafter_io";
    if root.join(name).with_extension("safetensors").exists() {
        let golden = Fixture::open(root, name)?;
        hspec::<B>(root, &golden, device, to).context(name)?;
        training::<Autodiff<B>>(root, &golden, device, to).context(name)?;
    }
    for name in names(root, "dspark", "infer_") {
        dspark::<B>(root, &Fixture::open(root, &name)?, device, to).context(name)?;
    }
    Ok(())
}

fn config(dir: &Path, window: Option<u64>) -> anyhow::Result<HSpecConfig> {
    let file = dir.join("config.json");
    let mut config: Value = read_json(&file)?;
    if let Some(window) = window {
        config["transformer_layer_config"]["sliding_window"] = window.into();
    }
    let config: HSpecConfig = serde_json::from_value(config).with_context(|| file.display().to_string())?;
    config.validate(&file)?;
    Ok(config)
}

fn hspec<B: Backend>(
    root: &Path,
    golden: &Fixture,
    device: &B::Device,
    to: &mut Findings,
) -> anyhow::Result<()> {
    let dir = root.join("hspec/full_drafter");
    let weights = Weights::open(&dir)?;
    for (name, case) in golden.cases("infer_cases")? {
        let at = |t: &str| format!("{name}/{t}");
        let config = config(&dir, case["sliding_window"].as_u64())?;
        let mut drafter = HSpec::<B>::from_weights(config, &weights, &dir.join("config.json"), None, device)?;
        let serving = case["window_rule"].as_str().is_some_and(|rule| rule.starts_with("serving"));
        drafter.window_rule = if serving { WindowRule::Serving } else { WindowRule::Training };
        let n = super::fixture::size(&case, "anchor_position")?;
        let kv = golden.float::<B, 5>(&at("target_kv"), device)?;
        let [t, layers, _, heads, d] = kv.dims();
        let part = |l: usize, which: usize| {
            kv.clone().slice([0..t, l..l + 1, which..which + 1]).reshape([t, heads, d]).swap_dims(0, 1)
        };
        let lent: Vec<Prefix<B>> =
            (0..layers).map(|l| Prefix { keys: part(l, 0), values: part(l, 1) }).collect();
        let seeds = golden.float::<B, 2>(&at("seed_hidden_states"), device)?;
        let [f, h] = seeds.dims();
        let anchor = golden.ints(&at("anchor_token"))?;
        let tokens = [TokenId(*anchor.first().context("anchor_token is empty")? as u32)];
        let hidden = drafter.forward(&Blocks {
            anchors: &[Anchor::at(n)],
            tokens: &tokens,
            seeds: seeds.reshape([1, f * h]),
            prefixes: &lent,
            slots: drafter.max_draft() + 1,
        });
        to.tensor("H-Spec, hidden states", hidden.clone(), &golden.f32s(&at("hidden"))?)?;
        let base = drafter.base_logits(hidden.clone());
        to.tensor("H-Spec, logits", base, &golden.f32s(&at("base_logits"))?)?;
        let previous = golden.int::<B, 2>(&at("path_prev_token_ids"), device)?;
        let corrected = drafter.corrected_logits(hidden.clone(), previous.clone());
        to.tensor("H-Spec, logits", corrected, &golden.f32s(&at("logits_path"))?)?;
        if let Some(confidence) = drafter.confidence_logits(hidden, previous) {
            to.tensor("H-Spec, confidence", confidence, &golden.f32s(&at("confidence_logits_path"))?)?;
        }
    }
    Ok(())
}

/// Two rounds of a request, with the drafter's own cache.
fn dspark<B: Backend>(
    root: &Path,
    golden: &Fixture,
    device: &B::Device,
    to: &mut Findings,
) -> anyhow::Result<()> {
    let checkpoint = golden.notes()["checkpoint"].as_str().context("the notes name no checkpoint")?;
    let drafter = DSpark::<B>::load(&root.join("dspark").join(checkpoint), None, device)?;
    let layers = drafter.shape().rules.len();
    let rounds = (0..).take_while(|r| golden.has(&format!("r{r}/start"))).count();
    let start = |round: usize| -> anyhow::Result<usize> {
        let starts = golden.usizes(&format!("r{round}/start"))?;
        starts.first().copied().context("start is empty")
    };
    let mut session = drafter.start(start(rounds.saturating_sub(1))?);
    for round in 0..rounds {
        let at = |t: &str| format!("r{round}/{t}");
        let features = golden.float::<B, 3>(&at("context_features"), device)?;
        let [_, n, width] = features.dims();
        session.observe(&vec![TokenId(0); n], features.reshape([n, width]));
        let start = start(round)?;
        for layer in 0..layers {
            let cache: &KvCache<B> = session.context();
            let (keys, values) = (cache.keys(layer, 0, start), cache.values(layer, 0, start));
            for (what, found) in [("k", keys), ("v", values)] {
                let reference = golden.f32s(&at(&format!("cache_{what}_{layer}")))?;
                to.tensor("DSpark, keys and values", found, &reference)?;
            }
        }
        let tokens = golden.ints(&at("draft_input_ids"))?;
        let anchor = TokenId(*tokens.first().context("draft_input_ids is empty")? as u32);
        let prefixes: Vec<Prefix<B>> = (0..layers).map(|l| session.context().lend(l)).collect();
        let hidden = drafter.forward(&[Anchor::at(start)], &[anchor], &prefixes);
        to.tensor("DSpark, hidden states", hidden.clone(), &golden.f32s(&at("hidden"))?)?;
        let base = drafter.base_logits(hidden);
        to.tensor("DSpark, logits", base, &golden.f32s(&at("base_logits"))?)?;
    }
    Ok(())
}

/// Forward, loss and gradients of a packed row.
fn training<B: AutodiffBackend>(
    root: &Path,
    golden: &Fixture,
    device: &B::Device,
    to: &mut Findings,
) -> anyhow::Result<()> {
    let dir = root.join("hspec/full_drafter");
    let file = dir.join("config.json");
    let config = config(&dir, None)?;
    let weights = Weights::open(&dir)?;
    let source = |name: &str| weights.tensor(name).ok().flatten();
    let trained = |name: &str| !HSpecModel::<B>::frozen(name);
    let model = params::fill(HSpecModel::<B>::init(&config, device), device, source, trained)?;
    let d2t = weights.tensor("d2t")?.context("the drafter has no d2t")?.iter::<i64>().collect::<Vec<_>>();
    let vocab = DraftVocab::from_offsets(&d2t, config.transformer_layer_config.vocab_size, &file)?;
    let eps = config.transformer_layer_config.rms_norm_eps;
    let drafter = HSpec::new(config, model, vocab, &file)?;

    let kv = golden.float::<B, 6>("train/kv_caches", device)?;
    let [_, t, layers, _, heads, d] = kv.dims();
    let part = |l: usize, which: usize| {
        let part = kv.clone().slice([0..1, 0..t, l..l + 1, which..which + 1]);
        part.reshape([t, heads, d]).swap_dims(0, 1)
    };
    let row = |name: &str| golden.float::<B, 3>(name, device).map(|x| x.squeeze_dim::<2>(0));
    let flags = |name: &str| golden.ints(name).map(|f| f.iter().map(|&f| f == 1).collect::<Vec<_>>());
    let packed = Packed {
        ids: golden.ints("train/input_ids")?.iter().map(|&i| TokenId(i as u32)).collect(),
        loss_mask: flags("train/loss_mask")?,
        positions: golden.usizes("train/position_ids")?,
        fused: row("train/verifier_hidden_states")?,
        last: row("train/verifier_last_hidden_states")?,
        prefixes: (0..layers).map(|l| Prefix { keys: part(l, 0), values: part(l, 1) }).collect(),
    };
    let anchors =
        Anchors { index: golden.usizes("train/anchor_positions")?, valid: flags("train/anchor_valid")? };
    let norm = RmsNorm::new(golden.float("train/verifier_norm.weight", device)?, eps);
    let head = Linear::new(golden.float("train/verifier_lm_head.weight", device)?, None);

    let forward = packed.forward(&drafter, &anchors, &Judge { norm, head });
    to.tensor("training, logits", forward.logits.whole(), &golden.f32s("train/logits")?)?;
    let notes = &golden.notes()["train"];
    let number =
        |path: &str| notes.pointer(path).and_then(Value::as_f64).with_context(|| format!("no {path}"));
    let found = objective(
        forward,
        &LossConfig {
            ce: number("/loss/ce")?,
            tv: number("/loss/tv")?,
            kl: 0.0,
            confidence: number("/confidence_alpha")?,
            weighting: Weighting::Decay { gamma: number("/gamma")? },
        },
    );
    for (key, value) in [("ce", found.ce), ("tv", found.tv), ("loss", found.total)] {
        to.compare("training, loss", &[value as f32], &golden.f32s(&format!("train/{key}"))?)?;
    }
    let gradients = Fixture::open(root, "hspec/full_drafter_grads")?;
    let grads = found.differentiable.backward();
    let mut visitor = Gradients { grads: &grads, path: Vec::new(), found: Vec::new() };
    drafter.model.visit(&mut visitor);
    for name in gradients.names() {
        let grad = visitor.found.iter().find(|(found, _)| name.strip_prefix("grad.") == Some(found.as_str()));
        let (_, grad) = grad.with_context(|| format!("{name} got no gradient"))?;
        let grad: Vec<f32> = grad.iter::<f32>().collect();
        to.compare_within("training, gradients", GRADIENTS, &grad, &gradients.f32s(name)?)?;
    }
    Ok(())
}

struct Gradients<'a, B: AutodiffBackend> {
    grads: &'a B::Gradients,
    path: Vec<String>,
    found: Vec<(String, TensorData)>,
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
        if let Some(grad) = param.val().grad(self.grads) {
            self.found.push((self.path.join("."), grad.into_data()));
        }
    }
}
