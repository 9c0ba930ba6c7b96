//! What the configurations of drafters say about their layers, in whatever file.

use super::LayerConfig;
use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// Elements that a matrix of a drafter may have; the embedding of a large target has a quarter of it.
pub(crate) const MOST_ELEMENTS: usize = 1 << 31;
/// Width that a head may have; the widest in use are 256 to 576.
const MOST_HEAD_DIM: usize = 1 << 16;
/// Slots that a block may have; the released drafters have 7 to 16.
pub(crate) const MOST_SLOTS: usize = 1024;

const SLIDING: &str = "sliding_attention";

impl LayerConfig {
    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Window of layer `i` by its type; none for full attention.
    pub fn window(&self, i: usize) -> Option<usize> {
        let kind = self.layer_types.as_ref().and_then(|types| types.get(i));
        self.sliding_window.filter(|_| kind.is_some_and(|kind| kind == SLIDING))
    }

    /// Share of a head's dimensions that rotate, where the rotary parameters do not say.
    pub fn partial_rotary_factor(&self) -> f64 {
        self.extra.get("partial_rotary_factor").and_then(Value::as_f64).unwrap_or(1.0)
    }

    /// Refuses what cannot be right for `layers` attention layers. `at` is the place of these fields in
    /// `file`, empty or ending in a dot.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub(crate) fn validate(&self, at: &str, layers: usize, file: &Path) -> Result<()> {
        let refuse = |field: &str, found: String, expected: String| {
            Err(Error::invalid(file, format!("{at}{field}"), found, expected))
        };
        for (field, n) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim()),
        ] {
            if n == 0 {
                return refuse(field, "0".into(), "a positive size".into());
            }
        }
        // Rotary tables are as long, and are made before any weight is looked for.
        if self.head_dim() > MOST_HEAD_DIM {
            return refuse("head_dim", self.head_dim().to_string(), format!("at most {MOST_HEAD_DIM}"));
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let found = self.num_key_value_heads.to_string();
            return refuse("num_key_value_heads", found, "a divisor of the heads".into());
        }
        if let Some(types) = &self.layer_types
            && types.len() != layers
        {
            let expected = format!("{layers} entries, one per attention layer");
            return refuse("layer_types", format!("{} entries", types.len()), expected);
        }
        let known = [SLIDING, "full_attention"];
        let types = self.layer_types.iter().flatten();
        if let Some(other) = types.clone().find(|t| !known.contains(&t.as_str())) {
            return refuse("layer_types", other.clone(), known.join(" or "));
        }
        if self.sliding_window.is_none() && types.clone().any(|t| t == SLIDING) {
            let expected = format!("a length, because layer_types has {SLIDING}");
            return refuse("sliding_window", "nothing".into(), expected);
        }
        if self.sliding_window == Some(0) {
            return refuse("sliding_window", "0".into(), "a positive length or null".into());
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps < 1.0) {
            return refuse("rms_norm_eps", self.rms_norm_eps.to_string(), "a small positive number".into());
        }
        if let Some(found) = self.extra.get("hidden_act").filter(|f| !f.is_null() && **f != "silu") {
            return refuse("hidden_act", found.to_string(), "\"silu\"".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rotary table of 10^18 entries aborted the process before the sizes of matrices were looked at.
    #[test]
    fn a_head_too_wide_for_memory_is_refused() {
        let layer = |head_dim: u64| -> LayerConfig {
            serde_json::from_value(serde_json::json!({
                "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim, "rms_norm_eps": 1e-5
            }))
            .unwrap()
        };
        let found = |head_dim| layer(head_dim).validate("", 1, Path::new("config.json"));
        found(1 << 16).unwrap();
        let error = found(1_000_000_000_000_000_000).unwrap_err().to_string();
        assert_eq!(error, "config.json: head_dim: found 1000000000000000000, expected at most 65536");
    }
}
