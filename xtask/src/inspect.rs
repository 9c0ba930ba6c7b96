//! `cargo xtask inspect`: what a drafter's checkpoint is.

use anyhow::Context;
use comfy_table::{ContentArrangement, Table, presets::UTF8_FULL_CONDENSED};
use hspec_core::drafter::{self, Bytes, Inspection};
use serde_json::Value;
use std::{io::Write, path::PathBuf};

/// Print what a drafter's checkpoint is: kind, sizes, what it reads of the target, memory, anything odd.
///
/// Only the configuration and the headers of the files are read, so that a large drafter is told at once.
/// Layer ids are those of the residual streams that enter layers, whatever the file counts.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask inspect assets/drafters/smollm2-135m-hspec
  cargo xtask inspect runs/smollm2-135m/best --json")]
pub(crate) struct Args {
    /// The drafter's folder: speculators, DeepSpec or z-lab layout.
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Write JSON to standard output instead of a table.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let inspection =
        drafter::inspect(&args.dir).with_context(|| format!("drafter {}", args.dir.display()))?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&inspection)?)?;
    } else {
        writeln!(out, "{}", table(&inspection))?;
    }
    Ok(())
}

fn table(inspection: &Inspection) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
    for (name, value) in rows(inspection) {
        table.add_row([name, &value]);
    }
    table
}

fn rows(inspection: &Inspection) -> Vec<(&'static str, String)> {
    let Inspection { description: d, odd, .. } = inspection;
    let mut rows = vec![
        ("kind", d.kind.to_owned()),
        ("layout of the files", d.format.to_string()),
        ("made for", d.target.clone().unwrap_or_else(|| "a target that it does not name".into())),
        ("drafts", drafts(inspection)),
        (
            "layers",
            match &d.pattern {
                Some(pattern) => words(pattern.iter().filter_map(|kind| serde_json::to_value(kind).ok())),
                None => d.layers.to_string(),
            },
        ),
        (
            "width",
            format!(
                "{}, feed-forward {}, {} query and {} key-value heads of {}",
                d.hidden_size, d.intermediate_size, d.attention_heads, d.kv_heads, d.head_dim
            ),
        ),
        ("reads the layers' inputs", d.feature_layers.as_ref().map_or("unknown".into(), |ids| list(ids))),
    ];
    if !d.kv_layers.is_empty() {
        rows.push(("reads the layers' cache", list(&d.kv_layers)));
    }
    if d.windows.iter().any(Option::is_some) {
        let window = |w: &Option<usize>| w.map_or("none".to_owned(), |w| w.to_string());
        rows.push(("windows", d.windows.iter().map(window).collect::<Vec<_>>().join(", ")));
    }
    for (name, sizes) in &d.heads {
        let sizes = sizes.as_object().into_iter().flatten().map(|(key, value)| match value {
            Value::String(word) => format!("{key} {word}"),
            other => format!("{key} {other}"),
        });
        rows.push(("head", format!("{name}: {}", sizes.collect::<Vec<_>>().join(", "))));
    }
    rows.extend([
        ("vocabulary", format!("{} of the target's {}", d.draft_vocabulary, d.vocabulary)),
        (
            "parameters",
            format!(
                "{} trainable, {} frozen, {} borrowed from the target",
                inspection.params_trainable, inspection.params_frozen, inspection.params_borrowed
            ),
        ),
        ("stored", stored(inspection)),
        ("memory per token", memory(d.kv_bytes_per_token)),
        ("memory per request", memory(d.state_bytes)),
    ]);
    rows.extend(odd.iter().map(|sentence| ("odd", sentence.clone())));
    rows
}

fn drafts(inspection: &Inspection) -> String {
    let d = &inspection.description;
    let mask = d.mask_token.map_or(String::new(), |mask| format!(", mask token {}", mask.0));
    let block = match (d.block_size, d.layout) {
        (Some(slots), Some("anchor_predicts")) => {
            format!(" in a block of {slots}, from the anchor's slot on")
        }
        (Some(slots), _) => format!(" in a block of {slots}, the anchor's slot excepted"),
        (None, _) => String::new(),
    };
    format!("{} tokens{block}{mask}", d.k)
}

fn stored(inspection: &Inspection) -> String {
    let types = inspection.dtypes.iter().map(|(name, tensors)| format!("{tensors} {name}"));
    format!("{} tensors, {}", types.collect::<Vec<_>>().join(", "), size(inspection.bytes_on_disk))
}

/// Bytes for people.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    }
}

fn memory(bytes: Bytes) -> String {
    match bytes.f32 {
        0 => "none".to_owned(),
        _ => format!("{} bytes in bf16, {} in f32", bytes.bf16, bytes.f32),
    }
}

fn list(ids: &[usize]) -> String {
    words(ids.iter().map(|id| Value::from(*id)))
}

fn words(values: impl Iterator<Item = Value>) -> String {
    let word = |value: Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    values.map(word).collect::<Vec<_>>().join(" ")
}
