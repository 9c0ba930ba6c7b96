//! `cargo xtask doctor`: why a drafter is not accepted.

use crate::{
    backend::{Common, with_backend},
    model::default_target,
};
use burn::backend::Autodiff;
use hspec_train::doctor::{Check, Diagnosis, Doctor, Verdict};
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// Check a drafter against its target, and name the first thing that differs.
///
/// A drafter can learn with a good loss and never be accepted: layers counted from elsewhere, a rotary base or a
/// vocabulary map that is another's, answers rendered with another chat template, weights that were changed.
/// Checks run in order, each told in a line; what comes first is the one to mend. Every kind of drafter in every
/// layout that can be read is checked.
#[derive(clap::Args)]
#[command(after_help = "\
Exit code 1 where anything differs. Warnings are no failure.

Examples:
  cargo xtask doctor --drafter assets/drafters/smollm2-135m-hspec
  cargo xtask doctor --target models/mine --drafter runs/mine/best --responses runs/mine/responses.jsonl
  cargo xtask doctor --drafter runs/mine/best --prompt 'Why is the sky blue?' --json")]
pub(crate) struct Args {
    /// The model: a Hugging Face folder or a GGUF file [default: models/smollm2-135m-instruct].
    #[arg(long, value_name = "DIR")]
    target: Option<PathBuf>,
    /// The drafter's folder.
    #[arg(long, value_name = "DIR")]
    drafter: PathBuf,
    /// Answers of the target to check on, from `cargo xtask distill` or the folder of a run.
    #[arg(long, value_name = "FILE")]
    responses: Option<PathBuf>,
    /// A prompt to have answered and to check on [default: some built in].
    #[arg(long, value_name = "TEXT", conflicts_with = "responses")]
    prompt: Option<String>,
    /// Write one JSON document.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    backend: Common,
}

/// The JSON of `doctor --json`.
#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    target: &'a Path,
    drafter: &'a Path,
    first_difference: Option<&'static str>,
    checks: &'a [Check],
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let target = args.target.clone().unwrap_or_else(default_target);
    let doctor = Doctor {
        target: &target,
        drafter: &args.drafter,
        responses: args.responses.as_deref(),
        prompt: args.prompt.as_deref(),
        storage: args.backend.weights,
    };
    let mut written = Ok(());
    let diagnosis: Diagnosis = with_backend!(args.backend, |B, device| {
        doctor.examine::<Autodiff<B>>(&device, &mut |check| {
            if !args.json && written.is_ok() {
                written = writeln!(std::io::stdout(), "{}", line(check));
            }
        })
    });
    written?;
    let first = diagnosis.first_difference();
    if args.json {
        let document = Document {
            schema: 1,
            target: &target,
            drafter: &args.drafter,
            first_difference: first.map(|check| check.name),
            checks: &diagnosis.checks,
        };
        writeln!(std::io::stdout(), "{}", serde_json::to_string_pretty(&document)?)?;
    }
    match first {
        Some(check) => anyhow::bail!(
            "the first thing that differs: {}: found {}, expected {}",
            check.name,
            check.found,
            check.expected
        ),
        None => Ok(()),
    }
}

fn line(check: &Check) -> String {
    let verdict = match check.verdict {
        Verdict::Ok => "ok",
        Verdict::Differs => "DIFFERS",
        Verdict::Warning => "warning",
        Verdict::Skipped => "skipped",
    };
    let expected = match check.expected.as_str() {
        "" => String::new(),
        text => format!("; expected {text}"),
    };
    let difference = check.difference.map_or(String::new(), |d| format!(" (largest difference {d:.1e})"));
    format!("{verdict:<8} {}: {}{expected}{difference}", check.name, check.found)
}
