//! The command line of hspec: `cargo xtask COMMAND`, one file per command.
//!
//! Standard output carries results; logs, progress and errors go to standard error. Exit codes: 0 done,
//! 1 failed, 2 wrong usage.

mod backend;
mod bench;
mod cache;
mod compare;
mod demo;
mod distill;
mod doctor;
mod eval;
mod export;
mod fetch;
mod generate;
mod inspect;
mod kv_table;
mod mask;
mod model;
mod output;
mod parity;
mod progress;
mod prompts;
mod report;
mod schedule;
mod test;
mod train;

use clap::{Parser, Subcommand};
use std::{io::IsTerminal, path::PathBuf, process::ExitCode};
use tracing_subscriber::EnvFilter;

/// Train, measure and run H-Spec drafters for speculative decoding.
#[derive(Parser)]
#[command(name = "xtask", bin_name = "cargo xtask", version, arg_required_else_help = true)]
#[command(after_help = "\
Exit codes: 0 done, 1 failed, 2 wrong usage. Set RUST_LOG=debug to see more.

Examples:
  cargo xtask demo
  cargo xtask generate --prompt 'Why is the sky blue?'
  cargo xtask help generate")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Fetch(fetch::Args),
    Demo(demo::Args),
    Generate(generate::Args),
    Eval(eval::Args),
    Compare(compare::Args),
    Report(report::Args),
    Test(test::Args),
    Distill(distill::Args),
    Prompts(prompts::Args),
    Cache(cache::Args),
    Doctor(doctor::Args),
    Train(train::Args),
    Inspect(inspect::Args),
    Export(export::Args),
    KvTable(kv_table::Args),
    Bench(bench::Args),
    Parity(parity::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    // What the hub's library logs comes back as an error too.
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn,hf_hub=off"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).without_time();
    log.with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal()).init();
    let result = match &cli.command {
        Command::Fetch(args) => fetch::run(args),
        Command::Demo(args) => demo::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Eval(args) => eval::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Report(args) => report::run(args),
        Command::Test(args) => test::run(args),
        Command::Distill(args) => distill::run(args),
        Command::Prompts(args) => prompts::run(args),
        Command::Cache(args) => cache::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Train(args) => train::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Export(args) => export::run(args),
        Command::KvTable(args) => kv_table::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Parity(args) => parity::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read the output has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", with_causes(&error));
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kind = error.root_cause().downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    kind == Some(std::io::ErrorKind::BrokenPipe)
}

/// An error and its causes on one line, leaving out causes that the text before already tells.
fn with_causes(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |message, cause| {
        match (message.is_empty(), message.contains(&cause)) {
            (true, _) => cause,
            (_, true) => message,
            _ => format!("{message}: {cause}"),
        }
    })
}

/// The workspace's folder when run through cargo, else the current one.
fn workspace() -> PathBuf {
    let folder = std::env::var_os("CARGO_MANIFEST_DIR").map(|dir| PathBuf::from(dir).join(".."));
    let folder = folder.unwrap_or_default().canonicalize().unwrap_or_default();
    // Shorter in messages where both are the same.
    if std::env::current_dir().is_ok_and(|current| current == folder) { PathBuf::new() } else { folder }
}

/// The folder that models are fetched into and looked for: `HSPEC_MODELS`, or `models` in the workspace.
fn models() -> PathBuf {
    workspace().join(std::env::var_os("HSPEC_MODELS").unwrap_or_else(|| "models".into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent_and_every_command_has_examples() {
        let command = Cli::command();
        command.clone().debug_assert();
        for sub in command.get_subcommands() {
            let help = sub.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("cargo xtask"), "{} has no examples", sub.get_name());
        }
    }

    #[test]
    fn causes_are_told_once() {
        let inner = std::io::Error::other("disk full");
        let error = anyhow::Error::new(inner).context("writing").context("fetching");
        assert_eq!(with_causes(&error), "fetching: writing: disk full");
        let told = anyhow::Error::msg("disk full").context("model: disk full");
        assert_eq!(with_causes(&told), "model: disk full");
    }
}
