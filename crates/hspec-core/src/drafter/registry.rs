//! The kinds of drafter by the word that their files have for them.

use super::{
    Drafter, HSpec,
    dspark::{self, DSpark},
    eagle3::{self, Eagle3},
    hspec,
    peagle::{self, PEagle},
    stated::Stated,
};
use crate::{Error, Result, checkpoint::read_json, target::Target};
use burn::tensor::backend::Backend;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A drafter's folder with its `config.json` read.
pub(super) struct Source<'a, B: Backend> {
    pub(super) dir: &'a Path,
    /// The path of `config.json`, for errors.
    pub(super) file: PathBuf,
    pub(super) config: Value,
    /// Lends what the files leave out.
    pub(super) target: Option<&'a Target<B>>,
    pub(super) device: &'a B::Device,
}

impl<'a, B: Backend> Source<'a, B> {
    /// # Errors
    /// As [`read_json`].
    pub(super) fn read(dir: &'a Path, target: Option<&'a Target<B>>, device: &'a B::Device) -> Result<Self> {
        let file = dir.join("config.json");
        Ok(Self { dir, config: read_json(&file)?, file, target, device })
    }

    /// Its configuration as one kind of drafter has it.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the first field that is missing or has another type.
    pub(super) fn parse<T: DeserializeOwned>(&self) -> Result<T> {
        parse(&self.config, &self.file)
    }
}

/// A configuration as one kind of drafter has it; `file` names it in errors.
///
/// # Errors
/// [`Error::Invalid`] with the first field that is missing or has another type.
pub(super) fn parse<T: DeserializeOwned>(config: &Value, file: &Path) -> Result<T> {
    T::deserialize(config)
        .map_err(|e| Error::invalid(file, "config", e.to_string(), "the fields this file has"))
}

type Words = &'static [&'static str];
type Loader<B> = fn(Source<'_, B>) -> Result<Box<dyn Drafter<B>>>;
type Reader = fn(&Value, &Path, Option<usize>) -> Result<Box<dyn Stated>>;

/// The words that tell a kind, and what loads it: one line per kind.
fn loaders<B: Backend>() -> [(Words, Loader<B>); 4] {
    [
        (hspec::stated::WORDS, |source| Ok(Box::new(HSpec::open(source)?))),
        (dspark::WORDS, |source| Ok(Box::new(DSpark::open(source)?))),
        (eagle3::WORDS, |source| Ok(Box::new(Eagle3::open(source)?))),
        (peagle::WORDS, |source| Ok(Box::new(PEagle::open(source)?))),
    ]
}

/// The same words, and what reads the configuration alone.
const READERS: [(Words, Reader); 4] = [
    (hspec::stated::WORDS, hspec::stated::state),
    (dspark::WORDS, dspark::state),
    (eagle3::WORDS, eagle3::state),
    (peagle::WORDS, eagle3::state),
];

/// The entry of the kind that a configuration names.
fn find<T: Copy>(config: &Value, file: &Path, kinds: &[(Words, T)]) -> Result<T> {
    let (field, word) = match config.get("speculators_model_type") {
        Some(word) => ("speculators_model_type", word),
        None => ("architectures", config.pointer("/architectures/0").unwrap_or(&Value::Null)),
    };
    match kinds.iter().find(|(known, _)| known.iter().any(|known| word == known)) {
        Some((_, found)) => Ok(*found),
        None => {
            let known: Vec<&str> = kinds.iter().flat_map(|(known, _)| *known).copied().collect();
            Err(Error::invalid(file, field, word.to_string(), format!("one of {}", known.join(", "))))
        }
    }
}

/// Reads a configuration of any kind; `target_layers` is the number of the target's layers, where it is known.
///
/// # Errors
/// A kind that is not known, or a field that cannot be right.
pub(super) fn state(config: &Value, file: &Path, target_layers: Option<usize>) -> Result<Box<dyn Stated>> {
    find(config, file, &READERS)?(config, file, target_layers)
}

/// Loads a drafter of any kind for `target`, which lends the frozen tensors that the files leave out.
///
/// # Errors
/// A kind that is not known; files that are missing, damaged, incomplete, or made for another target.
pub fn load<B: Backend>(dir: &Path, target: &Target<B>, device: &B::Device) -> Result<Box<dyn Drafter<B>>> {
    let source = Source::read(dir, Some(target), device)?;
    find(&source.config, &source.file, &loaders::<B>())?(source)
}
