//! `config.json` of an H-Spec drafter in the speculators format.

use super::{RopeParameters, TargetConfig};
use crate::{Error, Result};
use hspec_heads::MarkovKind;
use hspec_mamba::MambaConfig;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// The value of `speculators_model_type`.
pub(crate) const MODEL_TYPE: &str = "mamba_attn_hybrid";

/// Elements that a matrix of a drafter may have; the embedding of a large target has a quarter of it.
const MOST_ELEMENTS: usize = 1 << 31;

/// Kind of a sub-layer in `block_pattern`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SubLayerKind {
    /// A Mamba-2 mixer started from the seed state.
    Mamba,
    /// Attention over the target's cached prefix and the block.
    Attention,
    /// SwiGLU.
    Mlp,
}

/// The sub-layers in order; a list of words, or one string of words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct BlockPattern(pub Vec<SubLayerKind>);

impl<'de> Deserialize<'de> for BlockPattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Words {
            One(String),
            Many(Vec<String>),
        }
        let words = match Words::deserialize(deserializer)? {
            Words::One(text) => text.split_whitespace().map(str::to_owned).collect(),
            Words::Many(words) => words,
        };
        let kind = |word: &String| match word.to_lowercase().as_str() {
            "mamba" => Ok(SubLayerKind::Mamba),
            "attention" => Ok(SubLayerKind::Attention),
            "mlp" => Ok(SubLayerKind::Mlp),
            _ => Err(serde::de::Error::custom(format!(
                "block_pattern: found {word:?}, expected mamba, attention or mlp"
            ))),
        };
        words.iter().map(kind).collect::<std::result::Result<_, _>>().map(Self)
    }
}

/// Which Mamba sub-layers start from the seed state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SeedMode {
    /// Each through its own projection.
    PerLayer,
    /// All from one projection.
    Shared,
    /// Only the first; the others start from zero.
    Once,
}

/// Rotary parameters of the target layer that an attention sub-layer reads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AttnRope {
    /// As stated by the target.
    pub rope_parameters: RopeParameters,
    /// Window of that layer, if any.
    pub sliding_window: Option<usize>,
    /// Informational.
    pub layer_type: Option<String>,
}

/// `transformer_layer_config`: a Qwen3 configuration whatever the target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerConfig {
    /// Target vocabulary, V.
    pub vocab_size: usize,
    /// H.
    pub hidden_size: usize,
    /// Width of the feed-forward sub-layers.
    pub intermediate_size: usize,
    /// Number of attention sub-layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key-value heads; the target's.
    pub num_key_value_heads: usize,
    /// Width of a head; the target's. Absent: `hidden_size / num_attention_heads`.
    #[serde(default)]
    pub head_dim: Option<usize>,
    /// Added to mean squares.
    pub rms_norm_eps: f64,
    /// Per attention sub-layer, `sliding_attention` or `full_attention`.
    #[serde(default)]
    pub layer_types: Option<Vec<String>>,
    /// Window of the sliding sub-layers.
    #[serde(default)]
    pub sliding_window: Option<usize>,
    /// Keys that only other implementations use, rope included.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// How the drafter is meant to be used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpeculatorsConfig {
    /// `mamba_attn_hybrid`.
    pub algorithm: String,
    /// `greedy`.
    pub default_proposal_method: String,
    /// Usually one.
    pub proposal_methods: Vec<ProposalMethod>,
    /// The target it was trained for.
    pub verifier: Verifier,
}

/// One way of proposing tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProposalMethod {
    /// `greedy`.
    pub proposal_type: String,
    /// Tokens per draft, `block_size - 1`.
    pub speculative_tokens: usize,
    /// Always 1.
    #[serde(default)]
    pub verifier_accept_k: usize,
    /// Always 0.
    #[serde(default)]
    pub accept_tolerance: f64,
}

/// The target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verifier {
    /// Where it came from.
    pub name_or_path: Option<String>,
    /// Its class.
    #[serde(default)]
    pub architectures: Vec<String>,
}

/// Configuration of an H-Spec drafter (H-Spec section 3; field by field as released).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // the names are the file format's
pub struct HSpecConfig {
    pub speculators_model_type: String,
    #[serde(default)]
    pub architectures: Vec<String>,
    #[serde(default = "d32000")]
    pub draft_vocab_size: usize,
    #[serde(default = "d8")]
    pub block_size: usize,
    #[serde(default = "d256")]
    pub max_anchors: usize,
    pub aux_hidden_state_layer_ids: Vec<usize>,
    pub mask_token_id: u32,
    pub latent_fusion_layer_ids: Vec<usize>,
    pub attn_kv_layer_ids: Vec<usize>,
    pub block_pattern: BlockPattern,
    #[serde(default)]
    pub attn_rope: Option<Vec<AttnRope>>,
    #[serde(default = "yes")]
    pub use_qk_norm: bool,
    #[serde(default = "d16")]
    pub mamba_d_state: usize,
    #[serde(default = "d64")]
    pub mamba_num_heads: usize,
    #[serde(default = "d64")]
    pub mamba_head_dim: usize,
    #[serde(default = "d1")]
    pub mamba_n_groups: usize,
    #[serde(default = "d4")]
    pub mamba_conv_kernel: usize,
    #[serde(default = "per_layer")]
    pub mamba_seed_mode: SeedMode,
    #[serde(default)]
    pub fc_norm: bool,
    #[serde(default)]
    pub disable_mamba_init_state_injection: bool,
    #[serde(default)]
    pub disable_target_kv_reuse: bool,
    #[serde(default)]
    pub markov_rank: usize,
    #[serde(default = "vanilla")]
    pub markov_head_type: String,
    #[serde(default)]
    pub enable_confidence_head: bool,
    #[serde(default)]
    pub confidence_head_with_markov: bool,
    #[serde(default)]
    pub sliding_window_non_causal: bool,
    #[serde(default)]
    pub sliding_window_prefix: usize,
    pub transformer_layer_config: LayerConfig,
    pub speculators_config: SpeculatorsConfig,
    /// Keys this reader has no use for; kept for writing.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

fn d32000() -> usize {
    32_000
}
fn d256() -> usize {
    256
}
fn d64() -> usize {
    64
}
fn d16() -> usize {
    16
}
fn d8() -> usize {
    8
}
fn d4() -> usize {
    4
}
fn d1() -> usize {
    1
}
fn yes() -> bool {
    true
}
fn per_layer() -> SeedMode {
    SeedMode::PerLayer
}
fn vanilla() -> String {
    "vanilla".to_owned()
}

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
        if self.block_size < 2 {
            return refuse(
                "block_size",
                self.block_size.to_string(),
                "at least 2: the anchor and a slot".into(),
            );
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

    /// Sizes of the mixers.
    pub fn mamba(&self) -> MambaConfig {
        MambaConfig {
            hidden: self.transformer_layer_config.hidden_size,
            d_state: self.mamba_d_state,
            num_heads: self.mamba_num_heads,
            head_dim: self.mamba_head_dim,
            n_groups: self.mamba_n_groups,
            conv_kernel: self.mamba_conv_kernel,
        }
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

    /// The kind of correction head.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown word.
    pub fn markov_kind(&self, file: &Path) -> Result<MarkovKind> {
        let word = &self.markov_head_type;
        word.parse().map_err(|_| Error::invalid(file, "markov_head_type", word, "vanilla, gated or rnn"))
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
        let deepest = self.attn_kv_layer_ids.iter().max().copied().unwrap_or(0);
        let fused = self.latent_fusion_layer_ids.iter().max().copied().unwrap_or(0);
        if deepest >= target.num_hidden_layers || fused > target.num_hidden_layers {
            return Err(Error::Mismatch(format!(
                "the drafter reads target layers up to {}, the target has {}",
                deepest.max(fused),
                target.num_hidden_layers
            )));
        }
        Ok(())
    }

    /// Number of attention sub-layers.
    pub fn attention_layers(&self) -> usize {
        self.block_pattern.0.iter().filter(|k| **k == SubLayerKind::Attention).count()
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        let layer = &self.transformer_layer_config;
        layer.head_dim.unwrap_or(layer.hidden_size / layer.num_attention_heads.max(1))
    }

    /// Target layers whose input is fused into the seed, ascending: the order of concatenation.
    pub fn fusion_layers(&self) -> Vec<usize> {
        let mut ids = self.latent_fusion_layer_ids.clone();
        ids.sort_unstable();
        ids
    }

    /// Window of attention sub-layer `j`; none for full attention.
    pub fn window(&self, j: usize) -> Option<usize> {
        let layer = &self.transformer_layer_config;
        let kind = layer.layer_types.as_ref().map(|t| t[j].as_str());
        match kind {
            Some("sliding_attention") => layer.sliding_window,
            _ => self.attn_rope.as_ref().and_then(|r| r[j].sliding_window),
        }
    }

    /// Rotary parameters of attention sub-layer `j`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when neither `attn_rope` nor the layer configuration states them.
    pub fn rope_parameters(&self, j: usize, file: &Path) -> Result<RopeParameters> {
        match &self.attn_rope {
            Some(rope) => Ok(rope[j].rope_parameters.clone()),
            None => RopeParameters::from_config(&self.transformer_layer_config.extra, file),
        }
    }

    /// Share of a head's dimensions that rotate, where the rotary parameters do not say.
    pub fn partial_rotary_factor(&self) -> f64 {
        let extra = &self.transformer_layer_config.extra;
        extra.get("partial_rotary_factor").and_then(Value::as_f64).unwrap_or(1.0)
    }
}
