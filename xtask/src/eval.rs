//! `cargo xtask eval`: acceptance and speed of drafters on prompt files.

use crate::{
    backend::{Common, threads, with_backend},
    model::{Model, SamplingArgs},
    output::{probe, probe_file},
    progress::Progress,
    schedule::ScheduleArgs,
};
use anyhow::{Context, bail};
use burn::tensor::backend::Backend;
use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use hspec_core::{
    checkpoint::write_atomic,
    prompts::{Prompt, read_prompts},
};
use hspec_eval::{
    DrafterFacts, DrafterReport, Evaluation, Machine, Report, Settings, Task, TaskPrompt, calibrate, commit,
    utc_date,
};
use std::{io::Write, path::PathBuf, time::SystemTime};

/// Measure acceptance and speed of drafters on prompt files.
///
/// Every prompt is decoded plainly and with each drafter, one right after the other in the same process,
/// and who begins changes from prompt to prompt. Times are those after the prompt's own pass. tau is the
/// number of tokens per target pass, the bonus token included; at temperature 0 the texts must be the
/// same, and are compared token by token.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask eval --drafter assets/drafters/smollm2-135m-hspec --prompts assets/prompts/demo.jsonl
  cargo xtask eval --drafter runs/a/best runs/b/best --prompts gsm8k.jsonl mt-bench.jsonl \\
      --max-prompts 20 --out runs/eval
  cargo xtask eval --drafter runs/a/best --prompts gsm8k.jsonl --temperature 1 --seed 7 --json
  cargo xtask eval --drafter runs/a/best --prompts gsm8k.jsonl --fit-calibration runs/a/sts.json
  cargo xtask eval --drafter runs/a/best --prompts gsm8k.jsonl --schedule threshold=0.4 \\
      --calibration runs/a/sts.json")]
pub(crate) struct Args {
    /// The model: a Hugging Face folder or a GGUF file [default: models/smollm2-135m-instruct].
    #[arg(long, value_name = "DIR")]
    target: Option<PathBuf>,
    /// Drafters for it; several are measured on the same plain decoding.
    #[arg(long, value_name = "DIR", required = true, num_args = 1..)]
    drafter: Vec<PathBuf>,
    /// Prompt files, JSON lines, gzipped or not; a task is named after its file.
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    prompts: Vec<PathBuf>,
    /// The most prompts of a file, from its beginning.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_prompts: Option<u32>,
    /// The most tokens of an answer.
    #[arg(long, value_name = "N", default_value = "128", value_parser = clap::value_parser!(u32).range(2..))]
    max_new_tokens: u32,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    schedule: ScheduleArgs,
    /// Fit temperatures to the drafter's confidences (Sequential Temperature Scaling) and write them into
    /// this file, for --calibration.
    #[arg(long, value_name = "FILE", conflicts_with = "schedule")]
    fit_calibration: Option<PathBuf>,
    /// Write the report's JSON to standard output instead of a table.
    #[arg(long)]
    json: bool,
    /// Write results.json and results.md into this folder.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    backend: Common,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(dir) = &args.out {
        probe(dir)?;
    }
    if let Some(file) = &args.fit_calibration {
        if args.drafter.len() > 1 {
            bail!("--fit-calibration: found {} drafters, expected one", args.drafter.len());
        }
        probe_file("--fit-calibration", file)?;
    }
    let files = read(&args.prompts, args.max_prompts)?;
    let report = with_backend!(args.backend, |B, device| evaluate::<B>(args, &files, &device))?;
    if let Some(dir) = &args.out {
        let markdown = report.to_markdown(&command(std::env::args()), &utc_date(SystemTime::now()));
        for (name, text) in [("results.json", report.to_json()), ("results.md", markdown)] {
            write_atomic(&dir.join(name), |out| out.write_all(text.as_bytes()))?;
        }
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        write!(out, "{}", report.to_json())?;
    } else {
        writeln!(out, "{}", summary(&report))?;
    }
    if let Some(dir) = &args.out {
        eprintln!("wrote results.json and results.md into {}", dir.display());
    }
    Ok(())
}

/// Prompts by task name.
fn read(files: &[PathBuf], most: Option<u32>) -> anyhow::Result<Vec<(String, Vec<Prompt>)>> {
    let mut tasks: Vec<(String, Vec<Prompt>)> = Vec::new();
    for file in files {
        let mut prompts = read_prompts(file)?;
        prompts.truncate(most.map_or(usize::MAX, |most| most as usize));
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let name = name.trim_end_matches(".gz").trim_end_matches(".jsonl").to_owned();
        if tasks.iter().any(|(other, _)| *other == name) {
            bail!(
                "--prompts {}: another file is named {name} too, and tasks are told by name",
                file.display()
            );
        }
        tasks.push((name, prompts));
    }
    Ok(tasks)
}

fn evaluate<B: Backend>(
    args: &Args,
    files: &[(String, Vec<Prompt>)],
    device: &B::Device,
) -> anyhow::Result<Report> {
    let schedule = args.schedule.load()?;
    let model = Model::<B>::load(args.target.as_deref(), &args.backend, device)?;
    let drafters = args.drafter.iter().map(|dir| model.drafter(dir)).collect::<anyhow::Result<Vec<_>>>()?;
    let encode = |(name, prompts): &(String, Vec<Prompt>)| {
        let tokens = |prompt: &Prompt| {
            let tokens = model.encode(&prompt.messages, false)?;
            anyhow::Ok(TaskPrompt { id: prompt.id.clone(), tokens })
        };
        let prompts = prompts.iter().map(tokens).collect::<anyhow::Result<_>>()?;
        anyhow::Ok(Task { name: name.clone(), prompts })
    };
    let tasks = files.iter().map(encode).collect::<anyhow::Result<Vec<_>>>()?;
    let evaluation = Evaluation {
        target: &model.target,
        drafters: &drafters,
        k: args.sampling.k(&drafters)?,
        schedule: schedule.as_ref(),
        max_new_tokens: args.max_new_tokens as usize,
        sampling: args.sampling.params()?,
        seed: args.sampling.law.seed,
        stop_tokens: &model.eos,
    };
    let progress = Progress::count("answers", 0);
    let runs = evaluation.run(&tasks, &mut |done, total| {
        progress.set_total(total as u64);
        progress.set(done as u64);
    })?;
    drop(progress);
    let reports = args.drafter.iter().zip(&drafters).zip(&runs).map(|((dir, drafter), runs)| {
        DrafterReport::new(DrafterFacts::new(dir, &**drafter), runs, args.sampling.law.seed)
    });
    let mut reports = reports.collect::<Result<Vec<_>, _>>()?;
    if let Some(file) = &args.fit_calibration {
        let (calibration, fit) = calibrate(&runs[0]).context("--fit-calibration")?;
        calibration.save(file).context("--fit-calibration")?;
        reports[0].calibration = Some(fit);
    }
    let settings = Settings {
        target: model.path.display().to_string(),
        k: evaluation.k,
        temperature: evaluation.sampling.temperature(),
        max_new_tokens: evaluation.max_new_tokens,
        schedule: args.schedule.name(),
    };
    let commit = commit(&crate::workspace());
    Ok(Report::new(commit, Machine::this(threads()), settings, reports))
}

/// The command as it could be typed again.
pub(crate) fn command(args: impl Iterator<Item = String>) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,".contains(c);
    let quoted = |arg: String| match arg.is_empty() || !arg.chars().all(plain) {
        true => format!("'{}'", arg.replace('\'', r"'\''")),
        false => arg,
    };
    args.skip(1).map(quoted).fold("cargo xtask".to_owned(), |command, arg| command + " " + &arg)
}

fn summary(report: &Report) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header([
        "drafter",
        "task",
        "drafts a round",
        "tau",
        "ms per token",
        "plainly",
        "speed-up",
        "same text",
    ]);
    for drafter in &report.drafters {
        for task in &drafter.tasks {
            table.add_row([
                drafter.facts.path.clone(),
                task.task.clone(),
                format!("{:.2}", task.drafts_per_round()),
                format!("{:.2}", task.tau),
                format!("{:.1}", task.ms_per_token),
                format!("{:.1}", task.ms_per_token_plain),
                format!("{:.2}", task.ms_per_token_plain / task.ms_per_token),
                format!("{} of {}", task.same_text, task.prompts),
            ]);
        }
        let interval =
            drafter.interval().map_or_else(String::new, |[low, high]| format!(" ({low:.2} to {high:.2})"));
        table.add_row([
            drafter.facts.path.clone(),
            "all".to_owned(),
            String::new(),
            format!("{:.2}", drafter.mean_tau),
            String::new(),
            String::new(),
            format!("{:.2}{interval}", drafter.speedup),
            String::new(),
        ]);
    }
    let fits = report.drafters.iter().filter_map(|drafter| drafter.calibration.as_ref());
    fits.fold(table.to_string(), |text, fit| {
        let percent = |x: &f64| format!("{:.1}", 100.0 * x);
        let row = |values: &[f64]| values.iter().map(percent).collect::<Vec<_>>().join(" ");
        format!(
            "{text}\ncalibration error of the survival by slot, in percent over {} rounds: {} before, {} after",
            fit.rounds,
            row(&fit.ece_before),
            row(&fit.ece_after)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_quoted_where_needed() {
        let args = ["/somewhere/xtask", "eval", "--prompts", "my file.jsonl", "--out", "runs/a=1", "it's"];
        let expected = r"cargo xtask eval --prompts 'my file.jsonl' --out runs/a=1 'it'\''s'";
        assert_eq!(command(args.iter().map(|a| (*a).to_owned())), expected);
    }

    #[test]
    fn tasks_are_named_after_their_files() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "{\"prompt\":\"a\"}\n{\"prompt\":\"b\"}\n").unwrap();
            path
        };
        let (one, two, same) = (file("gsm8k.jsonl"), file("mt.bench.jsonl"), file("other/gsm8k.jsonl"));
        let tasks = read(&[one.clone(), two], Some(1)).unwrap();
        let told: Vec<_> = tasks.iter().map(|(name, prompts)| (name.as_str(), prompts.len())).collect();
        assert_eq!(told, [("gsm8k", 1), ("mt.bench", 1)]);
        let message = read(&[one, same], None).unwrap_err().to_string();
        assert!(message.contains("another file is named gsm8k"), "{message}");
    }
}
