//! Reading and writing H-Spec drafters in the speculators layout.

use super::{DraftVocab, HSpec, HSpecModel};
use crate::{
    Error, Result, TokenId,
    checkpoint::{StoreAs, Weights, read_json, write_atomic, write_safetensors},
    config::HSpecConfig,
    target::Target,
};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use hspec_nn::{Linear, params};
use std::{collections::BTreeMap, path::Path};

const EMBEDDING: &str = "embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

impl<B: Backend> HSpec<B> {
    /// Loads a drafter directory. Frozen tensors that the file leaves out are taken from `target`.
    ///
    /// # Errors
    /// Files that are missing, damaged, incomplete, or made for another target.
    pub fn load(dir: &Path, target: Option<&Target<B>>, device: &B::Device) -> Result<Self> {
        let file = dir.join("config.json");
        let config: HSpecConfig = read_json(&file)?;
        config.validate(&file)?;
        if let Some(target) = target {
            config.check_target(target.config())?;
        }
        let weights = Weights::open(dir)?;
        Self::from_weights(config, &weights, &file, target, device)
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
        let (vocab_size, kept) = (config.transformer_layer_config.vocab_size, config.draft_vocab_size);
        let vocab = match weights.tensor("d2t")? {
            Some(d2t) if d2t.num_elements() == kept => {
                DraftVocab::from_offsets(&d2t.iter::<i64>().collect::<Vec<_>>(), vocab_size, weights.path())?
            }
            Some(d2t) => {
                let found = format!("shape {:?}", d2t.shape.to_vec());
                return Err(Error::invalid(weights.path(), "d2t", found, format!("[{kept}]")));
            }
            None if kept == vocab_size => DraftVocab::full(vocab_size),
            None => {
                let expected = format!("offsets of {kept} draft ids: the vocabulary is pruned");
                return Err(Error::invalid(weights.path(), "d2t", "no such tensor", expected));
            }
        };
        let mut failed = None;
        let source = |name: &str| match weights.tensor(name) {
            Ok(Some(data)) => Some(data),
            Ok(None) => target.and_then(|t| borrowed(name, t, &vocab)),
            Err(error) => {
                failed = Some(error);
                None
            }
        };
        let model = params::fill(HSpecModel::init(&config, device), device, source, |_| false);
        if let Some(error) = failed {
            return Err(error);
        }
        let model = model
            .map_err(|e| Error::invalid(weights.path(), "tensors", e.to_string(), "the configuration's"))?;
        Self::new(config, model, vocab, file)
    }

    /// Writes `config.json` and `model.safetensors` into `dir`; without the frozen tensors unless
    /// asked for, in which case a reader must have the target at hand.
    ///
    /// # Errors
    /// When the folder cannot be written; an older file is then left whole.
    pub fn save(&self, dir: &Path, store: StoreAs, with_frozen: bool) -> Result<()> {
        std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
        let mut tensors: BTreeMap<String, TensorData> = params::collect(&self.model);
        if !with_frozen {
            tensors.retain(|name, _| !HSpecModel::<B>::frozen(name));
        }
        let vocab_size = self.config.transformer_layer_config.vocab_size;
        if self.vocab.len() < vocab_size {
            tensors.insert("d2t".into(), TensorData::new(self.vocab.offsets(), [self.vocab.len()]));
            tensors.insert("t2d".into(), TensorData::new(self.vocab.kept(vocab_size), [vocab_size]));
        }
        write_safetensors(&dir.join("model.safetensors"), &tensors, store)?;
        let file = dir.join("config.json");
        let dtype = match store {
            StoreAs::F32 => "float32",
            StoreAs::Bf16 => "bfloat16",
        };
        let mut config = self.config.clone();
        config.extra.insert("dtype".into(), dtype.into());
        let config = serde_json::to_string_pretty(&config)
            .map_err(|e| Error::invalid(&file, "config", e.to_string(), "a serialisable configuration"))?;
        write_atomic(&file, |out| out.write_all(config.as_bytes()))
    }
}

/// The target's tensor that stands for a frozen one.
fn borrowed<B: Backend>(name: &str, target: &Target<B>, vocab: &DraftVocab) -> Option<TensorData> {
    match name {
        EMBEDDING => Some(target.embedding().to_data()),
        HEAD => Some(pruned_head(target, vocab).weight.val().into_data()),
        _ => None,
    }
}

/// The rows of the target's head that a pruned vocabulary keeps, `[Vd, H]`.
pub fn pruned_head<B: Backend>(target: &Target<B>, vocab: &DraftVocab) -> Linear<B> {
    let ids: Vec<i64> = vocab.targets().iter().map(|TokenId(id)| i64::from(*id)).collect();
    let ids = Tensor::from_data(TensorData::new(ids, [vocab.len()]), target.device());
    Linear::new(target.head().weight.val().select(0, ids), None)
}
