//! What a configuration asks for, before anything is made or read.

use super::{registry, stated::Description};
use crate::Result;
use serde_json::Value;
use std::path::Path;

/// A drafter as its configuration states it.
#[derive(Debug, Clone, PartialEq)]
pub struct Outline {
    /// Its sizes and rules.
    pub description: Description,
    /// Its tensors, in the order of the module's fields.
    pub tensors: Vec<TensorOutline>,
}

/// A tensor of a drafter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorOutline {
    /// Its name in files.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Whether it is the drafter's own, and no copy of the target's.
    pub trained: bool,
}

impl Outline {
    /// Number of parameters that training changes.
    pub fn trainable(&self) -> usize {
        let own = self.tensors.iter().filter(|t| t.trained);
        own.map(|t| t.shape.iter().product::<usize>()).sum()
    }
}

/// Outlines the drafter of a configuration; `file` names it in errors, `target_layers` is the number of the
/// target's layers, where it is known.
///
/// # Errors
/// A kind that is not known, or a field that cannot be right.
pub fn outline(config: &Value, file: &Path, target_layers: Option<usize>) -> Result<Outline> {
    let stated = registry::state(config, file, target_layers)?;
    let tensors = stated.parameters().0.into_iter();
    Ok(Outline {
        description: stated.describe(),
        tensors: tensors
            .map(|p| TensorOutline { name: p.name, shape: p.shape, trained: p.trained })
            .collect(),
    })
}
