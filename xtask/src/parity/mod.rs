//! `cargo xtask parity`: does a backend compute what it should?

mod components;
mod drafters;
mod findings;
mod fixture;
mod targets;

use crate::{
    backend::{Common, Name, with_backend},
    bench::Shape,
};
use burn::tensor::backend::Backend;
use findings::{Finding, Findings};
use hspec_core::target::Target;
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// Compare what a backend computes with what it should.
///
/// Scan, mixer, attention, heads, targets, whole drafters and a training step's gradients are held against the
/// reference implementation's numbers in tests/goldens; a target decodes on the backend and, with the same tokens,
/// on the CPU in f32 (flex, or ndarray for flex; both must be built in). Differences are relative to `1 +
/// max|reference|`. Each token that the backend chose must have a logit, on the CPU, within a stated distance of
/// the largest. A failed comparison ends with exit code 1.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask parity
  cargo xtask parity --backend cuda --target models/smollm2-135m-instruct --json
  xtask parity --backend cuda --goldens goldens --shape smollm2    # a binary on another machine")]
pub(crate) struct Args {
    /// The model that decodes: a Hugging Face folder or a GGUF file [default: random weights].
    #[arg(long, value_name = "DIR", conflicts_with = "shape")]
    target: Option<PathBuf>,
    /// The shape of random weights.
    #[arg(long, value_enum, default_value = "smollm2")]
    shape: Shape,
    /// The folder of fixtures [default: tests/goldens].
    #[arg(long, value_name = "DIR")]
    goldens: Option<PathBuf>,
    /// Write one JSON document instead of a table.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    backend: Common,
}

/// How far a backend may be off.
#[derive(Debug, Clone, Copy)]
struct Tolerances {
    /// Relative, of components.
    values: f64,
    /// Of a chosen token's logit from the largest.
    distance: f64,
}

impl Tolerances {
    fn of(backend: Name) -> Self {
        match backend {
            Name::Flex | Name::Ndarray => Self { values: 2e-5, distance: 1e-3 },
            // Its matrix products may round their operands to 10 bits (TF32).
            Name::Cuda => Self { values: 5e-3, distance: 5e-2 },
        }
    }
}

/// The JSON of `parity --json`.
#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    backend: String,
    fusion: bool,
    pass: bool,
    rows: &'a [Finding],
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let backend = args.backend.backend;
    let goldens = args.goldens.clone().unwrap_or_else(|| crate::workspace().join("tests/goldens"));
    let tolerances = Tolerances::of(backend);
    let mut findings = Findings::new(tolerances.values);
    with_backend!(args.backend, |B, device| components::<B>(&goldens, &device, &mut findings))?;
    decode(args, backend, tolerances.distance, &mut findings)?;

    let failed = findings.failed();
    let mut out = std::io::stdout().lock();
    if args.json {
        let document = Document {
            schema: 1,
            backend: backend.to_string(),
            fusion: cfg!(feature = "fusion") && backend == Name::Cuda,
            pass: failed.is_empty(),
            rows: &findings.all,
        };
        writeln!(out, "{}", serde_json::to_string_pretty(&document)?)?;
    } else {
        write!(out, "{}", findings.table())?;
    }
    anyhow::ensure!(failed.is_empty(), "--backend {backend} is off in: {}", failed.join("; "));
    Ok(())
}

/// All fixtures of a folder.
fn components<B: Backend>(goldens: &Path, device: &B::Device, to: &mut Findings) -> anyhow::Result<()> {
    components::all::<B>(goldens, device, to)?;
    targets::all::<B>(goldens, device, to)?;
    drafters::all::<B>(goldens, device, to)?;
    anyhow::ensure!(
        !to.all.is_empty(),
        "{}: found no fixtures, expected folders hspec, dspark and targets; name the folder with --goldens",
        goldens.display()
    );
    Ok(())
}

/// A decode on the backend and on another one of the CPU.
fn decode(args: &Args, backend: Name, distance: f64, to: &mut Findings) -> anyhow::Result<()> {
    match backend {
        #[cfg(all(feature = "flex", feature = "ndarray"))]
        Name::Flex => on::<burn_flex::Flex, burn_ndarray::NdArray>(args, distance, to),
        #[cfg(all(feature = "flex", feature = "ndarray"))]
        Name::Ndarray => on::<burn_ndarray::NdArray, burn_flex::Flex>(args, distance, to),
        #[cfg(all(feature = "flex", feature = "cuda"))]
        Name::Cuda => on::<burn_cuda::Cuda, burn_flex::Flex>(args, distance, to),
        #[allow(unreachable_patterns)]
        other => {
            let needed = if other == Name::Flex { "ndarray" } else { "flex" };
            let _ = (args, distance, to);
            eprintln!("decoding was not compared: that needs {needed}, built in with --features {needed}");
            Ok(())
        }
    }
}

/// The same target on two backends.
#[allow(dead_code)] // in a build with one backend
fn on<B: Backend, R: Backend>(args: &Args, distance: f64, to: &mut Findings) -> anyhow::Result<()> {
    let (there, here) = (Default::default(), Default::default());
    match &args.target {
        Some(path) => {
            let (target, reference) = (Target::<B>::load(path, &there)?, Target::<R>::load(path, &here)?);
            targets::decode(&target, &reference, distance, to)
        }
        None => {
            let target = Target::<B>::random(args.shape.config()?, Some(0), &there)?;
            let reference = Target::<R>::random(args.shape.config()?, Some(0), &here)?;
            targets::decode(&target, &reference, distance, to)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hspec_core::checkpoint::{StoreAs, Weights, write_safetensors};

    fn found<B: Backend>(goldens: &Path) -> Findings {
        let mut findings = Findings::new(Tolerances::of(Name::Flex).values);
        super::components::<B>(goldens, &Default::default(), &mut findings).unwrap();
        findings
    }

    #[test]
    fn every_component_agrees_with_the_fixtures() {
        let findings = found::<burn_flex::Flex>(&hspec_goldens::root());
        assert_eq!(findings.failed(), [""; 0], "{}", findings.table());
        let known: Vec<&str> = findings.all.iter().map(|f| f.component.as_str()).collect();
        for component in [
            "recurrence",
            "scan",
            "mixer",
            "attention over a prefix",
            "vanilla Markov head",
            "gated Markov head",
            "rnn Markov head",
            "confidence head",
            "Domino head",
            "block convolution",
            "candidate selector",
            "target, logits",
            "target, far positions",
            "H-Spec, hidden states",
            "H-Spec, logits",
            "H-Spec, confidence",
            "training, logits",
            "training, loss",
            "training, gradients",
            "DSpark, keys and values",
            "DSpark, hidden states",
            "DSpark, logits",
        ] {
            assert!(known.contains(&component), "{component} was not compared: {known:?}");
        }
    }

    /// A scan that is off by a thousandth in one output.
    #[test]
    fn a_broken_component_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (hspec_goldens::root().join("hspec"), dir.path().join("hspec"));
        std::fs::create_dir(&to).unwrap();
        std::fs::copy(from.join("ssd_scan.json"), to.join("ssd_scan.json")).unwrap();
        let copy = dir.path().join("copy");
        std::fs::create_dir(&copy).unwrap();
        std::fs::copy(from.join("ssd_scan.safetensors"), copy.join("model.safetensors")).unwrap();
        let weights = Weights::open(&copy).unwrap();
        let tensor = |name: String| (name.clone(), weights.tensor(&name).unwrap().unwrap());
        let mut tensors: std::collections::BTreeMap<_, _> = weights.names().into_iter().map(tensor).collect();
        let file = to.join("ssd_scan.safetensors");
        write_safetensors(&file, &tensors, StoreAs::F32).unwrap();
        assert_eq!(found::<burn_flex::Flex>(dir.path()).failed(), [""; 0]);

        let (_, state) = tensors.iter_mut().find(|(name, _)| name.ends_with("/final_state")).unwrap();
        state.as_mut_slice::<f32>().unwrap()[0] += 1e-2;
        write_safetensors(&file, &tensors, StoreAs::F32).unwrap();
        assert_eq!(found::<burn_flex::Flex>(dir.path()).failed(), ["recurrence", "scan"]);
    }

    #[test]
    fn a_folder_without_fixtures_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut findings = Findings::new(1.0);
        let refused = super::components::<burn_flex::Flex>(dir.path(), &Default::default(), &mut findings);
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("found no fixtures") && message.contains("--goldens"), "{message}");
    }
}
