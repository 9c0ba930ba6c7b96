//! A DFlash or DSpark drafter's configuration in another layout, where that layout can say it. The tensors
//! have the same names in all of them.

use super::{
    DSparkConfig, DSparkShape, DeepSpecFile, Kind, Layout, SpeculatorsFile, ZLabFile, deepspec,
    stated::StatedDSpark, zlab,
};
use crate::{
    config::{LayerConfig, SPECULATORS_VERSION},
    drafter::{
        Format,
        stated::{TargetFacts, usage},
    },
};
use hspec_attn::WindowRule;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Keys of flat files that say something of the drafter and nothing of its layers.
const OWN: [&str; 19] = [
    "architectures",
    "auto_map",
    "block_size",
    "confidence_head_with_markov",
    "dflash_config",
    "dtype",
    "enable_confidence_head",
    "final_logit_softcapping",
    "input_embedding_scale",
    "is_causal",
    "markov_head_type",
    "markov_rank",
    "mask_token_id",
    "num_anchors",
    "num_target_layers",
    "output_multiplier",
    "target_layer_ids",
    "target_model_name_or_path",
    "torch_dtype",
];

/// Anchors per sequence in training, as published; DeepSpec asks for it.
const ANCHORS: u64 = 512;

pub(super) fn convert(
    stated: &StatedDSpark,
    to: Format,
    target: Option<&TargetFacts>,
) -> Result<Value, String> {
    let StatedDSpark { config, shape } = stated;
    if let Some(reason) = obstacle(shape, to) {
        return Err(reason);
    }
    // The two are equal where both are known: another target has been refused.
    let target_layers = shape.target_layers.or(target.map(|target| target.layers));
    let written = match to {
        Format::Speculators => DSparkConfig::Speculators(speculators(config, shape, target, target_layers)),
        Format::DeepSpec => DSparkConfig::DeepSpec(deepspec(config, shape, target_layers.ok_or(
            "it says how many layers the target has, which this drafter's files do not: the target is needed",
        )?)),
        Format::ZLab => DSparkConfig::ZLab(zlab(config, shape, target_layers)),
    };
    let back = written.shape(Path::new("config.json")).map_err(|e| e.to_string())?;
    // Whatever the sentences below forget must not be lost without one.
    if meaning(&back) != meaning(shape) {
        return Err("it cannot say all that this drafter's configuration states".into());
    }
    serde_json::to_value(written).map_err(|e| e.to_string())
}

/// Why a layout cannot say what a drafter is.
fn obstacle(s: &DSparkShape, to: Format) -> Option<String> {
    let window = s.rules.iter().find_map(|rule| rule.window);
    let windows = match (window, to) {
        (None, _) => None,
        (Some(w), Format::DeepSpec) => {
            Some(format!("all its layers see the whole context, and this drafter has a window of {w}"))
        }
        // A speculators window ends at the anchor for all slots, a z-lab one at each slot.
        (Some(w), _) => Some(format!(
            "a sliding window ends at the anchor for all slots in speculators and at each slot in zlab, and \
             this drafter has a window of {w}"
        )),
    };
    let causal = s.rules.iter().any(|rule| rule.causal && rule.window.is_none());
    let zlab = to == Format::ZLab;
    let pruned = s.draft_vocab_size < s.vocab_size;
    let reasons: [(bool, String); 10] = [
        (!zlab && s.kind == Kind::DFlash2, "it has no convolutions and no candidate selector".into()),
        (!zlab && s.kind == Kind::Domino, "it has no recurrence over a block's tokens".into()),
        (!zlab && s.scales(), "it has no factors of embeddings and logits, and no cap on logits".into()),
        (
            !zlab && causal,
            "a block is bidirectional in its full attention, and causal in this drafter".into(),
        ),
        (zlab && s.markov.is_some(), "it has no Markov head".into()),
        (zlab && s.confidence, "it has no confidence head".into()),
        (
            zlab && s.kind != Kind::Domino && s.layout == Layout::AnchorPredicts,
            "each slot of a block predicts the token at its own position, and in this drafter the token \
             behind it"
                .into(),
        ),
        (
            to == Format::DeepSpec && s.layout == Layout::SlotPredictsItself,
            "each slot of a block predicts the token behind it, and in this drafter the token at its own \
             position"
                .into(),
        ),
        (
            to != Format::Speculators && pruned,
            format!(
                "it has no pruned vocabulary, and this drafter has {} of {} tokens",
                s.draft_vocab_size, s.vocab_size
            ),
        ),
        (windows.is_some(), windows.unwrap_or_default()),
    ];
    reasons.into_iter().find_map(|(holds, reason)| holds.then_some(reason))
}

/// What has to survive.
fn meaning(shape: &DSparkShape) -> DSparkShape {
    let mut shape = shape.clone();
    // The target at hand may add it.
    shape.target_layers = None;
    // Two words for a backbone without heads; and rules for windows that are not there.
    shape.kind = if shape.kind == Kind::DSpark { Kind::DFlash } else { shape.kind };
    shape.confidence_with_markov &= shape.confidence;
    for rule in shape.rules.iter_mut().filter(|rule| rule.window.is_none()) {
        rule.rule = WindowRule::Training;
    }
    shape
}

/// A number that only some layouts have a place for.
fn known(config: &DSparkConfig, key: &str) -> Option<u64> {
    let value = match config {
        DSparkConfig::DeepSpec(config) => config.layer.extra.get(key),
        DSparkConfig::Speculators(config) => config.extra.get(key),
        DSparkConfig::ZLab(config) => config.field(key),
    };
    value?.as_u64()
}

/// The layers alone, with everything spelt out that readers have other defaults for.
fn layer(config: &DSparkConfig, shape: &DSparkShape) -> LayerConfig {
    let mut layer = config.layer().clone();
    layer.extra.retain(|key, _| !OWN.contains(&key.as_str()));
    layer.extra.insert("model_type".into(), "qwen3".into());
    layer.extra.insert("tie_word_embeddings".into(), false.into());
    layer.head_dim = Some(shape.head_dim);
    layer.layer_types = Some(vec!["full_attention".into(); shape.rules.len()]);
    layer
}

/// Hidden ids as outputs of layers.
fn outputs(shape: &DSparkShape) -> Vec<i64> {
    shape.feature_layers.iter().map(|&entered| entered as i64 - 1).collect()
}

fn speculators(
    config: &DSparkConfig,
    shape: &DSparkShape,
    target: Option<&TargetFacts>,
    target_layers: Option<usize>,
) -> SpeculatorsFile {
    let heads = shape.markov.is_some() || shape.confidence;
    let (kind, class) = if heads { ("dspark", "DSparkDraftModel") } else { ("dflash", "DFlashDraftModel") };
    let mut extra = Map::from_iter([
        ("tie_word_embeddings".to_owned(), json!(false)),
        ("speculators_version".to_owned(), json!(SPECULATORS_VERSION)),
    ]);
    // For the way back.
    for (key, value) in [
        ("num_anchors", known(config, "num_anchors")),
        ("num_target_layers", target_layers.map(|n| n as u64)),
    ] {
        extra.extend(value.map(|value| (key.to_owned(), json!(value))));
    }
    SpeculatorsFile {
        speculators_model_type: kind.into(),
        architectures: vec![class.into()],
        aux_hidden_state_layer_ids: shape.feature_layers.clone(),
        block_size: shape.block_size,
        mask_token_id: shape.mask_token.0,
        draft_vocab_size: shape.draft_vocab_size,
        sample_from_anchor: Some(shape.layout == Layout::AnchorPredicts),
        sliding_window_non_causal: false,
        target_hidden_size: None,
        markov_rank: heads.then(|| shape.markov.map_or(0, |markov| markov.rank)),
        markov_head_type: heads.then(|| shape.markov.map_or("vanilla".into(), |m| m.kind.to_string())),
        enable_confidence_head: heads.then_some(shape.confidence),
        confidence_head_with_markov: heads.then_some(shape.confidence && shape.confidence_with_markov),
        transformer_layer_config: layer(config, shape),
        speculators_config: usage(kind, shape.max_draft(), config.target(), target),
        extra,
    }
}

fn deepspec(config: &DSparkConfig, shape: &DSparkShape, target_layers: usize) -> DeepSpecFile {
    let mut layer = layer(config, shape);
    let anchors = known(config, "num_anchors").unwrap_or(ANCHORS);
    layer.extra.insert("num_anchors".into(), anchors.into());
    layer.extra.extend(config.target().map(|name| ("target_model_name_or_path".to_owned(), name.into())));
    DeepSpecFile {
        architectures: vec![deepspec::WORD.into()],
        block_size: shape.block_size,
        mask_token_id: shape.mask_token.0,
        target_layer_ids: outputs(shape),
        num_target_layers: Some(target_layers),
        markov_rank: shape.markov.map_or(0, |markov| markov.rank),
        markov_head_type: shape.markov.map(|markov| markov.kind.to_string()),
        enable_confidence_head: shape.confidence,
        confidence_head_with_markov: shape.confidence.then_some(shape.confidence_with_markov),
        layer,
    }
}

/// Only DFlash comes here, for the other kinds of this layout have no other.
fn zlab(config: &DSparkConfig, shape: &DSparkShape, target_layers: Option<usize>) -> ZLabFile {
    let mut layer = layer(config, shape);
    // Older readers look for it here.
    layer.extra.insert("block_size".into(), shape.block_size.into());
    layer.extra.extend(target_layers.map(|n| ("num_target_layers".to_owned(), n.into())));
    layer.extra.extend(config.target().map(|name| ("target_model_name_or_path".to_owned(), name.into())));
    ZLabFile {
        architectures: vec![zlab::DFLASH.into()],
        dflash_config: Map::from_iter([
            ("target_layer_ids".to_owned(), json!(outputs(shape))),
            ("mask_token_id".to_owned(), json!(shape.mask_token.0)),
            ("block_size".to_owned(), json!(shape.block_size)),
        ]),
        layer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drafter::stated::Stated;

    fn read(config: &Value) -> StatedDSpark {
        let config = DSparkConfig::from_value(config, Path::new("c")).unwrap();
        let shape = config.shape(Path::new("c")).unwrap();
        StatedDSpark { config, shape }
    }

    fn deepspec_config() -> Value {
        json!({
            "architectures": ["Qwen3DSparkModel"], "block_size": 4, "mask_token_id": 19,
            "target_layer_ids": [-1, 2], "num_target_layers": 5, "markov_rank": 3, "markov_head_type": "rnn",
            "enable_confidence_head": true, "confidence_head_with_markov": true, "num_anchors": 7,
            "vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
            "rope_parameters": { "rope_theta": 1e4, "rope_type": "default" }, "attention_bias": true,
            "tie_word_embeddings": false, "model_type": "qwen3", "a_key_of_another_program": [1],
        })
    }

    fn speculators_config() -> Value {
        let there = read(&deepspec_config()).convert(Format::Speculators, None).unwrap();
        assert_eq!(there["aux_hidden_state_layer_ids"], json!([0, 3]));
        there
    }

    /// Outputs of layers are inputs of the next: the layouts differ by one.
    #[test]
    fn there_and_back() {
        let there = speculators_config();
        assert_eq!(
            (&there["speculators_model_type"], &there["architectures"][0]),
            (&json!("dspark"), &json!("DSparkDraftModel"))
        );
        let usage = &there["speculators_config"];
        assert_eq!(usage["proposal_methods"][0]["speculative_tokens"], 4);
        assert_eq!(there["transformer_layer_config"]["head_dim"], 2);
        assert!(there["transformer_layer_config"].get("num_anchors").is_none());

        let mut back = read(&there).convert(Format::DeepSpec, None).unwrap();
        let mut expected = deepspec_config();
        expected.as_object_mut().unwrap().remove("dtype");
        (expected["head_dim"], expected["layer_types"]) =
            (json!(2), json!(["full_attention", "full_attention"]));
        expected["sliding_window"] = Value::Null;
        back.sort_all_objects();
        expected.sort_all_objects();
        assert_eq!(back, expected);
    }

    #[test]
    fn zlab_and_speculators() {
        let mut config = speculators_config();
        for key in
            ["markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"]
        {
            config.as_object_mut().unwrap().remove(key);
        }
        config["speculators_model_type"] = json!("dflash");
        config["sample_from_anchor"] = json!(false);
        let there = read(&config).convert(Format::ZLab, None).unwrap();
        assert_eq!(there["architectures"], json!(["DFlashDraftModel"]));
        let own = json!({ "target_layer_ids": [-1, 2], "mask_token_id": 19, "block_size": 4 });
        assert_eq!((&there["dflash_config"], &there["num_target_layers"]), (&own, &json!(5)));
        let back = read(&there).convert(Format::Speculators, None).unwrap();
        assert_eq!(back["aux_hidden_state_layer_ids"], json!([0, 3]));
        assert_eq!((&back["sample_from_anchor"], &back["draft_vocab_size"]), (&json!(false), &json!(20)));
        assert!(back.get("markov_rank").is_none());
        assert_eq!(read(&back).shape.target_layers, Some(5));
        assert_eq!(meaning(&read(&back).shape), meaning(&read(&config).shape));
    }

    type Edit = fn(&mut Value);

    #[test]
    fn what_a_layout_cannot_say() {
        type Case = (Edit, Format, &'static str);
        let cases: [Case; 8] = [
            (|_| (), Format::ZLab, "it has no Markov head"),
            (|c| c["markov_rank"] = json!(0), Format::ZLab, "it has no confidence head"),
            (
                |c| (c["markov_rank"], c["enable_confidence_head"]) = (json!(0), json!(false)),
                Format::ZLab,
                "each slot of a block predicts the token at its own position, and in this drafter the token behind it",
            ),
            (
                |c| c["sample_from_anchor"] = json!(false),
                Format::DeepSpec,
                "each slot of a block predicts the token behind it, and in this drafter the token at its own position",
            ),
            (
                |c| c["draft_vocab_size"] = json!(9),
                Format::DeepSpec,
                "it has no pruned vocabulary, and this drafter has 9 of 20 tokens",
            ),
            (
                |c| {
                    c["transformer_layer_config"]["layer_types"] =
                        json!(["sliding_attention", "full_attention"]);
                    c["transformer_layer_config"]["sliding_window"] = json!(6);
                },
                Format::DeepSpec,
                "all its layers see the whole context, and this drafter has a window of 6",
            ),
            (
                |c| drop(c.as_object_mut().unwrap().remove("num_target_layers")),
                Format::DeepSpec,
                "it says how many layers the target has, which this drafter's files do not: the target is needed",
            ),
            (
                |c| c["num_target_layers"] = json!(3),
                Format::DeepSpec,
                "config.json: target_layer_ids: found 2, expected -1 up to below 2",
            ),
        ];
        for (edit, to, reason) in cases {
            let mut config = speculators_config();
            config["confidence_head_with_markov"] = json!(false);
            edit(&mut config);
            assert_eq!(read(&config).convert(to, None).unwrap_err(), reason);
        }
        let mut config = deepspec_config();
        config["architectures"] = json!(["DFlashDraftModel"]);
        config["dflash_config"] = json!({ "target_layer_ids": [0] });
        let cases: [(Edit, &str); 4] = [
            (
                |c| {
                    c["layer_types"] = json!(["sliding_attention", "full_attention"]);
                    c["sliding_window"] = json!(6);
                },
                "a sliding window ends at the anchor for all slots in speculators and at each slot in zlab, and \
                 this drafter has a window of 6",
            ),
            (
                |c| c["is_causal"] = json!(true),
                "a block is bidirectional in its full attention, and causal in",
            ),
            (|c| c["output_multiplier"] = json!(0.5), "it has no factors of embeddings and logits"),
            (
                |c| {
                    c["architectures"] = json!(["DominoDraftModel"]);
                    (c["emb_dim"], c["gru_hidden_dim"]) = (json!(3), json!(4));
                },
                "it has no recurrence over a block's tokens",
            ),
        ];
        for (edit, reason) in cases {
            let mut config = config.clone();
            edit(&mut config);
            let found = read(&config).convert(Format::Speculators, None).unwrap_err();
            assert!(found.starts_with(reason), "{found}");
        }
    }
}
