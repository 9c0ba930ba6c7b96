//! Files: a checkpoint's tensors behind one interface, JSON with errors that name the line, and writing
//! that never leaves half a file.
//!
//! ```
//! use burn::tensor::TensorData;
//! use hspec_core::checkpoint::{StoreAs, Weights, write_safetensors};
//! use std::collections::BTreeMap;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let dir = tempfile::tempdir()?;
//! let norm = TensorData::new(vec![1.0f32, 0.5], [2]);
//! let tensors = BTreeMap::from([("model.norm.weight".to_owned(), norm)]);
//! write_safetensors(&dir.path().join("model.safetensors"), &tensors, StoreAs::Bf16)?;
//!
//! let weights = Weights::open(dir.path())?;
//! assert_eq!(weights.shape("model.norm.weight"), Some(vec![2]));
//! let norm = weights.tensor("model.norm.weight")?.expect("it was written above");
//! assert_eq!(norm.to_vec::<f32>()?, [1.0, 0.5]); // floats come back as f32 whatever they are stored as
//! # Ok(())
//! # }
//! ```

mod gguf;
mod json;
mod safetensors;
mod stored;
mod weights;
mod write;

pub use gguf::Gguf;
pub use json::{is_gguf, model_json, read_json};
pub(crate) use stored::{Element, Stored};
pub use weights::Weights;
pub(crate) use write::write_stored;
pub use write::{StoreAs, refuse_foreign, write_atomic, write_safetensors};
