//! `cargo xtask prompts`: prompts that a target writes itself.

use crate::{
    backend::{Common, with_backend},
    distill::Talk,
    model::{Model, temperature, top_p},
    output::probe_file,
};
use anyhow::Context;
use burn::tensor::backend::Backend;
use hspec_core::{TokenId, checkpoint::write_atomic, prompts::is_gzipped};
use hspec_train::{
    recipe::Data,
    responses::{Finish, PromptTokens, Response},
};
use std::{
    collections::HashSet,
    fmt::Write as _,
    path::{Path, PathBuf},
};

/// Have a target write prompts like those it was taught with.
///
/// A chat model that is shown its template up to where a user speaks goes on as that user. Sampled often, this
/// gives prompts from what the model knows, for `distill` or `train`, where prompts of one's own are few or of few
/// kinds; `--begin` asks for kinds. Empty ones, those cut at the length limit and repetitions are left out.
#[derive(clap::Args)]
#[command(after_help = "\
The prompts are JSON lines with `id` and `prompt`. Stopped at any moment, the same command
continues; until it is done, its samples are in FILE.samples.

Examples:
  cargo xtask prompts --count 2000 --out prompts.jsonl
  cargo xtask prompts --count 2000 --seed 1 --out more.jsonl
  cargo xtask prompts --count 500 --begin 'Write a function' --begin 'How many' --out kinds.jsonl
  cargo xtask train --recipe recipes/smollm2-135m.toml --prompts prompts.jsonl:0.5 mine.jsonl:0.5")]
pub(crate) struct Args {
    /// The model: a Hugging Face folder or a GGUF file [default: models/smollm2-135m-instruct].
    #[arg(long, value_name = "DIR")]
    target: Option<PathBuf>,
    /// How often to sample; the prompts are fewer, by what is left out.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Words that a prompt begins with; given several times, the samples take turns.
    #[arg(long, value_name = "TEXT")]
    begin: Vec<String>,
    /// File of the prompts; none may be there yet.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Temperature of sampling.
    #[arg(long, value_name = "T", default_value = "1", value_parser = temperature, allow_negative_numbers = true)]
    temperature: f64,
    /// Sample from the fewest tokens whose probabilities make up P.
    #[arg(long, value_name = "P", value_parser = top_p)]
    top_p: Option<f64>,
    /// Seed: the same seed gives the same prompts, another one others.
    #[arg(long, value_name = "S", default_value_t = 0, allow_negative_numbers = true)]
    seed: u64,
    /// The most tokens of a prompt, without those of --begin.
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
    let out = args.out.display();
    anyhow::ensure!(
        args.temperature > 0.0,
        "--temperature 0: found the one most probable prompt, expected a temperature above 0 to sample many"
    );
    // Prompts may be somebody's own work.
    anyhow::ensure!(!args.out.is_file(), "--out {out}: found a file, expected none yet");
    let packed = is_gzipped(&args.out) || args.out.extension().is_some_and(|e| e == "parquet");
    anyhow::ensure!(!packed, "--out {out}: found a name of packed files, expected one for plain JSON lines");
    probe_file("--out", &args.out)?;
    with_backend!(args.backend, |B, device| {
        write(args, &Model::<B>::load(args.target.as_deref(), &args.backend, &device)?)
    })
}

fn write<B: Backend>(args: &Args, model: &Model<B>) -> anyhow::Result<()> {
    let mut partial = args.out.clone().into_os_string();
    partial.push(".samples");
    let head = head(model)?;
    let samples = sample(args, model, &head, Path::new(&partial))?;
    let mut seen = HashSet::new();
    let mut lines = String::new();
    for sample in &samples {
        // Without the token that ends it.
        let ([said @ .., _], Some(Finish::Stop)) = (&sample.response_ids[..], sample.finish) else {
            continue;
        };
        // Where nothing is added, the words of --begin alone are no prompt.
        if model.tokenizer.decode(said, true)?.trim().is_empty() {
            continue;
        }
        let text = model.tokenizer.decode(&[&sample.prompt_ids[head.len()..], said].concat(), true)?;
        let text = text.trim();
        if seen.insert(text.to_owned()) {
            writeln!(lines, "{}", serde_json::json!({ "id": sample.id, "prompt": text }))?;
        }
    }
    if !seen.is_empty() {
        write_atomic(&args.out, |out| out.write_all(lines.as_bytes()))?;
    }
    std::fs::remove_file(&partial).with_context(|| Path::new(&partial).display().to_string())?;
    anyhow::ensure!(
        !seen.is_empty(),
        "found no prompt among {} samples, all empty or cut at {} tokens",
        samples.len(),
        args.max_tokens
    );
    eprintln!("{} prompts of {} samples", seen.len(), samples.len());
    println!("{}", args.out.display());
    Ok(())
}

/// What stands before a user's words in the target's template, and leaves it room for them.
fn head<B: Backend>(model: &Model<B>) -> anyhow::Result<Vec<TokenId>> {
    let (before, behind) = model.template()?.user_turn()?;
    let head = model.tokenizer.encode(&before)?;
    anyhow::ensure!(
        !head.is_empty(),
        "chat template: found nothing before a user's message, expected a header to go on from"
    );
    // Else the model would go on into its own answer, and all of that be taken for a prompt.
    let end = model.tokenizer.encode(behind.trim_start())?.first().copied();
    anyhow::ensure!(
        end.is_some_and(|end| model.eos.contains(&end)),
        "chat template: found {behind:?} behind a user's message, expected a token that ends texts"
    );
    Ok(head)
}

/// What the target says behind `head`, and behind the words that a prompt is to begin with.
fn sample<B: Backend>(
    args: &Args,
    model: &Model<B>,
    head: &[TokenId],
    file: &Path,
) -> anyhow::Result<Vec<Response>> {
    let mut begins = Vec::new();
    for text in &args.begin {
        // Words bear the space before them: one at the end would be a word of its own.
        let words = model.tokenizer.encode(text.trim_end())?;
        anyhow::ensure!(!words.is_empty(), "--begin: found nothing in {text:?}, expected words");
        let ends = words.iter().any(|id| model.eos.contains(id));
        anyhow::ensure!(
            !ends,
            "--begin: found a token that ends texts in {text:?}, expected words of a user"
        );
        begins.push([head, &words].concat());
    }
    if begins.is_empty() {
        begins.push(head.to_owned());
    }
    let (context, most) = (model.target.config().max_position_embeddings, args.max_tokens as usize);
    let longest = begins.iter().map(Vec::len).max().unwrap_or(0);
    anyhow::ensure!(
        longest.saturating_add(most) <= context,
        "--max-tokens {most} behind {longest} of the chat template and --begin: the target's context has {context} \
         tokens",
    );
    let name = args.out.file_stem().unwrap_or_default().to_string_lossy();
    let prompts: Vec<PromptTokens> = (0..args.count)
        .zip(begins.iter().cycle())
        .map(|(i, ids)| PromptTokens { id: format!("{name}-{i}"), ids: ids.clone() })
        .collect();
    let data = Data {
        max_new_tokens: most,
        batch: args.batch.into(),
        temperature: args.temperature,
        top_p: args.top_p,
        ..Data::default()
    };
    let talk = Talk { prompts: &prompts, follow: &|_, _| Ok(None), given: &[], unit: "prompts" };
    Ok(talk.hear(model, &data, args.seed, file)?.0)
}
