//! `cargo xtask generate`: answers to prompts, plainly or with a drafter.

use crate::{
    backend::{Common, with_backend},
    model::{Model, SamplingArgs},
    progress::Progress,
    schedule::ScheduleArgs,
};
use anyhow::Context;
use burn::tensor::backend::Backend;
use hspec_core::{
    TokenId,
    decode::{Decoder, Finish, Generation, Request, Schedule, Timing},
    drafter::Drafter,
    prompts::{Prompt, read_prompts},
    text::{Message, StopHit, StopStrings, TextStream},
};
use hspec_eval::Acceptance;
use serde::Serialize;
use std::{io::Write, ops::ControlFlow, path::PathBuf, time::Duration};

/// Answer prompts with a target, plainly or with a drafter.
///
/// The text is the target's own either way; a drafter only makes it come in fewer passes. Text is
/// written to standard output as soon as it is final: never half a character, and never past a stop
/// string. What it took goes to standard error.
#[derive(clap::Args)]
#[command(after_help = "\
Prompts are put into the model's chat template where it has one.

Examples:
  cargo xtask generate --prompt 'Why is the sky blue?'
  cargo xtask generate --prompt 'Why is the sky blue?' --drafter assets/drafters/smollm2-135m-hspec
  cargo xtask generate --prompt 'Why is the sky blue?' --drafter assets/drafters/smollm2-135m-hspec \\
      --schedule threshold=0.4
  cargo xtask generate --prompts assets/prompts/demo.jsonl --max-new-tokens 64 --json
  cargo xtask generate --prompt 'def add(a, b):' --raw --stop 'def ' --temperature 0.7 --seed 3")]
pub(crate) struct Args {
    /// The model: a Hugging Face folder or a GGUF file [default: models/smollm2-135m-instruct].
    #[arg(long, value_name = "DIR")]
    target: Option<PathBuf>,
    /// A drafter for it; without one, decoding is plain.
    #[arg(long, value_name = "DIR")]
    drafter: Option<PathBuf>,
    #[command(flatten)]
    input: Input,
    /// The most tokens of an answer.
    #[arg(long, value_name = "N", default_value = "256", value_parser = clap::value_parser!(u32).range(1..))]
    max_new_tokens: u32,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    schedule: ScheduleArgs,
    /// End an answer before this text; may be given several times.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    /// Take prompts as they are, without the chat template.
    #[arg(long)]
    raw: bool,
    /// Write one JSON document instead of the text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    backend: Common,
}

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct Input {
    /// A prompt.
    #[arg(long, value_name = "TEXT", value_parser = not_blank, allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Prompts: JSON lines with `prompt`, `turns` or `messages`, gzipped or not.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
}

fn not_blank(text: &str) -> Result<String, String> {
    if text.trim().is_empty() { Err("the prompt is empty".to_owned()) } else { Ok(text.to_owned()) }
}

/// The JSON of `generate --json`.
#[derive(Serialize)]
struct Document {
    target: String,
    drafter: Option<String>,
    k: usize,
    schedule: Option<String>,
    temperature: f64,
    seed: u64,
    max_new_tokens: usize,
    answers: Vec<Answer>,
}

#[derive(Serialize)]
struct Answer {
    id: String,
    prompt_tokens: usize,
    tokens: Vec<TokenId>,
    text: String,
    finish: &'static str,
    /// Drafts verified (`proposed`) and accepted, by round.
    rounds: Vec<Round>,
    /// Confidences that were no probabilities; a schedule takes them for 0.
    unusable_confidences: usize,
    tau: f64,
    target_passes: usize,
    prefill_ms: f64,
    draft_ms: f64,
    target_ms: f64,
    sampling_ms: f64,
    total_ms: f64,
}

#[derive(Serialize)]
struct Round {
    proposed: usize,
    accepted: usize,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let prompts = match (&args.input.prompt, &args.input.prompts) {
        (Some(text), _) => vec![Prompt::new("1", vec![Message::user(text)])],
        (None, Some(file)) => read_prompts(file)?,
        (None, None) => unreachable!("one of the group is required"),
    };
    with_backend!(args.backend, |B, device| generate::<B>(args, &prompts, &device))
}

fn generate<B: Backend>(args: &Args, prompts: &[Prompt], device: &B::Device) -> anyhow::Result<()> {
    let schedule = args.schedule.load()?;
    let model = Model::<B>::load(args.target.as_deref(), &args.backend, device)?;
    let drafter = args.drafter.as_ref().map(|dir| model.drafter(dir)).transpose()?;
    let writer = Writer {
        model: &model,
        drafter: drafter.as_deref(),
        schedule: schedule.as_ref(),
        stop: &args.stop,
        request: Request {
            prompt: &[],
            sampling: args.sampling.params()?,
            seed: args.sampling.law.seed,
            id: 0,
            max_new_tokens: args.max_new_tokens as usize,
            k: args.sampling.k(&drafter)?,
            stop_tokens: &model.eos,
        },
    };
    // Of many prompts, the last may be the one that is too long.
    let encode = |prompt: &Prompt| {
        let tokens = model.encode(&prompt.messages, args.raw)?;
        writer.check(&tokens)?;
        anyhow::Ok(tokens)
    };
    let encoded: Vec<Vec<TokenId>> = prompts
        .iter()
        .map(|prompt| encode(prompt).with_context(|| format!("prompt {}", prompt.id)))
        .collect::<anyhow::Result<_>>()?;
    let mut out = std::io::stdout().lock();
    let progress = args.json.then(|| Progress::count("answers", prompts.len() as u64));
    let mut answers = Vec::new();
    for (number, (prompt, tokens)) in prompts.iter().zip(&encoded).enumerate() {
        let named = || format!("prompt {}", prompt.id);
        let mut show = |text: &str| match args.json {
            true => Ok(()),
            false => out.write_all(text.as_bytes()).and_then(|()| out.flush()),
        };
        if prompts.len() > 1 {
            show(&format!("--- {}\n", prompt.id))?;
        }
        let written = writer.write(tokens, number as u64, &mut show).with_context(named)?;
        show("\n")?;
        match &progress {
            Some(progress) => progress.set(number as u64 + 1),
            None => eprintln!("{}", written.summary()),
        }
        answers.push(written.answer(&prompt.id, tokens.len()));
    }
    drop(progress);
    if args.json {
        let document = Document {
            target: model.path.display().to_string(),
            drafter: args.drafter.as_ref().map(|dir| dir.display().to_string()),
            k: if drafter.is_some() { writer.request.k } else { 0 },
            schedule: args.schedule.name(),
            temperature: writer.request.sampling.temperature(),
            seed: writer.request.seed,
            max_new_tokens: writer.request.max_new_tokens,
            answers,
        };
        writeln!(out, "{}", serde_json::to_string_pretty(&document)?)?;
    }
    Ok(())
}

/// Decodes prompts and hands out their text as it becomes final.
pub(crate) struct Writer<'a, B: Backend> {
    pub(crate) model: &'a Model<B>,
    pub(crate) drafter: Option<&'a dyn Drafter<B>>,
    /// Decides how many drafts are verified.
    pub(crate) schedule: Option<&'a Schedule>,
    /// Texts that end an answer.
    pub(crate) stop: &'a [String],
    /// All but the prompt and its number.
    pub(crate) request: Request<'a>,
}

/// An answer as it was written.
pub(crate) struct Written {
    pub(crate) generation: Generation,
    pub(crate) text: String,
    k: usize,
    stop: Option<StopHit>,
}

impl<B: Backend> Writer<'_, B> {
    /// Refuses a prompt that cannot be decoded, without decoding it.
    pub(crate) fn check(&self, prompt: &[TokenId]) -> hspec_core::Result<()> {
        let request = Request { prompt, max_new_tokens: 0, ..self.request.clone() };
        Decoder::new(&self.model.target, None).generate(&request, &mut |_| ControlFlow::Break(())).map(|_| ())
    }

    /// Decodes prompt number `id`.
    pub(crate) fn write(
        &self,
        prompt: &[TokenId],
        id: u64,
        show: &mut dyn FnMut(&str) -> std::io::Result<()>,
    ) -> anyhow::Result<Written> {
        let mut stream = StopStrings::new(TextStream::new(&self.model.tokenizer, true), self.stop)?;
        let mut text = String::new();
        let mut push = |tokens: &[TokenId]| -> anyhow::Result<bool> {
            let piece = stream.push(tokens)?;
            text += &piece.text;
            show(&piece.text)?;
            Ok(piece.stop.is_some())
        };
        let mut failed = None;
        let request = Request { prompt, id, ..self.request.clone() };
        let decoder = Decoder::new(&self.model.target, self.drafter).scheduled(self.schedule);
        let generation = decoder.generate(&request, &mut |tokens| match push(tokens) {
            Ok(false) => ControlFlow::Continue(()),
            Ok(true) => ControlFlow::Break(()),
            Err(error) => {
                failed = Some(error);
                ControlFlow::Break(())
            }
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
        let rest = stream.flush()?;
        text += &rest.text;
        show(&rest.text)?;
        Ok(Written { generation, text, k: request.k, stop: rest.stop })
    }
}

impl Written {
    /// Tokens per target pass after the prompt's.
    fn tau(&self) -> f64 {
        Acceptance::of(&self.generation, self.k).tau()
    }

    fn finish(&self) -> &'static str {
        match self.generation.finish {
            _ if self.stop.is_some() => "stop_string",
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Context => "context",
            Finish::Cancelled => "cancelled",
        }
    }

    fn summary(&self) -> String {
        let Generation { tokens, target_passes, timing, .. } = &self.generation;
        let after = timing.total.saturating_sub(timing.prefill);
        let per_token = milliseconds(after) / tokens.len().saturating_sub(1).max(1) as f64;
        format!(
            "[{} tokens, {}; {target_passes} target passes, tau {:.2}; prompt {:.0} ms, then {per_token:.1} ms per token]",
            tokens.len(),
            self.finish(),
            self.tau(),
            milliseconds(timing.prefill),
        )
    }

    fn answer(self, id: &str, prompt_tokens: usize) -> Answer {
        let (tau, finish) = (self.tau(), self.finish());
        let Generation { mut tokens, rounds, unusable_confidences, target_passes, timing, .. } =
            self.generation;
        let Timing { prefill, draft, target, sampling, total } = timing;
        if let Some(stop) = self.stop {
            tokens.truncate(stop.tokens);
        }
        Answer {
            id: id.to_owned(),
            prompt_tokens,
            tokens,
            text: self.text,
            finish,
            rounds: rounds.iter().map(|r| Round { proposed: r.proposed, accepted: r.accepted }).collect(),
            unusable_confidences,
            tau,
            target_passes,
            prefill_ms: milliseconds(prefill),
            draft_ms: milliseconds(draft),
            target_ms: milliseconds(target),
            sampling_ms: milliseconds(sampling),
            total_ms: milliseconds(total),
        }
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
