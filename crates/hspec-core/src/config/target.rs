//! `config.json` of a target.

use super::RopeParameters;
use crate::{Error, Result};
use hspec_attn::Rope;
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

/// Model families whose forward pass is implemented.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Family {
    /// Llama 2 and 3, SmolLM2.
    Llama,
    /// Qwen3 (dense): Llama with per-head norms of queries and keys.
    Qwen3,
}

/// Shape of a target.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetConfig {
    /// Which forward pass.
    pub family: Family,
    /// Number of token ids, V.
    pub vocab_size: usize,
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// Width of the feed-forward block.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key-value heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Added to mean squares.
    pub rms_norm_eps: f64,
    /// Longest context, in tokens.
    pub max_position_embeddings: usize,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether the attention projections have biases.
    pub attention_bias: bool,
    /// Rotary parameters as stated.
    pub rope_parameters: RopeParameters,
}

#[derive(Deserialize)]
struct Raw {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    rms_norm_eps: f64,
    max_position_embeddings: usize,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    use_sliding_window: bool,
    #[serde(default)]
    hidden_act: Option<String>,
    #[serde(default)]
    partial_rotary_factor: Option<f64>,
}

impl TargetConfig {
    /// Checks and converts a parsed `config.json`; `file` names it in errors.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field that is missing, out of range, or asks for something that
    /// is not implemented.
    pub fn from_value(value: &Value, file: &Path) -> Result<Self> {
        let object = value
            .as_object()
            .ok_or_else(|| Error::invalid(file, "config", "no JSON object", "a JSON object"))?;
        let raw = Raw::deserialize(value).map_err(|e| {
            Error::invalid(file, "config", e.to_string(), "a Llama or Qwen3 model configuration")
        })?;
        let family = match raw.model_type.as_str() {
            "llama" => Family::Llama,
            "qwen3" => Family::Qwen3,
            other => return Err(Error::invalid(file, "model_type", other, "llama or qwen3")),
        };
        let refuse =
            |field: &str, found: String, expected: &str| Err(Error::invalid(file, field, found, expected));
        if raw.mlp_bias {
            return refuse("mlp_bias", "true".into(), "false");
        }
        if raw.use_sliding_window {
            return refuse("use_sliding_window", "true".into(), "false");
        }
        if let Some(act) = raw.hidden_act.filter(|a| a != "silu") {
            return refuse("hidden_act", act, "silu");
        }
        for (field, n) in [
            ("vocab_size", raw.vocab_size),
            ("hidden_size", raw.hidden_size),
            ("intermediate_size", raw.intermediate_size),
            ("num_hidden_layers", raw.num_hidden_layers),
            ("num_attention_heads", raw.num_attention_heads),
            ("max_position_embeddings", raw.max_position_embeddings),
            ("head_dim", raw.head_dim.unwrap_or(1)),
        ] {
            if n == 0 || n > 1 << 24 {
                return refuse(field, n.to_string(), "a positive size");
            }
        }
        let kv = raw.num_key_value_heads.unwrap_or(raw.num_attention_heads);
        if kv == 0 || raw.num_attention_heads % kv != 0 {
            return refuse("num_key_value_heads", kv.to_string(), "a divisor of num_attention_heads");
        }
        let head_dim = raw.head_dim.unwrap_or(raw.hidden_size / raw.num_attention_heads);
        if !(raw.rms_norm_eps > 0.0 && raw.rms_norm_eps < 1.0) {
            return refuse("rms_norm_eps", raw.rms_norm_eps.to_string(), "a small positive number");
        }
        let mut rope_parameters = RopeParameters::from_config(object, file)?;
        rope_parameters.partial_rotary_factor =
            rope_parameters.partial_rotary_factor.or(raw.partial_rotary_factor);
        rope_parameters.rope(head_dim, 1.0, file)?;
        Ok(Self {
            family,
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            num_hidden_layers: raw.num_hidden_layers,
            num_attention_heads: raw.num_attention_heads,
            num_key_value_heads: kv,
            head_dim,
            rms_norm_eps: raw.rms_norm_eps,
            max_position_embeddings: raw.max_position_embeddings,
            tie_word_embeddings: raw.tie_word_embeddings,
            attention_bias: raw.attention_bias,
            rope_parameters,
        })
    }

    /// The rotary frequencies of its layers.
    ///
    /// # Errors
    /// None for a configuration that came from [`TargetConfig::from_value`].
    pub fn rope(&self) -> Result<Rope> {
        self.rope_parameters.rope(self.head_dim, 1.0, Path::new("config.json"))
    }
}
