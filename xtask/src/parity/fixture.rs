//! Fixtures whose damage is an error.

use anyhow::Context;
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use hspec_goldens::Golden;
use serde_json::Value;
use std::path::Path;

/// A fixture with its notes.
pub(crate) struct Fixture {
    name: String,
    golden: Golden,
}

/// Names below `root/folder` that begin with `prefix`, without extension, sorted.
pub(crate) fn names(root: &Path, folder: &str, prefix: &str) -> Vec<String> {
    let entries = std::fs::read_dir(root.join(folder)).into_iter().flatten().flatten();
    let name = |entry: std::fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let name = name.strip_suffix(".safetensors").filter(|name| name.starts_with(prefix))?;
        Some(format!("{folder}/{name}"))
    };
    let mut names: Vec<String> = entries.filter_map(name).collect();
    names.sort();
    names
}

impl Fixture {
    pub(crate) fn open(root: &Path, name: &str) -> anyhow::Result<Self> {
        let golden = Golden::read(root, name).map_err(anyhow::Error::msg)?;
        Ok(Self { name: name.to_owned(), golden })
    }

    pub(crate) fn notes(&self) -> &Value {
        &self.golden.notes
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.golden.has(name)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.golden.names()
    }

    /// A list of the notes, whose entries tell their `case`.
    pub(crate) fn cases(&self, field: &str) -> anyhow::Result<Vec<(String, Value)>> {
        let cases =
            self.notes()[field].as_array().with_context(|| format!("{}.json: no {field}", self.name))?;
        Ok(cases
            .iter()
            .map(|case| (case["case"].as_str().unwrap_or_default().to_owned(), case.clone()))
            .collect())
    }

    pub(crate) fn data(&self, name: &str) -> anyhow::Result<TensorData> {
        Ok(self.golden.get(name).map_err(anyhow::Error::msg)?.clone())
    }

    fn ranked<const D: usize>(&self, name: &str) -> anyhow::Result<TensorData> {
        let data = self.data(name)?;
        let shape = data.shape.to_vec();
        anyhow::ensure!(
            shape.len() == D,
            "{}: {name}: found shape {shape:?}, expected {D} dimensions",
            self.name
        );
        Ok(data)
    }

    pub(crate) fn float<B: Backend, const D: usize>(
        &self,
        name: &str,
        device: &B::Device,
    ) -> anyhow::Result<Tensor<B, D>> {
        Ok(Tensor::from_data(self.ranked::<D>(name)?, device))
    }

    pub(crate) fn int<B: Backend, const D: usize>(
        &self,
        name: &str,
        device: &B::Device,
    ) -> anyhow::Result<Tensor<B, D, Int>> {
        Ok(Tensor::from_data(self.ranked::<D>(name)?, device))
    }

    pub(crate) fn f32s(&self, name: &str) -> anyhow::Result<Vec<f32>> {
        Ok(self.data(name)?.iter::<f32>().collect())
    }

    pub(crate) fn ints(&self, name: &str) -> anyhow::Result<Vec<i64>> {
        Ok(self.data(name)?.iter::<i64>().collect())
    }

    /// Positions and indices; -1, which stands for none, becomes 0.
    pub(crate) fn usizes(&self, name: &str) -> anyhow::Result<Vec<usize>> {
        Ok(self.ints(name)?.into_iter().map(|i| i.max(0) as usize).collect())
    }
}

/// A size of the notes.
pub(crate) fn size(notes: &Value, key: &str) -> anyhow::Result<usize> {
    Ok(notes[key].as_u64().with_context(|| format!("the fixture's notes have no {key}"))? as usize)
}
