//! Reading and writing H-Spec drafters in the speculators layout.

use super::{HSpec, HSpecModel};
use crate::{
    Error, Result,
    checkpoint::{StoreAs, Weights},
    config::HSpecConfig,
    drafter::{files, registry::Source},
    target::Target,
};
use burn::tensor::{TensorData, backend::Backend};
use hspec_nn::params;
use std::{collections::BTreeMap, path::Path};

impl<B: Backend> HSpec<B> {
    /// Loads a drafter directory. Frozen tensors that the file leaves out are taken from `target`.
    ///
    /// # Errors
    /// Files that are missing, damaged, incomplete, or made for another target.
    pub fn load(dir: &Path, target: Option<&Target<B>>, device: &B::Device) -> Result<Self> {
        Self::open(Source::read(dir, target, device)?)
    }

    pub(in crate::drafter) fn open(source: Source<'_, B>) -> Result<Self> {
        let config: HSpecConfig = source.parse()?;
        config.validate(&source.file)?;
        if let Some(target) = source.target {
            config.check_target(target.config())?;
        }
        let weights = Weights::open(source.dir)?;
        let drafter = Self::from_weights(config, &weights, &source.file, source.target, source.device)?;
        Ok(drafter.prepack())
    }

    /// Builds a drafter from a validated configuration and a checkpoint's tensors.
    ///
    /// # Errors
    /// As [`HSpec::load`].
    pub fn from_weights(
        config: HSpecConfig,
        weights: &Weights,
        file: &Path,
        target: Option<&Target<B>>,
        device: &B::Device,
    ) -> Result<Self> {
        let vocab_size = config.transformer_layer_config.vocab_size;
        let vocab = files::vocabulary(weights, vocab_size, config.draft_vocab_size)?;
        let model = files::fill(HSpecModel::init(&config, device), weights, target, &vocab, device)?;
        Self::new(config, model, vocab, file)
    }

    /// Writes `config.json` and `model.safetensors` into `dir`; without the frozen tensors unless
    /// asked for, in which case a reader must have the target at hand.
    ///
    /// # Errors
    /// When the folder cannot be written; an older file is then left whole.
    pub fn save(&self, dir: &Path, store: StoreAs, with_frozen: bool) -> Result<()> {
        let mut tensors: BTreeMap<String, TensorData> = params::collect(&self.model);
        if !with_frozen {
            tensors.retain(|name, _| !HSpecModel::<B>::frozen(name));
        }
        let vocab_size = self.config.transformer_layer_config.vocab_size;
        let config = serde_json::to_value(&self.config).map_err(|e| {
            Error::invalid(dir.join("config.json"), "config", e.to_string(), "a serialisable configuration")
        })?;
        files::write(dir, config, tensors, &self.vocab, vocab_size, store)
    }
}
