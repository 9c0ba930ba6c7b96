//! The loop: responses, features, rows, loss, step, checkpoint.

pub use crate::events::{Event, Finish, Simulation, StepMetrics};

use crate::{
    caches::Caches,
    features::FeatureStore,
    feed::{self, Pack, feed},
    journal::Journal,
    kinds::{Learner, Start},
    loss::LossConfig,
    optim::{Optimizers, check_finite},
    pack::{Draw, Judge},
    recipe::{Recipe, Shape},
    record::{Init, Record},
    responses::{Response, check_ids},
    run_dir::{Progress, RunDir, target_hash},
    step::{self, Row, Sum},
    vocab, warm,
};
use burn::tensor::backend::{AutodiffBackend, Backend};
use hspec_core::{
    Error, Result, TokenId,
    checkpoint::StoreAs,
    decode::{Decoder, Request, SamplingParams},
    drafter::{DraftVocab, Drafter, HSpec, dspark::DSpark, eagle3::Eagle3, peagle::PEagle, pruned_head},
    target::Target,
};
use hspec_nn::autocast;
use std::{
    ops::ControlFlow,
    path::Path,
    sync::mpsc,
    time::{Duration, Instant},
};

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
    /// Commit of the source, for the record beside checkpoints.
    pub commit: &'a str,
    /// Tokens that end a response.
    pub stop_tokens: &'a [TokenId],
    /// A drafter to start from instead of a fresh one.
    pub init: Option<&'a Path>,
    /// Devices that share the rows of a step, the target's first; one, or none, for the target's alone.
    /// More than one need the feature `collective`.
    pub devices: &'a [B::Device],
    /// Time after which the run stops behind a step, with a checkpoint.
    pub limit: Option<Duration>,
}

/// Everything that a step changes.
struct State<B: AutodiffBackend, L: Learner<B>> {
    /// What decodes; its weights follow the learner's when they are needed.
    drafter: L::Drafter,
    learner: L,
    optimizers: Optimizers<B, L::Module>,
    progress: Progress,
}

impl<B: AutodiffBackend> Trainer<'_, B> {
    /// Trains on responses until the recipe's last step or until time runs out. The best drafter by simulated
    /// acceptance lies in the folder then.
    ///
    /// # Errors
    /// A recipe that does not fit the target or the data, a folder that cannot be written, a loss, gradient
    /// or parameter that is not finite (the last checkpoint, which the error names, is whole then).
    pub fn run(
        &self,
        responses: &[Response],
        dir: &RunDir,
        report: &mut dyn FnMut(Event<'_>),
    ) -> Result<Finish> {
        match &self.recipe.drafter {
            Shape::HSpec(_) => self.run_kind::<HSpec<B>>(responses, dir, report),
            Shape::DSpark(_) | Shape::DFlash(_) | Shape::DFlash2(_) | Shape::Domino(_) => {
                self.run_kind::<DSpark<B>>(responses, dir, report)
            }
            Shape::Eagle3(_) => self.run_kind::<Eagle3<B>>(responses, dir, report),
            Shape::PEagle(_) => self.run_kind::<PEagle<B>>(responses, dir, report),
        }
    }

    fn run_kind<L: Learner<B>>(
        &self,
        responses: &[Response],
        dir: &RunDir,
        report: &mut dyn FnMut(Event<'_>),
    ) -> Result<Finish> {
        let start = Instant::now();
        let recipe = &self.recipe.train;
        let device = self.target.device();
        check_ids(responses, self.target.config().vocab_size)?;
        warm::check_compute::<B::InnerBackend>(self.recipe, device, self.recipe_file)?;
        let (held_out, training) = self.split(responses)?;
        let resumed = dir.newest(|path| {
            let drafter = L::load(path, self.target)?;
            let learner = L::learner(&drafter, device, self.recipe_file)?;
            let optimizers =
                Optimizers::new(learner.module(), recipe).load(RunDir::optimizers(path)?, device)?;
            // A record is told, not needed: a damaged one leaves the checkpoint whole.
            let init = Record::read(path).unwrap_or_else(|error| {
                tracing::warn!("what the run began with is no longer known: {error}");
                None
            });
            let init = init.and_then(|record| record.init);
            Ok((drafter, learner, optimizers, init))
        })?;
        let ((drafter, learner, optimizers, init), progress) = match resumed {
            Some(found) => found,
            None => {
                let drafter = self.first::<L>(training)?;
                let learner = L::learner(&drafter, device, self.recipe_file)?;
                let optimizers = Optimizers::new(learner.module(), recipe);
                let init = self.init.map(Init::new).transpose()?;
                (
                    (drafter, learner, optimizers, init),
                    Progress { step: 0, epoch: 0, cursor: 0, best_tau: 0.0 },
                )
            }
        };
        let steps = feed::steps(training, recipe);
        let mut state = State { drafter, learner, optimizers, progress };
        let mut journal = Journal::open(dir, state.progress.step)?;
        report(Event::Start {
            documents: training.len(),
            supervised: training.iter().map(Response::supervised).sum(),
            coverage: vocab::coverage(training, L::vocab(&state.drafter).targets()),
            parameters: state.drafter.footprint().params_trainable,
            resumed_at: state.progress.step,
            steps,
            best_tau: state.progress.best_tau,
        });
        if state.progress.step == 0 {
            let simulation = self.simulate(&state.drafter, held_out, 0)?;
            journal.write(&simulation)?;
            report(Event::Simulated(&simulation));
        }
        let reads = L::reads(&state.drafter);
        let devices = if self.devices.is_empty() { std::slice::from_ref(device) } else { self.devices };
        let hash = target_hash(self.target);
        let mut record =
            Record::new::<B::InnerBackend>(self.commit, devices, hash, self.recipe, responses, &reads);
        record.init = init;
        let mut store = FeatureStore::new(self.target, reads, recipe.feature_cache_mib << 20);
        if !self.recipe.data.cache.is_empty() {
            store = store.cached(Box::new(Caches::open(&self.recipe.data.cache)?))?;
        }
        let progress = state.progress.clone();
        let until = self.limit.map(|limit| start + limit);
        std::thread::scope(|scope| {
            // Without a buffer: one row is learned from, one is ready.
            let (send, packs) = mpsc::sync_channel(0);
            scope.spawn(move || feed(store, training, recipe, steps, &progress, &send));
            let run = Run { held_out, dir, record, steps, until };
            self.learn(&mut state, &run, &packs, &mut journal, report)
        })?;
        Ok(Finish { step: state.progress.step, steps })
    }

    /// Steps until the last, or until time is up.
    fn learn<L: Learner<B>>(
        &self,
        state: &mut State<B, L>,
        run: &Run<'_>,
        packs: &mpsc::Receiver<Result<Pack<B::InnerBackend>>>,
        journal: &mut Journal<'_>,
        report: &mut dyn FnMut(Event<'_>),
    ) -> Result<()> {
        let (recipe, dir) = (&self.recipe.train, run.dir);
        let head = pruned_head(self.target, L::vocab(&state.drafter));
        let judge = Judge { norm: self.target.norm().clone(), head };
        while state.progress.step < run.steps {
            let start = Instant::now();
            let (rows, at) = self.rows(packs, state.progress.step, run.steps)?;
            let scale = recipe.schedule.scale(state.progress.step, run.steps, recipe.warmup);
            let step = state.progress.step + 1;
            state.progress = Progress { step, epoch: at.0, cursor: at.1, ..state.progress };
            let tokens: usize = rows.iter().map(|row| row.packed.ids.len()).sum();
            let metrics = autocast(recipe.compute, || self.step(state, rows, &judge, scale))
                .map_err(|e| stopped(&e, step, dir))?;
            match metrics {
                None => {
                    tracing::warn!("step {step} has no supervised token to draft from and changes nothing");
                }
                Some(mut metrics) => {
                    metrics.seconds = start.elapsed().as_secs_f64();
                    metrics.tokens_per_second = tokens as f64 / metrics.seconds;
                    journal.write(&metrics)?;
                    report(Event::Step(&metrics));
                }
            }

            let out_of_time = run.until.is_some_and(|until| Instant::now() >= until);
            let last = step == run.steps;
            let measure = last || step.is_multiple_of(recipe.evaluate_every);
            let save = last || out_of_time || step.is_multiple_of(recipe.checkpoint_every);
            if measure || save {
                check_finite(state.learner.module()).map_err(|e| stopped(&e, step, dir))?;
                state.learner.teach(&mut state.drafter);
            }
            let mut tau = None;
            if measure {
                let simulation = self.simulate(&state.drafter, run.held_out, step)?;
                journal.write(&simulation)?;
                report(Event::Simulated(&simulation));
                tau = Some(simulation.tau);
                if simulation.tau >= state.progress.best_tau {
                    state.progress.best_tau = simulation.tau;
                    L::save(&state.drafter, &dir.best(), StoreAs::Bf16)?;
                    run.record.write(&dir.best(), step, tau)?;
                }
            }
            if save {
                let write = |path: &Path| {
                    L::save(&state.drafter, path, StoreAs::F32)?;
                    run.record.write(path, step, tau)
                };
                dir.save(&write, &state.optimizers, &state.progress, recipe.keep)?;
            }
            if measure || save {
                journal.draw()?;
            }
            if out_of_time {
                break;
            }
        }
        Ok(())
    }

    /// The rows of a step, and where reading stands after them.
    #[allow(clippy::type_complexity)] // read once, right there
    fn rows(
        &self,
        packs: &mpsc::Receiver<Result<Pack<B::InnerBackend>>>,
        done: usize,
        steps: usize,
    ) -> Result<(Vec<Row<B::InnerBackend>>, (u64, usize))> {
        let recipe = &self.recipe.train;
        let (mut rows, mut at) = (Vec::with_capacity(recipe.accumulate), (0, 0));
        for i in 0..recipe.accumulate {
            let stopped = |_| Error::Mismatch("reading ahead stopped; earlier checkpoints are whole".into());
            let pack = packs.recv().map_err(stopped)??;
            let draw = Draw {
                seed: recipe.seed,
                row: (done * recipe.accumulate + i) as u64,
                anchors: recipe.row_anchors(),
                progress: done as f64 / steps as f64,
            };
            at = (pack.epoch, pack.cursor);
            rows.push(Row { packed: pack.packed, draw });
        }
        Ok((rows, at))
    }

    /// Forward, loss, backward and the optimisers' step; nothing without a token to learn from.
    fn step<L: Learner<B>>(
        &self,
        state: &mut State<B, L>,
        rows: Vec<Row<B::InnerBackend>>,
        judge: &Judge<B::InnerBackend>,
        scale: f64,
    ) -> Result<Option<StepMetrics>> {
        let supervised: usize =
            rows.iter().map(|row| row.packed.loss_mask.iter().filter(|m| **m).count()).sum();
        let done = rows.first().map_or(0.0, |row| row.draw.progress);
        let config = self.recipe.train.objective(done);
        let Some(sum) = self.sum(&state.learner, rows, judge, &config)? else { return Ok(None) };
        let (grads, tally) = sum.mean(&state.learner);
        let (module, grad_norm) = state.optimizers.step(scale, state.learner.module().clone(), grads)?;
        state.learner.replace(module);
        let first = state.learner.first_slot();
        let mean = |term: f64| term / tally.count;
        Ok(Some(StepMetrics {
            step: state.progress.step,
            loss: mean(tally.total),
            ce: mean(tally.ce),
            tv: mean(tally.tv),
            kl: mean(tally.kl),
            confidence: mean(tally.confidence),
            accuracy: (first..tally.agreement.total.len()).map(|t| tally.agreement.accuracy(t)).collect(),
            expected_length: tally.agreement.expected_length(first),
            grad_norm,
            lr_scale: scale,
            anchors: tally.blocks,
            coverage: tally.judged as f64 / supervised.max(1) as f64,
            tokens_per_second: 0.0,
            seconds: 0.0,
        }))
    }

    fn sum<L: Learner<B>>(
        &self,
        learner: &L,
        rows: Vec<Row<B::InnerBackend>>,
        judge: &Judge<B::InnerBackend>,
        config: &LossConfig,
    ) -> Result<Option<Sum>> {
        if self.devices.len() > 1 {
            #[cfg(feature = "collective")]
            return crate::devices::sum(learner, rows, judge, config, self.devices);
            #[cfg(not(feature = "collective"))]
            return Err(Error::Mismatch("several devices need the feature collective".into()));
        }
        step::sum(learner, rows, judge, config)
    }

    fn split<'r>(&self, responses: &'r [Response]) -> Result<(&'r [Response], &'r [Response])> {
        let held_out = self.recipe.data.validation;
        if responses.len() <= held_out {
            let expected = format!("fewer than the {} responses", responses.len());
            return Err(Error::invalid(self.recipe_file, "data.validation", held_out.to_string(), expected));
        }
        Ok(responses.split_at(held_out))
    }

    /// The drafter before the first step.
    fn first<L: Learner<B>>(&self, training: &[Response]) -> Result<L::Drafter> {
        if let Some(dir) = self.init {
            warm::check_init(dir, self.recipe, self.target, self.recipe_file)?;
            return L::load(dir, self.target);
        }
        let all = self.target.config().vocab_size;
        let vocab = match self.recipe.drafter.draft_vocab() {
            Some(kept) => {
                let ids = vocab::most_frequent(training, self.stop_tokens, all, kept);
                DraftVocab::new(ids, all, self.recipe_file)?
            }
            None => DraftVocab::full(all),
        };
        B::InnerBackend::seed(self.target.device(), self.recipe.train.seed);
        L::fresh(Start {
            recipe: self.recipe,
            file: self.recipe_file,
            target: self.target,
            name: self.target_name,
            vocab,
        })
    }

    fn simulate(
        &self,
        drafter: &dyn Drafter<B::InnerBackend>,
        held_out: &[Response],
        step: usize,
    ) -> Result<Simulation> {
        let decoder = Decoder::new(self.target, Some(drafter));
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

/// What a run's steps do not change.
struct Run<'a> {
    held_out: &'a [Response],
    dir: &'a RunDir,
    record: Record,
    steps: usize,
    until: Option<Instant>,
}

/// An error that names the step and what can be gone back to.
fn stopped(error: &Error, step: usize, dir: &RunDir) -> Error {
    let last = dir.last().map_or_else(
        || "there is no checkpoint before".to_owned(),
        |path| format!("the last good checkpoint is {}", path.display()),
    );
    Error::Mismatch(format!("step {step}: {error}; {last}"))
}
