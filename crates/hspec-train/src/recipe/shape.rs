//! The drafter's kind and shape.

use hspec_core::config::{BlockConvOptions, DominoOptions, SelectorOptions};
use serde::{Deserialize, Deserializer, Serialize, de::Error};
use toml::{Table, Value};

/// The drafter's kind and shape; sizes that must equal the target's are taken from it. In a recipe `kind`
/// names the variant, and without it the drafter is an H-Spec one. A key of another kind is refused.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
#[allow(clippy::large_enum_variant)] // there is one per run
pub enum Shape {
    /// H-Spec and its ablations.
    HSpec(HSpecShape),
    /// DFlash's backbone with a Markov and a confidence head; the anchor's slot predicts too.
    DSpark(DSparkShape),
    /// Block diffusion over a cache of its own.
    DFlash(DFlashShape),
    /// With convolutions and a candidate selector.
    DFlash2(DFlash2Shape),
    /// With a recurrence over the block's tokens.
    Domino(DominoShape),
    /// Step by step.
    Eagle3(Eagle3Shape),
    /// EAGLE-3 with all steps at once.
    PEagle(PEagleShape),
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut table = Table::deserialize(deserializer)?;
        let kind = match table.remove("kind") {
            None => "hspec".to_owned(),
            Some(Value::String(kind)) => kind,
            Some(other) => return Err(D::Error::custom(format!("kind: found {other}, expected a word"))),
        };
        fn shape<T: for<'a> Deserialize<'a>>(table: Table) -> Result<T, toml::de::Error> {
            T::deserialize(Value::Table(table))
        }
        let shape = match kind.as_str() {
            "hspec" => shape(table).map(Self::HSpec),
            "dspark" => shape(table).map(Self::DSpark),
            "dflash" => shape(table).map(Self::DFlash),
            "dflash2" => shape(table).map(Self::DFlash2),
            "domino" => shape(table).map(Self::Domino),
            "eagle3" => shape(table).map(Self::Eagle3),
            "peagle" => shape(table).map(Self::PEagle),
            other => {
                let known = "hspec, dspark, dflash, dflash2, domino, eagle3 or peagle";
                return Err(D::Error::custom(format!("kind: found {other:?}, expected {known}")));
            }
        };
        let message =
            |e: toml::de::Error| D::Error::custom(format!("a drafter of kind {kind}: {}", e.message()));
        shape.map_err(message)
    }
}

impl Shape {
    /// Ids of the pruned vocabulary; none where the kind's files know the whole vocabulary only.
    pub fn draft_vocab(&self) -> Option<usize> {
        match self {
            Self::HSpec(s) => Some(s.draft_vocab),
            Self::DSpark(s) => Some(s.draft_vocab),
            Self::DFlash(s) => Some(s.draft_vocab),
            Self::Eagle3(s) => Some(s.draft_vocab),
            Self::PEagle(s) => Some(s.draft_vocab),
            Self::DFlash2(_) | Self::Domino(_) => None,
        }
    }

    /// Token placed in the slots to predict; none where there are no such slots.
    pub fn mask_token(&self) -> Option<u32> {
        match self {
            Self::HSpec(s) => Some(s.mask_token),
            Self::DSpark(s) => Some(s.mask_token),
            Self::DFlash(s) => Some(s.mask_token),
            Self::DFlash2(s) => Some(s.mask_token),
            Self::Domino(s) => Some(s.mask_token),
            Self::PEagle(s) => Some(s.mask_token),
            Self::Eagle3(_) => None,
        }
    }

    /// Width of the feed-forward layers.
    pub fn intermediate_size(&self) -> usize {
        match self {
            Self::HSpec(s) => s.intermediate_size,
            Self::DSpark(s) => s.intermediate_size,
            Self::DFlash(s) => s.intermediate_size,
            Self::DFlash2(s) => s.intermediate_size,
            Self::Domino(s) => s.intermediate_size,
            Self::Eagle3(s) => s.intermediate_size,
            Self::PEagle(s) => s.intermediate_size,
        }
    }
}

/// H-Spec.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HSpecShape {
    /// Sub-layers, separated by spaces. Without mamba (naive reuse of the target's cache) or without
    /// attention, the flag that switches off what the missing ones read must be set.
    pub block_pattern: String,
    /// Slots of a block, the anchor's included.
    #[serde(default = "default_block")]
    pub block_size: usize,
    /// Target layers whose input makes the seed.
    pub fusion_layers: Vec<usize>,
    /// Target layers whose cache is read, one per attention sub-layer.
    #[serde(default)]
    pub kv_layers: Vec<usize>,
    /// Width of the feed-forward sub-layers.
    pub intermediate_size: usize,
    /// Mamba heads; needed where the pattern has mamba.
    #[serde(default)]
    pub mamba_heads: usize,
    /// Width of a Mamba head.
    #[serde(default = "default_head")]
    pub mamba_head_dim: usize,
    /// Mamba state size.
    #[serde(default = "default_state")]
    pub mamba_state: usize,
    /// Mamba groups.
    #[serde(default = "one")]
    pub mamba_groups: usize,
    /// Kernel of the Mamba convolution.
    #[serde(default = "default_state")]
    pub mamba_conv: usize,
    /// Ids of the pruned vocabulary.
    pub draft_vocab: usize,
    /// Rank of the Markov head; 0 for none.
    pub markov_rank: usize,
    /// `vanilla`, `gated` or `rnn`.
    #[serde(default = "vanilla")]
    pub markov_head_type: String,
    /// Whether acceptance is predicted.
    #[serde(default = "yes")]
    pub confidence_head: bool,
    /// Whether that prediction reads the Markov head's token features, if there is one.
    #[serde(default = "yes")]
    pub confidence_head_with_markov: bool,
    /// Window over the prefix.
    #[serde(default = "default_window")]
    pub sliding_window: usize,
    /// Token placed in the slots to predict.
    pub mask_token: u32,
    /// Mamba starts from zeros: no seed.
    #[serde(default)]
    pub disable_mamba_init_state_injection: bool,
    /// Attention sees its block only: no cache of the target.
    #[serde(default)]
    pub disable_target_kv_reuse: bool,
    /// Per attention sub-layer, the target's key-value heads that it reads, ascending; all where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attn_kv_head_ids: Option<Vec<Vec<usize>>>,
    /// Domino's recurrence in place of the Markov head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domino: Option<DominoOptions>,
    /// DFlash-2's convolutions around attention and feed-forward sub-layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_conv: Option<BlockConvOptions>,
    /// DFlash-2's selector in place of the Markov head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub candidate_selector: Option<SelectorOptions>,
}

/// What DFlash and its relatives have in common; a macro, as serde flattens no struct that refuses keys.
macro_rules! block_shape {
    ($(#[$doc:meta])* $name:ident, $block:literal { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            /// Decoder layers.
            pub layers: usize,
            /// Target layers whose input is fused into the context.
            pub feature_layers: Vec<usize>,
            /// Width of the feed-forward layers.
            pub intermediate_size: usize,
            /// Slots of a block, the anchor's included.
            #[serde(default = $block)]
            pub block_size: usize,
            /// Window over the prefix; none for all of it.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub sliding_window: Option<usize>,
            /// Token placed in the slots to predict.
            pub mask_token: u32,
            $($(#[$field_doc])* pub $field: $type,)*
        }
    };
}

block_shape! {
    /// DSpark.
    DSparkShape, "dspark_block" {
        /// Ids of the pruned vocabulary.
        draft_vocab: usize,
        /// Rank of the Markov head; 0 for none.
        markov_rank: usize,
        /// `vanilla`, `gated` or `rnn`.
        #[serde(default = "vanilla")]
        markov_head_type: String,
        /// Whether acceptance is predicted.
        #[serde(default = "yes")]
        confidence_head: bool,
        /// Whether that prediction reads the Markov head's token features, if there is one.
        #[serde(default = "yes")]
        confidence_head_with_markov: bool,
    }
}

block_shape! {
    /// DFlash.
    DFlashShape, "default_block" {
        /// Ids of the pruned vocabulary.
        draft_vocab: usize,
    }
}

block_shape! {
    /// DFlash-2, which drafts from the whole vocabulary.
    DFlash2Shape, "default_block" {
        /// Slots that a convolution covers.
        conv_kernel_size: usize,
        /// Channels with one dynamic kernel.
        conv_group_size: usize,
        /// Width of the selector's codebooks.
        selector_rank: usize,
        /// Candidates per slot.
        selector_top_k: usize,
    }
}

block_shape! {
    /// Domino, which drafts from the whole vocabulary.
    DominoShape, "default_block" {
        /// Width between the head's two projections.
        emb_dim: usize,
        /// Width of its recurrent state.
        gru_hidden_dim: usize,
        /// Drafted tokens at the front of the block that keep their base logits.
        #[serde(default)]
        pure_draft_prefix_len: usize,
    }
}

/// EAGLE-3.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Eagle3Shape {
    /// Decoder layers.
    #[serde(default = "one")]
    pub layers: usize,
    /// Target layers whose input is fused, ascending.
    pub feature_layers: Vec<usize>,
    /// Width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Ids of the pruned vocabulary.
    pub draft_vocab: usize,
    /// Tokens per draft, and steps that training unrolls.
    #[serde(default = "default_draft")]
    pub draft_tokens: usize,
}

/// P-EAGLE.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PEagleShape {
    /// Decoder layers.
    #[serde(default = "one")]
    pub layers: usize,
    /// Target layers whose input is fused, ascending.
    pub feature_layers: Vec<usize>,
    /// Width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Ids of the pruned vocabulary.
    pub draft_vocab: usize,
    /// Tokens per draft, and depths that training samples.
    #[serde(default = "default_block")]
    pub draft_tokens: usize,
    /// Stands for a token that is not known yet.
    pub mask_token: u32,
}

fn default_block() -> usize {
    8
}
fn dspark_block() -> usize {
    7
}
fn default_draft() -> usize {
    7
}
fn default_head() -> usize {
    64
}
fn default_state() -> usize {
    4
}
fn default_window() -> usize {
    2048
}
fn one() -> usize {
    1
}
fn yes() -> bool {
    true
}
fn vanilla() -> String {
    "vanilla".into()
}
