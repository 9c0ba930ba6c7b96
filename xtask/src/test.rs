//! `cargo xtask test`: every test of the workspace.

use crate::fetch::{self, SMOLLM2, Source};
use anyhow::{Context, bail};
use std::{ffi::OsString, process::Command};

/// Run every test of the workspace, after fetching what they need.
///
/// Unit, integration and documentation tests of all crates, in release mode, which is how the commands
/// are built too.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask test
  cargo xtask test -- golden                           # only tests with golden in their names
  HSPEC_GOLDENS=DIR cargo xtask test -- golden         # against other fixtures of the same layout
  cargo xtask test -- --doc                            # arguments go to cargo test
  cargo xtask test -- lossless -- --nocapture          # and after a second -- to the tests")]
pub(crate) struct Args {
    /// Arguments for cargo test.
    #[arg(last = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    fetch::fetch(&Source::Known(SMOLLM2), &crate::models())?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(&cargo)
        .args(["test", "--release", "--workspace"])
        .args(&args.args)
        .current_dir(std::path::absolute(crate::workspace()).unwrap_or_else(|_| ".".into()))
        .status()
        .with_context(|| format!("{} cannot be run", cargo.display()))?;
    if !status.success() {
        bail!("cargo test: {status}");
    }
    Ok(())
}
