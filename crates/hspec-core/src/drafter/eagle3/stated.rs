//! What the configuration of an EAGLE-3 or P-EAGLE drafter states, whichever layout it has.

use super::{Eagle3Config, Eagle3Shape};
use crate::{
    Result,
    config::{LayerConfig, TargetConfig},
    drafter::{
        Format, odd,
        parameters::{Attention, Parameters},
        stated::{Bytes, Description, Stated, TargetFacts},
    },
};
use serde_json::{Map, Value};
use std::path::Path;

/// A configuration and what it means.
pub(super) struct StatedEagle3 {
    pub config: Eagle3Config,
    pub shape: Eagle3Shape,
    /// Whether the features are those of a target at hand or stated in the file.
    pub features_known: bool,
}

/// Layers of a target that stands in for one that is not at hand, where only the number of features counts.
const STAND_IN: usize = 16;

/// Reads a configuration. The features that a file leaves to the target are unknown without its layers.
pub(in crate::drafter) fn state(
    value: &Value,
    file: &Path,
    target_layers: Option<usize>,
) -> Result<Box<dyn Stated>> {
    let config = Eagle3Config::from_value(value, file)?;
    let stated = match &config {
        Eagle3Config::DeepSpec(_) => true,
        Eagle3Config::Speculators(config) => config.eagle_aux_hidden_state_layer_ids.is_some(),
    };
    let shape = config.shape(target_layers.or(Some(STAND_IN)), file)?;
    Ok(Box::new(StatedEagle3 { config, shape, features_known: stated || target_layers.is_some() }))
}

impl Eagle3Config {
    pub(super) fn layer(&self) -> &LayerConfig {
        match self {
            Self::DeepSpec(config) => &config.layer,
            Self::Speculators(config) => &config.transformer_layer_config,
        }
    }

    /// The target that it names.
    pub(super) fn target(&self) -> Option<String> {
        match self {
            Self::DeepSpec(config) => {
                config.layer.extra.get("target_model_name_or_path")?.as_str().map(str::to_owned)
            }
            Self::Speculators(config) => config.speculators_config.verifier.name_or_path.clone(),
        }
    }
}

impl Stated for StatedEagle3 {
    fn describe(&self) -> Description {
        let s = &self.shape;
        Description {
            kind: if s.mask_token.is_some() { "peagle" } else { "eagle3" },
            format: match self.config {
                Eagle3Config::DeepSpec(_) => Format::DeepSpec,
                Eagle3Config::Speculators(_) => Format::Speculators,
            },
            target: self.config.target(),
            k: s.max_draft,
            block_size: None,
            layout: None,
            mask_token: s.mask_token,
            layers: s.num_hidden_layers,
            pattern: None,
            hidden_size: s.hidden_size,
            intermediate_size: s.intermediate_size,
            attention_heads: s.num_attention_heads,
            kv_heads: s.num_key_value_heads,
            head_dim: s.head_dim,
            feature_layers: self.features_known.then(|| s.feature_layers.clone()),
            kv_layers: Vec::new(),
            windows: vec![None; s.num_hidden_layers],
            heads: Map::new(),
            vocabulary: s.vocab_size,
            draft_vocabulary: s.draft_vocab_size,
            kv_bytes_per_token: Bytes::of(2 * s.num_hidden_layers * s.num_key_value_heads * s.head_dim),
            state_bytes: Bytes::of((s.max_draft + 2) * s.hidden_size),
        }
    }

    fn parameters(&self) -> Parameters {
        let s = &self.shape;
        let (h, features) = (s.hidden_size, s.feature_layers.len());
        let mut all = Parameters::new(s.vocab_size, s.draft_vocab_size, h, s.trains_embedding);
        if s.norm_before_fc {
            all.norm("input_norm", features * h);
        }
        for f in (0..features).filter(|_| s.fc_norm) {
            all.norm(&format!("fc_norm.{f}"), h);
        }
        all.linear("fc", [h, features * h], false);
        for i in 0..s.num_hidden_layers {
            let at = |name: &str| format!("layers.{i}.{name}");
            all.norm(&at("input_layernorm"), h);
            if i == 0 {
                all.norm(&at("hidden_norm"), h);
            }
            let sizes = Attention {
                input: if i == 0 { 2 * h } else { h },
                hidden: h,
                heads: s.num_attention_heads,
                kv_heads: s.num_key_value_heads,
                head_dim: s.head_dim,
                bias: s.attention_bias,
                norms: s.qk_norm,
            };
            all.attention(&at("self_attn"), &sizes);
            all.norm(&at("post_attention_layernorm"), h);
            all.feed_forward(&at("mlp"), h, s.intermediate_size);
        }
        all.norm("norm", h);
        if s.mask_token.is_some() {
            all.add("mask_hidden", &[1, 1, features * h]);
        }
        all
    }

    fn odd(&self) -> Vec<String> {
        let mut odd = odd::in_layers(self.config.layer());
        if let Eagle3Config::Speculators(config) = &self.config {
            let (usage, kind) = (&config.speculators_config, &config.speculators_model_type);
            odd.extend(odd::in_usage(usage, kind, self.shape.max_draft));
            if config.eagle_aux_hidden_state_layer_ids.is_none() {
                odd.push(
                    "eagle_aux_hidden_state_layer_ids is missing: of a target of n layers, 2, n/2 and n-3 are read"
                        .into(),
                );
            }
        }
        odd
    }

    fn check_target(&self, target: &TargetConfig) -> Result<()> {
        self.shape.check_target(target)
    }

    fn convert(&self, to: Format, target: Option<&TargetFacts>) -> Result<Value, String> {
        super::convert::convert(self, to, target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drafter::{
        eagle3::{Eagle3Model, testing},
        parameters::of_module,
    };
    use serde_json::json;
    type B = burn_ndarray::NdArray;

    #[test]
    fn parameters_are_those_of_the_module() {
        let mut flags = testing::speculators();
        for flag in ["fc_norm", "norm_before_fc", "embed_requires_grad"] {
            flags[flag] = true.into();
        }
        flags["draft_vocab_size"] = json!(9);
        (flags["speculators_model_type"], flags["mask_token_id"]) = (json!("peagle"), json!(15));
        let layer = &mut flags["transformer_layer_config"];
        (layer["model_type"], layer["attention_bias"]) = (json!("llama"), json!(true));
        (layer["num_hidden_layers"], layer["layer_types"]) = (json!(2), Value::Null);
        for config in [testing::deepspec(), testing::speculators(), flags] {
            let config = Eagle3Config::from_value(&config, Path::new("c")).unwrap();
            let shape = config.shape(None, Path::new("c")).unwrap();
            let module = Eagle3Model::<B>::init(&shape, &Default::default());
            let expected = of_module(&module, |name| shape.frozen(name));
            let stated = StatedEagle3 { config, shape, features_known: true };
            assert_eq!(stated.parameters().0, expected);
        }
    }

    #[test]
    fn features_that_the_target_decides_are_unknown_without_it() {
        let mut config = testing::speculators();
        config["eagle_aux_hidden_state_layer_ids"] = Value::Null;
        let read = |layers| state(&config, Path::new("c"), layers).unwrap();
        assert_eq!(read(None).describe().feature_layers, None);
        assert_eq!(read(Some(36)).describe().feature_layers, Some(vec![2, 18, 33]));
        assert_eq!(read(None).parameters().0, read(Some(36)).parameters().0);
        assert!(read(None).odd()[0].starts_with("eagle_aux_hidden_state_layer_ids is missing"));
    }
}
