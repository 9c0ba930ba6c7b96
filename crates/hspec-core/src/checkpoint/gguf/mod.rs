//! GGUF files: a whole language model in one file, here of the Llama and Qwen3 families. Names, row orders
//! and settings are turned into Hugging Face's at this edge, so that nothing behind it knows the format.

mod config;
mod export;
mod header;
mod names;
mod quant;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod tokenizer;

use super::safetensors::map;
use crate::error::{Error, Result};
use burn::tensor::TensorData;
use header::Entry;
use memmap2::Mmap;
use serde_json::Value;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// A GGUF file of a Llama or Qwen3 model, mapped into memory.
pub struct Gguf {
    path: PathBuf,
    map: Mmap,
    metadata: BTreeMap<String, Value>,
    /// By Hugging Face name.
    tensors: BTreeMap<String, Entry>,
    family: Family,
    /// Divisors of the rotary frequencies, where the file has them.
    rope_factors: Option<Vec<f32>>,
}

/// What `general.architecture` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Llama,
    Qwen3,
}

impl Gguf {
    /// Opens and checks a file.
    ///
    /// # Errors
    /// [`Error::Io`] where it cannot be read; [`Error::Invalid`], naming the field, where it is cut short
    /// or no GGUF of version 2 or 3, where a size or offset points outside of it, and where the
    /// architecture, a tensor or an element type is none of those that are read.
    pub fn open(path: &Path) -> Result<Self> {
        let map = map(path)?;
        let header::Header { metadata, tensors: entries } = header::parse(path, &map)?;
        let family = match metadata.get("general.architecture").and_then(Value::as_str) {
            Some("llama") => Family::Llama,
            Some("qwen3") => Family::Qwen3,
            other => {
                let found = other.unwrap_or("nothing");
                return Err(Error::invalid(path, "general.architecture", found, "llama or qwen3"));
            }
        };
        let mut tensors = BTreeMap::new();
        let mut rope_factors = None;
        for entry in entries {
            if entry.name == "rope_freqs.weight" {
                rope_factors = Some(entry.kind.dequantize(&map[entry.range]));
                continue;
            }
            let Some(name) = names::hugging_face(&entry.name) else {
                let expected = "a tensor of a dense Llama or Qwen3 model without biases";
                return Err(Error::invalid(path, "tensor", entry.name, expected));
            };
            if tensors.contains_key(&name) {
                return Err(Error::invalid(path, entry.name, "twice in the file", "each tensor once"));
            }
            tensors.insert(name, entry);
        }
        let file = Self { path: path.to_owned(), map, metadata, tensors, family, rope_factors };
        file.check_heads()?;
        Ok(file)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A value of the metadata.
    pub fn metadata(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// Hugging Face names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    /// A tensor's shape, the slowest dimension first.
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.tensors.get(name).map(|entry| entry.dims.iter().rev().copied().collect())
    }

    /// Whether a tensor's values are decoded from blocks that hold less than they once were.
    pub(super) fn quantised(&self, name: &str) -> bool {
        self.tensors.get(name).is_some_and(|entry| entry.kind.block().0 > 1)
    }

    /// A tensor's values as f32, with the rows of Llama's q and k projections in Hugging Face's order.
    pub fn tensor(&self, name: &str) -> Option<TensorData> {
        self.tensors.get(name).map(|entry| self.read(name, entry))
    }

    fn read(&self, name: &str, entry: &Entry) -> TensorData {
        let mut values = entry.kind.dequantize(&self.map[entry.range.clone()]);
        let shape: Vec<usize> = entry.dims.iter().rev().copied().collect();
        if let Some(heads) = self.permuted_heads(name) {
            values = rows_by_half(&values, heads, shape[0]);
        }
        TensorData::new(values, shape)
    }

    /// One of the JSON files of the model; see [`super::model_json`].
    ///
    /// # Errors
    /// [`Error::Invalid`] where the metadata lacks what the file says, or says what is not supported.
    pub fn json(&self, name: &str) -> Result<Option<Value>> {
        Ok(Some(match name {
            "config.json" => self.config()?,
            "generation_config.json" => self.generation_config(),
            "tokenizer.json" => self.tokenizer_json()?,
            "tokenizer_config.json" => self.tokenizer_config()?,
            "special_tokens_map.json" => self.special_tokens()?,
            _ => return Ok(None),
        }))
    }

    /// Number of heads of a projection whose rows are stored in the order of interleaved rotary pairs:
    /// q and k of the Llama family.
    fn permuted_heads(&self, name: &str) -> Option<usize> {
        let key = match name.rsplit_once(".self_attn.")?.1 {
            "q_proj.weight" => "head_count",
            "k_proj.weight" => "head_count_kv",
            _ => return None,
        };
        (self.family == Family::Llama).then(|| self.count(&format!("attention.{key}")).ok()).flatten()
    }

    /// Checks that every projection divides into its heads, so that reading a tensor cannot fail.
    fn check_heads(&self) -> Result<()> {
        if self.family != Family::Llama {
            return Ok(());
        }
        let heads = [
            ("q_proj", self.count("attention.head_count")?),
            ("k_proj", self.count("attention.head_count_kv")?),
        ];
        for (name, entry) in &self.tensors {
            let Some((_, heads)) = heads.iter().find(|(part, _)| name.contains(part)) else { continue };
            let found = format!("shape {:?}", self.shape(name).unwrap_or_default());
            let rows = entry.dims.get(1).copied().unwrap_or(0);
            if entry.dims.len() != 2 || !rows.is_multiple_of(*heads) || !(rows / heads).is_multiple_of(2) {
                let expected =
                    format!("[rows, columns] with an even number of rows for each of {heads} heads");
                return Err(Error::invalid(&self.path, &entry.name, found, expected));
            }
        }
        Ok(())
    }

    fn invalid(&self, field: &str, found: impl Into<String>, expected: impl Into<String>) -> Error {
        Error::invalid(&self.path, field, found, expected)
    }

    /// `key` after the architecture's prefix.
    fn setting(&self, key: &str) -> Option<&Value> {
        let prefix = match self.family {
            Family::Llama => "llama",
            Family::Qwen3 => "qwen3",
        };
        self.metadata(&format!("{prefix}.{key}"))
    }

    /// A positive number among the settings.
    fn count(&self, key: &str) -> Result<usize> {
        let value = self.setting(key);
        let count = value.and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok()).filter(|&n| n > 0);
        count.ok_or_else(|| {
            self.invalid(key, value.map_or("nothing".to_owned(), Value::to_string), "a positive whole number")
        })
    }
}

/// Rows of each head from (D/2, 2), pairs side by side, to (2, D/2), first halves first.
fn rows_by_half(values: &[f32], heads: usize, rows: usize) -> Vec<f32> {
    let (size, columns) = (rows / heads, values.len() / rows.max(1));
    (0..rows)
        .flat_map(|row| {
            let (head, row) = (row / size, row % size);
            let (half, pair) = (row / (size / 2), row % (size / 2));
            let from = (head * size + 2 * pair + half) * columns;
            &values[from..from + columns]
        })
        .copied()
        .collect()
}
