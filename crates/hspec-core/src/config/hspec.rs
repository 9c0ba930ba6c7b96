//! `config.json` of an H-Spec drafter in the speculators format.

use super::RopeParameters;
use crate::{Error, Result};
use hspec_heads::MarkovKind;
use hspec_mamba::MambaConfig;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// The value of `speculators_model_type`.
pub(super) const MODEL_TYPE: &str = "mamba_attn_hybrid";

/// What new files in the layout of speculators give as their `speculators_version`: a version of that library
/// which has this layout. Nothing is decided by it; the reference implementation writes its own.
pub const SPECULATORS_VERSION: &str = "0.7.0";

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
///
/// Released drafters have mamba, attention and mlp sub-layers, and the authors' reader refuses a pattern
/// without one of the three. Here a kind other than mlp may be missing, for ablations, if the flag is set
/// that switches off what it reads: `disable_mamba_init_state_injection` without mamba (reuse of the
/// target's cache alone, H-Spec section 3.1), `disable_target_kv_reuse` without attention.
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
    /// Key-value heads; the target's, or as many as a sub-layer reads of them.
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
    /// Other keys, kept for writing: those of [`super::HSpecExtensions`], and those this reader has no use
    /// for.
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

    /// The kind of correction head.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown word.
    pub fn markov_kind(&self, file: &Path) -> Result<MarkovKind> {
        let word = &self.markov_head_type;
        word.parse().map_err(|_| Error::invalid(file, "markov_head_type", word, "vanilla, gated or rnn"))
    }

    /// Number of attention sub-layers.
    pub fn attention_layers(&self) -> usize {
        self.count(SubLayerKind::Attention)
    }

    /// Number of Mamba sub-layers.
    pub fn mamba_layers(&self) -> usize {
        self.count(SubLayerKind::Mamba)
    }

    fn count(&self, kind: SubLayerKind) -> usize {
        self.block_pattern.0.iter().filter(|k| **k == kind).count()
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.transformer_layer_config.head_dim()
    }

    /// Target layers whose input is fused into the seed, ascending: the order of concatenation.
    pub fn fusion_layers(&self) -> Vec<usize> {
        let mut ids = self.latent_fusion_layer_ids.clone();
        ids.sort_unstable();
        ids
    }

    /// Window of attention sub-layer `j`; none for full attention.
    pub fn window(&self, j: usize) -> Option<usize> {
        let of_target = || self.attn_rope.as_ref().and_then(|r| r[j].sliding_window);
        self.transformer_layer_config.window(j).or_else(of_target)
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
}
