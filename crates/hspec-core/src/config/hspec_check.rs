//! What is refused in an H-Spec configuration.

use super::{HSpecConfig, MOST_ELEMENTS, MOST_SLOTS, SubLayerKind, TargetConfig, hspec::MODEL_TYPE};
use crate::{Error, Result};
use std::path::Path;

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
        let (mamba, attention) = (self.mamba_layers(), self.attention_layers());
        if pattern.last() != Some(&SubLayerKind::Mlp) || mamba + attention == 0 {
            let expected = "mamba or attention, and an mlp at the end";
            return refuse("block_pattern", format!("{pattern:?}"), expected.into());
        }
        // A pattern without one of the two is an ablation, which the flags must say as well.
        for (missing, kind, flag, set) in [
            (
                mamba == 0,
                "mamba",
                "disable_mamba_init_state_injection",
                self.disable_mamba_init_state_injection,
            ),
            (attention == 0, "attention", "disable_target_kv_reuse", self.disable_target_kv_reuse),
        ] {
            if missing && !set {
                return refuse(flag, "false".into(), format!("true, or {kind} in block_pattern"));
            }
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
        layer.validate("transformer_layer_config.", self.attention_layers(), file)?;
        self.mamba()
            .validate()
            .or_else(|e| refuse("mamba", e.to_string(), "sizes of a Mamba-2 mixer".into()))?;
        for (field, n) in [
            ("draft_vocab_size", self.draft_vocab_size),
            ("latent_fusion_layer_ids", self.latent_fusion_layer_ids.len()),
        ] {
            if n == 0 {
                return refuse(field, "0".into(), "a positive size".into());
            }
        }
        for (field, rows, columns) in self.largest_matrices() {
            bounded(field, rows, columns, file)?;
        }
        if let Some(found) = layer.extra.get("attention_bias").filter(|f| !f.is_null() && **f != false) {
            return refuse("transformer_layer_config.attention_bias", found.to_string(), "false".into());
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
        self.check_extensions(file)
    }

    /// Whether it can draft for a target.
    ///
    /// # Errors
    /// [`Error::Mismatch`] naming the first size that differs.
    pub fn check_target(&self, target: &TargetConfig) -> Result<()> {
        let layer = &self.transformer_layer_config;
        let heads = self.extensions(Path::new("config.json"))?.attn_kv_head_ids;
        if let Some(id) = heads.iter().flatten().flatten().find(|&&id| id >= target.num_key_value_heads) {
            return Err(Error::Mismatch(format!(
                "the drafter was made for another target: its attn_kv_head_ids has {id}, and the target has \
                 {} key-value heads",
                target.num_key_value_heads
            )));
        }
        // A drafter that reads some heads states how many those are.
        let kv_heads = heads.map_or(layer.num_key_value_heads, |_| target.num_key_value_heads);
        for (what, ours, theirs) in [
            ("hidden_size", layer.hidden_size, target.hidden_size),
            ("vocab_size", layer.vocab_size, target.vocab_size),
            ("num_key_value_heads", kv_heads, target.num_key_value_heads),
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

/// Refuses a matrix that no drafter has, before memory is asked for.
pub(super) fn bounded(field: &str, rows: usize, columns: usize, file: &Path) -> Result<()> {
    if rows.checked_mul(columns).is_none_or(|n| n > MOST_ELEMENTS) {
        let found = format!("a matrix of {rows} x {columns}");
        return Err(Error::invalid(file, field, found, format!("at most {MOST_ELEMENTS} elements")));
    }
    Ok(())
}
