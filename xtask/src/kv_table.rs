//! `cargo xtask kv-table`: what drafters add to the KV cache.

use anyhow::Context;
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use hspec_core::checkpoint::read_json;
use hspec_eval::kv::{KvRow, KvShape, paper_targets};
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// Bytes of a bf16 value, in which serving keeps caches.
const BF16: usize = 2;

/// Print how much KV cache a drafter adds to its target's, per token.
///
/// A DFlash or DSpark drafter keeps keys and values of its own for every token of every request; an H-Spec
/// drafter reads the target's. Without arguments, the targets of the paper's Table 1; with them, the given
/// models: DFlash drafters are taken to have five layers with the target's heads. Layers of the target that
/// attend to a window keep no more than its tokens: they are told as a fixed size and are not in the ratio.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask kv-table
  cargo xtask kv-table models/smollm2-135m-instruct
  cargo xtask kv-table config.json --json")]
pub(crate) struct Args {
    /// Models: folders with a config.json, or such files.
    #[arg(value_name = "CONFIG")]
    configs: Vec<PathBuf>,
    /// Write JSON to standard output instead of a table.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let targets: Vec<(String, KvShape, KvShape)> = if args.configs.is_empty() {
        paper_targets()
            .into_iter()
            .map(|(name, target, drafter)| (name.to_owned(), target, drafter))
            .collect()
    } else {
        args.configs.iter().map(|path| given(path)).collect::<anyhow::Result<_>>()?
    };
    let mut rows = Vec::new();
    for (name, target, dflash) in &targets {
        rows.push(KvRow::new(name, *target, "dflash", dflash.bytes_per_token(BF16), BF16)?);
        rows.push(KvRow::new(name, *target, "hspec", 0, BF16)?);
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&serde_json::json!({ "rows": rows }))?)?;
    } else {
        writeln!(out, "{}", table(&rows))?;
        let mut told = Vec::new();
        for row in rows.iter().filter(|row| row.target_window_bytes > 0) {
            if !told.contains(&&row.target) {
                let mib = row.target_window_bytes as f64 / (1 << 20) as f64;
                writeln!(
                    out,
                    "{}: and at most {mib:.1} MiB of windowed layers, whatever the context",
                    row.target
                )?;
                told.push(&row.target);
            }
        }
    }
    Ok(())
}

fn given(path: &Path) -> anyhow::Result<(String, KvShape, KvShape)> {
    let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let shape = KvShape::from_config(&read_json(&file)?, &file)?;
    let folder = if path.is_dir() { Some(path) } else { path.parent().filter(|p| !p.as_os_str().is_empty()) };
    let name = folder.and_then(Path::file_name).unwrap_or(path.as_os_str());
    let name = name.to_str().with_context(|| format!("{}: not a name in UTF-8", path.display()))?;
    Ok((name.to_owned(), shape, shape.dflash()))
}

fn table(rows: &[KvRow]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(["target", "KiB per token (bf16)", "drafter", "adds KiB", "together"]);
    let kib = |bytes: usize| format!("{:.1}", bytes as f64 / 1024.0);
    for row in rows {
        let (target, drafter) = (kib(row.target_bytes_per_token), kib(row.drafter_bytes_per_token));
        table.add_row([&row.target, &target, &row.drafter, &drafter, &format!("{:.3} x", row.inflation)]);
    }
    for column in [1, 3, 4] {
        table.column_mut(column).expect("it was just made").set_cell_alignment(CellAlignment::Right);
    }
    table
}
