//! A target, a drafter and the steps that are timed.

use super::{
    shape,
    work::{DRAFT_CONTEXT, Pass, ROWS, Work},
};
use anyhow::Context;
use burn::{
    backend::Autodiff,
    optim::GradientsParams,
    tensor::{Distribution, Tensor, backend::Backend},
};
use hspec_attn::Prefix;
use hspec_core::{
    TokenId,
    config::TargetConfig,
    drafter::{DraftVocab, Drafter, HSpec, HSpecModel, pruned_head},
    target::{KvCache, Rows, Target, Want},
};
use hspec_mamba::{SsdInputs, ssd_scan};
use hspec_nn::{Compute, autocast};
use hspec_train::{
    kinds::{self, Learner},
    loss::{LossConfig, Weighting},
    objective::objective,
    optim::Optimizers,
    pack::{Anchors, Draw, Judge, Packed},
    recipe::Recipe,
};
use std::path::Path;

/// Names the recipe in errors.
const FILE: &str = "recipe";
/// Blocks of a scan.
const SCANNED: usize = 512;

/// One repetition of a piece of work, until its result is on the host.
pub(crate) type Step<'a> = Box<dyn FnMut() -> anyhow::Result<()> + 'a>;

/// What is timed.
pub(crate) struct Scene<B: Backend> {
    pub(crate) target: Target<B>,
    /// The same with its matrices rounded to bf16, where that is measured.
    pub(crate) rounded: Option<Target<B>>,
    pub(crate) drafter: HSpec<B>,
    pub(crate) recipe: Recipe,
}

impl<B: Backend> Scene<B> {
    /// A target, rounded too if need be, with a random drafter of the shape that goes with it.
    pub(crate) fn new(target: Target<B>, rounded: Option<Target<B>>) -> anyhow::Result<Self> {
        let recipe = shape::recipe(target.config())?;
        let file = Path::new(FILE);
        let config = serde_json::from_value(kinds::config(&recipe, target.config(), "bench", file)?)?;
        let model = HSpecModel::init(&config, target.device());
        let drafter = HSpec::new(config, model, vocab(target.config(), &recipe)?, file)?.prepack();
        Ok(Self { target, rounded, drafter, recipe })
    }

    /// Prepares a piece of work.
    pub(crate) fn step(&self, work: Work) -> anyhow::Result<Step<'_>> {
        match work {
            Work::Pass(pass) => self.target_pass(&self.target, pass),
            Work::Rounded(pass) => {
                self.target_pass(self.rounded.as_ref().context("no target with rounded weights")?, pass)
            }
            Work::DraftStep => self.draft_step(),
            Work::TrainStep(compute) => self.train_step(compute),
            Work::SsdScan => Ok(self.scan()),
        }
    }

    fn target_pass<'a>(&'a self, target: &'a Target<B>, pass: Pass) -> anyhow::Result<Step<'a>> {
        match pass {
            Pass::Decode(context) => self.pass(target, context, 1, Rows::Last, &[]),
            Pass::Verify(context) => {
                self.pass(target, context, ROWS, Rows::All, self.drafter.feature_layers())
            }
            Pass::Prefill(tokens) => self.pass(target, 0, tokens, Rows::Last, &[]),
        }
    }

    /// The target on `rows` tokens behind `context` tokens, and the best token of each row of logits.
    fn pass<'a>(
        &'a self,
        target: &'a Target<B>,
        context: usize,
        rows: usize,
        logits: Rows,
        hidden: &'a [usize],
    ) -> anyhow::Result<Step<'a>> {
        let mut cache = self.filled(context, context + rows);
        let vocab = target.config().vocab_size;
        let ids: Vec<TokenId> = (0..rows).map(|i| TokenId((i * 7919 % vocab) as u32)).collect();
        Ok(Box::new(move || {
            let pass = target.forward(&ids, &mut cache, &Want { logits, hidden })?;
            pass.logits.map(|logits| logits.argmax(2).into_data());
            cache.truncate(context);
            Ok(())
        }))
    }

    /// A cache that holds `len` tokens of noise.
    fn filled(&self, len: usize, capacity: usize) -> KvCache<B> {
        let mut cache = self.target.cache(1, capacity);
        let c = self.target.config();
        let shape = [1, len, c.num_key_value_heads, c.head_dim];
        if len > 0 {
            for layer in 0..c.num_hidden_layers {
                cache.write(layer, self.noise(shape), self.noise(shape));
            }
            cache.advance(len);
        }
        cache
    }

    fn noise<const D: usize>(&self, shape: [usize; D]) -> Tensor<B, D> {
        Tensor::random(shape, Distribution::Normal(0.0, 1.0), self.target.device())
    }

    /// All drafts of one block through the decoding path, greedily.
    fn draft_step(&self) -> anyhow::Result<Step<'_>> {
        let drafter = &self.drafter;
        let (k, context) = (drafter.max_draft(), DRAFT_CONTEXT);
        let cache = self.filled(context, context + k + 1);
        let mut session = drafter.session(context + k + 1);
        let width = drafter.feature_layers().len() * self.target.config().hidden_size;
        session.observe(&[TokenId(1)], self.noise([1, width]));
        Ok(Box::new(move || {
            session.draft(TokenId(1), &cache, k, &mut |_, logits| {
                let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
                // The draft vocabulary is the first ids of the target's.
                Ok(TokenId(best.unwrap_or_default() as u32))
            })?;
            Ok(())
        }))
    }

    /// A training step on features that the target has left: forward, loss, backward, optimisers.
    fn train_step(&self, compute: Compute) -> anyhow::Result<Step<'_>> {
        let (recipe, device) = (&self.recipe.train, self.target.device());
        let packed = self.packed().constant::<Autodiff<B>>();
        let draw = Draw { seed: recipe.seed, row: 0, anchors: recipe.anchors_per_step, progress: 0.0 };
        let anchors = Anchors::draw(&packed.loss_mask, self.drafter.config.block_size, &draw);
        let judge =
            Judge { norm: self.target.norm().clone(), head: pruned_head(&self.target, &self.drafter.vocab) };
        let mut learner = HSpec::<Autodiff<B>>::learner(&self.drafter, device, Path::new(FILE))?;
        let mut optimizers = Optimizers::new(&learner.model, recipe);
        let loss = LossConfig {
            ce: recipe.ce,
            tv: recipe.tv,
            kl: recipe.kl,
            confidence: recipe.confidence,
            weighting: Weighting::Decay { gamma: recipe.gamma },
        };
        let mut step = move || {
            let forward = packed.forward(&learner, &anchors, &judge);
            let gradients = objective(forward, &loss).differentiable.backward();
            let gradients = GradientsParams::from_grads(gradients, &learner.model);
            learner.model = optimizers.step(1.0, learner.model.clone(), gradients)?.0;
            sync::<B>(device)
        };
        Ok(Box::new(move || autocast(compute, &mut step)))
    }

    /// Documents of noise, all of their tokens supervised.
    fn packed(&self) -> Packed<B> {
        let (tokens, c) = (shape::PACKED, self.target.config());
        let prefix = || Prefix {
            keys: self.noise([c.num_key_value_heads, tokens, c.head_dim]),
            values: self.noise([c.num_key_value_heads, tokens, c.head_dim]),
        };
        Packed {
            ids: (0..tokens).map(|i| TokenId((i * 31 % c.vocab_size) as u32)).collect(),
            loss_mask: vec![true; tokens],
            positions: (0..tokens).map(|i| i % shape::DOCUMENT).collect(),
            fused: self.noise([tokens, self.drafter.feature_layers().len() * c.hidden_size]),
            last: self.noise([tokens, c.hidden_size]),
            prefixes: (0..self.drafter.config.attention_layers()).map(|_| prefix()).collect(),
        }
    }

    fn scan(&self) -> Step<'_> {
        let (c, slots) = (self.drafter.config.mamba(), self.drafter.config.block_size);
        let (b, h, p, n, g) = (SCANNED, c.num_heads, c.head_dim, c.d_state, c.n_groups);
        let device = self.target.device();
        let inputs = SsdInputs::<B> {
            x: self.noise([b, slots, h, p]),
            dt: Tensor::random([b, slots, h], Distribution::Uniform(0.1, 1.0), device),
            a: Tensor::random([h], Distribution::Uniform(-4.0, -1.0), device),
            b: self.noise([b, slots, g, n]),
            c: self.noise([b, slots, g, n]),
            d: self.noise([h]),
        };
        let state = self.noise([b, h, p, n]);
        Box::new(move || {
            let result = ssd_scan(inputs.clone(), Some(state.clone()));
            sync::<B>(device)?;
            drop(result);
            Ok(())
        })
    }
}

/// The first ids of the target's vocabulary: which they are changes no time.
pub(crate) fn vocab(target: &TargetConfig, recipe: &Recipe) -> anyhow::Result<DraftVocab> {
    let ids = (0..shape::hspec(recipe).draft_vocab as u32).map(TokenId).collect();
    Ok(DraftVocab::new(ids, target.vocab_size, Path::new(FILE))?)
}

/// Waits for what has been asked of a device.
pub(crate) fn sync<B: Backend>(device: &B::Device) -> anyhow::Result<()> {
    B::sync(device).map_err(|e| anyhow::anyhow!("the device failed: {e:?}"))
}
