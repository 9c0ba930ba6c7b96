//! What an EAGLE-3 or P-EAGLE drafter looks like, whichever layout states it.

use super::{DeepSpecFile, SpeculatorsFile};
use crate::{
    Error, Result, TokenId,
    config::{LayerConfig, MOST_ELEMENTS, MOST_SLOTS, RopeParameters, TargetConfig},
};
use hspec_attn::Rope;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::path::Path;

/// What files call this kind: `speculators_model_type`, or the first of `architectures`, of which the layout
/// of DeepSpec has two.
pub(in crate::drafter) const WORDS: &[&str] = &["eagle3", "Qwen3Eagle3Model", "Eagle3DraftModel"];

/// A drafter's `config.json` in one of its layouts.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
#[allow(clippy::large_enum_variant)] // one per drafter
pub enum Eagle3Config {
    /// A flat Qwen3 configuration.
    DeepSpec(DeepSpecFile),
    /// A layer configuration inside one of drafting; EAGLE-3 and P-EAGLE.
    Speculators(SpeculatorsFile),
}

impl Eagle3Config {
    /// Reads either layout; `file` names the source in errors.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the first field that is missing or has another type.
    pub fn from_value(value: &Value, file: &Path) -> Result<Self> {
        fn parse<T: DeserializeOwned>(value: &Value, file: &Path, expected: &str) -> Result<T> {
            T::deserialize(value).map_err(|e| Error::invalid(file, "config", e.to_string(), expected))
        }
        // Only the speculators layout names its kind.
        if value.get("speculators_model_type").is_some() {
            parse(value, file, "the fields of a speculators drafter").map(Self::Speculators)
        } else {
            parse(value, file, "the fields of a DeepSpec EAGLE-3 drafter").map(Self::DeepSpec)
        }
    }

    /// What it states, checked. `target_layers` is the number of the target's layers, which decides which
    /// of them are read where the file does not say.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field that cannot be right or asks for something that is not
    /// implemented.
    pub fn shape(&self, target_layers: Option<usize>, file: &Path) -> Result<Eagle3Shape> {
        let shape = match self {
            Self::DeepSpec(config) => config.shape(file)?,
            Self::Speculators(config) => config.shape(target_layers, file)?,
        };
        shape.validate(file)?;
        Ok(shape)
    }
}

/// The sizes and rules of a drafter, with layer ids and vocabularies in this crate's terms.
#[derive(Debug, Clone, PartialEq)]
pub struct Eagle3Shape {
    /// Width of the residual stream, H; the target's.
    pub hidden_size: usize,
    /// Width of the feed-forward block.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key-value heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Added to mean squares.
    pub rms_norm_eps: f64,
    /// The target's vocabulary, V.
    pub vocab_size: usize,
    /// The drafter's, Vd.
    pub draft_vocab_size: usize,
    /// Whether queries and keys are normed per head (Qwen3).
    pub qk_norm: bool,
    /// Whether the attention projections have biases.
    pub attention_bias: bool,
    /// Rotary frequencies.
    pub rope: Rope,
    /// Hidden ids of the target that are fused, ascending.
    pub feature_layers: Vec<usize>,
    /// Layers of the target, where the file says.
    pub target_layers: Option<usize>,
    /// One norm over all features before they are fused.
    pub norm_before_fc: bool,
    /// One norm per feature before they are fused.
    pub fc_norm: bool,
    /// Whether the residual stream of the first layer starts from the normed state.
    pub norm_before_residual: bool,
    /// Whether a step feeds the next one its output after the final norm.
    pub norm_output: bool,
    /// Rotary position of the first pair.
    pub first_position: usize,
    /// Tokens per draft.
    pub max_draft: usize,
    /// Whether training changes the embedding.
    pub trains_embedding: bool,
    /// P-EAGLE: the token that stands for one not known yet.
    pub mask_token: Option<TokenId>,
}

impl Eagle3Shape {
    /// What both layouts say in the same words. `at` is the place of `layer` in its file, empty or ending in
    /// a dot. The rest is that of plain EAGLE-3 without features.
    pub(super) fn from_layer(layer: &LayerConfig, at: &str, file: &Path) -> Result<Self> {
        let refuse = |field: &str, found: String, expected: &str| {
            Err(Error::invalid(file, format!("{at}{field}"), found, expected))
        };
        let stated = |field: &str| layer.extra.get(field).filter(|value| !value.is_null());
        let layers = layer.num_hidden_layers;
        if !(1..=MOST_SLOTS).contains(&layers) {
            return refuse("num_hidden_layers", layers.to_string(), &format!("1 to {MOST_SLOTS}"));
        }
        layer.validate(at, layers, file)?;
        for field in ["mlp_bias", "use_sliding_window"] {
            if let Some(found) = stated(field).filter(|value| **value != false) {
                return refuse(field, found.to_string(), "false");
            }
        }
        if (0..layers).any(|i| layer.window(i).is_some()) {
            return refuse("layer_types", "sliding_attention".into(), "full_attention");
        }
        let attention_bias = match stated("attention_bias") {
            None => false,
            Some(Value::Bool(bias)) => *bias,
            Some(other) => return refuse("attention_bias", other.to_string(), "true or false"),
        };
        let qk_norm = match stated("model_type") {
            None => false,
            Some(kind) if kind == "llama" => false,
            Some(kind) if kind == "qwen3" => true,
            Some(other) => return refuse("model_type", other.to_string(), "llama or qwen3"),
        };
        let head_dim = layer.head_dim();
        let rope = RopeParameters::from_config(&layer.extra, file)?;
        Ok(Self {
            hidden_size: layer.hidden_size,
            intermediate_size: layer.intermediate_size,
            num_hidden_layers: layers,
            num_attention_heads: layer.num_attention_heads,
            num_key_value_heads: layer.num_key_value_heads,
            head_dim,
            rms_norm_eps: layer.rms_norm_eps,
            vocab_size: layer.vocab_size,
            draft_vocab_size: layer.vocab_size,
            qk_norm,
            attention_bias,
            rope: rope.rope(head_dim, layer.partial_rotary_factor(), file)?,
            feature_layers: Vec::new(),
            target_layers: None,
            norm_before_fc: false,
            fc_norm: false,
            norm_before_residual: false,
            norm_output: false,
            first_position: 0,
            max_draft: 0,
            trains_embedding: false,
            mask_token: None,
        })
    }

    /// Refuses sizes that ask for more memory than any drafter has, and drafts of no length.
    fn validate(&self, file: &Path) -> Result<()> {
        let h = self.hidden_size;
        for (what, rows, columns) in [
            ("vocab_size", self.vocab_size, h),
            ("intermediate_size", self.intermediate_size, h),
            (
                "num_attention_heads",
                self.num_attention_heads.saturating_mul(self.head_dim),
                h.saturating_mul(2),
            ),
            ("the layer ids of the features", self.feature_layers.len().saturating_mul(h), h),
        ] {
            if rows.saturating_mul(columns) > MOST_ELEMENTS {
                let found = format!("a matrix of {rows} x {columns}");
                return Err(Error::invalid(file, what, found, format!("at most {MOST_ELEMENTS} elements")));
            }
        }
        if !(1..=MOST_SLOTS).contains(&self.max_draft) {
            let found = self.max_draft.to_string();
            return Err(Error::invalid(file, "tokens per draft", found, format!("1 to {MOST_SLOTS}")));
        }
        Ok(())
    }

    /// Whether it can draft for a target.
    ///
    /// # Errors
    /// [`Error::Mismatch`] naming the first size that differs.
    pub fn check_target(&self, target: &TargetConfig) -> Result<()> {
        let other =
            |what: String| Err(Error::Mismatch(format!("the drafter was made for another target: {what}")));
        for (what, ours, theirs) in [
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
        ] {
            if ours != theirs {
                return other(format!("its {what} is {ours}, the target's is {theirs}"));
            }
        }
        let layers = target.num_hidden_layers;
        if let Some(stated) = self.target_layers.filter(|&stated| stated != layers) {
            return other(format!("its num_target_layers is {stated}, the target has {layers}"));
        }
        // What leaves the last layer has two meanings: before the final norm here, and behind it elsewhere.
        match self.feature_layers.last().filter(|&&last| last >= layers) {
            Some(last) => other(format!(
                "it reads what enters layer {last}, and the target has {layers} layers, from 0"
            )),
            None => Ok(()),
        }
    }

    /// Whether the parameter of this name is a copy of the target's that training leaves alone.
    pub fn frozen(&self, name: &str) -> bool {
        match name {
            "lm_head.weight" => true,
            "embed_tokens.weight" => !self.trains_embedding,
            _ => false,
        }
    }
}

/// Refuses layer ids that do not ascend: their order is that of the features in `fc`.
pub(super) fn ascending(ids: &[usize], field: &str, file: &Path) -> Result<()> {
    if ids.is_empty() || ids.windows(2).any(|w| w[0] >= w[1]) {
        return Err(Error::invalid(file, field, format!("{ids:?}"), "layer ids in ascending order"));
    }
    Ok(())
}
