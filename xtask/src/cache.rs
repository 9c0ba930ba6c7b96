//! `cargo xtask cache`: what a target computes for its answers, on disk.

use crate::{
    backend::{Common, with_backend},
    model::Model,
    output::probe,
    progress::Progress,
};
use burn::tensor::backend::Backend;
use hspec_core::checkpoint::StoreAs;
use hspec_train::{
    feature_cache::{Manifest, SHARD_BYTES},
    features::Reads,
    kinds,
    recipe::Recipe,
    responses::{Response, read_documents},
    run_dir::target_hash,
};
use indicatif::HumanBytes;
use serde::Serialize;
use std::{io::Write, path::PathBuf, time::Instant};

/// Write what a target computes for its answers, so that training need not compute it again.
///
/// The size is told before anything is computed, and a disk that is too small is refused. Stopped at any moment,
/// the same command continues with the first shard that is not whole. Training without a cache computes features
/// when it needs them and keeps them in memory: a cache pays when several runs learn from the same answers, or when
/// they do not fit into memory.
#[derive(clap::Args)]
#[command(after_help = "\
Layer L of --layers is the residual stream that enters 0-based layer L, as in recipes.

Examples:
  cargo xtask cache --responses responses.jsonl --recipe recipes/smollm2-135m.toml --out features
  cargo xtask cache --responses responses.jsonl --layers 1 8 15 22 28 --kv-layers 28 --out features
  cargo xtask cache --responses responses.jsonl --layers 1 8 15 22 28 --bf16 --out features")]
pub(crate) struct Args {
    /// The model: a Hugging Face folder or a GGUF file [default: models/smollm2-135m-instruct].
    #[arg(long, value_name = "DIR")]
    target: Option<PathBuf>,
    /// Files of answers, gzipped or not, from `cargo xtask distill` or the folder of a run.
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    responses: Vec<PathBuf>,
    /// The recipe whose drafter is to read the cache, in the place of layers.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["layers", "kv_layers"])]
    recipe: Option<PathBuf>,
    /// Layers whose hidden states the drafter reads.
    #[arg(long, value_name = "L", num_args = 1.., required_unless_present = "recipe")]
    layers: Vec<usize>,
    /// Layers whose keys and values it reads.
    #[arg(long, value_name = "L", num_args = 1..)]
    kv_layers: Vec<usize>,
    /// Folder of the cache; one that is there is continued.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Round to bf16: half the size, and no longer exactly what the target computes.
    #[arg(long)]
    bf16: bool,
    /// Write one JSON document about what was done.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    backend: Common,
}

/// The JSON of `cache --json`.
#[derive(Serialize)]
struct Document {
    cache: PathBuf,
    documents: usize,
    tokens: usize,
    bytes_per_token: u64,
    bytes: u64,
    seconds: f64,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    probe(&args.out)?;
    with_backend!(args.backend, |B, device| {
        let model = Model::<B>::load(args.target.as_deref(), &args.backend, &device)?;
        cache(args, &model)
    })
}

fn cache<B: Backend>(args: &Args, model: &Model<B>) -> anyhow::Result<()> {
    let template = model.chat.as_ref().map(|template| template.hash());
    let documents: Vec<Response> =
        read_documents(&args.responses, &target_hash(&model.target), template, 0, 0)?;
    let mut reads = match &args.recipe {
        Some(file) => kinds::reads(&Recipe::read(file)?, model.target.config(), file)?,
        None => Reads { hidden: args.layers.clone(), kv: args.kv_layers.clone() },
    };
    reads.hidden.sort_unstable();
    reads.hidden.dedup();
    let store = if args.bf16 { StoreAs::Bf16 } else { StoreAs::F32 };
    let plan = Manifest::plan(&documents, &reads, &model.target, store, SHARD_BYTES)?;
    let mut manifest = plan.resume(&args.out)?;
    let (free, left) = (fs4::available_space(&args.out)?, manifest.bytes_left());
    eprintln!(
        "{} documents of {} tokens: {}, {} bytes per token; {} to be written, {} free",
        manifest.documents,
        manifest.tokens,
        HumanBytes(manifest.bytes()),
        manifest.bytes_per_token(),
        HumanBytes(left),
        HumanBytes(free),
    );
    anyhow::ensure!(
        left < free,
        "--out {}: {} are free, {} are needed",
        args.out.display(),
        HumanBytes(free),
        HumanBytes(left)
    );
    let start = Instant::now();
    let progress = Progress::count("documents", manifest.documents as u64);
    manifest.fill(&args.out, &documents, &model.target, &mut |done| progress.set(done as u64))?;
    drop(progress);
    let document = Document {
        cache: args.out.clone(),
        documents: manifest.documents,
        tokens: manifest.tokens,
        bytes_per_token: manifest.bytes_per_token(),
        bytes: manifest.bytes(),
        seconds: start.elapsed().as_secs_f64(),
    };
    let mut out = std::io::stdout().lock();
    match args.json {
        true => writeln!(out, "{}", serde_json::to_string_pretty(&document)?)?,
        false => writeln!(out, "{}", args.out.display())?,
    }
    Ok(())
}
