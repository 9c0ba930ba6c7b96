//! Reading and writing H-Spec drafters in the speculators layout.

use super::{DraftVocab, HSpec, HSpecModel, files, registry::Source};
use crate::{
    Error, Result, TokenId,
    checkpoint::{StoreAs, Weights},
    config::HSpecConfig,
    target::Target,
};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use hspec_nn::{Linear, params};
use std::{collections::BTreeMap, path::Path};

impl<B: Backend> HSpec<B> {
    /// Loads a drafter directory. Frozen tensors that the file leaves out are taken from `target`.
    ///
    /// # Errors
    /// Files that are missing, damaged, incomplete, or made for another target.
    pub fn load(dir: &Path, target: Option<&Target<B>>, device: &B::Device) -> Result<Self> {
        Self::open(Source::read(dir, target, device)?)
    }

    pub(super) fn open(source: Source<'_, B>) -> Result<Self> {
        let config: HSpecConfig = source.parse()?;
        config.validate(&source.file)?;
        if let Some(target) = source.target {
            config.check_target(target.config())?;
        }
        let weights = Weights::open(source.dir)?;
        Self::from_weights(config, &weights, &source.file, source.target, source.device)
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

/// The rows of the target's head that a pruned vocabulary keeps, `[Vd, H]`.
pub fn pruned_head<B: Backend>(target: &Target<B>, vocab: &DraftVocab) -> Linear<B> {
    let ids: Vec<i64> = vocab.targets().iter().map(|TokenId(id)| i64::from(*id)).collect();
    let ids = Tensor::from_data(TensorData::new(ids, [vocab.len()]), target.device());
    Linear::new(target.head().weight.val().select(0, ids), None)
}
