//! `cargo xtask compare`: drafters over tasks, draft lengths, temperatures, context lengths and seeds.

mod plan;
mod public;
pub(crate) mod store;
mod suites;

use crate::{
    backend::{Common, threads, with_backend},
    model::Model,
    output::probe,
    progress::Progress,
    report,
};
use anyhow::{Context, bail};
use burn::tensor::backend::Backend;
use hspec_core::{decode::SamplingParams, drafter::Drafter};
use hspec_eval::{
    Error,
    comparison::{Cell, Manifest, Measurer, Missing, Question, Record},
};
use plan::{Chosen, Plan};
use std::path::PathBuf;
use store::Store;
use suites::{Asked, Suite};

/// The most tokens of the decodings before the first that counts.
const WARM_UP: usize = 16;

/// Compare drafters, with an interval for every figure and difference.
///
/// Every prompt is decoded plainly and with each drafter in turn, and then goes into a journal in the folder of
/// --out: a run that was stopped, at any moment, goes on where it was when the same command
/// is given again, and drafters, tasks and settings may be added later. The folder then holds results.json,
/// results.md, report.html, a page that needs nothing but a browser, and headline.svg, its first figures.
///
/// Sets: own (chat, code, reasoning, translation, summary and retrieval, written for this project), synthetic
/// (citation and questions in texts made as long as --context says), hspec, deepspec and helmet (the public
/// sets of the papers, from the Hugging Face hub), one set of them as in own:code, and files of JSON lines.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask compare --drafters assets/drafters/smollm2-135m-hspec --out runs/compare
  cargo xtask compare --drafters hspec=runs/a/best dspark=runs/b/best --suite own gsm8k.jsonl \\
      --k 3 5 7 --temperature 0 1 --seeds 3 --out runs/compare
  cargo xtask compare --drafters hspec#0=runs/a/best hspec#1=runs/b/best dspark=runs/c/best \\
      --out runs/pooled
  cargo xtask compare --drafters runs/a/best --suite synthetic --context 512..8192 --out runs/long
  cargo xtask compare --target models/finetuned --drafters runs/a/best runs/b/best --suite deepspec \\
      --protocol deepspec --skip-missing --out runs/transfer")]
pub(crate) struct Args {
    /// The model: a Hugging Face folder or a GGUF file [default: models/smollm2-135m-instruct].
    #[arg(long, value_name = "DIR")]
    target: Option<PathBuf>,
    /// Drafters for it, with the names that they are to have in the report; names that differ behind a `#`
    /// alone are trainings of one drafter, which share a row.
    #[arg(long, value_name = "[NAME=]DIR", required = true, num_args = 1..)]
    drafters: Vec<String>,
    /// Sets of prompts.
    #[arg(long, value_name = "SET|FILE", num_args = 1.., default_value = "own")]
    suite: Vec<String>,
    /// Take k, temperatures, context lengths and the length of answers from a paper.
    #[arg(long, value_name = "hspec|deepspec|helmet", value_parser = ["hspec", "deepspec", "helmet"])]
    protocol: Option<String>,
    /// Drafts per round [default: 7].
    #[arg(long, value_name = "N", num_args = 1.., value_parser = clap::value_parser!(u16).range(1..))]
    k: Vec<u16>,
    /// Temperatures of sampling; 0 takes the most probable token [default: 0].
    #[arg(long, value_name = "T", num_args = 1.., value_parser = crate::model::temperature, allow_negative_numbers = true)]
    temperature: Vec<f64>,
    /// Tokens that prompt and answer may have together, for sets of any length; A..B doubles from A to B.
    #[arg(long, value_name = "N|A..B", num_args = 1.., value_parser = plan::contexts)]
    context: Vec<plan::Contexts>,
    /// Seeds of the sampling: every prompt is decoded with each of 0 to N - 1.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..))]
    seeds: u16,
    /// The most prompts of a set, from its beginning.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_prompts: Option<u32>,
    /// The most tokens of an answer [default: 128].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    max_new_tokens: Option<u32>,
    /// Go on without sets that cannot be had, and say so in the report.
    #[arg(long)]
    skip_missing: bool,
    /// Folder of the comparison.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Write the results' JSON to standard output instead of a summary.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    backend: Common,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    probe(&args.out)?;
    let table = public::Table::read()?;
    let plan = Plan::new(args, &table)?;
    let (suites, missing) = suites::load(&args.suite, &table, args.skip_missing)?;
    if suites.is_empty() {
        bail!("--suite: none of the sets can be had");
    }
    with_backend!(args.backend, |B, device| compare::<B>(args, plan, &suites, missing, &device))?;
    report::show(&report::write(&args.out)?, &args.out, args.json)
}

fn compare<B: Backend>(
    args: &Args,
    mut plan: Plan,
    suites: &[Suite],
    mut missing: Vec<Missing>,
    device: &B::Device,
) -> anyhow::Result<()> {
    let mut model = Model::<B>::load(args.target.as_deref(), &args.backend, device)?;
    // As in both papers.
    model.chat = model.chat.map(|chat| chat.thinking(false));
    missing.extend(plan.leave_out_contexts(model.target.config().max_position_embeddings)?);
    let mut drafters: Vec<(Chosen, Box<dyn Drafter<B>>)> = Vec::new();
    for chosen in plan::drafters(&args.drafters)? {
        let drafter = model.drafter(&chosen.dir)?;
        if let Some(k) = plan.ks.iter().find(|&&k| k > drafter.max_draft()) {
            bail!("--k {k}: drafter {} proposes at most {} tokens at once", chosen.name, drafter.max_draft());
        }
        drafters.push((chosen, drafter));
    }
    let limits = suites::Limits {
        max_prompts: args.max_prompts.map(|n| n as usize),
        contexts: &plan.contexts,
        max_new_tokens: plan.max_new_tokens,
    };
    let mut asked = Vec::new();
    for suite in suites {
        asked.extend(suite.ask(&model, &limits)?);
    }
    if asked.is_empty() {
        bail!("--suite: no prompts");
    }
    let mut manifest = plan.manifest(&model, &drafters, &asked, missing, threads())?;
    let mut store = Store::open(&args.out, &mut manifest)?;
    let measurer =
        Measurer { target: &model.target, max_new_tokens: plan.max_new_tokens, stop_tokens: &model.eos };
    measure(&measurer, &manifest, &drafters, &asked, &mut store)
}

/// Everything that the journal lacks, prompt by prompt.
fn measure<B: Backend>(
    measurer: &Measurer<'_, B>,
    manifest: &Manifest,
    drafters: &[(Chosen, Box<dyn Drafter<B>>)],
    asked: &[Asked],
    store: &mut Store,
) -> anyhow::Result<()> {
    let cells = manifest.ks.len() * manifest.temperatures.len() * drafters.len() * manifest.seeds.len();
    let total = cells * asked.iter().map(|task| task.prompts.len()).sum::<usize>();
    let progress = Progress::count("answers", total as u64);
    let (mut done, mut warm) = (0, false);
    // Counts every question, also those that are done, so that whose turn it is does not depend on interruptions.
    let mut turn = 0;
    for task in asked {
        for &temperature in &manifest.temperatures {
            for (number, prompt) in task.prompts.iter().enumerate() {
                // All seeds of a prompt before the next: what is cut off then has whole prompts.
                for &seed in &manifest.seeds {
                    let question = Question { id: &prompt.id, tokens: &prompt.tokens, number, seed };
                    let named = || format!("task {}, prompt {}", task.task, prompt.id);
                    turn += 1;
                    let mut contestants = contestants(manifest, drafters, task, temperature);
                    let all = contestants.len();
                    contestants.retain(|(_, cell)| !store.has(&cell.key(&prompt.id, seed)));
                    done += all - contestants.len();
                    progress.set(done as u64);
                    if contestants.is_empty() {
                        continue;
                    }
                    if !warm {
                        warm_up(measurer, &question, drafters).with_context(named)?;
                        warm = true;
                    }
                    let records: Vec<Record> =
                        measurer.measure(&question, &contestants, turn).map_err(|source| Error::Prompt {
                            task: task.task.clone(),
                            prompt: prompt.id.clone(),
                            source: Box::new(source),
                        })?;
                    store.append(&records)?;
                    done += records.len();
                    progress.set(done as u64);
                }
            }
        }
    }
    Ok(())
}

/// Each drafter with each draft length on a task.
fn contestants<'a, B: Backend>(
    manifest: &Manifest,
    drafters: &'a [(Chosen, Box<dyn Drafter<B>>)],
    task: &Asked,
    temperature: f64,
) -> Vec<(&'a dyn Drafter<B>, Cell)> {
    let mut list: Vec<(&dyn Drafter<B>, Cell)> = Vec::new();
    for (chosen, drafter) in drafters {
        let (name, task_name, context) = (&chosen.name, &task.task, task.context);
        list.extend(manifest.ks.iter().map(|&k| {
            let cell = Cell { drafter: name.clone(), task: task_name.clone(), k, temperature, context };
            (&**drafter, cell)
        }));
    }
    list
}

/// Pays for pages and threads that all later decodings find ready.
fn warm_up<B: Backend>(
    measurer: &Measurer<'_, B>,
    question: &Question<'_>,
    drafters: &[(Chosen, Box<dyn Drafter<B>>)],
) -> anyhow::Result<()> {
    let most = WARM_UP.min(measurer.max_new_tokens);
    let greedy = SamplingParams::greedy();
    measurer.answer(question, None, 0, greedy, most)?;
    for (_, drafter) in drafters {
        measurer.answer(question, Some(&**drafter), drafter.max_draft().min(7), greedy, most)?;
    }
    Ok(())
}
