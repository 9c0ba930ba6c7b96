//! EAGLE-3: the steps of a draft unrolled over all pairs of a row.
//!
//! A pair is a position's features and the token behind it; step `i` of pair `t` is held against the target's
//! law behind the token of pair `t + i`, if that token is supervised and of the pair's document. The means of
//! the steps are summed, the decay between them is `gamma`'s (speculators: the divergence is the objective).

use super::{Learner, Start, layers, named, with_gradients};
use crate::{
    features::Reads,
    loss::Slots,
    pack::{Draw, Forward, Judge, Packed, indices, judged},
    recipe::{Loop, Shape, WarmStart},
};
use burn::{
    module::AutodiffModule,
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
};
use hspec_core::{
    Error, Result, TokenId,
    checkpoint::StoreAs,
    config::{Family, SPECULATORS_VERSION, TargetConfig},
    drafter::{
        DraftVocab,
        eagle3::{Context, Eagle3, Eagle3Config, Eagle3Model, Pairs},
        pruned_head,
    },
    target::Target,
};
use serde_json::{Value, json};
use std::path::Path;

impl<B: AutodiffBackend> Learner<B> for Eagle3<B> {
    type Module = Eagle3Model<B>;
    type Drafter = Eagle3<B::InnerBackend>;

    fn fresh(start: Start<'_, B::InnerBackend>) -> Result<Self::Drafter> {
        trunk(start)
    }

    fn load(dir: &Path, target: &Target<B::InnerBackend>) -> Result<Self::Drafter> {
        Eagle3::load(dir, Some(target), target.device())
    }

    fn save(drafter: &Self::Drafter, dir: &Path, store: StoreAs) -> Result<()> {
        drafter.save(dir, store, false)
    }

    fn vocab(drafter: &Self::Drafter) -> &DraftVocab {
        &drafter.vocab
    }

    fn reads(drafter: &Self::Drafter) -> Reads {
        Reads { hidden: drafter.shape.feature_layers.clone(), kv: Vec::new() }
    }

    fn learner(drafter: &Self::Drafter, device: &B::Device, _: &Path) -> Result<Self> {
        learning(drafter, device)
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
        0
    }

    fn forward(&self, row: &Packed<B>, _: &Draw, judge: &Judge<B::InnerBackend>) -> Option<Forward<B>> {
        let pairs = RowPairs::new(row);
        let (n, steps) = (pairs.at.len(), self.shape.max_draft);
        let counts =
            |t: usize, i: usize| pairs.at.get(t + i).is_some_and(|&at| row.supervised(at + 1, pairs.at[t]));
        let mask: Vec<bool> = (0..n).flat_map(|t| (0..steps).map(move |i| counts(t, i))).collect();
        if !mask.contains(&true) {
            return None;
        }
        let device = row.fused.device();
        let features = row.fused.clone().select(0, indices(&pairs.at, &device));
        let positions: Vec<usize> =
            pairs.at.iter().map(|&at| row.positions[at] + self.shape.first_position).collect();
        let unrolled = self.ttt(
            &Pairs {
                features: features.unsqueeze(),
                next: &pairs.next,
                positions: &positions,
                context: Context::Packed(&pairs.documents),
            },
            steps,
        );
        let logits = unrolled.into_iter().map(|step| step.logits.squeeze_dim::<2>(0)).collect();
        // Behind the last pair any law will do: nothing there counts.
        let against = |t: usize, i: usize| pairs.at[(t + i).min(n - 1)] + 1;
        let wanted: Vec<usize> = (0..n).flat_map(|t| (0..steps).map(move |i| against(t, i))).collect();
        let (table, rows) = judged(row.last.clone().inner(), &wanted, judge);
        Some(Forward {
            logits: Tensor::stack::<3>(logits, 1).into(),
            confidence: None,
            base: None,
            table,
            anchors: pairs.at.iter().map(|at| at + 1).collect(),
            rows,
            slots: Slots { means: steps, ..Slots::blocks(n, steps, 0) },
            mask: row.flags(mask.into_iter(), n, steps),
        })
    }
}

/// The pairs of a row: every token but a document's last, with the token behind it.
pub(super) struct RowPairs {
    /// Packed index of each pair's features.
    pub at: Vec<usize>,
    /// The token behind each.
    pub next: Vec<TokenId>,
    /// The document of each.
    pub documents: Vec<i64>,
}

impl RowPairs {
    pub(super) fn new<B: Backend>(row: &Packed<B>) -> Self {
        let follows = |&i: &usize| row.positions[i + 1] == row.positions[i] + 1;
        let at: Vec<usize> = (0..row.ids.len().saturating_sub(1)).filter(follows).collect();
        Self {
            next: at.iter().map(|&i| row.ids[i + 1]).collect(),
            documents: at.iter().map(|&i| (i - row.positions[i]) as i64).collect(),
            at,
        }
    }
}

/// A fresh drafter, or the trunk of a P-EAGLE one.
pub(super) fn trunk<B: Backend>(start: Start<'_, B>) -> Result<Eagle3<B>> {
    let Start { recipe, file, target, name, vocab } = start;
    let config = Eagle3Config::from_value(&super::config(recipe, target.config(), name, file)?, file)?;
    let shape = config.shape(Some(target.config().num_hidden_layers), file)?;
    let mut model = Eagle3Model::init(&shape, target.device());
    model.embed_tokens.weight = model.embed_tokens.weight.map(|_| target.embedding());
    model.lm_head = pruned_head(target, &vocab);
    Ok(Eagle3 { config, shape, model: named(model, target.device())?, vocab })
}

/// The same with gradients.
pub(super) fn learning<B: AutodiffBackend>(
    drafter: &Eagle3<B::InnerBackend>,
    device: &B::Device,
) -> Result<Eagle3<B>> {
    let (config, shape, vocab) = (drafter.config.clone(), drafter.shape.clone(), drafter.vocab.clone());
    let fresh = Eagle3Model::<B>::init(&shape, device);
    let model = with_gradients(fresh, &drafter.model, device, |name| !shape.frozen(name))?;
    Ok(Eagle3 { config, shape, model, vocab })
}

/// `config.json`, in the layout of speculators.
pub(super) fn config(shape: &Shape, target: &TargetConfig, name: &str, file: &Path) -> Result<Value> {
    let family = if target.family == Family::Qwen3 { "qwen3" } else { "llama" };
    let make = |kind: &str, class: &str, layers, features: &[usize], inner, kept: usize, k| {
        json!({
            "speculators_model_type": kind, "architectures": [class], "draft_vocab_size": kept,
            "eagle_aux_hidden_state_layer_ids": features, "tie_word_embeddings": false,
            "num_target_layers": target.num_hidden_layers,
            "transformer_layer_config": layers::layer(target, family, layers, inner, None),
            "speculators_version": SPECULATORS_VERSION,
                "speculators_config": layers::usage(kind, k, name, target),
        })
    };
    let config = match shape {
        Shape::Eagle3(s) => make(
            "eagle3",
            "Eagle3DraftModel",
            s.layers,
            &s.feature_layers,
            s.intermediate_size,
            s.draft_vocab,
            s.draft_tokens,
        ),
        Shape::PEagle(s) => {
            let (features, inner) = (&s.feature_layers, s.intermediate_size);
            let class = "PEagleDraftModel";
            let mut config = make("peagle", class, s.layers, features, inner, s.draft_vocab, s.draft_tokens);
            config["mask_token_id"] = s.mask_token.into();
            config
        }
        _ => return Err(Error::Mismatch("this kind has a configuration of its own".into())),
    };
    let shape = Eagle3Config::from_value(&config, file)?.shape(Some(target.num_hidden_layers), file)?;
    shape.check_target(target)?;
    Ok(config)
}

/// A first layer that reads a token beside the state has no like in a target.
pub(super) fn check_warm_start(train: &Loop, file: &Path) -> Result<()> {
    let refuse =
        |field: &str, found: String, expected: &str| Err(Error::invalid(file, field, found, expected));
    if train.warm_start != WarmStart::None {
        return refuse("train.warm_start", format!("{:?}", train.warm_start), "\"none\" for this kind");
    }
    match train.start_layers.as_slice() {
        [] => Ok(()),
        ids => refuse("train.start_layers", format!("{ids:?}"), "none, with warm_start = \"none\""),
    }
}
