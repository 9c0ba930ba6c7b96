//! The layout of speculators, for EAGLE-3 and P-EAGLE: a layer configuration inside one of drafting, and a
//! vocabulary that may be pruned.

use super::{Eagle3Shape, config::ascending};
use crate::{
    Error, Result, TokenId,
    config::{LayerConfig, SpeculatorsConfig},
    drafter::stated::target_layers,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

const AUX: &str = "eagle_aux_hidden_state_layer_ids";

/// `config.json` of a speculators EAGLE-3 or P-EAGLE drafter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // the names are the file format's
pub struct SpeculatorsFile {
    /// `eagle3` or `peagle`.
    pub speculators_model_type: String,
    #[serde(default = "d32000")]
    pub draft_vocab_size: usize,
    /// Hidden ids, ascending; three spread over the target where absent.
    #[serde(default)]
    pub eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
    #[serde(default)]
    pub norm_before_residual: bool,
    #[serde(default)]
    pub norm_before_fc: bool,
    #[serde(default)]
    pub fc_norm: bool,
    #[serde(default)]
    pub norm_output: bool,
    /// Absent: true for P-EAGLE.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embed_requires_grad: Option<bool>,
    /// P-EAGLE only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_token_id: Option<u32>,
    #[serde(default)]
    pub target_hidden_size: Option<usize>,
    pub transformer_layer_config: LayerConfig,
    pub speculators_config: SpeculatorsConfig,
    /// Keys this reader has no use for; kept for writing.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

fn d32000() -> usize {
    32_000
}

impl SpeculatorsFile {
    pub(super) fn shape(&self, at_hand: Option<usize>, file: &Path) -> Result<Eagle3Shape> {
        let refuse =
            |field: &str, found: String, expected: String| Err(Error::invalid(file, field, found, expected));
        let shape =
            Eagle3Shape::from_layer(&self.transformer_layer_config, "transformer_layer_config.", file)?;
        let parallel = match self.speculators_model_type.as_str() {
            "eagle3" => false,
            "peagle" => true,
            other => return refuse("speculators_model_type", other.into(), "eagle3 or peagle".into()),
        };
        let mask_token = match (parallel, self.mask_token_id) {
            (false, _) => None,
            (true, Some(id)) if (id as usize) < shape.vocab_size => Some(TokenId(id)),
            (true, found) => {
                let found = found.map_or("nothing".to_owned(), |id| id.to_string());
                return refuse("mask_token_id", found, format!("an id below {}", shape.vocab_size));
            }
        };
        if let Some(width) = self.target_hidden_size.filter(|&width| width != shape.hidden_size) {
            let expected = format!("{}, the drafter's hidden_size", shape.hidden_size);
            return refuse("target_hidden_size", width.to_string(), expected);
        }
        if !(1..=shape.vocab_size).contains(&self.draft_vocab_size) {
            let expected = format!("1 to {}", shape.vocab_size);
            return refuse("draft_vocab_size", self.draft_vocab_size.to_string(), expected);
        }
        let feature_layers = match (&self.eagle_aux_hidden_state_layer_ids, at_hand) {
            (Some(ids), _) => ids.clone(),
            (None, Some(n)) => vec![2, n / 2, n.saturating_sub(3)],
            (None, None) => return refuse(AUX, "nothing".into(), "ids, or the target at hand".into()),
        };
        ascending(&feature_layers, AUX, file)?;
        let SpeculatorsConfig { proposal_methods, default_proposal_method, .. } = &self.speculators_config;
        let method = proposal_methods.iter().find(|m| m.proposal_type == *default_proposal_method);
        let Some(method) = method.or(proposal_methods.first()) else {
            let expected = "one, which says how many tokens a draft has";
            return refuse("speculators_config.proposal_methods", "none".into(), expected.into());
        };
        Ok(Eagle3Shape {
            draft_vocab_size: self.draft_vocab_size,
            feature_layers,
            target_layers: target_layers(&self.extra),
            norm_before_fc: self.norm_before_fc,
            fc_norm: self.fc_norm,
            norm_before_residual: self.norm_before_residual,
            norm_output: self.norm_output,
            first_position: 1,
            max_draft: method.speculative_tokens,
            trains_embedding: self.embed_requires_grad.unwrap_or(parallel),
            mask_token,
            ..shape
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Eagle3Config;
    use super::super::testing::{self, refused};
    use super::*;
    use serde_json::json;

    #[test]
    fn ids_are_taken_as_they_are_and_spread_where_absent() {
        let file = Path::new("c");
        let mut config = testing::speculators();
        let shape =
            |config: &Value, n| Eagle3Config::from_value(config, file).unwrap().shape(n, file).unwrap();
        assert_eq!(shape(&config, None).feature_layers, [1, 3, 5]);
        assert_eq!((shape(&config, None).first_position, shape(&config, None).max_draft), (1, 3));
        config["eagle_aux_hidden_state_layer_ids"] = Value::Null;
        assert_eq!(shape(&config, Some(36)).feature_layers, [2, 18, 33]);
        let back = Eagle3Config::from_value(&config, file).unwrap();
        assert_eq!(serde_json::to_value(&back).unwrap(), config);
    }

    /// A mask token that a file lacks once became id -1.
    #[test]
    fn a_missing_mask_token_is_refused() {
        let mut config = testing::speculators();
        config["speculators_model_type"] = json!("peagle");
        let message = "config.json: mask_token_id: found nothing, expected an id below 16";
        assert_eq!(refused(&config), message);
        config["mask_token_id"] = json!(16);
        assert_eq!(refused(&config), message.replace("nothing", "16"));
    }

    #[test]
    fn what_cannot_be_right_names_the_field() {
        for (pointer, value, message) in [
            ("/speculators_model_type", json!("medusa"), "speculators_model_type: found medusa"),
            (
                "/eagle_aux_hidden_state_layer_ids",
                json!([5, 3]),
                "eagle_aux_hidden_state_layer_ids: found [5",
            ),
            (
                "/eagle_aux_hidden_state_layer_ids",
                json!(null),
                "eagle_aux_hidden_state_layer_ids: found noth",
            ),
            ("/draft_vocab_size", json!(17), "draft_vocab_size: found 17, expected 1 to 16"),
            ("/target_hidden_size", json!(4), "target_hidden_size: found 4, expected 8"),
            ("/speculators_config/proposal_methods", json!([]), "speculators_config.proposal_methods: found"),
            (
                "/transformer_layer_config/hidden_size",
                json!(0),
                "transformer_layer_config.hidden_size: found 0",
            ),
            ("/transformer_layer_config/attention_bias", json!(1), "transformer_layer_config.attention_bias"),
        ] {
            let mut config = testing::speculators();
            *config.pointer_mut(pointer).unwrap() = value;
            let found = refused(&config);
            assert!(found.starts_with(&format!("config.json: {message}")), "{found}");
        }
    }
}
