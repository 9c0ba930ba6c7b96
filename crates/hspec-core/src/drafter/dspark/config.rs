//! A drafter's `config.json` in one of its layouts.

use super::{DSparkShape, DeepSpecFile, SpeculatorsFile, ZLabFile, deepspec, zlab};
use crate::{Error, Result};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::path::Path;

/// What files call the drafters of this family: `speculators_model_type`, or the first of `architectures`.
pub(in crate::drafter) const WORDS: &[&str] =
    &["dspark", "dflash", deepspec::WORD, zlab::DFLASH, zlab::DFLASH2, zlab::DOMINO];

/// A drafter's `config.json`. Keys that nobody here reads are kept.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
#[allow(clippy::large_enum_variant)] // there is one per drafter
pub enum DSparkConfig {
    /// A flat Qwen3 configuration with the drafter's fields beside it.
    DeepSpec(DeepSpecFile),
    /// A layer configuration inside one of drafting.
    Speculators(SpeculatorsFile),
    /// A flat Qwen3 configuration with a `dflash_config` inside.
    ZLab(ZLabFile),
}

impl DSparkConfig {
    /// Reads any of the layouts; `file` names the source in errors.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the first field that is missing or has another type.
    pub fn from_value(value: &Value, file: &Path) -> Result<Self> {
        fn parse<T: DeserializeOwned>(value: &Value, file: &Path) -> Result<T> {
            let expected = "the fields that this layout has";
            T::deserialize(value).map_err(|e| Error::invalid(file, "config", e.to_string(), expected))
        }
        if value.get("speculators_model_type").is_some() {
            parse(value, file).map(Self::Speculators)
        } else if value.pointer("/architectures/0").is_some_and(|word| word == deepspec::WORD) {
            parse(value, file).map(Self::DeepSpec)
        } else {
            parse(value, file).map(Self::ZLab)
        }
    }

    /// What it states, checked.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field that cannot be right or asks for something that is not
    /// implemented.
    pub fn shape(&self, file: &Path) -> Result<DSparkShape> {
        let shape = match self {
            Self::DeepSpec(config) => config.shape(file)?,
            Self::Speculators(config) => config.shape(file)?,
            Self::ZLab(config) => config.shape(file)?,
        };
        shape.validate(file)?;
        Ok(shape)
    }
}
