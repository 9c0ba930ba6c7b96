//! What the configurations of all kinds of drafter state, without a tensor: for telling what a checkpoint
//! is, and for writing it in another layout.

use super::{Format, parameters::Parameters};
use crate::{
    Result, TokenId,
    config::{ProposalMethod, SpeculatorsConfig, SubLayerKind, TargetConfig, Verifier},
};
use serde::Serialize;
use serde_json::{Map, Value};

/// A drafter's configuration in this crate's terms: hidden id `L` is the residual stream *entering* layer
/// `L`, whatever the file counts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Description {
    /// `hspec`, `dspark`, `dflash`, `dflash2`, `domino`, `eagle3` or `peagle`.
    pub kind: &'static str,
    /// Layout of its files.
    pub format: Format,
    /// The target that it names.
    pub target: Option<String>,
    /// Most tokens of a draft.
    pub k: usize,
    /// Slots of a block, the anchor's included; none where drafts are no blocks.
    pub block_size: Option<usize>,
    /// `anchor_predicts`: slot k predicts the token behind its position; `slot_predicts_itself`: the token at
    /// it.
    pub layout: Option<&'static str>,
    /// Stands for a token that is not known yet.
    pub mask_token: Option<TokenId>,
    /// Decoder layers, or sub-layers where there is a pattern.
    pub layers: usize,
    /// Kinds of the sub-layers, H-Spec only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pattern: Option<Vec<SubLayerKind>>,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward blocks.
    pub intermediate_size: usize,
    /// Query heads.
    pub attention_heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Hidden ids of the target that are fused, ascending; none where the file leaves them to the target.
    pub feature_layers: Option<Vec<usize>>,
    /// The target's layer whose keys and values each attention sub-layer reads, H-Spec only.
    pub kv_layers: Vec<usize>,
    /// Per attention layer, tokens that it looks back; none for all.
    pub windows: Vec<Option<usize>>,
    /// Parts beside the backbone, each with its sizes.
    pub heads: Map<String, Value>,
    /// The target's vocabulary.
    pub vocabulary: usize,
    /// Tokens that it can draft.
    pub draft_vocabulary: usize,
    /// What it keeps per token of context.
    pub kv_bytes_per_token: Bytes,
    /// What it keeps per request between steps, whatever the context.
    pub state_bytes: Bytes,
}

/// Memory of values in two types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Bytes {
    /// As serving keeps them.
    pub bf16: usize,
    /// As this crate keeps them.
    pub f32: usize,
}

impl Bytes {
    pub(super) fn of(values: usize) -> Self {
        Self { bf16: 2 * values, f32: 4 * values }
    }
}

/// What a target adds to a configuration in another layout.
pub(super) struct TargetFacts {
    pub layers: usize,
    pub name: Option<String>,
    pub architectures: Vec<String>,
}

/// A configuration that has been read and checked.
pub(super) trait Stated {
    fn describe(&self) -> Description;

    /// Its tensors.
    fn parameters(&self) -> Parameters;

    /// What is unusual in it, a sentence each.
    fn odd(&self) -> Vec<String>;

    /// Refuses a target that it was not made for.
    fn check_target(&self, target: &TargetConfig) -> Result<()>;

    /// The configuration in another layout, or why that layout cannot say it.
    fn convert(&self, to: Format, target: Option<&TargetFacts>) -> Result<Value, String>;
}

/// The target's layers in the layout of speculators, which has no place for them: exports from other layouts
/// keep their key.
pub(super) fn target_layers(extra: &Map<String, Value>) -> Option<usize> {
    usize::try_from(extra.get("num_target_layers")?.as_u64()?).ok()
}

/// How a drafter of `k` tokens is meant to be used, in the layout of speculators.
pub(super) fn usage(
    algorithm: &str,
    k: usize,
    name: Option<String>,
    target: Option<&TargetFacts>,
) -> SpeculatorsConfig {
    SpeculatorsConfig {
        algorithm: algorithm.into(),
        default_proposal_method: "greedy".into(),
        proposal_methods: vec![ProposalMethod {
            proposal_type: "greedy".into(),
            speculative_tokens: k,
            verifier_accept_k: 1,
            accept_tolerance: 0.0,
        }],
        verifier: Verifier {
            name_or_path: name.or_else(|| target?.name.clone()),
            architectures: target.map(|target| target.architectures.clone()).unwrap_or_default(),
        },
    }
}
