//! `cargo xtask distill`: the target's own answers to prompts, as token ids.

use crate::{
    backend::{Common, with_backend, workers},
    mask,
    model::{LawArgs, Model},
    output::probe,
    progress::Progress,
};
use burn::tensor::backend::Backend;
use hspec_core::prompts::{PromptFile, Prompts};
use hspec_train::{
    recipe::{Data, GivenAnswers},
    responses::{Answering, FORMAT, Finish, Follow, Origin, PromptTokens, Response, Sampling, documents},
    run_dir::target_hash,
    select::{Renderer, Selection, select},
};
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
    time::Instant,
};

/// Have a target answer prompts, for drafters to learn from.
///
/// Answers are written as token ids as soon as they end, one JSON line each, under a line that says how they were
/// sampled and with which chat template. Stopped at any moment, the same command continues. Conversations of
/// several user turns are answered turn by turn.
#[derive(clap::Args)]
#[command(after_help = "\
Prompts are JSON lines with `prompt`, `turns` or `messages`, gzipped or not; of several files with weights
(FILE:WEIGHT) each gives its share of the prompts.

Examples:
  cargo xtask distill --prompts prompts.jsonl --out responses.jsonl
  cargo xtask distill --prompts chat.jsonl.gz:0.6 code.jsonl.gz:0.4 --max-prompts 1000 --out responses.jsonl
  cargo xtask distill --prompts prompts.jsonl --out r.jsonl --temperature 0.8 --top-p 0.95 --show-mask 3")]
pub(crate) struct Args {
    /// The model: a Hugging Face folder or a GGUF file [default: models/smollm2-135m-instruct].
    #[arg(long, value_name = "DIR")]
    target: Option<PathBuf>,
    /// Prompt files, each with a weight or none of them.
    #[arg(long, value_name = "FILE[:WEIGHT]", num_args = 1.., required = true)]
    prompts: Vec<PromptFile>,
    /// File of the answers; one that is there is continued.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    law: LawArgs,
    /// The most tokens of an answer.
    #[arg(long, value_name = "N", default_value = "256", value_parser = clap::value_parser!(u32).range(1..))]
    max_new_tokens: u32,
    /// Prompts longer than this are left out.
    #[arg(long, value_name = "N", default_value = "512", value_parser = clap::value_parser!(u32).range(1..))]
    max_prompt_tokens: u32,
    /// Prompts drawn at random [default: all, or as many as keep the weights].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_prompts: Option<u32>,
    /// Answers in the files' `messages`: `context` for the target's own, or `supervised` as they stand.
    #[arg(long, value_name = "context|supervised", default_value = "context")]
    given_answers: GivenAnswers,
    /// Prompts answered at once.
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Show this many samples, with what is learned from marked.
    #[arg(long, value_name = "N", default_value_t = 0)]
    show_mask: usize,
    /// Write one JSON document about what was done.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    backend: Common,
}

/// The JSON of `distill --json`.
#[derive(Serialize)]
struct Document {
    responses: PathBuf,
    target: PathBuf,
    template: String,
    prompts: usize,
    too_long: usize,
    /// Answers in the file that end with a token that ends them, at the length limit, and as given.
    stopped: usize,
    cut: usize,
    given: usize,
    supervised_tokens: usize,
    /// Of this run.
    new_tokens: usize,
    seconds: f64,
    tokens_per_second: f64,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let prompts = Prompts::read(&args.prompts)?;
    let folder = args.out.parent().filter(|folder| !folder.as_os_str().is_empty());
    probe(folder.unwrap_or(Path::new(".")))?;
    let data = Data {
        given_answers: args.given_answers,
        max_prompts: args.max_prompts.unwrap_or(0) as usize,
        max_prompt_tokens: args.max_prompt_tokens as usize,
        max_new_tokens: args.max_new_tokens as usize,
        batch: args.batch.into(),
        temperature: args.law.temperature,
        top_k: args.law.top_k,
        top_p: args.law.top_p,
        ..Data::default()
    };
    with_backend!(args.backend, |B, device| {
        let model = Model::<B>::load(args.target.as_deref(), &args.backend, &device)?;
        distill(args, &model, &prompts, &data)
    })
}

fn distill<B: Backend>(args: &Args, model: &Model<B>, prompts: &Prompts, data: &Data) -> anyhow::Result<()> {
    let context = model.target.config().max_position_embeddings;
    anyhow::ensure!(
        data.max_prompt_tokens + data.max_new_tokens <= context,
        "--max-new-tokens {} behind {} of a prompt: the target's context has {context} tokens",
        data.max_new_tokens,
        data.max_prompt_tokens,
    );
    let selection = selected(model, prompts, data, args.law.seed)?;
    let start = Instant::now();
    let (responses, new_tokens) = answer(model, &selection, data, args.law.seed, &args.out)?;
    let seconds = start.elapsed().as_secs_f64();
    let count = |finish| responses.iter().filter(|r| r.finish == Some(finish)).count();
    let document = Document {
        responses: args.out.clone(),
        target: model.path.clone(),
        template: model.template()?.hash().to_owned(),
        prompts: selection.prompts.len(),
        too_long: selection.too_long,
        stopped: count(Finish::Stop),
        cut: count(Finish::Length),
        given: count(Finish::Given),
        supervised_tokens: responses.iter().map(Response::supervised).sum(),
        new_tokens,
        seconds,
        tokens_per_second: new_tokens as f64 / seconds,
    };
    if args.show_mask > 0 {
        mask::show(&documents(responses), args.show_mask, &model.tokenizer)?;
    }
    eprintln!(
        "{} answers ended by themselves, {} at {} tokens; {} tokens to learn from; {:.0} tokens/s",
        document.stopped,
        document.cut,
        data.max_new_tokens,
        document.supervised_tokens,
        document.tokens_per_second,
    );
    let mut out = std::io::stdout().lock();
    match args.json {
        true => writeln!(out, "{}", serde_json::to_string_pretty(&document)?)?,
        false => writeln!(out, "{}", args.out.display())?,
    }
    Ok(())
}

/// The conversations to be answered.
pub(crate) fn selected<B: Backend>(
    model: &Model<B>,
    prompts: &Prompts,
    data: &Data,
    seed: u64,
) -> anyhow::Result<Selection> {
    let selection = select(prompts, data, seed, &renderer(model, data)?)?;
    eprintln!(
        "{} of {} prompts ({} left out, longer than {} tokens)",
        selection.prompts.len().max(selection.given.len()),
        prompts.prompts.len(),
        selection.too_long,
        data.max_prompt_tokens,
    );
    Ok(selection)
}

fn renderer<'a, B: Backend>(model: &'a Model<B>, data: &Data) -> anyhow::Result<Renderer<'a>> {
    Ok(Renderer {
        tokenizer: &model.tokenizer,
        template: model.template()?,
        max_prompt_tokens: data.max_prompt_tokens,
    })
}

/// Has the conversations answered into a file, or what it lacks of them; all turns, and the number of new tokens.
pub(crate) fn answer<B: Backend>(
    model: &Model<B>,
    selection: &Selection,
    data: &Data,
    seed: u64,
    file: &Path,
) -> anyhow::Result<(Vec<Response>, usize)> {
    let renderer = renderer(model, data)?;
    let talk = Talk {
        prompts: &selection.prompts,
        follow: &|number, answers| selection.follow(number, answers, &renderer),
        given: &selection.given,
        unit: "answers",
    };
    talk.hear(model, data, seed, file)
}

/// What a target is to say something to.
pub(crate) struct Talk<'a> {
    pub(crate) prompts: &'a [PromptTokens],
    /// Later turns.
    pub(crate) follow: &'a Follow<'a>,
    /// Documents that go into the file as they are.
    pub(crate) given: &'a [Response],
    /// What is counted meanwhile.
    pub(crate) unit: &'static str,
}

impl Talk<'_> {
    /// Has it said into a file, or what that lacks; all turns, and the number of new tokens.
    pub(crate) fn hear<B: Backend>(
        &self,
        model: &Model<B>,
        data: &Data,
        seed: u64,
        file: &Path,
    ) -> anyhow::Result<(Vec<Response>, usize)> {
        let sampling = Sampling {
            params: data.sampling()?,
            seed,
            max_new_tokens: data.max_new_tokens,
            stop_tokens: &model.eos,
            batch: data.batch,
        };
        let origin = Origin {
            format: FORMAT.into(),
            target: target_hash(&model.target),
            template: model.template()?.hash().into(),
            temperature: data.temperature,
            top_k: data.top_k,
            top_p: data.top_p,
            seed,
            max_new_tokens: data.max_new_tokens,
        };
        let answering = Answering {
            target: &model.target,
            sampling: &sampling,
            origin: Some(&origin),
            follow: self.follow,
            given: self.given,
            threads: workers::<B>(model.target.device()),
        };
        let progress = Progress::count(self.unit, 0);
        let (start, mut new_tokens) = (Instant::now(), 0);
        let responses = answering.run(self.prompts, file, &mut |told| {
            new_tokens = told.new_tokens;
            progress.set_total(told.total as u64);
            progress.rate(format!("{:.0} tokens/s", told.new_tokens as f64 / start.elapsed().as_secs_f64()));
            progress.set(told.done as u64);
        })?;
        Ok((responses, new_tokens))
    }
}

/// What a run learns from, for its identity.
pub(crate) fn tokens(documents: &[Response]) -> Vec<PromptTokens> {
    let tokens = |d: &Response| PromptTokens { id: d.id.clone(), ids: d.ids().collect() };
    documents.iter().map(tokens).collect()
}
