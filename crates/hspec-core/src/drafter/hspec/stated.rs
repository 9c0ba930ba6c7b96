//! What an H-Spec configuration states. Its only layout is that of speculators.

use crate::{
    Result, TokenId,
    config::{HSpecConfig, HSpecExtensions, SeedMode, SubLayerKind, TargetConfig},
    drafter::{
        Format, odd,
        parameters::{Attention, Parameter, Parameters},
        registry::parse,
        stated::{Bytes, Description, Stated, TargetFacts},
    },
};
use serde_json::{Map, Value, json};
use std::path::Path;

/// The value of `speculators_model_type`.
pub(in crate::drafter) const WORDS: &[&str] = &["mamba_attn_hybrid"];

/// Reads a configuration.
pub(in crate::drafter) fn state(value: &Value, file: &Path, _: Option<usize>) -> Result<Box<dyn Stated>> {
    let config: HSpecConfig = parse(value, file)?;
    config.validate(file)?;
    Ok(Box::new(config))
}

impl HSpecConfig {
    /// Number of parameters that training changes, without building the drafter: drafters are compared at
    /// equal size. Embedding and output head are the target's. For a validated configuration.
    pub fn trainable_parameters(&self) -> usize {
        self.parameters().0.iter().filter(|p| p.trained).map(Parameter::size).sum()
    }

    /// Of a validated configuration.
    fn extended(&self) -> HSpecExtensions {
        self.extensions(Path::new("config.json")).unwrap_or_default()
    }
}

impl Stated for HSpecConfig {
    fn describe(&self) -> Description {
        let layer = &self.transformer_layer_config;
        let extensions = self.extended();
        let mut heads = Map::new();
        if self.markov_rank > 0 {
            heads.insert("markov".into(), json!({ "kind": self.markov_head_type, "rank": self.markov_rank }));
        }
        if let Some(domino) = extensions.domino {
            heads.insert("domino".into(), json!(domino));
        }
        if let Some(selector) = extensions.candidate_selector {
            heads.insert("candidate_selector".into(), json!(selector));
        }
        if let Some(conv) = extensions.block_conv {
            heads.insert("block_conv".into(), json!(conv));
        }
        if self.enable_confidence_head {
            heads.insert("confidence".into(), json!({ "with_markov": self.confidence_head_with_markov }));
        }
        let features = self.fusion_layers();
        Description {
            kind: "hspec",
            format: Format::Speculators,
            target: self.speculators_config.verifier.name_or_path.clone(),
            k: self.block_size - 1,
            block_size: Some(self.block_size),
            layout: Some("slot_predicts_itself"),
            mask_token: Some(TokenId(self.mask_token_id)),
            layers: self.block_pattern.0.len(),
            pattern: Some(self.block_pattern.0.clone()),
            hidden_size: layer.hidden_size,
            intermediate_size: layer.intermediate_size,
            attention_heads: layer.num_attention_heads,
            kv_heads: layer.num_key_value_heads,
            head_dim: self.head_dim(),
            kv_layers: self.attn_kv_layer_ids.clone(),
            windows: (0..self.attention_layers()).map(|j| self.window(j)).collect(),
            heads,
            vocabulary: layer.vocab_size,
            draft_vocabulary: self.draft_vocab_size,
            kv_bytes_per_token: Bytes::of(0),
            state_bytes: Bytes::of(features.len() * layer.hidden_size),
            feature_layers: Some(features),
        }
    }

    fn parameters(&self) -> Parameters {
        let layer = &self.transformer_layer_config;
        let extensions = self.extended();
        let (h, v, kept) = (layer.hidden_size, layer.vocab_size, self.draft_vocab_size);
        let mut all = Parameters::new(v, kept, h, false);
        all.norm("norm", h);
        if !self.disable_mamba_init_state_injection {
            let fused = self.latent_fusion_layer_ids.len();
            all.linear("fc", [h, fused * h], false);
            for f in (0..fused).filter(|_| self.fc_norm) {
                all.norm(&format!("fc_norm.{f}"), h);
            }
            all.norm("hidden_norm", h);
            let projections = match self.mamba_seed_mode {
                SeedMode::PerLayer => self.mamba_layers(),
                SeedMode::Shared | SeedMode::Once => 1,
            };
            for s in 0..projections {
                let state = self.mamba().d_inner() * self.mamba_d_state;
                all.linear(&format!("seed_projs.{s}"), [state, h], false);
            }
        }
        for (i, kind) in self.block_pattern.0.iter().enumerate() {
            let conv = |all: &mut Parameters, name: &str| {
                if let Some(c) = extensions.block_conv {
                    let at = format!("layers.{i}.{name}");
                    all.convolution(&at, h, c.conv_kernel_size, c.conv_group_size);
                }
            };
            match kind {
                SubLayerKind::Mamba => self.mixer(&mut all, i),
                SubLayerKind::Attention => {
                    all.norm(&format!("layers.{i}.input_layernorm"), h);
                    let sizes = Attention {
                        input: h,
                        hidden: h,
                        heads: layer.num_attention_heads,
                        kv_heads: layer.num_key_value_heads,
                        head_dim: self.head_dim(),
                        bias: false,
                        norms: self.use_qk_norm,
                    };
                    all.attention(&format!("layers.{i}.self_attn"), &sizes);
                    conv(&mut all, "attention_conv");
                }
                SubLayerKind::Mlp => {
                    all.norm(&format!("layers.{i}.mlp_norm"), h);
                    all.feed_forward(&format!("layers.{i}.mlp"), h, layer.intermediate_size);
                    conv(&mut all, "mlp_conv");
                }
            }
        }
        if let Ok(kind) = self.markov_head_type.parse()
            && self.markov_rank > 0
        {
            all.markov(kind, v, kept, self.markov_rank, h);
        }
        if let Some(d) = extensions.domino {
            all.domino("domino_head.", h, d.gru_hidden_dim, d.emb_dim, kept);
        }
        if let Some(s) = extensions.candidate_selector {
            all.selector(v, kept, s.selector_rank, h);
        }
        if self.enable_confidence_head {
            let features = if self.confidence_head_with_markov { self.markov_rank } else { 0 };
            all.linear("confidence_head.proj", [1, h + features], true);
        }
        all
    }

    fn odd(&self) -> Vec<String> {
        let layer = &self.transformer_layer_config;
        let mut odd = Vec::new();
        let attention = self.attention_layers();
        if layer.num_hidden_layers != attention {
            odd.push(format!(
                "num_hidden_layers is {}, and block_pattern has {attention} attention sub-layers, which counts",
                layer.num_hidden_layers
            ));
        }
        let mut lent = self.attn_kv_layer_ids.clone();
        lent.sort_unstable();
        lent.dedup();
        if self.aux_hidden_state_layer_ids != lent {
            odd.push(format!(
                "aux_hidden_state_layer_ids is {:?}; attn_kv_layer_ids needs {lent:?}, which counts",
                self.aux_hidden_state_layer_ids
            ));
        }
        if self.latent_fusion_layer_ids != self.fusion_layers() {
            let ids = &self.latent_fusion_layer_ids;
            odd.push(format!("latent_fusion_layer_ids {ids:?} are fused in ascending order"));
        }
        for (flag, set) in [
            ("disable_mamba_init_state_injection", self.disable_mamba_init_state_injection),
            ("disable_target_kv_reuse", self.disable_target_kv_reuse),
        ] {
            if set {
                odd.push(format!("{flag} is set: an ablation"));
            }
        }
        let extensions = ["attn_kv_head_ids", "domino", "block_conv", "candidate_selector"];
        let present = |name: &&str| self.extra.get(*name).is_some_and(|value| !value.is_null());
        let present: Vec<&str> = extensions.into_iter().filter(|name| present(name)).collect();
        if !present.is_empty() {
            let keys = present.join(", ");
            odd.push(format!(
                "the published format does not have {keys}: only this program can draft with it"
            ));
        }
        odd.extend(odd::in_layers(layer));
        odd.extend(odd::in_usage(&self.speculators_config, WORDS[0], self.block_size - 1));
        odd
    }

    fn check_target(&self, target: &TargetConfig) -> Result<()> {
        HSpecConfig::check_target(self, target)
    }

    fn convert(&self, _: Format, _: Option<&TargetFacts>) -> Result<Value, String> {
        Err("H-Spec is published in the layout of speculators only".into())
    }
}

impl HSpecConfig {
    fn mixer(&self, all: &mut Parameters, i: usize) {
        let (m, at) = (self.mamba(), format!("layers.{i}.ssm"));
        all.norm(&format!("layers.{i}.ssm_norm"), m.hidden);
        all.linear(&format!("{at}.in_proj"), [m.in_proj_dim(), m.hidden], false);
        all.add(format!("{at}.conv1d.weight"), &[m.conv_dim(), 1, m.conv_kernel]);
        all.add(format!("{at}.conv1d.bias"), &[m.conv_dim()]);
        for name in ["A_log", "D", "dt_bias"] {
            all.add(format!("{at}.{name}"), &[m.num_heads]);
        }
        all.norm(&format!("{at}.norm"), m.d_inner());
        all.linear(&format!("{at}.out_proj"), [m.hidden, m.d_inner()], false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drafter::{HSpecModel, parameters::of_module};
    type B = burn_ndarray::NdArray;

    fn config() -> Value {
        json!({
            "speculators_model_type": "mamba_attn_hybrid", "draft_vocab_size": 7, "block_size": 4,
            "mask_token_id": 19, "aux_hidden_state_layer_ids": [2], "latent_fusion_layer_ids": [1, 3],
            "attn_kv_layer_ids": [2, 2], "block_pattern": "mamba mlp mamba attention mlp attention mlp",
            "mamba_d_state": 2, "mamba_num_heads": 4, "mamba_head_dim": 2, "mamba_n_groups": 2,
            "mamba_seed_mode": "shared", "markov_rank": 3, "enable_confidence_head": true,
            "confidence_head_with_markov": true,
            "transformer_layer_config": {
                "vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-6,
                "rope_theta": 1e4, "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 6,
            },
            "speculators_config": {
                "algorithm": "mamba_attn_hybrid", "default_proposal_method": "greedy",
                "proposal_methods": [], "verifier": { "name_or_path": null },
            },
        })
    }

    fn without_markov(c: &mut Value) {
        (c["markov_rank"], c["confidence_head_with_markov"]) = (json!(0), json!(false));
    }

    type Edit = fn(&mut Value);

    const VARIANTS: [Edit; 8] = [
        |_| (),
        |c| {
            (c["markov_head_type"], c["mamba_seed_mode"], c["fc_norm"]) =
                ("gated".into(), "per_layer".into(), true.into())
        },
        |c| {
            (c["markov_head_type"], c["mamba_seed_mode"], c["use_qk_norm"]) =
                ("rnn".into(), "once".into(), false.into())
        },
        |c| (c["confidence_head_with_markov"], c["draft_vocab_size"]) = (false.into(), 20.into()),
        |c| (c["disable_mamba_init_state_injection"], c["fc_norm"]) = (true.into(), true.into()),
        |c| {
            without_markov(c);
            c["enable_confidence_head"] = false.into();
        },
        |c| {
            without_markov(c);
            c["domino"] = json!({ "emb_dim": 6, "gru_hidden_dim": 5 });
            c["block_conv"] = json!({ "conv_kernel_size": 2, "conv_group_size": 4 });
        },
        |c| {
            without_markov(c);
            c["candidate_selector"] = json!({ "selector_rank": 5, "selector_top_k": 6 });
        },
    ];

    fn read(edit: Edit) -> HSpecConfig {
        let mut config = config();
        edit(&mut config);
        parse(&config, Path::new("c")).unwrap()
    }

    #[test]
    fn parameters_are_those_of_the_module() {
        for edit in VARIANTS {
            let config = read(edit);
            config.validate(Path::new("c")).unwrap();
            let module = HSpecModel::<B>::init(&config, &Default::default());
            assert_eq!(config.parameters().0, of_module(&module, HSpecModel::<B>::frozen));
        }
    }

    #[test]
    fn what_is_unusual() {
        assert_eq!(read(|_| ()).odd(), [""; 0]);
        let cases: [(Edit, &str); 7] = [
            (
                |c| c["transformer_layer_config"]["num_hidden_layers"] = json!(7),
                "num_hidden_layers is 7, and block_pattern has 2 attention sub-layers, which counts",
            ),
            (
                |c| c["aux_hidden_state_layer_ids"] = json!([1, 3]),
                "aux_hidden_state_layer_ids is [1, 3]; attn_kv_layer_ids needs [2], which counts",
            ),
            (
                |c| c["latent_fusion_layer_ids"] = json!([3, 1]),
                "latent_fusion_layer_ids [3, 1] are fused in ascending order",
            ),
            (|c| c["disable_target_kv_reuse"] = json!(true), "disable_target_kv_reuse is set: an ablation"),
            (
                |c| c["block_conv"] = json!({ "conv_kernel_size": 2, "conv_group_size": 4 }),
                "the published format does not have block_conv: only this program can draft with it",
            ),
            (
                |c| {
                    c["transformer_layer_config"]["layer_types"] = json!(["full_attention", "full_attention"])
                },
                "sliding_window 6 is not used: layer_types has no sliding_attention",
            ),
            (
                |c| c["speculators_config"]["algorithm"] = json!("dspark"),
                "speculators_config.algorithm is dspark, the kind is mamba_attn_hybrid",
            ),
        ];
        for (edit, sentence) in cases {
            assert_eq!(read(edit).odd(), [sentence]);
        }
    }
}
