//! What the configuration of a DFlash or DSpark drafter states, whichever layout it has.

use super::{ConvShape, DSparkConfig, DSparkShape, DominoShape, Layout, MarkovShape, SelectorShape};
use crate::{
    Result,
    config::{LayerConfig, TargetConfig},
    drafter::{
        Format, odd,
        parameters::{Attention, Parameters},
        stated::{Bytes, Description, Stated, TargetFacts},
    },
};
use serde_json::{Map, Value, json};
use std::path::Path;

/// A configuration and what it means.
pub(super) struct StatedDSpark {
    pub config: DSparkConfig,
    pub shape: DSparkShape,
}

/// Reads a configuration.
pub(in crate::drafter) fn state(value: &Value, file: &Path, _: Option<usize>) -> Result<Box<dyn Stated>> {
    let config = DSparkConfig::from_value(value, file)?;
    let shape = config.shape(file)?;
    Ok(Box::new(StatedDSpark { config, shape }))
}

impl DSparkConfig {
    pub(super) fn format(&self) -> Format {
        match self {
            Self::DeepSpec(_) => Format::DeepSpec,
            Self::Speculators(_) => Format::Speculators,
            Self::ZLab(_) => Format::ZLab,
        }
    }

    pub(super) fn layer(&self) -> &LayerConfig {
        match self {
            Self::DeepSpec(config) => &config.layer,
            Self::Speculators(config) => &config.transformer_layer_config,
            Self::ZLab(config) => &config.layer,
        }
    }

    /// The target that it names.
    pub(super) fn target(&self) -> Option<String> {
        match self {
            Self::Speculators(config) => config.speculators_config.verifier.name_or_path.clone(),
            Self::DeepSpec(_) | Self::ZLab(_) => {
                let name = self.layer().extra.get("target_model_name_or_path")?;
                name.as_str().map(str::to_owned)
            }
        }
    }
}

impl DSparkShape {
    fn heads(&self) -> Map<String, Value> {
        let mut heads = Map::new();
        if let Some(MarkovShape { kind, rank }) = self.markov {
            heads.insert("markov".into(), json!({ "kind": kind.to_string(), "rank": rank }));
        }
        if let Some(DominoShape { emb_dim, gru_hidden_dim, pure_draft_prefix_len }) = self.domino {
            let sizes = json!({
                "emb_dim": emb_dim, "gru_hidden_dim": gru_hidden_dim,
                "pure_draft_prefix_len": pure_draft_prefix_len,
            });
            heads.insert("domino".into(), sizes);
        }
        if let Some(SelectorShape { rank, top_k }) = self.selector {
            let sizes = json!({ "selector_rank": rank, "selector_top_k": top_k });
            heads.insert("candidate_selector".into(), sizes);
        }
        if let Some(ConvShape { taps, group_size }) = self.conv {
            let sizes = json!({ "conv_kernel_size": taps, "conv_group_size": group_size });
            heads.insert("block_conv".into(), sizes);
        }
        if self.confidence {
            heads.insert("confidence".into(), json!({ "with_markov": self.confidence_with_markov }));
        }
        heads
    }

    pub(super) fn scales(&self) -> bool {
        self.embedding_scale != 1.0 || self.output_multiplier != 1.0 || self.softcap.is_some()
    }
}

impl Stated for StatedDSpark {
    fn describe(&self) -> Description {
        let s = &self.shape;
        Description {
            kind: s.kind.name(),
            format: self.config.format(),
            target: self.config.target(),
            k: s.max_draft(),
            block_size: Some(s.block_size),
            layout: Some(match s.layout {
                Layout::AnchorPredicts => "anchor_predicts",
                Layout::SlotPredictsItself => "slot_predicts_itself",
            }),
            mask_token: Some(s.mask_token),
            layers: s.rules.len(),
            pattern: None,
            hidden_size: s.hidden_size,
            intermediate_size: s.intermediate_size,
            attention_heads: s.num_attention_heads,
            kv_heads: s.num_key_value_heads,
            head_dim: s.head_dim,
            feature_layers: Some(s.feature_layers.clone()),
            kv_layers: Vec::new(),
            windows: s.rules.iter().map(|rule| rule.window).collect(),
            heads: s.heads(),
            vocabulary: s.vocab_size,
            draft_vocabulary: s.draft_vocab_size,
            kv_bytes_per_token: Bytes::of(2 * s.rules.len() * s.num_key_value_heads * s.head_dim),
            state_bytes: Bytes::of(0),
        }
    }

    fn parameters(&self) -> Parameters {
        let s = &self.shape;
        let (h, v, kept) = (s.hidden_size, s.vocab_size, s.draft_vocab_size);
        let mut all = Parameters::new(v, kept, h, false);
        all.linear("fc", [h, s.feature_layers.len() * h], false);
        all.norm("hidden_norm", h);
        all.norm("norm", h);
        let sizes = Attention {
            input: h,
            hidden: h,
            heads: s.num_attention_heads,
            kv_heads: s.num_key_value_heads,
            head_dim: s.head_dim,
            bias: s.attention_bias,
            norms: true,
        };
        for i in 0..s.rules.len() {
            let at = |name: &str| format!("layers.{i}.{name}");
            all.norm(&at("input_layernorm"), h);
            all.attention(&at("self_attn"), &sizes);
            all.norm(&at("post_attention_layernorm"), h);
            all.feed_forward(&at("mlp"), h, s.intermediate_size);
            if let Some(c) = s.conv {
                for name in ["attention_conv", "mlp_conv"] {
                    all.convolution(&at(name), h, c.taps, c.group_size);
                }
            }
        }
        if let Some(m) = s.markov {
            all.markov(m.kind, v, kept, m.rank, h);
        }
        if s.confidence {
            let features = s.markov.filter(|_| s.confidence_with_markov).map_or(0, |m| m.rank);
            all.linear("confidence_head.proj", [1, h + features], true);
        }
        if let Some(c) = s.selector {
            all.selector(v, kept, c.rank, h);
        }
        if let Some(d) = s.domino {
            all.domino("", h, d.gru_hidden_dim, d.emb_dim, kept);
        }
        all
    }

    fn odd(&self) -> Vec<String> {
        let s = &self.shape;
        let mut odd = odd::in_layers(self.config.layer());
        if let DSparkConfig::Speculators(config) = &self.config {
            odd.extend(odd::in_usage(
                &config.speculators_config,
                &config.speculators_model_type,
                s.max_draft(),
            ));
            if config.sample_from_anchor.is_none() {
                let slot = if s.layout == Layout::AnchorPredicts { "proposes" } else { "proposes nothing" };
                odd.push(format!(
                    "sample_from_anchor is missing: taken as published, the anchor's slot {slot}"
                ));
            }
        }
        if s.scales() {
            odd.push(format!(
                "embeddings are multiplied by {}, logits by {}, {}",
                s.embedding_scale,
                s.output_multiplier,
                s.softcap.map_or("without a cap".into(), |cap| format!("with a cap at {cap}"))
            ));
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
    use crate::drafter::{dspark::DSparkModel, parameters::of_module};
    type B = burn_ndarray::NdArray;

    fn layer(bias: bool) -> Value {
        json!({
            "vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-6,
            "rope_theta": 1e4, "attention_bias": bias,
        })
    }

    fn with(mut base: Value, more: Value) -> Value {
        if let (Value::Object(base), Value::Object(more)) = (&mut base, more) {
            base.extend(more);
        }
        base
    }

    /// One configuration of each head and layout.
    fn configurations() -> Vec<Value> {
        let deepspec = |head: &str, confidence: bool, with_markov: bool| {
            let own = json!({
                "architectures": ["Qwen3DSparkModel"], "block_size": 4, "mask_token_id": 19,
                "target_layer_ids": [-1, 2], "markov_rank": 3, "markov_head_type": head,
                "enable_confidence_head": confidence, "confidence_head_with_markov": with_markov,
            });
            with(layer(true), own)
        };
        let speculators = json!({
            "speculators_model_type": "dspark", "aux_hidden_state_layer_ids": [0, 2], "block_size": 4,
            "mask_token_id": 19, "draft_vocab_size": 7, "transformer_layer_config": layer(false),
            "markov_rank": 3, "enable_confidence_head": true,
            "speculators_config": {
                "algorithm": "dspark", "default_proposal_method": "greedy", "proposal_methods": [],
                "verifier": { "name_or_path": null },
            },
        });
        let zlab = |word: &str| {
            let own = json!({
                "target_layer_ids": [0, 1, 2], "mask_token_id": 19, "block_size": 4,
                "conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 6,
                "emb_dim": 6, "gru_hidden_dim": 5,
            });
            with(layer(false), json!({ "architectures": [word], "dflash_config": own }))
        };
        vec![
            deepspec("vanilla", false, false),
            deepspec("gated", true, true),
            deepspec("rnn", true, false),
            speculators,
            zlab("DFlashDraftModel"),
            zlab("DFlash2DraftModel"),
            zlab("DominoDraftModel"),
        ]
    }

    #[test]
    fn parameters_are_those_of_the_module() {
        for config in configurations() {
            let stated = {
                let config = DSparkConfig::from_value(&config, Path::new("c")).unwrap();
                let shape = config.shape(Path::new("c")).unwrap();
                StatedDSpark { config, shape }
            };
            let module = DSparkModel::<B>::init(&stated.shape, &Default::default());
            assert_eq!(stated.parameters().0, of_module(&module, DSparkModel::<B>::frozen), "{config}");
        }
    }
}
