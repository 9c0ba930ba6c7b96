//! What a drafter's checkpoint is, from its configuration and the headers of its files.

use super::{files, odd, registry, stated::Description};
use crate::{
    Result,
    checkpoint::{Weights, read_json},
};
use serde::Serialize;
use serde_json::Value;
use std::{collections::BTreeMap, path::Path};

/// What a checkpoint is.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// What its configuration states.
    #[serde(flatten)]
    pub description: Description,
    /// Parameters in its files that training changes.
    pub params_trainable: usize,
    /// Copies of the target's in its files.
    pub params_frozen: usize,
    /// Parameters that its files leave to the target.
    pub params_borrowed: usize,
    /// Tensors in its files by the name of their type.
    pub dtypes: BTreeMap<String, usize>,
    /// Size of its files of tensors.
    pub bytes_on_disk: u64,
    /// What is unusual, a sentence each.
    pub odd: Vec<String>,
}

/// Tells what the drafter in a folder is. Of the tensors, only the maps of a vocabulary are read.
///
/// # Errors
/// Those of loading it, except for what depends on a target.
pub fn inspect(dir: &Path) -> Result<Inspection> {
    let file = dir.join("config.json");
    let config: Value = read_json(&file)?;
    let stated = registry::state(&config, &file, None)?;
    let (description, parameters) = (stated.describe(), stated.parameters());
    let weights = Weights::open(dir)?;
    let (vocab, kept) = (description.vocabulary, description.draft_vocabulary);
    files::vocabulary(&weights, vocab, kept)?;
    parameters.check(&weights)?;

    let mut dtypes = BTreeMap::new();
    for name in weights.names().iter().filter_map(|name| weights.type_name(name)) {
        *dtypes.entry(name).or_insert(0) += 1;
    }
    let size = |trained: bool| {
        let there = parameters.0.iter().filter(|p| p.trained == trained && weights.contains(&p.name));
        there.map(|p| p.size()).sum()
    };
    let mut odd = stated.odd();
    odd.extend(odd::in_files(dir, &config, &weights, &parameters, kept < vocab)?);
    Ok(Inspection {
        params_trainable: size(true),
        params_frozen: size(false),
        params_borrowed: parameters.0.iter().filter(|p| !weights.contains(&p.name)).map(|p| p.size()).sum(),
        dtypes,
        bytes_on_disk: weights.file_bytes()?,
        description,
        odd,
    })
}
