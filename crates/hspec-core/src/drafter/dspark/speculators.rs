//! The layout of speculators: a layer configuration inside one of drafting, a vocabulary that may be pruned,
//! and either [`Layout`].

use super::{DSparkShape, Kind, Layout, deepspec};
use crate::{
    Error, Result, TokenId,
    config::{LayerConfig, SpeculatorsConfig},
    drafter::stated::target_layers,
};
use hspec_attn::WindowRule;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// `config.json` of a speculators drafter, DSpark or DFlash.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpeculatorsFile {
    /// `dspark` or `dflash`.
    pub speculators_model_type: String,
    /// Informational.
    #[serde(default)]
    pub architectures: Vec<String>,
    /// Target layers whose input is read, ascending.
    pub aux_hidden_state_layer_ids: Vec<usize>,
    /// Slots of a block.
    pub block_size: usize,
    /// Stands for a token that is not known yet.
    pub mask_token_id: u32,
    /// Tokens that it can draft.
    pub draft_vocab_size: usize,
    /// Whether slot k predicts the token behind its position. Absent: as the kind was published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_from_anchor: Option<bool>,
    /// Whether windowed layers are bidirectional inside a block.
    #[serde(default)]
    pub sliding_window_non_causal: bool,
    /// Width of the target's hidden states where it is not the drafter's.
    #[serde(default)]
    pub target_hidden_size: Option<usize>,
    /// 0 or absent without a Markov head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub markov_rank: Option<usize>,
    /// `vanilla`, `gated` or `rnn`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub markov_head_type: Option<String>,
    /// Whether acceptance is predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_confidence_head: Option<bool>,
    /// Whether that prediction reads the Markov features.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confidence_head_with_markov: Option<bool>,
    /// The layers.
    pub transformer_layer_config: LayerConfig,
    /// How the drafter is meant to be used.
    pub speculators_config: SpeculatorsConfig,
    /// Keys that only other implementations use.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl SpeculatorsFile {
    pub(super) fn shape(&self, file: &Path) -> Result<DSparkShape> {
        let (kind, layout) = match self.speculators_model_type.as_str() {
            "dspark" => (Kind::DSpark, Layout::AnchorPredicts),
            "dflash" => (Kind::DFlash, Layout::SlotPredictsItself),
            other => return Err(Error::invalid(file, "speculators_model_type", other, "dspark or dflash")),
        };
        let layer = &self.transformer_layer_config;
        if let Some(width) = self.target_hidden_size.filter(|&width| width != layer.hidden_size) {
            let expected = format!("null or the drafter's own width, {}", layer.hidden_size);
            return Err(Error::invalid(file, "target_hidden_size", width.to_string(), expected));
        }
        let causal = self.sliding_window_non_causal.then_some(false);
        let at = "transformer_layer_config.";
        let shape = DSparkShape::from_layer(layer, at, WindowRule::Training, causal, file)?;
        let rank = self.markov_rank.unwrap_or(0);
        Ok(DSparkShape {
            kind,
            draft_vocab_size: self.draft_vocab_size,
            block_size: self.block_size,
            mask_token: TokenId(self.mask_token_id),
            layout: match self.sample_from_anchor {
                Some(true) => Layout::AnchorPredicts,
                Some(false) => Layout::SlotPredictsItself,
                None => layout,
            },
            feature_layers: self.aux_hidden_state_layer_ids.clone(),
            target_layers: target_layers(&self.extra),
            markov: deepspec::markov(rank, self.markov_head_type.as_deref(), file)?,
            confidence: self.enable_confidence_head.unwrap_or(false),
            confidence_with_markov: self.confidence_head_with_markov.unwrap_or(false),
            ..shape
        })
    }
}
