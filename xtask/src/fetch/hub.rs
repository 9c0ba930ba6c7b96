//! A model repository on the Hugging Face hub, through the cache that its other tools use.

use crate::progress::Progress;
use anyhow::{Context, bail};
use hf_hub::{
    HFClientSync, HFRepositorySync, RepoType,
    progress::{DownloadEvent, ProgressEvent, ProgressHandler},
};
use std::{
    collections::HashMap,
    fs::File,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Mutex,
};

/// Files of a model; a repository may hold the same weights in other forms too.
const FILES: [&str; 11] = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "LICENSE*",
    "README.md",
];

/// ORG/NAME.
#[derive(Debug, Clone)]
pub(crate) struct Repository {
    organisation: String,
    name: String,
}

impl FromStr for Repository {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // The name becomes a folder's.
        let allowed = |part: &str| {
            let characters = part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
            characters && !part.is_empty() && !part.starts_with('.')
        };
        match text.split_once('/') {
            Some((organisation, name)) if allowed(organisation) && allowed(name) => {
                Ok(Self::new(organisation, name))
            }
            _ => Err("a repository on the hub is written hub:ORG/NAME".to_owned()),
        }
    }
}

impl Repository {
    pub(super) fn new(organisation: &str, name: &str) -> Self {
        Self { organisation: organisation.to_owned(), name: name.to_owned() }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Puts the model's files into `folder`, as links to the cache where it is on the same disk.
    pub(super) fn fill(&self, folder: &Path) -> anyhow::Result<()> {
        let name = format!("hub:{}/{}", self.organisation, self.name);
        let snapshot = self.snapshot(&name).with_context(|| name.clone())?;
        let entries = std::fs::read_dir(&snapshot).with_context(|| snapshot.display().to_string())?;
        let mut files = 0;
        for entry in entries {
            let entry = entry.with_context(|| snapshot.display().to_string())?;
            if entry.file_name().to_str().is_some_and(wanted) {
                place(&entry.path(), &folder.join(entry.file_name()))?;
                files += 1;
            }
        }
        if files == 0 {
            bail!("{name} holds none of the files of a model");
        }
        Ok(())
    }

    fn snapshot(&self, name: &str) -> anyhow::Result<PathBuf> {
        let repository = HFClientSync::new()?.model(&self.organisation, &self.name);
        snapshot(&repository, &FILES, name)
    }

    /// One file of a data-set repository, in the cache.
    pub(crate) fn dataset_file(&self, file: &str) -> anyhow::Result<PathBuf> {
        let name = format!("hub:datasets/{}/{}", self.organisation, self.name);
        let repository = HFClientSync::new()?.dataset(&self.organisation, &self.name);
        let path = snapshot(&repository, &[file], &name).with_context(|| name.clone())?.join(file);
        std::fs::metadata(&path).with_context(|| format!("{name} holds no {file}"))?;
        Ok(path)
    }
}

/// The folder of the cache that holds the files of these patterns.
fn snapshot<T: RepoType>(
    repository: &HFRepositorySync<T>,
    patterns: &[&str],
    name: &str,
) -> anyhow::Result<PathBuf> {
    let files = Files { progress: Progress::bytes(format!("downloading {name}"), 0), done: Mutex::default() };
    let snapshot = repository
        .snapshot_download()
        .allow_patterns(patterns.iter().map(|&pattern| pattern.to_owned()).collect::<Vec<_>>())
        .local_files_only(offline())
        .progress(files)
        .send();
    let context =
        if offline() { "not in the local cache, and HF_HUB_OFFLINE is set" } else { "cannot be downloaded" };
    snapshot.context(context)
}

/// `HF_HUB_OFFLINE` as Python's tools read it.
fn offline() -> bool {
    std::env::var("HF_HUB_OFFLINE")
        .is_ok_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.to_uppercase().as_str()))
}

/// Whether a file name is one of [`FILES`].
fn wanted(name: &str) -> bool {
    FILES.iter().any(|pattern| match pattern.split_once('*') {
        Some((start, end)) => {
            name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
        }
        None => name == *pattern,
    })
}

/// A hard link, or a copy where there can be none. The cache itself holds symbolic links.
fn place(from: &Path, to: &Path) -> anyhow::Result<()> {
    let from = from.canonicalize().with_context(|| from.display().to_string())?;
    if std::fs::hard_link(&from, to).is_err() {
        std::fs::copy(&from, to).with_context(|| to.display().to_string())?;
        File::open(to).and_then(|file| file.sync_all()).with_context(|| to.display().to_string())?;
    }
    Ok(())
}

/// Adds up the bytes of files that are downloaded side by side.
struct Files {
    progress: Progress,
    done: Mutex<HashMap<String, u64>>,
}

impl ProgressHandler for Files {
    fn on_progress(&self, event: &ProgressEvent) {
        let ProgressEvent::Download(event) = event else { return };
        // A panic elsewhere leaves a map that is still right.
        let mut done = self.done.lock().unwrap_or_else(|e| e.into_inner());
        match event {
            DownloadEvent::Start { total_bytes, .. } => self.progress.set_total(*total_bytes),
            DownloadEvent::Progress { files } => {
                for file in files {
                    let bytes = done.entry(file.filename.clone()).or_default();
                    *bytes = (*bytes).max(file.bytes_completed);
                }
                self.progress.set(done.values().sum());
            }
            DownloadEvent::AggregateProgress { bytes_completed, .. } => self.progress.set(*bytes_completed),
            DownloadEvent::Complete => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_lead_out_of_the_folder_are_refused() {
        let name = |text: &str| text.parse::<Repository>().map(|r| r.name);
        assert_eq!(name("Qwen/Qwen3-0.6B").as_deref(), Ok("Qwen3-0.6B"));
        for wrong in ["", "Qwen", "a/b/c", "a/..", "../a", "a/", "/a", "a/.hidden", "a/b c", "a\\b/c"] {
            assert!(name(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_the_files_of_a_model_are_wanted() {
        for name in
            ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "LICENSE", "LICENSE.txt"]
        {
            assert!(wanted(name), "{name}");
        }
        for name in [
            "pytorch_model.bin",
            "consolidated.safetensors",
            "model.onnx",
            ".gitattributes",
            "tokenizer.model",
        ] {
            assert!(!wanted(name), "{name}");
        }
    }
}
