//! Which responses the target writes.

use super::{at_least_one, between};
use hspec_core::{Error, Result, decode::SamplingParams, prompts::PromptFile};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// What becomes of answers that stand in a prompt file's `messages`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GivenAnswers {
    /// They are context; the target answers the last question in its own words.
    #[default]
    Context,
    /// They are learned as they stand.
    Supervised,
}

impl std::str::FromStr for GivenAnswers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "context" => Ok(Self::Context),
            "supervised" => Ok(Self::Supervised),
            _ => Err("known are context and supervised".into()),
        }
    }
}

/// Which responses the target writes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Data {
    /// Prompt files, used where the command names none; relative to the current folder. Names, or tables of
    /// `file` and `weight`.
    pub prompts: Vec<PromptFile>,
    /// Files of responses that were written before, in the place of prompts: a name or several.
    #[serde(with = "files", skip_serializing_if = "Vec::is_empty")]
    pub responses: Vec<PathBuf>,
    /// Folders of target features that were written before, which hold all documents between them: a name or
    /// several. Without any they are computed while training.
    #[serde(with = "files", skip_serializing_if = "Vec::is_empty")]
    pub cache: Vec<PathBuf>,
    /// What becomes of answers in the prompt files.
    pub given_answers: GivenAnswers,
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
    /// Tokens that they are drawn among.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<usize>,
    /// Probability that they are drawn among.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// Responses kept out of training, for simulated acceptance.
    pub validation: usize,
}

/// A name, or a list of them.
mod files {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::path::PathBuf;

    #[derive(Serialize, Deserialize)]
    #[serde(untagged, expecting = "expected a name, or a list of names")]
    enum Files {
        One(PathBuf),
        Several(Vec<PathBuf>),
    }

    pub(super) fn serialize<S: Serializer>(files: &[PathBuf], to: S) -> Result<S::Ok, S::Error> {
        let files = match files {
            [file] => Files::One(file.clone()),
            files => Files::Several(files.to_vec()),
        };
        files.serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<PathBuf>, D::Error> {
        Ok(match Files::deserialize(from)? {
            Files::One(file) => vec![file],
            Files::Several(files) => files,
        })
    }
}

impl Default for Data {
    fn default() -> Self {
        Self {
            prompts: Vec::new(),
            responses: Vec::new(),
            cache: Vec::new(),
            given_answers: GivenAnswers::Context,
            max_prompts: 0,
            max_prompt_tokens: 512,
            max_new_tokens: 256,
            batch: 32,
            temperature: 0.0,
            top_k: None,
            top_p: None,
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
        between(file, &[("data.temperature", self.temperature, 0.0, f64::MAX)])?;
        if let Err(Error::Request { what, found, expected }) = self.sampling() {
            return Err(Error::invalid(file, format!("data.{}", what.replace('-', "_")), found, expected));
        }
        Ok(())
    }

    /// How the target samples responses.
    ///
    /// # Errors
    /// A number outside its range.
    pub fn sampling(&self) -> Result<SamplingParams> {
        SamplingParams::new(self.temperature, self.top_k, self.top_p)
    }
}
