//! `cargo xtask prompts`: prompts that a target writes itself.

use crate::{
    backend::{Common, with_backend, workers},
    model::{Model, temperature, top_p},
    output::probe,
    progress::Progress,
};
use anyhow::Context;
use burn::tensor::backend::Backend;
use hspec_core::{checkpoint::write_atomic, decode::SamplingParams};
use hspec_train::{
    responses::{Answering, FORMAT, Finish, Origin, PromptTokens, Response, Sampling},
    run_dir::target_hash,
};
use std::{
    collections::HashSet,
    fmt::Write as _,
    path::{Path, PathBuf},
    time::Instant,
};

/// Have a target write prompts like those it was taught with.
///
/// A chat model that is shown its template up to where a user speaks goes on as that user. Sampled often, this
/// gives prompts from what the model knows, for `distill` or `train`, where prompts of one's own are few or of few
/// kinds. Empty ones, those cut at the length limit and repetitions are left out.
#[derive(clap::Args)]
#[command(after_help = "\
The prompts are JSON lines with `id` and `prompt`. Stopped at any moment, the same command continues.

Examples:
  cargo xtask prompts --count 2000 --out prompts.jsonl
  cargo xtask prompts --count 2000 --seed 1 --out more.jsonl
  cargo xtask train --recipe recipes/smollm2-135m.toml --prompts prompts.jsonl:0.5 mine.jsonl:0.5")]
pub(crate) struct Args {
    /// The model: a Hugging Face folder or a GGUF file [default: models/smollm2-135m-instruct].
    #[arg(long, value_name = "DIR")]
    target: Option<PathBuf>,
    /// How often to sample; the prompts are fewer, by what is left out.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// File of the prompts.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Temperature of sampling.
    #[arg(long, value_name = "T", default_value = "1", value_parser = temperature)]
    temperature: f64,
    /// Sample from the fewest tokens whose probabilities make up P.
    #[arg(long, value_name = "P", value_parser = top_p)]
    top_p: Option<f64>,
    /// Seed: the same seed gives the same prompts, another one others.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// The most tokens of a prompt.
    #[arg(long, value_name = "N", default_value = "128", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Prompts written at once.
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    #[command(flatten)]
    backend: Common,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.temperature > 0.0,
        "--temperature 0: found the one most probable prompt, expected a temperature above 0 to sample many"
    );
    // Prompts may be somebody's own work.
    anyhow::ensure!(!args.out.exists(), "--out {}: found a file, expected none yet", args.out.display());
    let folder = args.out.parent().filter(|folder| !folder.as_os_str().is_empty());
    probe(folder.unwrap_or(Path::new(".")))?;
    with_backend!(args.backend, |B, device| {
        write(args, &Model::<B>::load(args.target.as_deref(), &args.backend, &device)?)
    })
}

fn write<B: Backend>(args: &Args, model: &Model<B>) -> anyhow::Result<()> {
    let partial = args.out.with_extension("samples.jsonl");
    let samples = sample(args, model, &partial)?;
    let mut seen = HashSet::new();
    let mut lines = String::new();
    for sample in &samples {
        let text = model.tokenizer.decode(&sample.response_ids, true)?;
        let text = text.trim();
        if sample.finish == Some(Finish::Stop) && !text.is_empty() && seen.insert(text.to_owned()) {
            writeln!(lines, "{}", serde_json::json!({ "id": sample.id, "prompt": text }))?;
        }
    }
    let done = || std::fs::remove_file(&partial).with_context(|| partial.display().to_string());
    if seen.is_empty() {
        done()?;
        anyhow::bail!(
            "found no prompt among {} samples, all empty or cut at {} tokens",
            samples.len(),
            args.max_tokens
        );
    }
    write_atomic(&args.out, |out| out.write_all(lines.as_bytes()))?;
    done()?;
    eprintln!("{} prompts of {} samples", seen.len(), samples.len());
    println!("{}", args.out.display());
    Ok(())
}

/// What the target says where its template lets a user speak.
fn sample<B: Backend>(args: &Args, model: &Model<B>, file: &Path) -> anyhow::Result<Vec<Response>> {
    let template = model.template()?;
    let head = model.tokenizer.encode(&template.user_head()?)?;
    let prompts: Vec<PromptTokens> = (0..args.count)
        .map(|i| PromptTokens { id: format!("self-{}-{i}", args.seed), ids: head.clone() })
        .collect();
    let sampling = Sampling {
        params: SamplingParams::new(args.temperature, None, args.top_p)?,
        seed: args.seed,
        max_new_tokens: args.max_tokens as usize,
        stop_tokens: &model.eos,
        batch: args.batch.into(),
    };
    let origin = Origin {
        format: FORMAT.into(),
        target: target_hash(&model.target),
        template: template.hash().into(),
        temperature: args.temperature,
        top_k: None,
        top_p: args.top_p,
        seed: args.seed,
        max_new_tokens: args.max_tokens as usize,
    };
    let answering = Answering {
        target: &model.target,
        sampling: &sampling,
        origin: Some(&origin),
        follow: &|_, _| Ok(None),
        given: &[],
        threads: workers::<B>(model.target.device()),
    };
    let progress = Progress::count("prompts", 0);
    let start = Instant::now();
    Ok(answering.run(&prompts, file, &mut |told| {
        progress.set_total(told.total as u64);
        progress.rate(format!("{:.0} tokens/s", told.new_tokens as f64 / start.elapsed().as_secs_f64()));
        progress.set(told.done as u64);
    })?)
}
