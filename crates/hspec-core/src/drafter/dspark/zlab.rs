//! The layout of z-lab, which SpecForge shares: a flat Qwen3 configuration with a `dflash_config` inside, and
//! only the drafter's own tensors; embedding and head are the target's.

use super::{ConvShape, DSparkShape, DominoShape, Kind, Layout, SelectorShape, deepspec};
use crate::{Error, Result, TokenId, config::LayerConfig};
use hspec_attn::WindowRule;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use std::path::Path;

/// The first of `architectures`, by kind.
pub(super) const DFLASH: &str = "DFlashDraftModel";
pub(super) const DFLASH2: &str = "DFlash2DraftModel";
pub(super) const DOMINO: &str = "DominoDraftModel";

/// `config.json` of a z-lab drafter: DFlash, DFlash-2 or Domino.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ZLabFile {
    /// One word: the kind.
    pub architectures: Vec<String>,
    /// The drafter's fields. Older files have some of them at the top.
    #[serde(default)]
    pub dflash_config: Map<String, Value>,
    /// The Qwen3 configuration.
    #[serde(flatten)]
    pub layer: LayerConfig,
}

impl ZLabFile {
    pub(super) fn shape(&self, file: &Path) -> Result<DSparkShape> {
        let f = Fields { config: self, file };
        let kind = match self.architectures.first().map(String::as_str) {
            Some(DFLASH) => Kind::DFlash,
            Some(DFLASH2) => Kind::DFlash2,
            Some(DOMINO) => Kind::Domino,
            other => {
                let expected = [DFLASH, DFLASH2, DOMINO].join(", ");
                return Err(Error::invalid(file, "architectures", other.unwrap_or("nothing"), expected));
            }
        };
        let shape =
            DSparkShape::from_layer(&self.layer, "", WindowRule::Serving, f.optional("is_causal")?, file)?;
        let domino = kind == Kind::Domino;
        let behind: bool = f.optional("shift_label")?.filter(|_| domino).unwrap_or(false);
        let ids: Vec<i64> = f.required("target_layer_ids")?;
        Ok(DSparkShape {
            kind,
            block_size: f.optional("block_size")?.unwrap_or(16),
            mask_token: TokenId(f.required("mask_token_id")?),
            layout: if behind { Layout::AnchorPredicts } else { Layout::SlotPredictsItself },
            feature_layers: deepspec::entered(&ids, f.optional("num_target_layers")?, file)?,
            embedding_scale: f.optional("input_embedding_scale")?.unwrap_or(1.0),
            output_multiplier: f.optional("output_multiplier")?.unwrap_or(1.0),
            softcap: f.optional("final_logit_softcapping")?.filter(|&cap: &f64| cap > 0.0),
            conv: match kind {
                Kind::DFlash2 => Some(ConvShape {
                    taps: f.required("conv_kernel_size")?,
                    group_size: f.required("conv_group_size")?,
                }),
                _ => None,
            },
            selector: match kind {
                Kind::DFlash2 => Some(SelectorShape {
                    rank: f.required("selector_rank")?,
                    top_k: f.required("selector_top_k")?,
                }),
                _ => None,
            },
            domino: match kind {
                Kind::Domino => Some(DominoShape {
                    emb_dim: f.required("emb_dim")?,
                    gru_hidden_dim: f.required("gru_hidden_dim")?,
                    pure_draft_prefix_len: f.optional("pure_draft_prefix_len")?.unwrap_or(0),
                }),
                _ => None,
            },
            ..shape
        })
    }
}

/// Fields that stand in `dflash_config` or at the top.
struct Fields<'a> {
    config: &'a ZLabFile,
    file: &'a Path,
}

impl Fields<'_> {
    fn optional<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let ZLabFile { dflash_config, layer, .. } = self.config;
        let Some(value) = dflash_config.get(name).or_else(|| layer.extra.get(name)) else { return Ok(None) };
        Option::<T>::deserialize(value).map_err(|e| {
            Error::invalid(self.file, format!("dflash_config.{name}"), e.to_string(), "a value of that type")
        })
    }

    fn required<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        self.optional(name)?
            .ok_or_else(|| Error::invalid(self.file, format!("dflash_config.{name}"), "nothing", "a value"))
    }
}
