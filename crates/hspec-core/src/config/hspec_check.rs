//! What is refused in an H-Spec configuration.

use super::{HSpecConfig, SubLayerKind, TargetConfig, hspec::MODEL_TYPE};
use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// Elements that a matrix of a drafter may have; the embedding of a large target has a quarter of it.
const MOST_ELEMENTS: usize = 1 << 31;
/// Slots that a block may have; the released drafters have 8.
const MOST_SLOTS: usize = 1024;

impl HSpecConfig {
    /// Refuses what cannot be right; `file` names the source in errors.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn validate(&self, file: &Path) -> Result<()> {
        let refuse =
            |field: &str, found: String, expected: String| Err(Error::invalid(file, field, found, expected));
        if self.speculators_model_type != MODEL_TYPE {
            return refuse("speculators_model_type", self.speculators_model_type.clone(), MODEL_TYPE.into());
        }
        let layer = &self.transformer_layer_config;
        if !(2..=MOST_SLOTS).contains(&self.block_size) {
            let expected = format!("2 to {MOST_SLOTS}: the anchor and the slots");
            return refuse("block_size", self.block_size.to_string(), expected);
        }
        let pattern = &self.block_pattern.0;
        let count = |kind| pattern.iter().filter(|k| **k == kind).count();
        if pattern.last() != Some(&SubLayerKind::Mlp)
            || count(SubLayerKind::Mamba) == 0
            || self.attention_layers() == 0
        {
            let found = format!("{pattern:?}");
            return refuse(
                "block_pattern",
                found,
                "at least one mamba, one attention, and an mlp at the end".into(),
            );
        }
        if self.attn_kv_layer_ids.len() != self.attention_layers() {
            let expected = format!("{} ids, one per attention sub-layer", self.attention_layers());
            return refuse("attn_kv_layer_ids", format!("{:?}", self.attn_kv_layer_ids), expected);
        }
        if let Some(rope) = &self.attn_rope
            && rope.len() != self.attention_layers()
        {
            let expected = format!("{} entries, one per attention sub-layer", self.attention_layers());
            return refuse("attn_rope", format!("{} entries", rope.len()), expected);
        }
        if let Some(types) = &layer.layer_types
            && types.len() != self.attention_layers()
        {
            let expected = format!("{} entries, one per attention sub-layer", self.attention_layers());
            return refuse(
                "transformer_layer_config.layer_types",
                format!("{} entries", types.len()),
                expected,
            );
        }
        self.mamba()
            .validate()
            .or_else(|e| refuse("mamba", e.to_string(), "sizes of a Mamba-2 mixer".into()))?;
        for (field, n) in [
            ("draft_vocab_size", self.draft_vocab_size),
            ("transformer_layer_config.vocab_size", layer.vocab_size),
            ("transformer_layer_config.hidden_size", layer.hidden_size),
            ("transformer_layer_config.intermediate_size", layer.intermediate_size),
            ("transformer_layer_config.num_attention_heads", layer.num_attention_heads),
            ("transformer_layer_config.num_key_value_heads", layer.num_key_value_heads),
            ("transformer_layer_config.head_dim", self.head_dim()),
            ("latent_fusion_layer_ids", self.latent_fusion_layer_ids.len()),
        ] {
            if n == 0 {
                return refuse(field, "0".into(), "a positive size".into());
            }
        }
        for (field, rows, columns) in self.largest_matrices() {
            if rows.checked_mul(columns).is_none_or(|n| n > MOST_ELEMENTS) {
                let found = format!("a matrix of {rows} x {columns}");
                return refuse(field, found, format!("at most {MOST_ELEMENTS} elements"));
            }
        }
        let known = ["sliding_attention", "full_attention"];
        let types = layer.layer_types.iter().flatten();
        if let Some(other) = types.clone().find(|t| !known.contains(&t.as_str())) {
            return refuse("transformer_layer_config.layer_types", other.clone(), known.join(" or "));
        }
        if layer.sliding_window.is_none() && types.clone().any(|t| t == known[0]) {
            let expected = "a length, because layer_types has sliding_attention";
            return refuse("transformer_layer_config.sliding_window", "nothing".into(), expected.into());
        }
        if !(layer.rms_norm_eps > 0.0 && layer.rms_norm_eps < 1.0) {
            let found = layer.rms_norm_eps.to_string();
            return refuse("transformer_layer_config.rms_norm_eps", found, "a small positive number".into());
        }
        for (field, expected) in [("hidden_act", Value::from("silu")), ("attention_bias", Value::from(false))]
        {
            if let Some(found) = layer.extra.get(field).filter(|f| !f.is_null() && **f != expected) {
                let field = format!("transformer_layer_config.{field}");
                return refuse(&field, found.to_string(), expected.to_string());
            }
        }
        if !layer.num_attention_heads.is_multiple_of(layer.num_key_value_heads) {
            let found = layer.num_key_value_heads.to_string();
            return refuse(
                "transformer_layer_config.num_key_value_heads",
                found,
                "a divisor of the heads".into(),
            );
        }
        if self.draft_vocab_size > layer.vocab_size {
            return refuse(
                "draft_vocab_size",
                self.draft_vocab_size.to_string(),
                format!("at most {}", layer.vocab_size),
            );
        }
        if self.mask_token_id as usize >= layer.vocab_size {
            return refuse(
                "mask_token_id",
                self.mask_token_id.to_string(),
                format!("below {}", layer.vocab_size),
            );
        }
        self.markov_kind(file)?;
        if self.confidence_head_with_markov && self.enable_confidence_head && self.markov_rank == 0 {
            return refuse("markov_rank", "0".into(), "above 0 with confidence_head_with_markov".into());
        }
        if self.sliding_window_prefix > 0 {
            return refuse("sliding_window_prefix", self.sliding_window_prefix.to_string(), "0".into());
        }
        if layer.sliding_window == Some(0) {
            return refuse(
                "transformer_layer_config.sliding_window",
                "0".into(),
                "a positive length or null".into(),
            );
        }
        Ok(())
    }

    /// Whether it can draft for a target.
    ///
    /// # Errors
    /// [`Error::Mismatch`] naming the first size that differs.
    pub fn check_target(&self, target: &TargetConfig) -> Result<()> {
        let layer = &self.transformer_layer_config;
        for (what, ours, theirs) in [
            ("hidden_size", layer.hidden_size, target.hidden_size),
            ("vocab_size", layer.vocab_size, target.vocab_size),
            ("num_key_value_heads", layer.num_key_value_heads, target.num_key_value_heads),
            ("head_dim", self.head_dim(), target.head_dim),
        ] {
            if ours != theirs {
                return Err(Error::Mismatch(format!(
                    "the drafter was made for another target: its {what} is {ours}, the target's is {theirs}"
                )));
            }
        }
        let layers = target.num_hidden_layers;
        for (field, ids, last) in [
            ("attn_kv_layer_ids", &self.attn_kv_layer_ids, layers - 1),
            ("latent_fusion_layer_ids", &self.latent_fusion_layer_ids, layers),
        ] {
            if let Some(id) = ids.iter().find(|&&id| id > last) {
                return Err(Error::Mismatch(format!(
                    "the drafter was made for another target: its {field} has {id}, and a target of {layers} \
                     layers allows at most {last}"
                )));
            }
        }
        Ok(())
    }

    /// The matrices that grow with each size, and a field to blame: so that an absurd size is refused
    /// before memory is asked for.
    fn largest_matrices(&self) -> [(&'static str, usize, usize); 8] {
        let layer = &self.transformer_layer_config;
        let h = layer.hidden_size;
        let state =
            self.mamba_num_heads.saturating_mul(self.mamba_head_dim).saturating_mul(self.mamba_d_state);
        let groups = self.mamba_n_groups.saturating_mul(self.mamba_d_state).saturating_mul(2);
        let heads = layer.num_attention_heads.saturating_mul(self.head_dim());
        [
            ("transformer_layer_config.vocab_size", layer.vocab_size, h),
            ("transformer_layer_config.intermediate_size", layer.intermediate_size, h),
            ("transformer_layer_config.num_attention_heads", heads, h),
            ("markov_rank", layer.vocab_size, self.markov_rank),
            ("mamba_num_heads", state, h),
            ("mamba_n_groups", groups, h),
            ("mamba_conv_kernel", state.saturating_add(groups), self.mamba_conv_kernel),
            ("latent_fusion_layer_ids", self.latent_fusion_layer_ids.len().saturating_mul(h), h),
        ]
    }
}
