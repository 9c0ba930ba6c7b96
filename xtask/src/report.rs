//! `cargo xtask report`: the pages of a comparison, made again from its JSON.

use crate::compare::store;
use anyhow::{Context, bail};
use hspec_core::checkpoint::{read_json, write_atomic};
use hspec_eval::comparison::Results;
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// Make the pages of a comparison again.
///
/// Where DIR holds the plan and the journal of `cargo xtask compare`, all figures are computed again from
/// them, also of a run that is not finished; where it holds results.json alone, the pages are made from that.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask report runs/compare
  cargo xtask report runs/compare --json")]
pub(crate) struct Args {
    /// The folder of the comparison.
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Write the results' JSON to standard output instead of a summary.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    show(&write(&args.dir)?, &args.dir, args.json)
}

/// Writes results.json, results.md, report.html and headline.svg into the folder.
pub(crate) fn write(dir: &Path) -> anyhow::Result<Results> {
    let results = match store::read(dir)? {
        Some((manifest, records)) => Results::new(manifest, &records)?,
        None => {
            let file = dir.join("results.json");
            if !file.exists() {
                bail!("{}: holds neither manifest.json nor results.json", dir.display());
            }
            read_json(&file).with_context(|| format!("{}: no results of a comparison", file.display()))?
        }
    };
    let texts = [
        ("results.json", results.to_json()),
        ("results.md", results.to_markdown()),
        ("report.html", results.to_html()?),
        ("headline.svg", results.to_svg()?),
    ];
    for (name, text) in texts {
        write_atomic(&dir.join(name), |out| out.write_all(text.as_bytes()))?;
    }
    Ok(results)
}

/// Tells on standard output what came out.
pub(crate) fn show(results: &Results, dir: &Path, json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        write!(out, "{}", results.to_json())?;
    } else {
        write!(out, "{}", results.summary())?;
    }
    eprintln!("wrote results.json, results.md, report.html and headline.svg into {}", dir.display());
    Ok(())
}
