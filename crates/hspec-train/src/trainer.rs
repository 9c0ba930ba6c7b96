//! The loop: responses, features, anchors, loss, step, checkpoint.

use crate::{
    feature_cache,
    features::FeatureStore,
    feed::{Pack, feed},
    loss::{LossConfig, Weighting},
    objective::objective,
    optim::Optimizers,
    pack::{Anchors, Packed},
    recipe::Recipe,
    responses::Response,
    run_dir::{Progress, RunDir},
    vocab, warm,
};
use burn::{module::AutodiffModule, tensor::backend::AutodiffBackend};
use hspec_core::{
    Error, Result, TokenId,
    decode::{Decoder, Request, SamplingParams},
    drafter::{Drafter, HSpec, HSpecModel, pruned_head},
    target::Target,
};
use hspec_nn::{Linear, params};
use serde::Serialize;
use std::{ops::ControlFlow, path::Path, sync::mpsc, time::Instant};

/// What a step measured; a line of `metrics.jsonl`.
#[derive(Debug, Clone, Serialize)]
pub struct StepMetrics {
    /// Steps done, this one included.
    pub step: usize,
    /// The objective.
    pub loss: f64,
    /// Its cross-entropy term.
    pub ce: f64,
    /// Its total variation term.
    pub tv: f64,
    /// Its confidence term.
    pub confidence: f64,
    /// Agreement with the target's best token at slots 1..K-1.
    pub accuracy: Vec<f64>,
    /// Expected accepted length from those, without the bonus token.
    pub expected_length: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Share of the peak learning rate.
    pub lr_scale: f64,
    /// Anchors in the step.
    pub anchors: usize,
    /// Packed tokens per second.
    pub tokens_per_second: f64,
    /// Seconds of the step.
    pub seconds: f64,
}

/// Simulated acceptance through the decoding path; a line of `metrics.jsonl`.
#[derive(Debug, Clone, Serialize)]
pub struct Simulation {
    /// Steps done.
    pub step: usize,
    /// Tokens per target pass on held-out prompts, greedy.
    pub tau: f64,
    /// Target passes behind it.
    pub passes: usize,
}

/// What a run tells its caller.
#[derive(Debug, Clone)]
pub enum Event<'a> {
    /// Before the first step.
    Start {
        /// Documents to train on.
        documents: usize,
        /// Their supervised tokens.
        supervised: usize,
        /// Share of those that the draft vocabulary holds.
        coverage: f64,
        /// Trained parameters.
        parameters: usize,
        /// Steps done before.
        resumed_at: usize,
        /// Steps in all.
        steps: usize,
        /// Best simulated tau before.
        best_tau: f64,
    },
    /// After a step.
    Step(&'a StepMetrics),
    /// After a measurement.
    Simulated(&'a Simulation),
}

/// A training run.
pub struct Trainer<'a, B: AutodiffBackend> {
    /// What to do.
    pub recipe: &'a Recipe,
    /// Names the recipe in errors.
    pub recipe_file: &'a Path,
    /// The frozen target.
    pub target: &'a Target<B::InnerBackend>,
    /// Name or path of the target, for the checkpoint.
    pub target_name: &'a str,
    /// Tokens that end a response.
    pub stop_tokens: &'a [TokenId],
}

/// Everything that a step changes.
struct State<B: AutodiffBackend> {
    /// What decodes; its weights follow the learner's when they are needed.
    drafter: HSpec<B::InnerBackend>,
    learner: HSpec<B>,
    optimizers: Optimizers<B, HSpecModel<B>>,
    progress: Progress,
}

impl<B: AutodiffBackend> Trainer<'_, B> {
    /// Trains on responses until the recipe's last step and returns the best drafter by simulated
    /// acceptance, which also lies in the folder.
    ///
    /// # Errors
    /// A recipe that does not fit the target or the data, a folder that cannot be written, a loss or
    /// gradient that is not finite (the last checkpoint is whole then).
    pub fn run(
        &self,
        responses: &[Response],
        dir: &RunDir,
        report: &mut dyn FnMut(Event<'_>),
    ) -> Result<HSpec<B::InnerBackend>> {
        let recipe = &self.recipe.train;
        let device = self.target.device();
        let (held_out, training) = self.split(responses)?;
        let resumed = dir.newest(|path| {
            let drafter = HSpec::<B::InnerBackend>::load(path, Some(self.target), device)?;
            let learner = self.learner(&drafter)?;
            let optimizers =
                Optimizers::new(&learner.model, recipe).load(RunDir::optimizers(path)?, device)?;
            Ok((drafter, learner, optimizers))
        })?;
        let ((drafter, learner, optimizers), progress) = match resumed {
            Some(found) => found,
            None => {
                let drafter = self.fresh(training)?;
                let learner = self.learner(&drafter)?;
                let optimizers = Optimizers::new(&learner.model, recipe);
                ((drafter, learner, optimizers), Progress { step: 0, epoch: 0, cursor: 0, best_tau: 0.0 })
            }
        };
        let mut state = State { drafter, learner, optimizers, progress };
        dir.rewind_metrics(state.progress.step)?;
        let vocab = &state.drafter.vocab;
        report(Event::Start {
            documents: training.len(),
            supervised: training.iter().map(Response::supervised).sum(),
            coverage: vocab::coverage(training, vocab.targets()),
            parameters: state.drafter.footprint().params_trainable,
            resumed_at: state.progress.step,
            steps: recipe.steps,
            best_tau: state.progress.best_tau,
        });
        if state.progress.step == 0 {
            let simulation = self.simulate(&state.drafter, held_out, 0)?;
            dir.log(&simulation)?;
            report(Event::Simulated(&simulation));
        }
        let mut store = FeatureStore::new(self.target, &state.drafter.config, recipe.feature_cache_mib << 20);
        if let Some(dir) = &self.recipe.data.cache {
            store = store.cached(feature_cache::open(dir)?)?;
        }
        let progress = state.progress.clone();
        std::thread::scope(|scope| {
            // Without a buffer: one pack is learned from, one is ready.
            let (send, packs) = mpsc::sync_channel(0);
            scope.spawn(move || feed(store, training, recipe, progress, &send));
            self.learn(&mut state, held_out, dir, packs, report)
        })?;
        HSpec::load(&dir.best(), Some(self.target), device)
    }

    /// Steps until the recipe's last.
    fn learn(
        &self,
        state: &mut State<B>,
        held_out: &[Response],
        dir: &RunDir,
        packs: mpsc::Receiver<Result<Pack<B::InnerBackend>>>,
        report: &mut dyn FnMut(Event<'_>),
    ) -> Result<()> {
        let recipe = &self.recipe.train;
        let head = pruned_head(self.target, &state.drafter.vocab);
        while state.progress.step < recipe.steps {
            let start = Instant::now();
            let stopped = |_| Error::Mismatch("reading ahead stopped; earlier checkpoints are whole".into());
            let pack = packs.recv().map_err(stopped)??;
            let packed = pack.packed.constant::<B>();
            let anchors = Anchors::draw(
                &packed.loss_mask,
                state.drafter.config.block_size,
                recipe.anchors_per_step,
                recipe.seed,
                state.progress.step as u64,
            );
            let scale = recipe.schedule.scale(state.progress.step, recipe.steps, recipe.warmup);
            let step = state.progress.step + 1;
            state.progress = Progress { step, epoch: pack.epoch, cursor: pack.cursor, ..state.progress };
            if anchors.index.is_empty() {
                tracing::warn!("step {step} has no supervised token to draft from and changes nothing");
            } else {
                let mut metrics = self.step(state, &packed, &anchors, &head, scale).map_err(|e| {
                    Error::Mismatch(format!("step {step}: {e}; earlier checkpoints are whole"))
                })?;
                metrics.seconds = start.elapsed().as_secs_f64();
                metrics.tokens_per_second = packed.ids.len() as f64 / metrics.seconds;
                dir.log(&metrics)?;
                report(Event::Step(&metrics));
            }

            let last = step == recipe.steps;
            let measure = last || step.is_multiple_of(recipe.evaluate_every);
            let save = last || step.is_multiple_of(recipe.checkpoint_every);
            if measure || save {
                state.drafter.model = state.learner.model.valid();
            }
            if measure {
                let simulation = self.simulate(&state.drafter, held_out, step)?;
                dir.log(&simulation)?;
                report(Event::Simulated(&simulation));
                if simulation.tau >= state.progress.best_tau {
                    state.progress.best_tau = simulation.tau;
                    state.drafter.save(&dir.best(), hspec_core::checkpoint::StoreAs::Bf16, false)?;
                }
            }
            if save {
                dir.save(&state.drafter, &state.optimizers, &state.progress)?;
            }
        }
        Ok(())
    }

    /// Forward, loss, backward and the optimisers' step.
    fn step(
        &self,
        state: &mut State<B>,
        packed: &Packed<B>,
        anchors: &Anchors,
        head: &Linear<B::InnerBackend>,
        scale: f64,
    ) -> Result<StepMetrics> {
        let forward = packed.forward(&state.learner, anchors, self.target.norm(), head);
        let found = objective(forward, &self.objective());
        if !found.total.is_finite() {
            return Err(Error::Mismatch("the loss is not finite".into()));
        }
        let gradients = found.differentiable.backward();
        let (model, grad_norm) = state.optimizers.step(scale, state.learner.model.clone(), gradients)?;
        state.learner.model = model;
        let slots = 1..state.learner.config.block_size;
        Ok(StepMetrics {
            step: state.progress.step,
            loss: found.total,
            ce: found.ce,
            tv: found.tv,
            confidence: found.confidence,
            accuracy: slots.map(|t| found.agreement.accuracy(t)).collect(),
            expected_length: found.agreement.expected_length(),
            grad_norm,
            lr_scale: scale,
            anchors: anchors.index.len(),
            tokens_per_second: 0.0,
            seconds: 0.0,
        })
    }

    fn objective(&self) -> LossConfig {
        let r = &self.recipe.train;
        LossConfig {
            ce: r.ce,
            tv: r.tv,
            confidence: r.confidence,
            weighting: Weighting::Decay { gamma: r.gamma },
        }
    }

    fn split<'r>(&self, responses: &'r [Response]) -> Result<(&'r [Response], &'r [Response])> {
        let held_out = self.recipe.data.validation;
        if responses.len() <= held_out {
            let expected = format!("fewer than the {} responses", responses.len());
            return Err(Error::invalid(self.recipe_file, "data.validation", held_out.to_string(), expected));
        }
        Ok(responses.split_at(held_out))
    }

    fn fresh(&self, training: &[Response]) -> Result<HSpec<B::InnerBackend>> {
        let config = warm::config(self.recipe, self.target, self.target_name, self.recipe_file)?;
        let (all, kept) = (self.target.config().vocab_size, config.draft_vocab_size);
        let kept = vocab::most_frequent(training, self.stop_tokens, all, kept);
        warm::drafter(config, self.target, kept, self.recipe, self.recipe_file)
    }

    /// The same drafter with gradients.
    fn learner(&self, drafter: &HSpec<B::InnerBackend>) -> Result<HSpec<B>> {
        let device = self.target.device();
        let values = params::collect(&drafter.model);
        // Norms of queries and keys are the target's and stay so, as in the released recipe.
        let trained = |name: &str| {
            let head_norm = name.ends_with("q_norm.weight") || name.ends_with("k_norm.weight");
            !HSpecModel::<B>::frozen(name) && !head_norm
        };
        let model = HSpecModel::<B>::init(&drafter.config, device);
        let model = params::fill(model, device, |n| values.get(n).cloned(), trained)
            .map_err(|e| Error::Mismatch(e.to_string()))?;
        HSpec::new(drafter.config.clone(), model, drafter.vocab.clone(), self.recipe_file)
    }

    fn simulate(
        &self,
        drafter: &HSpec<B::InnerBackend>,
        held_out: &[Response],
        step: usize,
    ) -> Result<Simulation> {
        let decoder = Decoder::new(self.target, Some(drafter as &dyn Drafter<B::InnerBackend>));
        let (mut emitted, mut passes) = (0, 0);
        for (id, response) in held_out.iter().enumerate() {
            let request = Request {
                prompt: &response.prompt_ids,
                sampling: SamplingParams::greedy(),
                seed: self.recipe.train.seed,
                id: id as u64,
                max_new_tokens: self.recipe.train.evaluate_tokens,
                k: drafter.max_draft(),
                stop_tokens: self.stop_tokens,
            };
            let generation = decoder.generate(&request, &mut |_| ControlFlow::Continue(()))?;
            // The first token comes from the prompt's own pass.
            passes += generation.target_passes;
            emitted += generation.tokens.len().saturating_sub(1);
        }
        Ok(Simulation { step, tau: emitted as f64 / passes.max(1) as f64, passes })
    }
}
