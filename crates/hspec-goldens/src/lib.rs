//! Reads the numeric fixtures that the tests compare against (`tests/goldens`, or the folder of the
//! same layout that `HSPEC_GOLDENS` names) and compares tensors the way their notes ask for.
//!
//! For tests: it panics with the name of the file or tensor that is wrong. Commands use [`Golden::read`] and
//! [`Golden::get`], which return it.

use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use safetensors::{Dtype, SafeTensors};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// The folder with `hspec/` and `targets/` in it.
pub fn root() -> PathBuf {
    match std::env::var_os("HSPEC_GOLDENS") {
        // Tests run in their crate's folder; a relative path is meant from the workspace's.
        Some(dir) => workspace().join(dir),
        None => workspace().join("tests/goldens"),
    }
}

fn workspace() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The folder of a fetched model: `models/NAME`, or `NAME` in the folder that `HSPEC_MODELS` names. Its
/// GGUF file, where there is one, lies beside it as `NAME.gguf`.
pub fn model(name: &str) -> PathBuf {
    let models = std::env::var_os("HSPEC_MODELS").unwrap_or_else(|| "models".into());
    let path = workspace().join(models).join(name);
    let message = "run `cargo xtask fetch smollm2-135m` first (cargo xtask test does)";
    assert!(path.is_dir(), "{}: no such folder; {message}", path.display());
    path
}

/// A `.safetensors` file read whole, with its `.json` notes where it has some.
pub struct Golden {
    name: String,
    tensors: BTreeMap<String, TensorData>,
    /// The notes beside the file; null where there are none.
    pub notes: serde_json::Value,
}

impl Golden {
    /// Opens `root()/name.safetensors` and `root()/name.json`.
    pub fn open(name: &str) -> Self {
        Self::read(&root(), name).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Opens `folder/name.safetensors` and `folder/name.json`, the latter if it is there.
    ///
    /// # Errors
    /// The name of the file that cannot be read and why.
    pub fn read(folder: &Path, name: &str) -> Result<Self, String> {
        let path = folder.join(format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|e| format!("{}: {e}", path.display()))?;
        let tensor = |(n, t): (&str, _)| Ok((n.to_owned(), data(&t)?));
        let tensors = file.iter().map(tensor).collect::<Result<_, String>>();
        let tensors = tensors.map_err(|e| format!("{}: {e}", path.display()))?;
        let path = path.with_extension("json");
        let notes = match std::fs::read(&path) {
            Ok(b) => serde_json::from_slice(&b).map_err(|e| format!("{}: {e}", path.display()))?,
            Err(_) => serde_json::Value::Null,
        };
        Ok(Self { name: name.to_owned(), tensors, notes })
    }

    /// The `cases` of the notes as (name, case) pairs.
    pub fn cases(&self) -> Vec<(String, serde_json::Value)> {
        let cases = self.notes["cases"].as_array().unwrap_or_else(|| panic!("{}: no cases", self.name));
        cases.iter().map(|c| (c["case"].as_str().unwrap_or_default().to_owned(), c.clone())).collect()
    }

    /// Names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// A tensor's data as stored (u8 flags and i64 ids included).
    pub fn data(&self, name: &str) -> TensorData {
        self.get(name).unwrap_or_else(|e| panic!("{e}")).clone()
    }

    /// A tensor's data as stored.
    ///
    /// # Errors
    /// The name of the fixture and of the tensor that it lacks.
    pub fn get(&self, name: &str) -> Result<&TensorData, String> {
        self.tensors.get(name).ok_or_else(|| format!("{} has no tensor {name}", self.name))
    }

    /// A float tensor.
    pub fn float<B: Backend, const D: usize>(&self, name: &str, device: &B::Device) -> Tensor<B, D> {
        Tensor::from_data(self.data(name), device)
    }

    /// An id tensor.
    pub fn int<B: Backend, const D: usize>(&self, name: &str, device: &B::Device) -> Tensor<B, D, Int> {
        Tensor::from_data(self.data(name), device)
    }

    /// Values as f32, in row-major order.
    pub fn f32s(&self, name: &str) -> Vec<f32> {
        self.data(name).iter::<f32>().collect()
    }

    /// Ids, positions or flags as integers, in row-major order.
    pub fn ints(&self, name: &str) -> Vec<i64> {
        self.data(name).iter::<i64>().collect()
    }
}

fn data(view: &safetensors::tensor::TensorView<'_>) -> Result<TensorData, String> {
    let (bytes, shape) = (view.data(), view.shape().to_vec());
    Ok(match view.dtype() {
        Dtype::F32 => TensorData::new(bytemuck::pod_collect_to_vec::<u8, f32>(bytes), shape),
        Dtype::F64 => TensorData::new(bytemuck::pod_collect_to_vec::<u8, f64>(bytes), shape),
        Dtype::I64 => TensorData::new(bytemuck::pod_collect_to_vec::<u8, i64>(bytes), shape),
        Dtype::I32 => TensorData::new(bytemuck::pod_collect_to_vec::<u8, i32>(bytes), shape),
        Dtype::U8 | Dtype::BOOL => TensorData::new(bytes.to_vec(), shape),
        other => return Err(format!("fixture of type {other:?}")),
    })
}

/// Tolerance of module outputs: `1e-5 (1 + max|ref|)`.
pub const FORWARD: Tolerance = Tolerance::Scaled(1e-5);
/// Tolerance of module gradients: `2e-5 (1 + max|ref|)`.
pub const GRADIENT: Tolerance = Tolerance::Scaled(2e-5);

/// How far two tensors may lie apart.
#[derive(Debug, Clone, Copy)]
pub enum Tolerance {
    /// The same for every element.
    Absolute(f32),
    /// This times `1 + max|ref|`.
    Scaled(f32),
}

/// Panics, naming `what`, unless `found` has the reference's length and lies within the tolerance of
/// it everywhere. A NaN on either side fails.
pub fn assert_close(what: &str, found: &[f32], reference: &[f32], tolerance: Tolerance) {
    assert_eq!(found.len(), reference.len(), "{what}: number of elements");
    let limit = match tolerance {
        Tolerance::Absolute(limit) => limit,
        Tolerance::Scaled(scale) => scale * (1.0 + reference.iter().fold(0f32, |m, r| m.max(r.abs()))),
    };
    for (i, (a, b)) in found.iter().zip(reference).enumerate() {
        // Written so that a NaN, which no comparison accepts, fails.
        let within = (a - b).abs() <= limit;
        assert!(within, "{what}[{i}]: {a} is not within {limit:e} of {b}");
    }
}

/// [`assert_close`] for a tensor.
pub fn assert_tensor<B: Backend, const D: usize>(
    what: &str,
    found: Tensor<B, D>,
    reference: &[f32],
    tolerance: Tolerance,
) {
    assert_close(what, &found.into_data().iter::<f32>().collect::<Vec<_>>(), reference, tolerance);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "is not within")]
    fn a_nan_on_either_side_fails() {
        assert_close("x", &[1.0], &[f32::NAN], Tolerance::Absolute(1.0));
    }
}
