//! The drafter's shape.

use serde::{Deserialize, Serialize};

/// The drafter's shape; sizes that must equal the target's are taken from it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Sub-layers, separated by spaces.
    pub block_pattern: String,
    /// Slots of a block, the anchor's included.
    #[serde(default = "default_block")]
    pub block_size: usize,
    /// Target layers whose input makes the seed.
    pub fusion_layers: Vec<usize>,
    /// Target layers whose cache is read, one per attention sub-layer.
    pub kv_layers: Vec<usize>,
    /// Width of the feed-forward sub-layers.
    pub intermediate_size: usize,
    /// Mamba heads.
    pub mamba_heads: usize,
    /// Width of a Mamba head.
    #[serde(default = "default_head")]
    pub mamba_head_dim: usize,
    /// Mamba state size.
    #[serde(default = "default_state")]
    pub mamba_state: usize,
    /// Mamba groups.
    pub mamba_groups: usize,
    /// Kernel of the Mamba convolution.
    #[serde(default = "default_state")]
    pub mamba_conv: usize,
    /// Ids of the pruned vocabulary.
    pub draft_vocab: usize,
    /// Rank of the Markov head.
    pub markov_rank: usize,
    /// Window over the prefix.
    #[serde(default = "default_window")]
    pub sliding_window: usize,
    /// Token placed in the slots to predict.
    pub mask_token: u32,
}

fn default_block() -> usize {
    8
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
