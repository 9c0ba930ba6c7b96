//! What the configurations of drafters say about their layers, in whatever file.

use super::LayerConfig;
use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// Elements that a matrix of a drafter may have; the embedding of a large target has a quarter of it.
pub(crate) const MOST_ELEMENTS: usize = 1 << 31;
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
