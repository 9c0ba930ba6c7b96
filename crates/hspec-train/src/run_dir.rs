//! The folder of a run: what is written when, so that a kill loses at most one interval.

use crate::{optim::Optimizers, recipe::Recipe, responses::PromptTokens};
use burn::{
    module::AutodiffModule,
    tensor::backend::{AutodiffBackend, Backend},
};
use hspec_core::{
    Error, Result,
    checkpoint::{read_json, refuse_foreign, write_atomic},
    target::Target,
};
use hspec_nn::params::fingerprint;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

const OPTIMIZERS: [&str; 3] = ["muon.mpk", "adamw_decayed.mpk", "adamw_plain.mpk"];

/// Where training stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps done.
    pub step: usize,
    /// Epoch of the next document.
    pub epoch: u64,
    /// Its place in the epoch's order.
    pub cursor: usize,
    /// Best simulated tau so far.
    pub best_tau: f64,
}

/// What a run learns from; a run cannot continue on anything else.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Fingerprint of the target's final norm, which no two models share.
    pub target: String,
    /// Fingerprint of the selected prompts' tokens.
    pub prompts: String,
}

impl Identity {
    /// Of a target and prompts.
    pub fn new<B: Backend>(target: &Target<B>, prompts: &[PromptTokens]) -> Self {
        let tokens = prompts.iter().flat_map(|p| p.ids.iter().map(|t| t.0).chain([u32::MAX]));
        let prompts = format!("{:016x}", fingerprint(tokens.flat_map(u32::to_le_bytes)));
        Self { target: target_hash(target), prompts }
    }
}

/// A hash of a target's final norm, which no two models share.
pub fn target_hash<B: Backend>(target: &Target<B>) -> String {
    let norm = target.norm().weight.val().into_data();
    format!("{:016x}", fingerprint(norm.iter::<f32>().flat_map(f32::to_le_bytes)))
}

/// The folder.
#[derive(Debug, Clone)]
pub struct RunDir(PathBuf);

impl RunDir {
    /// Opens the folder of a run. A fresh run refuses one that holds another run; a resumed run must
    /// find the same recipe, target and prompts.
    ///
    /// # Errors
    /// A folder that cannot be written, holds another run, or (resuming) one that began differently.
    pub fn open(path: &Path, recipe: &Recipe, identity: &Identity, resume: bool) -> Result<Self> {
        fs::create_dir_all(path).map_err(Error::io(path))?;
        let dir = Self(path.to_owned());
        let file = dir.file("recipe.toml");
        if file.exists() && !resume {
            let expected = "an empty folder, or --resume to go on with it";
            return Err(Error::invalid(path, "folder", "another run", expected));
        }
        if file.exists() {
            let began = Recipe::read(&file)?;
            if let Some((field, found, began)) = difference(recipe, &began) {
                let expected = format!("{began}, with which the run began{}", reason(&field));
                return Err(Error::invalid(&file, field, found, expected));
            }
            let file = dir.file("identity.json");
            let known: Identity = read_json(&file)?;
            if known != *identity {
                let (field, found, began) = match known.target != identity.target {
                    true => ("target", &identity.target, &known.target),
                    false => ("prompts", &identity.prompts, &known.prompts),
                };
                let expected = format!("those with the hash {began}, with which the run began");
                return Err(Error::invalid(&file, field, found, expected));
            }
        } else {
            // A run spreads over its folder. Its own: what one that was killed while it was set up leaves, and answers
            // that somebody put where a run keeps them.
            let own = ["identity.json", "responses.jsonl"];
            refuse_foreign(path, &own, "an empty folder, or that of a run")?;
            write_json(&dir.file("identity.json"), identity)?;
            write_atomic(&file, |out| out.write_all(recipe.resolved().as_bytes()))?;
        }
        Ok(dir)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The drafter with the best simulated tau.
    pub fn best(&self) -> PathBuf {
        self.file("best")
    }

    fn checkpoints(&self) -> Result<Vec<(usize, PathBuf)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.0).map_err(Error::io(&self.0))? {
            let path = entry.map_err(Error::io(&self.0))?.path();
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            if let Some(step) = name.strip_prefix("step-").and_then(|s| s.parse().ok()) {
                found.push((step, path));
            }
        }
        found.sort();
        Ok(found)
    }

    /// The newest checkpoint.
    pub fn last(&self) -> Option<PathBuf> {
        self.checkpoints().ok()?.pop().map(|(_, path)| path)
    }

    /// Writes a checkpoint under a temporary name and renames it when it is whole; `write` puts the drafter
    /// into a folder. The newest `keep` stay.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn save<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        write: &dyn Fn(&Path) -> Result<()>,
        optimizers: &Optimizers<B, M>,
        progress: &Progress,
        keep: usize,
    ) -> Result<()> {
        let part = self.file("checkpoint.part");
        if part.exists() {
            fs::remove_dir_all(&part).map_err(Error::io(&part))?;
        }
        write(&part)?;
        for (name, bytes) in OPTIMIZERS.iter().zip(optimizers.save()?) {
            write_atomic(&part.join(name), |out| out.write_all(&bytes))?;
        }
        write_json(&part.join("progress.json"), progress)?;
        let whole = self.file(&format!("step-{:06}", progress.step));
        if whole.exists() {
            fs::remove_dir_all(&whole).map_err(Error::io(&whole))?;
        }
        fs::rename(&part, &whole).map_err(Error::io(&whole))?;
        // The new name must be on the disk before an old checkpoint goes.
        File::open(&self.0).and_then(|dir| dir.sync_all()).map_err(Error::io(&self.0))?;
        let all = self.checkpoints()?;
        for (_, old) in all.iter().rev().skip(keep) {
            fs::remove_dir_all(old).map_err(Error::io(old))?;
        }
        Ok(())
    }

    /// What `load` makes of the newest checkpoint that it can read, with the progress beside it. A
    /// damaged one is reported and the one before it is used.
    ///
    /// # Errors
    /// When the folder cannot be read, or there are checkpoints but none is whole.
    pub fn newest<T>(&self, load: impl Fn(&Path) -> Result<T>) -> Result<Option<(T, Progress)>> {
        let mut last = None;
        for (_, path) in self.checkpoints()?.into_iter().rev() {
            let whole = load(&path).and_then(|t| Ok((t, read_json(&path.join("progress.json"))?)));
            match whole {
                Ok(found) => return Ok(Some(found)),
                Err(error) => {
                    tracing::warn!(
                        "checkpoint {} is damaged, trying the one before: {error}",
                        path.display()
                    );
                    last = Some(error);
                }
            }
        }
        last.map_or(Ok(None), Err)
    }

    /// The optimisers' state of a checkpoint.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn optimizers(checkpoint: &Path) -> Result<[Vec<u8>; 3]> {
        let read = |name: &str| {
            let path = checkpoint.join(name);
            fs::read(&path).map_err(Error::io(&path))
        };
        Ok([read(OPTIMIZERS[0])?, read(OPTIMIZERS[1])?, read(OPTIMIZERS[2])?])
    }

    /// Appends a line to the metrics.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn log(&self, line: &impl Serialize) -> Result<()> {
        let path = self.file("metrics.jsonl");
        let mut file = OpenOptions::new().create(true).append(true).open(&path).map_err(Error::io(&path))?;
        let line = serde_json::to_string(line).expect("metrics are numbers");
        writeln!(file, "{line}").map_err(Error::io(&path))
    }

    /// Drops metrics of steps after `step`, which a resumed run will write again; all of them when it
    /// begins anew. Returns what stays.
    ///
    /// # Errors
    /// When they cannot be read or written.
    pub fn rewind_metrics(&self, step: usize) -> Result<Vec<Value>> {
        let path = self.file("metrics.jsonl");
        let Ok(text) = fs::read_to_string(&path) else { return Ok(Vec::new()) };
        let keep = |value: &Value| value["step"].as_u64().is_some_and(|s| step > 0 && s as usize <= step);
        let lines = text.lines().filter_map(|line| Some((line, serde_json::from_str(line).ok()?)));
        let (text, kept): (Vec<&str>, Vec<Value>) = lines.filter(|(_, value)| keep(value)).unzip();
        write_atomic(&path, |out| text.iter().try_for_each(|line| writeln!(out, "{line}")))?;
        Ok(kept)
    }
}

/// The first key in which two recipes differ, with the values of both.
fn difference(ours: &Recipe, theirs: &Recipe) -> Option<(String, String, String)> {
    let table = |recipe: &Recipe| recipe.resolved().parse::<toml::Table>().unwrap_or_default();
    let (ours, theirs) = (table(ours), table(theirs));
    let mut keys: Vec<(&String, &String)> = [&ours, &theirs]
        .into_iter()
        .flatten()
        .filter_map(|(name, part)| Some((name, part.as_table()?)))
        .flat_map(|(name, part)| part.keys().map(move |key| (name, key)))
        .collect();
    keys.sort();
    let (part, key) = keys.into_iter().find(|(part, key)| {
        let value = |table: &toml::Table| table.get(*part).and_then(|p| p.get(*key)).cloned();
        value(&ours) != value(&theirs)
    })?;
    let text = |table: &toml::Table| {
        table.get(part).and_then(|p| p.get(key)).map_or("nothing".to_owned(), |value| value.to_string())
    };
    Some((format!("{part}.{key}"), text(&ours), text(&theirs)))
}

/// Why a run cannot go on with another value of a key that somebody may well want to change.
fn reason(field: &str) -> &'static str {
    match field {
        "train.tokens_per_step" | "train.anchors_per_step" | "train.accumulate" => {
            ": its learning rates and its place in the data count steps of that size; a new run can start from \
             its drafter with --init"
        }
        _ => "",
    }
}

pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).expect("plain numbers and texts always serialise");
    write_atomic(path, |out| out.write_all(text.as_bytes()))
}
