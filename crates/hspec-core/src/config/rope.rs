//! Rotary parameters in the two layouts that Hugging Face files use.

use crate::{Error, Result};
use hspec_attn::{Rope, RopeScaling};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// `rope_parameters` of newer files, or the union of `rope_theta` and `rope_scaling` of older ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RopeParameters {
    /// Base of the frequencies.
    pub rope_theta: f64,
    /// `default` or `llama3`.
    #[serde(default = "default_type")]
    pub rope_type: String,
    /// Share of a head's dimensions that rotate, where stated here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partial_rotary_factor: Option<f64>,
    /// llama3: divisor of the low frequencies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub factor: Option<f64>,
    /// llama3: see [`RopeScaling::Llama3`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_freq_factor: Option<f64>,
    /// llama3: see [`RopeScaling::Llama3`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high_freq_factor: Option<f64>,
    /// llama3: context length before stretching.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub original_max_position_embeddings: Option<f64>,
}

fn default_type() -> String {
    "default".to_owned()
}

impl RopeParameters {
    /// Reads either layout from a model configuration.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field when neither layout is there or a value has a wrong type.
    pub fn from_config(config: &Map<String, Value>, file: &Path) -> Result<Self> {
        let mut fields = match config.get("rope_parameters").and_then(Value::as_object) {
            Some(fields) => fields.clone(),
            None => config.get("rope_scaling").and_then(Value::as_object).cloned().unwrap_or_default(),
        };
        if let Some(old) = fields.remove("type") {
            fields.entry("rope_type").or_insert(old);
        }
        if let Some(theta) = config.get("rope_theta").filter(|t| !t.is_null()) {
            fields.entry("rope_theta").or_insert(theta.clone());
        }
        if !fields.contains_key("rope_theta") {
            return Err(Error::invalid(
                file,
                "rope_theta",
                "nothing",
                "a number, at the top level or in rope_parameters",
            ));
        }
        serde_json::from_value(Value::Object(fields))
            .map_err(|e| Error::invalid(file, "rope_parameters", e.to_string(), "numbers"))
    }

    /// The frequencies for heads of width `head_dim`, of which a share `partial` rotates.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a type other than `default` and `llama3` or a missing or bad number.
    pub fn rope(&self, head_dim: usize, partial: f64, file: &Path) -> Result<Rope> {
        let positive = |name: &str, value: Option<f64>| match value {
            Some(v) if v.is_finite() && v > 0.0 => Ok(v),
            other => {
                let found = other.map_or("nothing".to_owned(), |v| v.to_string());
                Err(Error::invalid(file, name, found, "a positive number"))
            }
        };
        let scaling = match self.rope_type.as_str() {
            "default" => RopeScaling::None,
            "llama3" => RopeScaling::Llama3 {
                factor: positive("factor", self.factor)?,
                low_freq_factor: positive("low_freq_factor", self.low_freq_factor)?,
                high_freq_factor: positive("high_freq_factor", self.high_freq_factor)?,
                original_max_position: positive(
                    "original_max_position_embeddings",
                    self.original_max_position_embeddings,
                )?,
            },
            other => return Err(Error::invalid(file, "rope_type", other, "default or llama3")),
        };
        let theta = positive("rope_theta", Some(self.rope_theta))?;
        let partial = self.partial_rotary_factor.unwrap_or(partial);
        let rotary = (head_dim as f64 * partial) as usize;
        if rotary == 0 || rotary % 2 == 1 || rotary > head_dim {
            let found = format!("{partial} of head_dim {head_dim}");
            return Err(Error::invalid(file, "partial_rotary_factor", found, "an even number of dimensions"));
        }
        Ok(Rope::new(theta, rotary, scaling))
    }
}
