//! Reading and writing EAGLE-3 drafters, whichever layout their configuration has: the tensors have the same
//! names in both.

use super::{Eagle3, Eagle3Config, Eagle3Model};
use crate::{
    Error, Result,
    checkpoint::{StoreAs, Weights},
    drafter::{files, registry::Source},
    target::Target,
};
use burn::tensor::backend::Backend;
use hspec_nn::params;
use std::path::Path;

impl<B: Backend> Eagle3<B> {
    /// Loads a drafter directory in the layout of DeepSpec or speculators. The embedding and the head, where
    /// the file leaves them out, are taken from `target`.
    ///
    /// # Errors
    /// Files that are missing, damaged, incomplete, of another kind, or made for another target.
    pub fn load(dir: &Path, target: Option<&Target<B>>, device: &B::Device) -> Result<Self> {
        Self::open(Source::read(dir, target, device)?)
    }

    pub(in crate::drafter) fn open(source: Source<'_, B>) -> Result<Self> {
        let file = source.file.clone();
        let drafter = Self::trunk(source)?;
        match drafter.shape.mask_token {
            None => Ok(drafter),
            Some(_) => Err(Error::invalid(file, "speculators_model_type", "peagle", "eagle3")),
        }
    }

    /// [`Eagle3::open`] for P-EAGLE too.
    pub(in crate::drafter) fn trunk(source: Source<'_, B>) -> Result<Self> {
        let config = Eagle3Config::from_value(&source.config, &source.file)?;
        let shape = config.shape(source.target.map(|t| t.config().num_hidden_layers), &source.file)?;
        if let Some(target) = source.target {
            shape.check_target(target.config())?;
        }
        let weights = Weights::open(source.dir)?;
        let vocab = files::vocabulary(&weights, shape.vocab_size, shape.draft_vocab_size)?;
        let fresh = Eagle3Model::init(&shape, source.device);
        let model = files::fill(fresh, &weights, source.target, &vocab, source.device)?;
        Ok(Self { config, shape, model: model.prepack(), vocab })
    }

    /// Writes `config.json` and `model.safetensors` into `dir`; without the frozen tensors unless asked for,
    /// in which case a reader must have the target at hand.
    ///
    /// # Errors
    /// When the folder cannot be written; an older file is then left whole.
    pub fn save(&self, dir: &Path, store: StoreAs, with_frozen: bool) -> Result<()> {
        let mut tensors = params::collect(&self.model);
        if !with_frozen {
            tensors.retain(|name, _| !self.shape.frozen(name));
        }
        let config = serde_json::to_value(&self.config).map_err(|e| {
            Error::invalid(dir.join("config.json"), "config", e.to_string(), "a serialisable configuration")
        })?;
        files::write(dir, config, tensors, &self.vocab, self.shape.vocab_size, store)
    }
}
