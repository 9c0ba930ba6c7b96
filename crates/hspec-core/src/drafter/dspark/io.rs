//! Reading and writing the drafters of this family; the layouts differ in their configuration and in which
//! tensors the file leaves to the target.

use super::{DSpark, DSparkConfig, DSparkModel};
use crate::{
    Result,
    checkpoint::{StoreAs, Weights},
    drafter::{files, registry::Source},
    target::Target,
};
use burn::tensor::backend::Backend;
use hspec_nn::params;
use std::path::Path;

impl<B: Backend> DSpark<B> {
    /// Loads a drafter directory. Frozen tensors that the file leaves out are taken from `target`.
    ///
    /// # Errors
    /// Files that are missing, damaged, incomplete, or made for another target.
    pub fn load(dir: &Path, target: Option<&Target<B>>, device: &B::Device) -> Result<Self> {
        Self::open(Source::read(dir, target, device)?)
    }

    pub(in crate::drafter) fn open(source: Source<'_, B>) -> Result<Self> {
        let config = DSparkConfig::from_value(&source.config, &source.file)?;
        let shape = config.shape(&source.file)?;
        if let Some(target) = source.target {
            shape.check_target(target.config())?;
        }
        let weights = Weights::open(source.dir)?;
        let vocab = files::vocabulary(&weights, shape.vocab_size, shape.draft_vocab_size)?;
        let fresh = DSparkModel::init(&shape, source.device);
        let model = files::fill(fresh, &weights, source.target, &vocab, source.device)?;
        Ok(Self { model: model.prepack(), config, shape, vocab })
    }

    /// Writes `config.json` and `model.safetensors` into `dir`, in the layout of its configuration; without
    /// the frozen tensors unless asked for, in which case a reader must have the target at hand.
    ///
    /// # Errors
    /// When the folder cannot be written; an older file is then left whole.
    pub fn save(&self, dir: &Path, store: StoreAs, with_frozen: bool) -> Result<()> {
        let mut tensors = params::collect(&self.model);
        tensors.retain(|name, _| with_frozen || !DSparkModel::<B>::frozen(name));
        let config = serde_json::to_value(&self.config)
            .map_err(|e| crate::Error::invalid(dir, "config", e.to_string(), "what JSON can say"))?;
        files::write(dir, config, tensors, &self.vocab, self.shape.vocab_size, store)
    }
}
