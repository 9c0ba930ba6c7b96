//! Which responses the target writes.

use super::{at_least_one, between};
use hspec_core::Result;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Which responses the target writes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Data {
    /// Prompt files, used where the command names none; relative to the current folder.
    pub prompts: Vec<PathBuf>,
    /// Prompts used, drawn at random; 0 for all.
    pub max_prompts: usize,
    /// Prompts longer than this are left out, in tokens.
    pub max_prompt_tokens: usize,
    /// Longest response, in tokens.
    pub max_new_tokens: usize,
    /// Prompts answered at once.
    pub batch: usize,
    /// Temperature of the responses.
    pub temperature: f64,
    /// Responses kept out of training, for simulated acceptance.
    pub validation: usize,
}

impl Default for Data {
    fn default() -> Self {
        Self {
            prompts: Vec::new(),
            max_prompts: 0,
            max_prompt_tokens: 512,
            max_new_tokens: 256,
            batch: 32,
            temperature: 0.0,
            validation: 8,
        }
    }
}

impl Data {
    /// Checks the numbers.
    pub(super) fn validate(&self, file: &Path) -> Result<()> {
        at_least_one(
            file,
            &[
                ("data.max_prompt_tokens", self.max_prompt_tokens),
                ("data.max_new_tokens", self.max_new_tokens),
                ("data.batch", self.batch),
                ("data.validation", self.validation),
            ],
        )?;
        between(file, &[("data.temperature", self.temperature, 0.0, f64::MAX)])
    }
}
