//! A GGUF file as a Hugging Face folder.

use super::Gguf;
use crate::{
    checkpoint::{StoreAs, write_atomic, write_safetensors},
    error::Result,
};
use std::{collections::BTreeMap, path::Path};

impl Gguf {
    /// Writes the model as a Hugging Face folder into `folder`, which must exist: settings, tokenizer and
    /// `model.safetensors` with the dequantised values, exactly, as f32. `loaded` is told after each tensor
    /// how many of how many have been dequantised.
    ///
    /// # Errors
    /// [`crate::Error::Io`] where a file cannot be written, [`crate::Error::Invalid`] as [`Gguf::json`].
    pub fn export(&self, folder: &Path, mut loaded: impl FnMut(usize, usize)) -> Result<()> {
        let files = [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
        ];
        for name in files {
            let Some(value) = self.json(name)? else { continue };
            write_atomic(&folder.join(name), |out| {
                serde_json::to_writer_pretty(&mut *out, &value)?;
                out.write_all(b"\n")
            })?;
        }
        let mut tensors = BTreeMap::new();
        for (name, entry) in &self.tensors {
            tensors.insert(name.clone(), self.read(name, entry));
            loaded(tensors.len(), self.tensors.len());
        }
        write_safetensors(&folder.join("model.safetensors"), &tensors, StoreAs::F32)
    }
}
