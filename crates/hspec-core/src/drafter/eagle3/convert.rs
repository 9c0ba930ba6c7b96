//! An EAGLE-3 drafter's configuration in another layout, where that layout can say it. The tensors have the
//! same names in both.

use super::{DeepSpecFile, Eagle3Config, Eagle3Shape, SpeculatorsFile, stated::StatedEagle3};
use crate::{
    config::{LayerConfig, SPECULATORS_VERSION},
    drafter::{
        Format,
        stated::{TargetFacts, usage},
    },
};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Keys of flat files that say something of the drafter and nothing of its layers.
const OWN: [&str; 10] = [
    "architectures",
    "auto_map",
    "draft_num_hidden_layers",
    "dtype",
    "num_target_layers",
    "step_loss_decay",
    "target_layer_ids",
    "target_model_name_or_path",
    "torch_dtype",
    "ttt_length",
];

/// Target layers that drafters in DeepSpec's layout read.
const FEATURES: usize = 5;

pub(super) fn convert(
    stated: &StatedEagle3,
    to: Format,
    target: Option<&TargetFacts>,
) -> Result<Value, String> {
    let StatedEagle3 { config, shape, .. } = stated;
    if to == Format::ZLab {
        return Err("it has no EAGLE drafters".into());
    }
    let written = match config {
        Eagle3Config::DeepSpec(file) => Eagle3Config::Speculators(speculators(file, shape, target)),
        Eagle3Config::Speculators(file) => {
            if let Some(reason) = obstacle(stated) {
                return Err(reason);
            }
            let target_layers = shape.target_layers.or(target.map(|target| target.layers));
            Eagle3Config::DeepSpec(deepspec(file, shape, target, target_layers.ok_or(
                "it says how many layers the target has, which this drafter's files do not: the target is needed",
            )?))
        }
    };
    let back = written.shape(None, Path::new("config.json")).map_err(|e| e.to_string())?;
    // Whatever the sentences below forget must not be lost without one.
    if meaning(&back) != meaning(shape) {
        return Err("it cannot say all that this drafter's configuration states".into());
    }
    serde_json::to_value(written).map_err(|e| e.to_string())
}

/// Why DeepSpec's layout cannot say what a drafter is.
fn obstacle(stated: &StatedEagle3) -> Option<String> {
    let s = &stated.shape;
    let flags = [
        ("norm_before_fc", s.norm_before_fc),
        ("fc_norm", s.fc_norm),
        ("norm_before_residual", s.norm_before_residual),
        ("norm_output", s.norm_output),
    ];
    let flag = flags.iter().find(|(_, set)| *set).map_or("", |(name, _)| name);
    let features = &s.feature_layers;
    let reasons: [(bool, String); 8] = [
        (s.mask_token.is_some(), "it has no P-EAGLE drafters".into()),
        (
            s.draft_vocab_size < s.vocab_size,
            format!(
                "it has no pruned vocabulary, and this drafter has {} of {} tokens",
                s.draft_vocab_size, s.vocab_size
            ),
        ),
        (!flag.is_empty(), format!("it has no {flag}, which this drafter sets")),
        (!s.qk_norm, "it norms queries and keys per head, and this drafter does not".into()),
        (s.num_hidden_layers != 1, format!("it has one layer, and this drafter {}", s.num_hidden_layers)),
        (s.trains_embedding, "it has the target's embedding, and this drafter trains its own".into()),
        (
            !stated.features_known,
            "it says which layers are read, which this drafter leaves to the target".into(),
        ),
        (
            features.len() != FEATURES || features.first() == Some(&0),
            format!(
                "it reads the outputs of {FEATURES} layers, and this drafter what enters layers {features:?}"
            ),
        ),
    ];
    reasons.into_iter().find_map(|(holds, reason)| holds.then_some(reason))
}

/// What has to survive. Rotary positions are relative: where they start changes nothing.
fn meaning(shape: &Eagle3Shape) -> Eagle3Shape {
    Eagle3Shape { first_position: 0, target_layers: None, ..shape.clone() }
}

/// The layers alone, with everything spelt out that readers have other defaults for.
fn layer(layer: &LayerConfig, shape: &Eagle3Shape) -> LayerConfig {
    let mut layer = layer.clone();
    layer.extra.retain(|key, _| !OWN.contains(&key.as_str()));
    layer.extra.insert("model_type".into(), if shape.qk_norm { "qwen3" } else { "llama" }.into());
    layer.extra.insert("tie_word_embeddings".into(), false.into());
    layer.head_dim = Some(shape.head_dim);
    layer.layer_types = Some(vec!["full_attention".into(); shape.num_hidden_layers]);
    layer
}

fn speculators(file: &DeepSpecFile, shape: &Eagle3Shape, target: Option<&TargetFacts>) -> SpeculatorsFile {
    let mut extra = Map::from_iter([
        ("architectures".to_owned(), json!(["Eagle3DraftModel"])),
        ("tie_word_embeddings".to_owned(), json!(false)),
        ("speculators_version".to_owned(), json!(SPECULATORS_VERSION)),
        // For the way back.
        ("num_target_layers".to_owned(), json!(file.num_target_layers)),
    ]);
    extra.extend(file.layer.extra.get_key_value("step_loss_decay").map(|(k, v)| (k.clone(), v.clone())));
    let name = file.layer.extra.get("target_model_name_or_path").and_then(Value::as_str).map(str::to_owned);
    SpeculatorsFile {
        speculators_model_type: "eagle3".into(),
        draft_vocab_size: shape.draft_vocab_size,
        eagle_aux_hidden_state_layer_ids: Some(shape.feature_layers.clone()),
        norm_before_residual: false,
        norm_before_fc: false,
        fc_norm: false,
        norm_output: false,
        embed_requires_grad: Some(false),
        mask_token_id: None,
        target_hidden_size: None,
        transformer_layer_config: layer(&file.layer, shape),
        speculators_config: usage("eagle3", shape.max_draft, name, target),
        extra,
    }
}

fn deepspec(
    file: &SpeculatorsFile,
    shape: &Eagle3Shape,
    target: Option<&TargetFacts>,
    target_layers: usize,
) -> DeepSpecFile {
    let mut layer = layer(&file.transformer_layer_config, shape);
    let decay = file.extra.get("step_loss_decay").cloned().unwrap_or(json!(0.8));
    let name = file.speculators_config.verifier.name_or_path.clone();
    let name = name.or_else(|| target?.name.clone());
    layer.extra.insert("step_loss_decay".into(), decay);
    layer.extra.insert("target_model_name_or_path".into(), json!(name));
    DeepSpecFile {
        architectures: vec!["Qwen3Eagle3Model".into()],
        target_layer_ids: shape.feature_layers.iter().map(|entered| entered - 1).collect(),
        num_target_layers: target_layers,
        ttt_length: shape.max_draft,
        draft_num_hidden_layers: shape.num_hidden_layers,
        layer,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{stated::state, testing};
    use super::*;

    fn to(config: &Value, format: Format) -> Result<Value, String> {
        state(config, Path::new("c"), None).unwrap().convert(format, None)
    }

    fn five() -> Value {
        let mut config = testing::deepspec();
        config["target_layer_ids"] = json!([0, 2, 3, 5, 6]);
        config["num_target_layers"] = json!(9);
        config["target_model_name_or_path"] = json!("toy");
        config["step_loss_decay"] = json!(0.7);
        config
    }

    /// Outputs of layers are inputs of the next: the layouts differ by one.
    #[test]
    fn there_and_back() {
        let there = to(&five(), Format::Speculators).unwrap();
        assert_eq!(there["eagle_aux_hidden_state_layer_ids"], json!([1, 3, 4, 6, 7]));
        assert_eq!(there["speculators_config"]["verifier"]["name_or_path"], "toy");
        assert_eq!(there["speculators_config"]["proposal_methods"][0]["speculative_tokens"], 3);
        assert_eq!(
            (&there["embed_requires_grad"], &there["norm_before_residual"]),
            (&json!(false), &json!(false))
        );
        let mut back = to(&there, Format::DeepSpec).unwrap();
        let mut expected = five();
        expected["tie_word_embeddings"] = json!(false);
        back.sort_all_objects();
        expected.sort_all_objects();
        assert_eq!(back, expected);
    }

    #[test]
    fn what_a_layout_cannot_say() {
        assert_eq!(to(&five(), Format::ZLab).unwrap_err(), "it has no EAGLE drafters");
        type Case = (fn(&mut Value), &'static str);
        let cases: [Case; 10] = [
            (
                |c| {
                    c["transformer_layer_config"]["num_hidden_layers"] = json!(2);
                    c["transformer_layer_config"]["layer_types"] = Value::Null;
                },
                "it has one layer, and this drafter 2",
            ),
            (
                |c| (c["speculators_model_type"], c["mask_token_id"]) = (json!("peagle"), json!(15)),
                "it has no P-EAGLE drafters",
            ),
            (
                |c| c["draft_vocab_size"] = json!(9),
                "it has no pruned vocabulary, and this drafter has 9 of 16 tokens",
            ),
            (|c| c["fc_norm"] = json!(true), "it has no fc_norm, which this drafter sets"),
            (|c| c["norm_output"] = json!(true), "it has no norm_output, which this drafter sets"),
            (
                |c| c["transformer_layer_config"]["model_type"] = json!("llama"),
                "it norms queries and keys per head, and this drafter does not",
            ),
            (
                |c| c["embed_requires_grad"] = json!(true),
                "it has the target's embedding, and this drafter trains",
            ),
            (
                |c| c["eagle_aux_hidden_state_layer_ids"] = Value::Null,
                "it says which layers are read, which this drafter leaves to the target",
            ),
            (
                |c| c["eagle_aux_hidden_state_layer_ids"] = json!([1, 2, 3]),
                "it reads the outputs of 5 layers, and this drafter what enters layers [1, 2, 3]",
            ),
            (
                |c| drop(c.as_object_mut().unwrap().remove("num_target_layers")),
                "it says how many layers the target has",
            ),
        ];
        for (edit, reason) in cases {
            let mut config = to(&five(), Format::Speculators).unwrap();
            edit(&mut config);
            let found = to(&config, Format::DeepSpec).unwrap_err();
            assert!(found.starts_with(reason), "{found}");
        }
    }
}
