//! The layout of DeepSpec: a flat Qwen3 configuration with the drafter's fields beside it, the whole
//! vocabulary, and frozen tensors in the file.

use super::{DSparkShape, Kind, Layout, MarkovShape};
use crate::{Error, Result, TokenId, config::LayerConfig};
use hspec_attn::WindowRule;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The first of `architectures`.
pub(super) const WORD: &str = "Qwen3DSparkModel";

/// `config.json` of a DeepSpec drafter, DSpark or DFlash.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeepSpecFile {
    /// `Qwen3DSparkModel`.
    pub architectures: Vec<String>,
    /// Slots of a block.
    pub block_size: usize,
    /// Stands for a token that is not known yet.
    pub mask_token_id: u32,
    /// 0-based target layers whose *output* is read, ascending; -1 is the embedding.
    pub target_layer_ids: Vec<i64>,
    /// Layers of the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_target_layers: Option<usize>,
    /// 0 without a Markov head.
    #[serde(default)]
    pub markov_rank: usize,
    /// `vanilla`, `gated` or `rnn`; absent without a head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub markov_head_type: Option<String>,
    /// Whether acceptance is predicted.
    #[serde(default)]
    pub enable_confidence_head: bool,
    /// Whether that prediction reads the Markov features; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confidence_head_with_markov: Option<bool>,
    /// The Qwen3 configuration.
    #[serde(flatten)]
    pub layer: LayerConfig,
}

impl DeepSpecFile {
    pub(super) fn shape(&self, file: &Path) -> Result<DSparkShape> {
        if let Some(kind) = self.layer.layer_types.iter().flatten().find(|kind| *kind != "full_attention") {
            return Err(Error::invalid(file, "layer_types", kind, "full_attention in this layout"));
        }
        let shape = DSparkShape::from_layer(&self.layer, "", WindowRule::Training, None, file)?;
        let markov = markov(self.markov_rank, self.markov_head_type.as_deref(), file)?;
        let plain = markov.is_none() && !self.enable_confidence_head;
        Ok(DSparkShape {
            kind: if plain { Kind::DFlash } else { Kind::DSpark },
            block_size: self.block_size,
            mask_token: TokenId(self.mask_token_id),
            layout: Layout::AnchorPredicts,
            feature_layers: entered(&self.target_layer_ids, self.num_target_layers, file)?,
            target_layers: self.num_target_layers,
            markov,
            confidence: self.enable_confidence_head,
            confidence_with_markov: self.confidence_head_with_markov.unwrap_or(false),
            ..shape
        })
    }
}

/// The Markov head of a rank and a word; vanilla without a word.
pub(super) fn markov(rank: usize, word: Option<&str>, file: &Path) -> Result<Option<MarkovShape>> {
    if rank == 0 {
        return Ok(None);
    }
    let word = word.unwrap_or("vanilla");
    let kind =
        word.parse().map_err(|_| Error::invalid(file, "markov_head_type", word, "vanilla, gated or rnn"))?;
    Ok(Some(MarkovShape { kind, rank }))
}

/// The output of layer i enters layer i + 1. The last layer's output has two meanings in the reference
/// implementation, before and behind the final norm, and is refused.
pub(super) fn entered(ids: &[i64], target_layers: Option<usize>, file: &Path) -> Result<Vec<usize>> {
    let end = target_layers.unwrap_or(usize::MAX);
    let entered = |&id: &i64| match id.checked_add(1).and_then(|id| usize::try_from(id).ok()) {
        Some(layer) if layer < end => Ok(layer),
        _ => {
            let last = target_layers.map_or("the target's".to_owned(), |n| n.saturating_sub(1).to_string());
            Err(Error::invalid(file, "target_layer_ids", id.to_string(), format!("-1 up to below {last}")))
        }
    };
    ids.iter().map(entered).collect()
}
