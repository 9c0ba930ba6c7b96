//! PyTorch doing the same work in a process of its own.

use super::work::Work;
use anyhow::Context;
use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

/// Carried along, so that a binary without the repository has it.
const SCRIPT: &str = include_str!("../../../benches/peers/torch_peer.py");
/// The script's exit code where there is no torch.
const NO_TORCH: i32 = 3;
/// How to get it.
const HINT: &str = "no python3 with torch on the PATH; benches/peers/README.md says how to install it";

/// Numbers that the peer computes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dtype {
    F32,
    Bf16,
}

/// A peer that waits for work.
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts PyTorch on so many threads for the shape that `facts` describe, or says why there is none.
    ///
    /// # Errors
    /// A python that cannot be talked to.
    pub(crate) fn start(
        dtype: Dtype,
        threads: usize,
        facts: &Value,
    ) -> anyhow::Result<Result<Self, &'static str>> {
        let (name, word) = match dtype {
            Dtype::F32 => ("torch-f32", "f32"),
            Dtype::Bf16 => ("torch-bf16", "bf16"),
        };
        let mut command = Command::new("python3");
        command.args(["-c", SCRIPT, "--dtype", word, "--threads", &threads.to_string()]);
        command.arg("--shape").arg(facts.to_string());
        // Its default allocator returns large blocks to the system at once and pays for every page again.
        command.env("MALLOC_ARENA_MAX", "1").env("MALLOC_MMAP_MAX_", "0");
        command.env("MALLOC_MMAP_THRESHOLD_", "4294967296").env("MALLOC_TRIM_THRESHOLD_", "17179869184");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Err(HINT)),
            Err(error) => return Err(error).context("python3"),
        };
        let input = child.stdin.take().context("python3: no standard input")?;
        let output = BufReader::new(child.stdout.take().context("python3: no standard output")?);
        let mut peer = Self { name, child, input, output };
        match peer.line() {
            Ok(line) if line.starts_with("ready") => Ok(Ok(peer)),
            _ if peer.child.wait()?.code() == Some(NO_TORCH) => Ok(Err(HINT)),
            other => anyhow::bail!("{name}: it did not get ready: {other:?}"),
        }
    }

    /// Does a piece of work once; milliseconds as the peer measured them.
    ///
    /// # Errors
    /// A peer that failed; what it says about it goes to standard error.
    pub(crate) fn run(&mut self, work: Work) -> anyhow::Result<f64> {
        let work = work.rounded_anyhow();
        writeln!(self.input, "{work}").and_then(|()| self.input.flush()).context(self.name)?;
        let line = self.line().with_context(|| format!("{} on {work}", self.name))?;
        line.parse().with_context(|| format!("{} on {work}: {line:?} is no number", self.name))
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        anyhow::ensure!(self.output.read_line(&mut line)? > 0, "it ended");
        Ok(line.trim().to_owned())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended already; either way nobody waits for it any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
