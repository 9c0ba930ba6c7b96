//! The layout of DeepSpec: a flat Qwen3 configuration with the drafter's fields beside it, and the whole
//! vocabulary.

use super::{Eagle3Shape, config::ascending};
use crate::{Error, Result, config::LayerConfig};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// `config.json` of a DeepSpec EAGLE-3 drafter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeepSpecFile {
    /// `Qwen3Eagle3Model`.
    pub architectures: Vec<String>,
    /// 0-based target layers whose *output* is read, ascending.
    pub target_layer_ids: Vec<usize>,
    /// Layers of the target.
    pub num_target_layers: usize,
    /// Steps that training unrolls, and tokens per draft.
    pub ttt_length: usize,
    /// Decoder layers of the drafter, once more.
    #[serde(default = "one")]
    pub draft_num_hidden_layers: usize,
    /// The Qwen3 configuration.
    #[serde(flatten)]
    pub layer: LayerConfig,
}

fn one() -> usize {
    1
}

impl DeepSpecFile {
    pub(super) fn shape(&self, file: &Path) -> Result<Eagle3Shape> {
        let refuse =
            |field: &str, found: String, expected: String| Err(Error::invalid(file, field, found, expected));
        let shape = Eagle3Shape::from_layer(&self.layer, "", file)?;
        for (field, n) in [
            ("num_hidden_layers", shape.num_hidden_layers),
            ("draft_num_hidden_layers", self.draft_num_hidden_layers),
        ] {
            if n != 1 {
                return refuse(field, n.to_string(), "1: this layout has one decoder layer".into());
            }
        }
        ascending(&self.target_layer_ids, "target_layer_ids", file)?;
        // The last layer's output is cached before the final norm and evaluated behind it.
        let end = self.num_target_layers.saturating_sub(1);
        if let Some(id) = self.target_layer_ids.iter().find(|&&id| id >= end) {
            let expected = format!("ids below {end}: the last layer's output has two meanings here");
            return refuse("target_layer_ids", id.to_string(), expected);
        }
        Ok(Eagle3Shape {
            // The output of layer i enters layer i + 1.
            feature_layers: self.target_layer_ids.iter().map(|id| id + 1).collect(),
            target_layers: Some(self.num_target_layers),
            max_draft: self.ttt_length,
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
    fn outputs_of_layers_become_inputs_of_the_next() {
        let config = Eagle3Config::from_value(&testing::deepspec(), Path::new("c")).unwrap();
        let shape = config.shape(None, Path::new("c")).unwrap();
        assert_eq!(shape.feature_layers, [1, 3, 4]);
        assert_eq!((shape.first_position, shape.max_draft, shape.qk_norm), (0, 3, true));
        assert_eq!(shape.draft_vocab_size, shape.vocab_size);
        assert_eq!(serde_json::to_value(&config).unwrap(), testing::deepspec());
    }

    #[test]
    fn what_cannot_be_right_names_the_field() {
        for (field, value, message) in [
            ("target_layer_ids", json!([0, 2, 7]), "target_layer_ids: found 7, expected ids below 7"),
            ("target_layer_ids", json!([2, 0]), "target_layer_ids: found [2, 0], expected layer ids in"),
            ("target_layer_ids", json!([]), "target_layer_ids: found []"),
            ("num_hidden_layers", json!(2), "layer_types: found 1 entries, expected 2"),
            ("draft_num_hidden_layers", json!(2), "draft_num_hidden_layers: found 2, expected 1"),
            ("ttt_length", json!(0), "tokens per draft: found 0, expected 1 to"),
            ("hidden_act", json!("gelu"), "hidden_act: found \"gelu\", expected \"silu\""),
            ("model_type", json!("gemma4"), "model_type: found \"gemma4\", expected llama or qwen3"),
            ("num_key_value_heads", json!(3), "num_key_value_heads: found 3, expected a divisor"),
            ("hidden_size", json!(1 << 28), "vocab_size: found a matrix of 16 x 268435456"),
            ("rms_norm_eps", json!(0.0), "rms_norm_eps: found 0, expected a small"),
            ("layer_types", json!(["chunked_attention"]), "layer_types: found chunked_attention"),
            ("ttt_length", json!("7"), "config: found invalid type: string \"7\", expected usize"),
        ] {
            let mut config = testing::deepspec();
            config[field] = value;
            let found = refused(&config);
            assert!(found.starts_with(&format!("config.json: {message}")), "{found}");
        }
    }
}
