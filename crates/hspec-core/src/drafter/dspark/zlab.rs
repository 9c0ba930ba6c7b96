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
    /// A field of the drafter that stands in `dflash_config` or at the top, unless it is null.
    pub(super) fn field(&self, name: &str) -> Option<&Value> {
        let places = [self.dflash_config.get(name), self.layer.extra.get(name)];
        places.into_iter().flatten().find(|value| !value.is_null())
    }

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
        let target_layers = f.optional("num_target_layers")?;
        // As the reference implementation of each kind has it.
        let slots = if kind == Kind::DFlash2 { 8 } else { 16 };
        Ok(DSparkShape {
            kind,
            block_size: f.optional("block_size")?.unwrap_or(slots),
            mask_token: TokenId(f.required("mask_token_id")?),
            layout: if behind { Layout::AnchorPredicts } else { Layout::SlotPredictsItself },
            feature_layers: deepspec::entered(&ids, target_layers, file)?,
            target_layers,
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

/// The drafter's fields by type.
struct Fields<'a> {
    config: &'a ZLabFile,
    file: &'a Path,
}

impl Fields<'_> {
    fn optional<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let value = self.config.field(name).map(T::deserialize).transpose();
        value.map_err(|e| {
            Error::invalid(self.file, format!("dflash_config.{name}"), e.to_string(), "a value of that type")
        })
    }

    fn required<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        self.optional(name)?
            .ok_or_else(|| Error::invalid(self.file, format!("dflash_config.{name}"), "nothing", "a value"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::DSparkConfig;
    use super::*;
    use serde_json::json;

    fn shape(word: &str, edit: impl FnOnce(&mut Value)) -> Result<DSparkShape> {
        let mut config = json!({
            "vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
            "architectures": [word],
            "dflash_config": {
                "target_layer_ids": [0, 1], "mask_token_id": 19, "conv_kernel_size": 2, "conv_group_size": 4,
                "selector_rank": 5, "selector_top_k": 6, "emb_dim": 3, "gru_hidden_dim": 4,
            },
        });
        edit(&mut config);
        DSparkConfig::from_value(&config, Path::new("c"))?.shape(Path::new("c"))
    }

    /// DFlash-2 once drafted in blocks of 16 where its file leaves the size out.
    #[test]
    fn blocks_without_a_size_are_as_long_as_their_kind_was_published() {
        for (word, slots) in [(DFLASH, 16), (DFLASH2, 8), (DOMINO, 16)] {
            assert_eq!(shape(word, |_| ()).unwrap().block_size, slots, "{word}");
        }
    }

    /// A null in `dflash_config` once hid the value at the top.
    #[test]
    fn a_null_inside_hides_nothing() {
        let found = shape(DFLASH, |c| {
            (c["dflash_config"]["block_size"], c["block_size"]) = (Value::Null, json!(5));
            (c["dflash_config"]["num_target_layers"], c["num_target_layers"]) = (Value::Null, json!(9));
        });
        let found = found.unwrap();
        assert_eq!((found.block_size, found.target_layers), (5, Some(9)));
        assert_eq!(shape(DFLASH, |c| c["block_size"] = Value::Null).unwrap().block_size, 16);
    }

    /// A prefix as long as the draft once left Domino's head without a slot, and the longest of all wrapped
    /// around to none.
    #[test]
    fn a_pure_draft_prefix_leaves_a_slot_to_correct() {
        for (shifted, most) in [(false, 3), (true, 4)] {
            let prefix = |n: usize| {
                shape(DOMINO, |c| {
                    let own = &mut c["dflash_config"];
                    own["block_size"] = json!(5);
                    (own["shift_label"], own["pure_draft_prefix_len"]) = (json!(shifted), json!(n));
                })
            };
            assert_eq!(prefix(most).unwrap().domino.unwrap().pure_draft_prefix_len, most);
            for n in [most + 1, usize::MAX] {
                let expected = format!("at most {most}, so that a slot is corrected");
                assert_eq!(
                    prefix(n).unwrap_err().to_string(),
                    format!("c: pure_draft_prefix_len: found {n}, expected {expected}")
                );
            }
        }
    }
}
