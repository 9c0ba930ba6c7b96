//! `cargo xtask export`: a drafter's checkpoint in another layout.

use crate::inspect::size;
use hspec_core::drafter::{self, Format};
use std::{io::Write, path::PathBuf};

/// Write a drafter in another layout: speculators, DeepSpec or z-lab.
///
/// Tensors go over byte by byte, in the type they have. Layer ids and the maps of a pruned vocabulary are
/// converted; where the layout cannot say what the drafter is, the reason is told and nothing written.
/// DeepSpec's files hold the target's embedding and head, z-lab's never do, and those of speculators do
/// where the drafter's own files do or a target is given, as the authors' code saves them.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask export --drafter dspark_qwen3_4b_block7 --format speculators --out dspark-speculators
  cargo xtask export --drafter dflash --format zlab --target models/qwen3-4b --out dflash-zlab
  cargo xtask export --drafter runs/new/best --format speculators --target models/qwen3-4b --out whole")]
pub(crate) struct Args {
    /// The drafter's folder.
    #[arg(long, value_name = "DIR")]
    drafter: PathBuf,
    /// The layout to write.
    #[arg(long, value_name = "speculators|deepspec|zlab")]
    format: Format,
    /// Its target, which lends what the files leave out and is named in them: a Hugging Face folder or a GGUF
    /// file.
    #[arg(long, value_name = "DIR")]
    target: Option<PathBuf>,
    /// The folder to write, which must be empty or absent, and outside of those that are read.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let exported = drafter::export(&args.drafter, args.format, args.target.as_deref(), &args.out)?;
    if !exported.left_out.is_empty() {
        eprintln!("left out, because nothing reads them: {}", exported.left_out.join(", "));
    }
    if !exported.decoded.is_empty() {
        eprintln!("lent by a quantised target, so decoded values: {}", exported.decoded.join(", "));
    }
    let what = exported.inspection;
    if what.description.format == Format::Speculators && what.description.target.is_none() {
        eprintln!("names no target; give --target so that readers find it");
    }
    let own = what.params_trainable + what.params_frozen;
    let borrowed = match what.params_borrowed {
        0 => String::new(),
        n => format!("; {n} are the target's"),
    };
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{}: {} in the layout of {}, {own} parameters in {}{borrowed}",
        args.out.display(),
        what.description.kind,
        what.description.format,
        size(what.bytes_on_disk)
    )?;
    Ok(())
}
