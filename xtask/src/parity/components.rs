//! The parts of drafters one by one, forward: scan, mixer, attention, heads.

use super::{
    findings::Findings,
    fixture::{Fixture, names, size},
};
use anyhow::Context;
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use hspec_attn::{
    Anchor, BlockRope, BlockRule, Position, Prefix, PrefixAttention, Rope, RopeScaling, WindowRule,
};
use hspec_heads::{
    BlockConv, CandidateSelector, CausalCorrection, ConfidenceHead, DominoConfig, DominoHead, MarkovHead,
    MarkovKind,
};
use hspec_mamba::{Mamba2Mixer, MambaConfig, SsdInputs, softplus, ssd_recurrent, ssd_scan};
use hspec_nn::{Linear, RmsNorm, params};
use std::path::Path;

/// Compares all of them that the folder has fixtures of.
pub(super) fn all<B: Backend>(root: &Path, device: &B::Device, to: &mut Findings) -> anyhow::Result<()> {
    #[allow(clippy::type_complexity)] // a type alias cannot name a device
    let checks: [(&str, &str, fn(&Fixture, &B::Device, &mut Findings) -> anyhow::Result<()>); 6] = [
        ("hspec", "ssd_scan", scan::<B>),
        ("hspec", "mamba_mixer", mixer::<B>),
        ("hspec", "target_kv_attention", attention::<B>),
        ("dspark", "head_", markov::<B>),
        ("dspark", "domino_head_", domino::<B>),
        ("dspark", "dflash2", dflash2::<B>),
    ];
    for (folder, prefix, check) in checks {
        for name in names(root, folder, prefix) {
            check(&Fixture::open(root, &name)?, device, to).context(name)?;
        }
    }
    Ok(())
}

fn scan<B: Backend>(golden: &Fixture, device: &B::Device, to: &mut Findings) -> anyhow::Result<()> {
    for (case, _) in golden.cases("cases")? {
        let at = |field: &str| format!("{case}/{field}");
        let dt = golden.float::<B, 3>(&at("dt"), device)?
            + golden.float::<B, 1>(&at("dt_bias"), device)?.unsqueeze();
        let inputs = SsdInputs::<B> {
            x: golden.float(&at("x"), device)?,
            dt: softplus(dt),
            a: golden.float(&at("A"), device)?,
            b: golden.float(&at("B"), device)?,
            c: golden.float(&at("C"), device)?,
            d: golden.float(&at("D"), device)?,
        };
        let initial = golden.float::<B, 4>(&at("initial_state"), device)?;
        for (what, f) in [("recurrence", ssd_recurrent as fn(_, _) -> _), ("scan", ssd_scan)] {
            for (zero, initial) in [("", Some(initial.clone())), ("zero_", None)] {
                let (y, state) = f(inputs.clone(), initial);
                to.tensor(what, y, &golden.f32s(&at(&format!("{zero}y")))?)?;
                to.tensor(what, state, &golden.f32s(&at(&format!("{zero}final_state")))?)?;
            }
        }
    }
    Ok(())
}

fn mixer<B: Backend>(golden: &Fixture, device: &B::Device, to: &mut Findings) -> anyhow::Result<()> {
    for (case, notes) in golden.cases("cases")? {
        let config = MambaConfig {
            hidden: size(&notes, "hidden")?,
            d_state: size(&notes, "d_state")?,
            num_heads: size(&notes, "num_heads")?,
            head_dim: size(&notes, "head_dim")?,
            n_groups: size(&notes, "n_groups")?,
            conv_kernel: size(&notes, "conv_kernel")?,
        };
        config.validate()?;
        let at = |field: &str| format!("{case}/{field}");
        let weight = |path: &str| golden.data(&at(&format!("weights.{path}"))).ok();
        let mixer = params::fill(Mamba2Mixer::<B>::init(&config, device), device, weight, |_| false)?;
        let x = golden.float::<B, 3>(&at("hidden_states"), device)?;
        let initial = golden.float::<B, 4>(&at("initial_state"), device)?;
        let (zero, _) = mixer.forward(x.clone(), None);
        let (output, state) = mixer.forward(x, Some(initial));
        to.tensor("mixer", zero, &golden.f32s(&at("output_zero_state"))?)?;
        to.tensor("mixer", output, &golden.f32s(&at("output"))?)?;
        to.tensor("mixer", state, &golden.f32s(&at("final_state"))?)?;
    }
    Ok(())
}

fn attention<B: Backend>(golden: &Fixture, device: &B::Device, to: &mut Findings) -> anyhow::Result<()> {
    for (name, case) in golden.cases("cases")? {
        let at = |t: &str| format!("{name}/{t}");
        let [hidden, d, heads, kv, k] =
            ["hidden", "head_dim", "num_q_heads", "num_kv_heads", "block_size"].map(|key| size(&case, key));
        let (hidden, d, heads, kv, k) = (hidden?, d?, heads?, kv?, k?);
        let number = |key: &str| case[key].as_f64().with_context(|| format!("{name}: no {key}"));
        let eps = number("rms_norm_eps")?;
        let norm = (case["use_qk_norm"] == true).then(|| RmsNorm::ones(d, eps, device));
        let linear = |input, output| Linear::random(input, output, false, 1.0, device);
        let module = PrefixAttention::<B> {
            q_proj: linear(hidden, heads * d),
            k_proj: linear(hidden, kv * d),
            v_proj: linear(hidden, kv * d),
            o_proj: linear(heads * d, hidden),
            q_norm: norm.clone(),
            k_norm: norm,
            head_dim: d,
        };
        let weight = |path: &str| golden.data(&at(&format!("weights.{path}"))).ok();
        let module = params::fill(module, device, weight, |_| false)?;
        let anchors = case["anchors"].as_array().with_context(|| format!("{name}: no anchors"))?;
        let anchors: Vec<Anchor> =
            anchors.iter().map(|a| Anchor::at(a.as_u64().unwrap_or_default() as usize)).collect();
        let positions = golden.usizes(&at("position_ids"))?;
        let positions: Vec<Position> = positions.into_iter().map(Position).collect();
        let rope = Rope::new(number("rope_theta")?, d, RopeScaling::None);
        let rope =
            BlockRope { q: rope.tables(&positions, heads, device), k: rope.tables(&positions, kv, device) };
        let prefix = Prefix {
            keys: golden.float::<B, 4>(&at("target_k"), device)?.squeeze_dim::<3>(0),
            values: golden.float::<B, 4>(&at("target_v"), device)?.squeeze_dim::<3>(0),
        };
        let window = case["sliding_window"].as_u64().map(|w| w as usize);
        let causal = case["intra_block"] == "causal";
        let x = golden.float::<B, 3>(&at("hidden_states"), device)?.reshape([anchors.len(), k, hidden]);
        for (key, rule) in [("output", WindowRule::Training), ("output_serving_window", WindowRule::Serving)]
        {
            if golden.has(&at(key)) {
                let rule = BlockRule { window, rule, causal };
                let y = module.forward(x.clone(), &anchors, &rope, Some(&prefix), &rule);
                to.tensor("attention over a prefix", y, &golden.f32s(&at(key))?)?;
            }
        }
    }
    Ok(())
}

fn markov<B: Backend>(golden: &Fixture, device: &B::Device, to: &mut Findings) -> anyhow::Result<()> {
    let dims = &golden.notes()["dims"];
    let (v, r, h, k) = (size(dims, "V")?, size(dims, "R")?, size(dims, "H")?, size(dims, "K")?);
    let n = size(dims, "B")? * size(dims, "N")?;
    let kind = match (golden.has("weight/joint_proj.weight"), golden.has("weight/gate_proj.weight")) {
        (true, _) => MarkovKind::Rnn,
        (_, true) => MarkovKind::Gated,
        _ => MarkovKind::Vanilla,
    };
    let weight = |name: &str| golden.data(&format!("weight/{name}")).ok();
    let head = MarkovHead::<B>::init(kind, v, v, r, h, device);
    let head = params::fill(head, device, weight, |_| false)?;
    let hidden = golden.float::<B, 4>("hidden_states", device)?.reshape([n, k, h]);
    let base = golden.float::<B, 4>("base_logits", device)?.reshape([n, k, v]);
    let prev = golden.int::<B, 3>("prev_token_ids", device)?.reshape([n, k]);
    let component = format!("{kind} Markov head");
    let logits = base + head.block(prev.clone(), hidden.clone());
    to.tensor(&component, logits, &golden.f32s("logits")?)?;
    let confidence = ConfidenceHead::<B>::init(h + r, device);
    let weight = |name: &str| golden.data(&name.replace("proj.", "conf/")).ok();
    let confidence = params::fill(confidence, device, weight, |_| false)?;
    let logits = confidence.forward(hidden, Some(head.features(prev)));
    to.tensor("confidence head", logits, &golden.f32s("conf/logits")?)
}

fn domino<B: Backend>(golden: &Fixture, device: &B::Device, to: &mut Findings) -> anyhow::Result<()> {
    let notes = &golden.notes()["config"];
    let shift_label = notes["shift_label"] == true;
    let [b, blocks, k, h] = golden.float::<B, 4>("hidden_states", device)?.dims();
    let [.., e] = golden.float::<B, 4>("prev_token_embeddings", device)?.dims();
    let [.., v] = golden.float::<B, 4>("base_logits", device)?.dims();
    let n = b * blocks;
    let config = DominoConfig {
        draft_vocab: v,
        hidden: h,
        embedding: e,
        gru_hidden_dim: size(notes, "gru_hidden_dim")?,
        emb_dim: size(notes, "emb_dim")?,
        pure_draft_prefix_len: size(notes, "pure_draft_prefix_len")?,
        shift_label,
    };
    let weight = |name: &str| golden.data(&format!("weight/{name}")).ok();
    let head = params::fill(DominoHead::<B>::init(&config, device), device, weight, |_| false)?;
    // The fixture gives the embeddings of the block's tokens: here every place is its own token.
    let table = golden.float::<B, 4>("prev_token_embeddings", device)?.reshape([n * k, e]);
    let before = |slot: usize| if shift_label { slot } else { slot.saturating_sub(1) };
    let prev: Vec<i64> = (0..n).flat_map(|i| (0..k).map(move |t| (i * k + before(t)) as i64)).collect();
    let prev = Tensor::<B, 2, Int>::from_data(TensorData::new(prev, [n, k]), device);
    let hidden = golden.float::<B, 4>("hidden_states", device)?.reshape([n, k, h]);
    let base = golden.float::<B, 4>("base_logits", device)?.reshape([n, k, v]);
    let logits = base + head.over(table).block(prev, hidden);
    to.tensor("Domino head", logits, &golden.f32s("logits")?)
}

fn dflash2<B: Backend>(golden: &Fixture, device: &B::Device, to: &mut Findings) -> anyhow::Result<()> {
    let notes = &golden.notes()["config"];
    let (h, v) = (size(notes, "hidden_size")?, size(notes, "vocab")?);
    let (taps, group) = (size(notes, "conv_kernel_size")?, size(notes, "conv_group_size")?);
    for layer in 0..size(notes, "layers")? {
        for which in ["attention_conv", "mlp_conv"] {
            let at = |what: &str| format!("l{layer}/{which}/{what}");
            let weight = |name: &str| golden.data(&format!("weight/layers.{layer}.{which}.{name}")).ok();
            let conv = BlockConv::<B>::identity(h, taps, group, device);
            let conv = params::fill(conv, device, weight, |_| false)?;
            let given = golden.float::<B, 3>(&at("finish_in"), device)?;
            let y = conv.around(golden.float(&at("prepare_in"), device)?, |_| given);
            to.tensor("block convolution", y, &golden.f32s(&at("finish_out"))?)?;
        }
    }
    let (rank, top) = (size(notes, "selector_rank")?, size(notes, "selector_top_k")?);
    let selector = CandidateSelector::<B>::init(v, v, rank, h, top, device);
    // The fixture calls the codebooks as its framework does; files do not say `.weight`.
    let weight = |name: &str| {
        let name = format!("weight/candidate_selector.{name}");
        golden.data(&name).or_else(|_| golden.data(&format!("{name}.weight"))).ok()
    };
    let selector = params::fill(selector, device, weight, |_| false)?;
    let [_, k, _] = golden.float::<B, 3>("logits", device)?.dims();
    let hidden = golden.float::<B, 3>("hidden", device)?.narrow(1, 1, k);
    let projected = selector.hidden_projection.forward(hidden);
    to.tensor("candidate selector", projected, &golden.f32s("projected_hidden")?)
}
