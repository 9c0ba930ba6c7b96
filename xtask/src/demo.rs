//! `cargo xtask demo`: the same text in fewer passes, on a real model.

use crate::{
    backend::{Common, with_backend},
    fetch::{self, SMOLLM2, Source},
    generate::{Writer, Written},
    model::Model,
    progress::Progress,
    train::Run,
};
use anyhow::Context;
use burn::tensor::backend::Backend;
use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use hspec_core::{
    TokenId,
    decode::{Request, SamplingParams},
    drafter::Drafter,
    prompts::{Prompt, Prompts, read_prompts},
};
use hspec_eval::{DrafterFacts, DrafterReport, PromptRun};
use hspec_train::recipe::Recipe;
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// The drafter that comes with hspec.
const SHIPPED: &str = "assets/drafters/smollm2-135m-hspec";
/// Prompts shown: two each of chat, code and arithmetic.
const PROMPTS: usize = 6;
/// Drafts per round: with a small target on a CPU, checking more costs more than it brings.
const DRAFTS: usize = 3;
/// The most tokens of an answer.
const NEW: usize = 64;
/// The most tokens of an answer that does not count.
const WARM_UP: usize = 8;

/// Show a real model answering a few prompts plainly and with a drafter.
///
/// Fetches SmolLM2-135M-Instruct if it is not there, answers prompts of chat, code and arithmetic both
/// ways, and compares: is the text the same, how many passes of the model were saved, and how long did it
/// take?
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask demo
  cargo xtask demo --train      # with a drafter of your own, trained here in a few minutes
  cargo xtask demo --json")]
pub(crate) struct Args {
    /// Train a small drafter first and use it in place of the one that comes with hspec. It stays in
    /// runs/smollm2-135m-demo and is used again; an interrupted training continues.
    #[arg(long)]
    train: bool,
    /// Write one JSON document instead of texts and a table.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    backend: Common,
}

/// The JSON of `demo --json`.
#[derive(Serialize)]
struct Document {
    #[serde(flatten)]
    figures: Figures,
    prompts: Vec<Shown>,
}

#[derive(Serialize)]
struct Shown {
    prompt: String,
    text: String,
    #[serde(flatten)]
    figures: Figures,
}

/// Figures of one answer or of all, the token of the prompt's own pass left out.
#[derive(Clone, Serialize)]
struct Figures {
    same_text: bool,
    tau: f64,
    speedup: f64,
    target_passes: u64,
    tokens: u64,
}

impl Figures {
    /// Share of the passes that plain decoding would have taken more.
    fn saved(&self) -> f64 {
        1.0 - self.target_passes as f64 / self.tokens as f64
    }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let target = fetch::fetch(&Source::Known(SMOLLM2), &crate::models())?;
    let workspace = crate::workspace();
    let mut prompts = read_prompts(&workspace.join("assets/prompts/demo.jsonl"))?;
    prompts.truncate(PROMPTS);
    let document = with_backend!(args.backend, |B, device| {
        let model = Model::<B>::load(Some(&target), &args.backend, &device)?;
        let dir = if args.train { train(&model, &workspace)? } else { workspace.join(SHIPPED) };
        let drafter = model.drafter(&dir)?;
        Demo { quiet: args.json, model: &model, drafter: &*drafter }.compare(&prompts)
    })?;
    let mut out = std::io::stdout().lock();
    match args.json {
        true => writeln!(out, "{}", serde_json::to_string_pretty(&document)?)?,
        false => writeln!(out, "\n{}\n\n{}", table(&document), conclusion(&document))?,
    }
    Ok(())
}

/// Trains a small drafter and gives its folder.
fn train<B: Backend>(model: &Model<B>, workspace: &Path) -> anyhow::Result<PathBuf> {
    let recipe_file = workspace.join("recipes/smollm2-135m-demo.toml");
    let recipe = Recipe::read(&recipe_file)?;
    let prompts = Prompts::new(read_prompts(&workspace.join("assets/prompts/demo-train.jsonl"))?);
    let out = workspace.join("runs/smollm2-135m-demo");
    eprintln!("training a drafter into {}, after which it is tried", out.display());
    let run = Run {
        recipe_file: &recipe_file,
        out: &out,
        resume: true,
        init: None,
        limit: None,
        show_mask: 0,
        devices: 1,
    };
    run.train(model, &recipe, Some(&prompts))
        .with_context(|| format!("{}: remove it to train anew", out.display()))?;
    Ok(out.join("best"))
}

struct Demo<'a, B: Backend> {
    quiet: bool,
    model: &'a Model<B>,
    drafter: &'a dyn Drafter<B>,
}

impl<B: Backend> Demo<'_, B> {
    fn compare(&self, prompts: &[Prompt]) -> anyhow::Result<Document> {
        let progress = self.quiet.then(|| Progress::count("prompts", prompts.len() as u64));
        let mut runs = Vec::new();
        let mut shown = Vec::new();
        for (number, prompt) in prompts.iter().enumerate() {
            let question = prompt.messages.iter().map(|m| m.content.as_str()).collect::<Vec<_>>().join("\n");
            let tokens = self.model.encode(&prompt.messages, false)?;
            if number == 0 {
                // The first passes of a process pay for memory and threads that the later ones find ready.
                self.writer(false, WARM_UP).write(&tokens, 0, &mut |_| Ok(()))?;
                self.writer(true, WARM_UP).write(&tokens, 0, &mut |_| Ok(()))?;
            }
            self.show(&format!("\n### {question}\n"))?;
            // Who begins changes, so that a machine that gets slower meanwhile favours nobody.
            let (plain, speculative) = if number % 2 == 0 {
                let plain = self.answer(&tokens, false)?;
                (plain, self.answer(&tokens, true)?)
            } else {
                let speculative = self.answer(&tokens, true)?;
                (self.answer(&tokens, false)?, speculative)
            };
            let run = PromptRun::new(
                DRAFTS.min(self.drafter.max_draft()),
                &plain.generation,
                &speculative.generation,
            );
            let figures = self.figures(std::slice::from_ref(&run))?;
            shown.push(Shown { prompt: question, text: speculative.text, figures });
            runs.push(run);
            if let Some(progress) = &progress {
                progress.set(number as u64 + 1);
            }
        }
        Ok(Document { figures: self.figures(&runs)?, prompts: shown })
    }

    /// Writes an answer while it comes.
    fn answer(&self, tokens: &[TokenId], speculative: bool) -> anyhow::Result<Written> {
        self.show(if speculative { "\n[with the drafter]\n" } else { "\n[plainly]\n" })?;
        let mut out = std::io::stdout().lock();
        let written = self.writer(speculative, NEW).write(tokens, 0, &mut |text| match self.quiet {
            true => Ok(()),
            false => out.write_all(text.as_bytes()).and_then(|()| out.flush()),
        })?;
        drop(out);
        self.show("\n")?;
        Ok(written)
    }

    fn writer(&self, speculative: bool, max_new_tokens: usize) -> Writer<'_, B> {
        let request = Request {
            prompt: &[],
            sampling: SamplingParams::greedy(),
            seed: 0,
            id: 0,
            max_new_tokens,
            k: DRAFTS.min(self.drafter.max_draft()),
            stop_tokens: &self.model.eos,
        };
        Writer {
            model: self.model,
            drafter: speculative.then_some(self.drafter),
            schedule: None,
            stop: &[],
            request,
        }
    }

    fn figures(&self, runs: &[PromptRun]) -> anyhow::Result<Figures> {
        let facts = DrafterFacts::new(Path::new(""), self.drafter);
        let report = DrafterReport::new(facts, &[("demo".to_owned(), runs.to_vec())], 0)?;
        Ok(Figures {
            same_text: runs.iter().all(|run| run.same_text),
            tau: report.mean_tau,
            speedup: report.speedup,
            target_passes: report.tasks[0].rounds,
            tokens: report.tasks[0].tokens,
        })
    }

    fn show(&self, text: &str) -> std::io::Result<()> {
        if self.quiet { Ok(()) } else { std::io::stdout().lock().write_all(text.as_bytes()) }
    }
}

fn table(document: &Document) -> Table {
    let mut table = Table::new();
    let header = ["prompt", "same text", "tokens", "target passes", "passes saved", "tau", "speed"];
    table.load_style(UTF8_FULL_CONDENSED).set_header(header);
    let row = |name: &str, f: &Figures| {
        [
            name.to_owned(),
            if f.same_text { "yes" } else { "NO" }.to_owned(),
            f.tokens.to_string(),
            f.target_passes.to_string(),
            format!("{:.0} %", 100.0 * f.saved()),
            format!("{:.2}", f.tau),
            format!("{:.2} x", f.speedup),
        ]
    };
    for shown in &document.prompts {
        let short: String = shown.prompt.chars().take(40).collect();
        table.add_row(row(&short, &shown.figures));
    }
    table.add_row(row("all", &document.figures));
    table
}

/// The outcome for someone who has never heard of drafters.
fn conclusion(document: &Document) -> String {
    let f = &document.figures;
    let text = match (document.prompts.iter().filter(|p| p.figures.same_text).count(), document.prompts.len())
    {
        (same, all) if same == all => {
            format!("All {all} answers are the same, word for word, with and without the drafter.")
        }
        (same, all) => {
            format!("ONLY {same} of {all} answers are the same with and without the drafter: this is a bug.")
        }
    };
    let speed = match f.speedup {
        s if s >= 1.0 => format!("The answers came {s:.2} times as fast."),
        s => format!(
            "The answers came {s:.2} times as fast, which is slower: drafting, and checking several tokens \
             at once,\ntakes more time on this machine than the saved passes would have taken."
        ),
    };
    format!(
        "{text}\nA language model reads all its weights in every pass, and plainly a pass yields one token. The \
         drafter guesses\nahead and the model checks the guesses in one pass: a pass yielded {:.2} tokens on \
         average (tau), so that\n{} passes were enough for {} tokens.\n{speed}",
        f.tau, f.target_passes, f.tokens,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(same_text: bool, speedup: f64) -> Document {
        let figures = Figures { same_text, tau: 2.0, speedup, target_passes: 50, tokens: 100 };
        let shown = Shown { prompt: "Why?".into(), text: "So.".into(), figures: figures.clone() };
        Document { figures, prompts: vec![shown] }
    }

    #[test]
    fn json_has_the_documented_layout() {
        let json = serde_json::to_value(document(true, 1.5)).unwrap();
        let keys: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["same_text", "tau", "speedup", "target_passes", "tokens", "prompts"]);
        assert_eq!(json["prompts"][0]["same_text"], true);
    }

    #[test]
    fn the_conclusion_is_honest() {
        let good = conclusion(&document(true, 1.5));
        assert!(
            good.contains("All 1 answers are the same") && good.contains("1.50 times as fast."),
            "{good}"
        );
        let bad = conclusion(&document(false, 0.5));
        assert!(bad.contains("ONLY 0 of 1") && bad.contains("which is slower"), "{bad}");
        let table = table(&document(false, 0.5)).to_string();
        assert!(table.contains("NO") && table.contains("50 %"), "{table}");
    }
}
