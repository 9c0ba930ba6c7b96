//! The kinds of drafter by the word that their files have for them.

use super::{Drafter, stated::Stated};
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

/// The table of kinds, a module and its drafter each: `WORDS` of the module tell the kind, `open` of the drafter
/// loads it, and `state` of the module reads its configuration alone. A macro, because only loading knows a
/// backend.
macro_rules! kinds {
    ($($kind:ident :: $drafter:ident;)*) => {
        fn loaders<B: Backend>() -> &'static [(Words, Loader<B>)] {
            &[$((super::$kind::WORDS, |source| Ok(Box::new(super::$kind::$drafter::open(source)?)))),*]
        }

        const READERS: &[(Words, Reader)] = &[$((super::$kind::WORDS, super::$kind::state)),*];
    };
}

kinds! {
    hspec::HSpec;
    dspark::DSpark;
    eagle3::Eagle3;
    peagle::PEagle;
}

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
    find(config, file, READERS)?(config, file, target_layers)
}

/// Loads a drafter of any kind for `target`, which lends the frozen tensors that the files leave out.
///
/// # Errors
/// A kind that is not known; files that are missing, damaged, incomplete, or made for another target.
pub fn load<B: Backend>(dir: &Path, target: &Target<B>, device: &B::Device) -> Result<Box<dyn Drafter<B>>> {
    let source = Source::read(dir, Some(target), device)?;
    find(&source.config, &source.file, loaders::<B>())?(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loading and reading once had a table each, which a new kind could miss one of.
    #[test]
    fn what_can_be_loaded_can_be_read_and_no_word_has_two_meanings() {
        let loaded: Vec<&str> =
            loaders::<burn_ndarray::NdArray>().iter().flat_map(|(words, _)| *words).copied().collect();
        let read: Vec<&str> = READERS.iter().flat_map(|(words, _)| *words).copied().collect();
        assert_eq!(loaded, read);
        let once: std::collections::BTreeSet<&str> = read.iter().copied().collect();
        assert_eq!(once.len(), read.len());
        let refused = state(&serde_json::json!({ "speculators_model_type": "medusa" }), Path::new("c"), None);
        let message = refused.err().unwrap().to_string();
        assert_eq!(
            message,
            format!("c: speculators_model_type: found \"medusa\", expected one of {}", read.join(", "))
        );
    }
}
