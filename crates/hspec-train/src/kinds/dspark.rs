//! DFlash, DSpark, DFlash-2 and Domino.
//!
//! The objective is the one of H-Spec over the slots that predict (speculators). Two kinds train the logits
//! before their correction as well: Domino's share of these falls from one to zero over the first half of a run
//! (arXiv 2605.29707), DFlash-2's stays one, as in the public port of its training. That port holds DFlash-2's
//! selector against its candidates only; here, where other tokens keep their base logits, against the whole
//! vocabulary.

use super::{Learner, Start, layers, named, with_gradients};
use crate::{
    features::Reads,
    pack::{Anchors, Base, Draw, Forward, Judge, Packed},
    recipe::{Loop, Shape, WarmStart},
};
use burn::{
    module::AutodiffModule,
    tensor::backend::{AutodiffBackend, Backend},
};
use hspec_core::{
    Error, Result,
    checkpoint::StoreAs,
    config::{SPECULATORS_VERSION, TargetConfig},
    drafter::{
        DraftVocab,
        dspark::{DSpark, DSparkConfig, DSparkModel, Kind, PackedRow},
        pruned_head,
    },
    target::Target,
};
use serde_json::{Map, Value, json};
use std::path::Path;

impl<B: AutodiffBackend> Learner<B> for DSpark<B> {
    type Module = DSparkModel<B>;
    type Drafter = DSpark<B::InnerBackend>;

    fn fresh(start: Start<'_, B::InnerBackend>) -> Result<Self::Drafter> {
        let Start { recipe, file, target, name, vocab } = start;
        let config = DSparkConfig::from_value(&super::config(recipe, target.config(), name, file)?, file)?;
        let shape = config.shape(file)?;
        shape.check_target(target.config())?;
        let mut model = DSparkModel::init(&shape, target.device());
        model.embed_tokens.weight = model.embed_tokens.weight.map(|_| target.embedding());
        model.lm_head = pruned_head(target, &vocab);
        copy_layers(&mut model, target, &recipe.train, file)?;
        DSpark::new(config, named(model, target.device())?, vocab, file)
    }

    fn load(dir: &Path, target: &Target<B::InnerBackend>) -> Result<Self::Drafter> {
        DSpark::load(dir, Some(target), target.device())
    }

    fn save(drafter: &Self::Drafter, dir: &Path, store: StoreAs) -> Result<()> {
        drafter.save(dir, store, false)
    }

    fn vocab(drafter: &Self::Drafter) -> &DraftVocab {
        drafter.vocab()
    }

    fn reads(drafter: &Self::Drafter) -> Reads {
        Reads { hidden: drafter.shape().feature_layers.clone(), kv: Vec::new() }
    }

    fn learner(drafter: &Self::Drafter, device: &B::Device, file: &Path) -> Result<Self> {
        let fresh = DSparkModel::<B>::init(drafter.shape(), device);
        let model = with_gradients(fresh, &drafter.model, device, |n| !DSparkModel::<B>::frozen(n))?;
        DSpark::new(drafter.config().clone(), model, drafter.vocab().clone(), file)
    }

    fn teach(&self, drafter: &mut Self::Drafter) {
        drafter.model = self.model.valid();
    }

    fn module(&self) -> &Self::Module {
        &self.model
    }

    fn replace(&mut self, module: Self::Module) {
        self.model = module;
    }

    fn first_slot(&self) -> usize {
        self.shape().layout.first()
    }

    fn forward(&self, row: &Packed<B>, draw: &Draw, judge: &Judge<B::InnerBackend>) -> Option<Forward<B>> {
        let anchors = Anchors::draw(&row.loss_mask, self.shape().block_size, draw);
        (!anchors.index.is_empty()).then(|| forward(self, row, &anchors, draw.progress, judge))
    }
}

/// Runs the drafter at the anchors; `progress` is the share of the run that is done.
fn forward<B: AutodiffBackend>(
    drafter: &DSpark<B>,
    row: &Packed<B>,
    anchors: &Anchors,
    progress: f64,
    judge: &Judge<B::InnerBackend>,
) -> Forward<B> {
    let shape = drafter.shape();
    let documents: Vec<usize> = row.positions.iter().enumerate().map(|(i, p)| i - p).collect();
    let packed = PackedRow {
        ids: &row.ids,
        positions: &row.positions,
        documents: &documents,
        features: row.fused.clone(),
    };
    let output = drafter.blocks(&packed, &anchors.index);
    let layout = shape.layout;
    let against = row.blocks(anchors, shape.block_size, layout.first(), |a, t| layout.label(a, t), judge);
    let share = match shape.kind {
        Kind::Domino => (1.0 - 2.0 * progress).max(0.0),
        Kind::DFlash2 => 1.0,
        Kind::DFlash | Kind::DSpark => 0.0,
    };
    let corrected = if shape.kind == Kind::Domino { 1.0 - share } else { 1.0 };
    Forward {
        logits: output.logits.into(),
        confidence: output.confidence,
        base: (share > 0.0).then_some(Base { logits: output.base, share, corrected }),
        table: against.table,
        anchors: anchors.index.clone(),
        rows: against.rows,
        slots: against.slots,
        mask: against.mask,
    }
}

/// `config.json`: in the layout of speculators, or of z-lab for the kinds that only that one has.
pub(super) fn config(shape: &Shape, target: &TargetConfig, name: &str, file: &Path) -> Result<Value> {
    let config = match shape {
        Shape::DSpark(s) => {
            let layer = layers::layer(target, "qwen3", s.layers, s.intermediate_size, s.sliding_window);
            let own = json!({
                "speculators_model_type": "dspark", "architectures": ["DSparkDraftModel"],
                "aux_hidden_state_layer_ids": s.feature_layers, "block_size": s.block_size,
                "mask_token_id": s.mask_token, "draft_vocab_size": s.draft_vocab,
                "sample_from_anchor": true, "markov_rank": s.markov_rank,
                "markov_head_type": s.markov_head_type, "enable_confidence_head": s.confidence_head,
                "confidence_head_with_markov": s.confidence_head_with_markov && s.markov_rank > 0,
                "speculators_version": SPECULATORS_VERSION,
                "speculators_config": layers::usage("dspark", s.block_size, name, target),
            });
            speculators(own, layer, target)
        }
        Shape::DFlash(s) => {
            let layer = layers::layer(target, "qwen3", s.layers, s.intermediate_size, s.sliding_window);
            let k = s.block_size.saturating_sub(1);
            let own = json!({
                "speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"],
                "aux_hidden_state_layer_ids": s.feature_layers, "block_size": s.block_size,
                "mask_token_id": s.mask_token, "draft_vocab_size": s.draft_vocab,
                "sample_from_anchor": false, "speculators_version": SPECULATORS_VERSION,
                "speculators_config": layers::usage("dflash", k, name, target),
            });
            speculators(own, layer, target)
        }
        Shape::DFlash2(s) => {
            let layer = layers::layer(target, "qwen3", s.layers, s.intermediate_size, s.sliding_window);
            let own = json!({
                "target_layer_ids": left(&s.feature_layers, file)?, "mask_token_id": s.mask_token,
                "block_size": s.block_size, "conv_kernel_size": s.conv_kernel_size,
                "conv_group_size": s.conv_group_size, "selector_rank": s.selector_rank,
                "selector_top_k": s.selector_top_k,
            });
            zlab("DFlash2DraftModel", own, layer, name, target)
        }
        Shape::Domino(s) => {
            let layer = layers::layer(target, "qwen3", s.layers, s.intermediate_size, s.sliding_window);
            let own = json!({
                "target_layer_ids": left(&s.feature_layers, file)?, "mask_token_id": s.mask_token,
                "block_size": s.block_size, "emb_dim": s.emb_dim, "gru_hidden_dim": s.gru_hidden_dim,
                "pure_draft_prefix_len": s.pure_draft_prefix_len, "shift_label": false,
            });
            zlab("DominoDraftModel", own, layer, name, target)
        }
        Shape::HSpec(_) | Shape::Eagle3(_) | Shape::PEagle(_) => {
            return Err(Error::Mismatch("this kind has a configuration of its own".into()));
        }
    };
    let shape = DSparkConfig::from_value(&config, file)?.shape(file)?;
    shape.check_target(target)?;
    Ok(config)
}

/// Slots see each other in both directions, with a window as without.
fn speculators(own: Value, layer: Map<String, Value>, target: &TargetConfig) -> Value {
    let mut config = own;
    config["transformer_layer_config"] = layer.into();
    config["sliding_window_non_causal"] = true.into();
    config["tie_word_embeddings"] = false.into();
    config["num_target_layers"] = target.num_hidden_layers.into();
    config
}

fn zlab(word: &str, own: Value, layer: Map<String, Value>, name: &str, target: &TargetConfig) -> Value {
    let mut config = Value::Object(layer);
    config["architectures"] = json!([word]);
    config["is_causal"] = false.into();
    config["num_target_layers"] = target.num_hidden_layers.into();
    config["target_model_name_or_path"] = name.into();
    config["dflash_config"] = own;
    config
}

/// The layers that the residual streams entering these layers leave, as z-lab counts.
fn left(entered: &[usize], file: &Path) -> Result<Vec<i64>> {
    let left = |&id: &usize| i64::try_from(id).ok().map(|id| id - 1);
    entered.iter().map(left).collect::<Option<_>>().ok_or_else(|| {
        Error::invalid(file, "drafter.feature_layers", format!("{entered:?}"), "layers of the target")
    })
}

fn copy_layers<B: Backend>(
    model: &mut DSparkModel<B>,
    target: &Target<B>,
    train: &Loop,
    file: &Path,
) -> Result<()> {
    if train.warm_start == WarmStart::None {
        return Ok(());
    }
    let whole = train.warm_start == WarmStart::Layers;
    for (layer, &id) in model.layers.iter_mut().zip(&train.start_layers) {
        let source = target.layer(id).ok_or_else(|| {
            let expected = format!("layers below {}", target.config().num_hidden_layers);
            Error::invalid(file, "train.start_layers", id.to_string(), expected)
        })?;
        let attention = &mut layer.self_attn;
        attention.q_proj = source.q_proj.clone();
        attention.k_proj = source.k_proj.clone();
        attention.v_proj = source.v_proj.clone();
        attention.q_norm = source.q_norm.clone().or(attention.q_norm.take());
        attention.k_norm = source.k_norm.clone().or(attention.k_norm.take());
        if whole {
            attention.o_proj = source.o_proj.clone();
            layer.input_layernorm = source.input_layernorm.clone();
            layer.post_attention_layernorm = source.post_attention_layernorm.clone();
            layer.mlp = source.mlp.clone();
        }
    }
    if whole {
        model.norm = target.norm().clone();
    }
    Ok(())
}
