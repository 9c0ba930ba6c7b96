//! `cargo xtask train`: a recipe to a drafter.

use crate::{
    backend::{Common, keep_freed_memory, with_backend},
    distill::{answer, selected, tokens},
    mask,
    model::Model,
    output::probe,
    progress::Progress,
};
use anyhow::Context;
use burn::{backend::Autodiff, tensor::backend::Backend};
use hspec_core::{
    prompts::{PromptFile, Prompts},
    provenance::commit,
};
use hspec_train::{
    Trainer,
    caches::{self, Caches},
    features::Cached,
    kinds,
    recipe::Recipe,
    responses::{PromptTokens, Response, check_ids, documents, read_documents},
    run_dir::{Identity, RunDir, target_hash},
    trainer::{Event, Finish, StepMetrics},
    warm,
};
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Train a drafter on what its target says.
///
/// The target answers the prompts first (kept in responses.jsonl) unless answers are given, then the drafter
/// learns from them. Everything lies in the run's folder: the resolved recipe, the answers, metrics.jsonl, event
/// files for TensorBoard, curves.svg, the last checkpoints, and `best`, the drafter with the highest simulated
/// tau. A run that was stopped, at any moment, continues with --resume and loses at most the steps since its
/// last checkpoint.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask train --recipe recipes/smollm2-135m.toml --prompts prompts.jsonl.gz
  cargo xtask train --recipe recipes/smollm2-135m.toml --prompts prompts.jsonl.gz --resume
  cargo xtask train --recipe recipes/smollm2-135m.toml --prompts prompts.jsonl.gz --max-minutes 60
  cargo xtask train --recipe mine.toml --target models/mine --prompts a.jsonl --out runs/mine
  cargo xtask train --recipe mine.toml --prompts b.jsonl --out runs/second --init runs/mine/best
  cargo xtask train --recipe mine.toml --prompts a.jsonl --out runs/mine-1 --seed 1
  cargo xtask train --recipe mine.toml --responses responses.jsonl --cache features --show-mask 3
  cargo xtask train --recipe mine.toml --responses old.jsonl new.jsonl --cache features-old features-new")]
pub(crate) struct Args {
    /// What to train and how, a TOML file; recipes/ holds some.
    #[arg(long, value_name = "FILE")]
    recipe: PathBuf,
    /// The model: a Hugging Face folder or a GGUF file [default: models/smollm2-135m-instruct].
    #[arg(long, value_name = "DIR")]
    target: Option<PathBuf>,
    /// Prompt files, JSON lines, gzipped or not, each with a weight or none [default: the recipe's].
    #[arg(long, value_name = "FILE[:WEIGHT]", num_args = 1..)]
    prompts: Vec<PromptFile>,
    /// Files of answers that `cargo xtask distill` wrote, gzipped or not, in the place of prompts [default: the
    /// recipe's].
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "prompts")]
    responses: Vec<PathBuf>,
    /// Folders of features that `cargo xtask cache` wrote, which hold all answers between them, or of DeepSpec's, which
    /// need no answers beside them [default: the recipe's, or none].
    #[arg(long, value_name = "DIR", num_args = 1..)]
    cache: Vec<PathBuf>,
    /// Show this many samples, with what is learned from marked, before training.
    #[arg(long, value_name = "N", default_value_t = 0)]
    show_mask: usize,
    /// Folder of the run [default: runs/NAME, after the recipe].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Continue the run in the folder.
    #[arg(long)]
    resume: bool,
    /// Start from this drafter's weights and vocabulary; its shape must be the recipe's.
    #[arg(long, value_name = "DIR")]
    init: Option<PathBuf>,
    /// Seed of every random choice: weights, order, anchors, held-out samples [default: the recipe's].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=i64::MAX as u64))]
    seed: Option<u64>,
    /// Stop training after this time, behind a whole step and with a checkpoint.
    #[arg(long, value_name = "N", value_parser = minutes)]
    max_minutes: Option<Duration>,
    /// Devices that share a step's rows, at most the recipe's accumulate.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    devices: u16,
    #[command(flatten)]
    backend: Common,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    keep_freed_memory();
    let name = args.recipe.file_stem().context("--recipe names no file")?;
    let out = args.out.clone().unwrap_or_else(|| crate::workspace().join("runs").join(name));
    let mut recipe = Recipe::read(&args.recipe)?;
    recipe.train.seed = args.seed.unwrap_or(recipe.train.seed);
    let data = &mut recipe.data;
    if !args.cache.is_empty() {
        data.cache.clone_from(&args.cache);
    }
    if !args.responses.is_empty() || !args.prompts.is_empty() {
        data.responses.clone_from(&args.responses);
    }
    let prompts = match (&data.responses[..], &args.prompts[..]) {
        ([_, ..], _) => None,
        // A folder of DeepSpec's holds tokens beside features.
        ([], []) if data.prompts.is_empty() && !data.cache.is_empty() => None,
        ([], []) if data.prompts.is_empty() => anyhow::bail!(
            "no prompts: name files with --prompts or in the recipe's data.prompts, or answers with --responses"
        ),
        ([], []) => Some(Prompts::read(&data.prompts)?),
        ([], files) => Some(Prompts::read(files)?),
    };
    if args.resume && !out.join("recipe.toml").exists() {
        eprintln!("there is no run in {} to continue: starting one", out.display());
    }
    let rows = recipe.train.accumulate;
    anyhow::ensure!(
        usize::from(args.devices) <= rows,
        "--devices: found {}, and a step of {} has {rows} rows to share: set train.accumulate",
        args.devices,
        args.recipe.display(),
    );
    anyhow::ensure!(
        args.devices == 1 || cfg!(feature = "collective"),
        "--devices: not built in; run `cargo run --release -p xtask --features collective -- train ...`"
    );
    probe(&out)?;
    let run = Run {
        recipe_file: &args.recipe,
        out: &out,
        resume: args.resume,
        init: args.init.as_deref(),
        limit: args.max_minutes,
        devices: args.devices,
        show_mask: args.show_mask,
    };
    let Finish { step, steps } = with_backend!(args.backend, |B, device| {
        let model = Model::<B>::load(args.target.as_deref(), &args.backend, &device)?;
        run.train(&model, &recipe, prompts.as_ref())
    })?;
    let best = out.join("best");
    if step < steps {
        eprintln!("time is up after step {step} of {steps}; the same command with --resume goes on");
    }
    if best.exists() {
        eprintln!("the best drafter is in {}", best.display());
        println!("{}", best.display());
    } else {
        eprintln!(
            "no drafter has been measured yet: the first time is at step {}",
            recipe.train.evaluate_every
        );
    }
    Ok(())
}

/// A positive number of minutes.
fn minutes(text: &str) -> Result<Duration, String> {
    let minutes: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    match Duration::try_from_secs_f64(60.0 * minutes) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err("not a positive number of minutes".into()),
    }
}

/// Where a run comes from and goes to.
pub(crate) struct Run<'a> {
    /// Names the recipe in errors.
    pub(crate) recipe_file: &'a Path,
    /// Folder of the run.
    pub(crate) out: &'a Path,
    /// Whether to continue what is there.
    pub(crate) resume: bool,
    /// A drafter to start from.
    pub(crate) init: Option<&'a Path>,
    /// Time after which to stop.
    pub(crate) limit: Option<Duration>,
    /// Devices that share a step's rows.
    pub(crate) devices: u16,
    /// Samples to show.
    pub(crate) show_mask: usize,
}

impl Run<'_> {
    /// Trains on the recipe's responses, or has the prompts answered and trains on the answers; the drafter ends
    /// up in `out/best`.
    pub(crate) fn train<B: Backend>(
        &self,
        model: &Model<B>,
        recipe: &Recipe,
        prompts: Option<&Prompts>,
    ) -> anyhow::Result<Finish> {
        let (data, seed) = (&recipe.data, recipe.train.seed);
        let (dir, documents) = match (&data.responses[..], prompts, &data.cache[..]) {
            (files @ [_, ..], ..) => {
                let template = model.chat.as_ref().map(|template| template.hash());
                let hash = target_hash(&model.target);
                let documents = read_documents(files, &hash, template, seed, data.max_prompts)?;
                self.check(model, recipe, &documents)?;
                (self.open(model, recipe, &tokens(&documents))?, documents)
            }
            ([], Some(prompts), _) => {
                let selection = selected(model, prompts, data, seed)?;
                let known = [&selection.prompts[..], &tokens(&selection.given)].concat();
                let dir = self.open(model, recipe, &known)?;
                let (answers, _) = answer(model, &selection, data, seed, &dir.file("responses.jsonl"))?;
                (dir, documents(answers))
            }
            ([], None, folders @ [_, ..]) => {
                let documents = caches::read_documents(folders, seed, data.max_prompts)?;
                self.check(model, recipe, &documents)?;
                (self.open(model, recipe, &tokens(&documents))?, documents)
            }
            ([], None, []) => anyhow::bail!("neither prompts nor responses"),
        };
        if self.show_mask > 0 {
            mask::show(&documents, self.show_mask, &model.tokenizer)?;
        }
        let name = model.path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let trainer = Trainer::<Autodiff<B>> {
            recipe,
            recipe_file: self.recipe_file,
            target: &model.target,
            target_name: &name,
            commit: &commit(&crate::workspace()),
            stop_tokens: &model.eos,
            init: self.init,
            devices: &devices::<B>(model.target.device(), self.devices)?,
            limit: self.limit,
        };
        let mut watch = Watch { progress: None, last: Instant::now(), tau: 0.0 };
        Ok(trainer.run(&documents, &dir, &mut |event| watch.tell(event))?)
    }

    /// Refuses documents that the target has no tokens for, or the cache of features no features.
    fn check<B: Backend>(
        &self,
        model: &Model<B>,
        recipe: &Recipe,
        documents: &[Response],
    ) -> anyhow::Result<()> {
        check_ids(documents, model.target.config().vocab_size)?;
        if !recipe.data.cache.is_empty() {
            let cache = Caches::<B>::open(&recipe.data.cache)?;
            let reads = kinds::reads(recipe, model.target.config(), self.recipe_file)?;
            cache.check(&reads, &model.target)?;
            documents.iter().try_for_each(|document| cache.holds(document))?;
        }
        Ok(())
    }

    /// The run's folder, once recipe and target are known to fit.
    fn open<B: Backend>(
        &self,
        model: &Model<B>,
        recipe: &Recipe,
        prompts: &[PromptTokens],
    ) -> anyhow::Result<RunDir> {
        warm::check(recipe, &model.target, prompts.len(), self.recipe_file)?;
        let identity = Identity::new(&model.target, prompts);
        Ok(RunDir::open(self.out, recipe, &identity, self.resume)?)
    }
}

/// The first `n` devices of a kind, from the given one. Where the kind has one device only, as a CPU is, all
/// are that one.
fn devices<B: Backend>(first: &B::Device, n: u16) -> anyhow::Result<Vec<B::Device>> {
    use burn::prelude::DeviceOps;
    let mut id = first.to_id();
    let there = B::device_count(id.type_id);
    if there <= 1 {
        return Ok(vec![first.clone(); n.into()]);
    }
    anyhow::ensure!(usize::from(n) <= there, "--devices: found {n}, and there are {there}");
    let device = |i| {
        id.index_id = i;
        B::Device::from_id(id)
    };
    Ok((0..n).map(device).collect())
}

/// Shows how a run goes.
struct Watch {
    progress: Option<Progress>,
    last: Instant,
    tau: f64,
}

impl Watch {
    fn tell(&mut self, event: Event<'_>) {
        match event {
            Event::Start { documents, supervised, coverage, parameters, resumed_at, steps, best_tau } => {
                self.tau = best_tau;
                eprintln!(
                    "{documents} answers, {supervised} tokens, {:.1} % of them in the draft vocabulary; {:.1} M \
                     parameters to train",
                    100.0 * coverage,
                    parameters as f64 / 1e6,
                );
                if resumed_at > 0 {
                    eprintln!("continuing after step {resumed_at}");
                }
                self.progress = Some(Progress::count("steps", steps as u64));
            }
            Event::Step(metrics) => {
                if let Some(progress) = &self.progress {
                    progress.set(metrics.step as u64);
                }
                if self.last.elapsed().as_secs() >= 30 {
                    self.last = Instant::now();
                    self.note(&line(metrics, self.tau));
                }
            }
            Event::Simulated(simulation) => {
                self.tau = simulation.tau;
                let (step, tau, passes) = (simulation.step, simulation.tau, simulation.passes);
                self.note(&format!("step {step}: simulated tau {tau:.3} over {passes} passes"));
            }
        }
    }

    fn note(&self, text: &str) {
        match &self.progress {
            Some(progress) => progress.note(text),
            None => eprintln!("{text}"),
        }
    }
}

fn line(m: &StepMetrics, tau: f64) -> String {
    format!(
        "step {}: loss {:.3} (ce {:.2}, tv {:.3}), first slot right {:.0} %, simulated tau {tau:.2}, \
         {:.0} % of the supervised tokens seen, {:.0} tokens/s",
        m.step,
        m.loss,
        m.ce,
        m.tv,
        100.0 * m.accuracy.first().copied().unwrap_or(0.0),
        100.0 * m.coverage,
        m.tokens_per_second,
    )
}
