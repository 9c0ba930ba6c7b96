use super::{B, Stored, TARGET, checkpoints, copy, dflash, edit, stored};
use burn::tensor::{Tensor, TensorData};
use hspec_attn::KvCache;
use hspec_core::{
    TokenId,
    checkpoint::{Weights, read_json},
    drafter::{Drafter, Format, dspark::DSpark, eagle3::Eagle3, export, inspect},
};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

fn target() -> PathBuf {
    hspec_goldens::root().join(TARGET)
}

fn config(dir: &Path) -> Value {
    read_json(&dir.join("config.json")).unwrap()
}

fn refused(dir: &Path, to: Format, target: Option<&Path>) -> String {
    let parent = tempfile::tempdir().unwrap();
    let error = export(dir, to, target, &parent.path().join("out")).unwrap_err().to_string();
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0, "something is left behind");
    error
}

#[test]
fn golden_checkpoints_stay_as_they_are_in_their_own_layout() {
    for dir in checkpoints() {
        let format = inspect(&dir).unwrap().description.format;
        let parent = tempfile::tempdir().unwrap();
        let out = parent.path().join("a/b");
        let exported = export(&dir, format, None, &out).unwrap();
        assert!(stored(&out) == stored(&dir), "{}", dir.display());
        assert_eq!(config(&out), config(&dir));
        assert_eq!((exported.inspection, exported.left_out), (inspect(&out).unwrap(), vec![]));
        let names = fs::read_dir(out.parent().unwrap()).unwrap().map(|e| e.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["b"]);
    }
}

/// Logits of two greedy drafts over random features.
fn drafts(dir: &Path) -> Vec<Vec<f32>> {
    let device = Default::default();
    let what = inspect(dir).unwrap().description;
    let drafter: Box<dyn Drafter<B>> = match what.kind {
        "eagle3" => Box::new(Eagle3::<B>::load(dir, None, &device).unwrap()),
        _ => Box::new(DSpark::<B>::load(dir, None, &device).unwrap()),
    };
    let width = what.feature_layers.unwrap().len() * what.hidden_size;
    let mut session = drafter.session(32);
    let mut cache = KvCache::new(1, 1, 1, 32, 1, &device);
    let mut rows = Vec::new();
    for n in [5, 2] {
        let tokens: Vec<TokenId> = (0..n).map(|i| TokenId(i as u32 * 7 % 50)).collect();
        let features = (0..n * width).map(|i| (i as f32 * 0.37).sin()).collect::<Vec<_>>();
        session.observe(&tokens, Tensor::from_data(TensorData::new(features, [n, width]), &device));
        cache.advance(n);
        let pick = &mut |_: usize, row: &[f32]| {
            rows.push(row.to_vec());
            Ok(TokenId((0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as u32))
        };
        session.draft(TokenId(3), &cache, drafter.max_draft(), pick).unwrap();
    }
    rows
}

#[test]
fn golden_round_trips_are_equal_byte_by_byte() {
    let mut done = 0;
    for dir in checkpoints() {
        let was = inspect(&dir).unwrap();
        for format in Format::ALL.into_iter().filter(|format| *format != was.description.format) {
            let parent = tempfile::tempdir().unwrap();
            let (there, back) = (parent.path().join("there"), parent.path().join("back"));
            let pruned = was.description.draft_vocabulary < was.description.vocabulary;
            let Ok(exported) = export(&dir, format, None, &there) else {
                let layouts = (was.description.format, format);
                assert!(pruned || layouts != (Format::DeepSpec, Format::Speculators), "{}", dir.display());
                continue;
            };
            done += 1;
            assert_eq!(exported.inspection.description.format, format);
            assert_eq!(exported.inspection.odd, was.odd);
            assert!(stored(&there) == stored(&dir), "{}", dir.display());
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-5 * a.abs().max(1.0);
            for (a, b) in drafts(&dir).iter().zip(&drafts(&there)) {
                assert!(a.iter().zip(b).all(close), "{} drafts other tokens", dir.display());
            }
            export(&there, was.description.format, None, &back).unwrap();
            assert!(stored(&back) == stored(&dir), "{}", dir.display());
            let mut expected = config(&dir);
            // Said twice in some files; and what a reader would take for granted.
            let mut found = config(&back);
            for config in [&mut expected, &mut found] {
                config.as_object_mut().unwrap().retain(|_, value| !value.is_null());
                config.sort_all_objects();
            }
            assert_eq!(found, expected, "{}", dir.display());
        }
    }
    assert!(done > 0, "no fixture could be converted");
}

/// Names of the fields of an object.
fn keys(value: &Value) -> BTreeSet<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

/// What other programs read must be there: the keys of a converted configuration are those that the
/// reference implementation writes itself for the kind.
#[test]
fn golden_converted_configurations_have_every_key_of_the_reference() {
    let mut compared = BTreeSet::new();
    for dir in checkpoints() {
        if inspect(&dir).unwrap().description.format != Format::DeepSpec {
            continue;
        }
        let parent = tempfile::tempdir().unwrap();
        export(&dir, Format::Speculators, None, &parent.path().join("out")).unwrap();
        let found = config(&parent.path().join("out"));
        for reference in checkpoints().iter().map(|dir| config(dir)) {
            let kind = &found["speculators_model_type"];
            if reference.get("speculators_model_type") != Some(kind) {
                continue;
            }
            let stamps = BTreeSet::from(["speculators_version", "transformers_version"]);
            let for_the_way_back = BTreeSet::from(["num_anchors", "num_target_layers", "step_loss_decay"]);
            let (own, expected) = (keys(&found), keys(&reference));
            assert_eq!(&own - &for_the_way_back, &expected - &stamps, "{}", dir.display());
            for inner in ["transformer_layer_config", "speculators_config"] {
                assert_eq!(keys(&found[inner]), keys(&reference[inner]), "{}", dir.display());
            }
            assert_eq!(found["architectures"], reference["architectures"]);
            compared.insert(kind.to_string());
        }
    }
    assert!(!compared.is_empty(), "no kind has fixtures of both layouts");
}

#[test]
fn golden_refusals_tell_the_reason() {
    let mut told = 0;
    for dir in checkpoints() {
        let was = inspect(&dir).unwrap().description;
        for format in Format::ALL.into_iter().filter(|format| *format != was.format) {
            let (to, kept, vocab) = (format.name(), was.draft_vocabulary, was.vocabulary);
            let pruned =
                format!("it has no pruned vocabulary, and this drafter has {kept} of {vocab} tokens");
            let reason = match (was.kind, format) {
                ("hspec", _) => "H-Spec is published in the layout of speculators only",
                ("peagle", Format::DeepSpec) => "it has no P-EAGLE drafters",
                ("peagle" | "eagle3", Format::ZLab) => "it has no EAGLE drafters",
                ("dspark", Format::ZLab) if was.heads.contains_key("markov") => "it has no Markov head",
                ("dflash" | "eagle3", _) if kept < vocab && was.layout != Some("slot_predicts_itself") => {
                    &pruned
                }
                ("dflash", Format::ZLab) if kept < vocab => &pruned,
                _ => continue,
            };
            let expected = format!("{}: {to} cannot hold this {} drafter: {reason}", dir.display(), was.kind);
            assert_eq!(refused(&dir, format, None), expected);
            told += 1;
        }
    }
    assert!(told > 0);
}

fn without(mut tensors: Stored, names: &[&str]) -> Stored {
    tensors.retain(|name, _| !names.contains(&name.as_str()));
    tensors
}

const FROZEN: [&str; 2] = ["embed_tokens.weight", "lm_head.weight"];

/// The floats of a target's tensor, rounded as the drafter stores its own.
fn bf16(dir: &Path, name: &str) -> Vec<u8> {
    let values = Weights::open(dir).unwrap().tensor(name).unwrap().unwrap();
    values.iter::<f32>().flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect()
}

#[test]
fn zlab_files_leave_the_targets_tensors_to_it() {
    let (own, parent, target) = (dflash(512), tempfile::tempdir().unwrap(), target());
    let at = |name: &str| parent.path().join(name);
    // Nothing to compare, so no target is needed.
    let exported = export(own.path(), Format::ZLab, None, &at("zlab")).unwrap();
    assert_eq!(exported.inspection.params_borrowed, 2 * 512 * 64);
    assert!(stored(&at("zlab")) == stored(own.path()));

    // The way back lends them, in the drafter's type.
    let exported = export(&at("zlab"), Format::Speculators, Some(&target), &at("speculators")).unwrap();
    assert_eq!((exported.inspection.params_borrowed, exported.inspection.params_frozen), (0, 2 * 512 * 64));
    let whole = stored(&at("speculators"));
    assert!(without(whole.clone(), &FROZEN) == stored(own.path()));
    let (head, embedding) = (&whole["lm_head.weight"], &whole["embed_tokens.weight"]);
    assert_eq!((head.0, embedding.0), (Dtype::BF16, Dtype::BF16));
    assert!(head.2 == bf16(&target, "lm_head.weight"));
    assert!(embedding.2 == bf16(&target, "model.embed_tokens.weight"));
    let verifier = &config(&at("speculators"))["speculators_config"]["verifier"];
    assert_eq!(*verifier, json!({ "name_or_path": "llama31-tiny", "architectures": ["LlamaForCausalLM"] }));

    // And once more away, which has to see that they are the target's.
    let needed = "zlab cannot hold this dflash drafter: it leaves embed_tokens.weight to the target, and this \
                  drafter has its own: the target is needed, to see that they are the same";
    assert!(refused(&at("speculators"), Format::ZLab, None).ends_with(needed));
    export(&at("speculators"), Format::ZLab, Some(&target), &at("again")).unwrap();
    assert!(stored(&at("again")) == stored(own.path()));
    edit(&at("speculators"), |t| t.get_mut("lm_head.weight").unwrap().2[0] ^= 1, |_| ());
    let message = refused(&at("speculators"), Format::ZLab, Some(&target));
    assert!(
        message.ends_with("leaves lm_head.weight to the target, and this drafter's differs from it"),
        "{message}"
    );
}

#[test]
fn deepspec_files_hold_the_targets_tensors() {
    let (own, parent, target) = (dflash(512), tempfile::tempdir().unwrap(), target());
    edit(own.path(), |_| (), |config| config["sample_from_anchor"] = json!(true));
    assert!(refused(own.path(), Format::DeepSpec, None).ends_with("the target is needed"));
    edit(own.path(), |_| (), |config| config["num_target_layers"] = json!(4));
    let message = refused(own.path(), Format::DeepSpec, None);
    assert!(
        message.contains("it has a copy of the target's embed_tokens.weight, which this drafter"),
        "{message}"
    );
    let out = parent.path().join("out");
    export(own.path(), Format::DeepSpec, Some(&target), &out).unwrap();
    assert!(without(stored(&out), &FROZEN) == stored(own.path()));
    let config = config(&out);
    assert_eq!((&config["target_layer_ids"], &config["num_target_layers"]), (&json!([-1, 1]), &json!(4)));
    assert_eq!((&config["num_anchors"], &config["dtype"]), (&json!(512), &json!("bfloat16")));
}

#[test]
fn a_pruned_head_gets_the_kept_rows_and_a_tied_target_lends_its_embedding() {
    let own = dflash(171);
    for (name, head) in
        [("targets/llama31-tiny", "lm_head.weight"), ("targets/qwen3-tiny-tied", "model.embed_tokens.weight")]
    {
        let (target, parent) = (hspec_goldens::root().join(name), tempfile::tempdir().unwrap());
        let out = parent.path().join("out");
        export(own.path(), Format::Speculators, Some(&target), &out).unwrap();
        let all = bf16(&target, head);
        let kept: Vec<u8> = all.chunks(3 * 64 * 2).flat_map(|rows| rows[..64 * 2].to_vec()).collect();
        assert!(stored(&out)["lm_head.weight"] == (Dtype::BF16, vec![171, 64], kept), "{name}");
    }
}

#[test]
fn a_target_of_another_drafter() {
    let message = refused(dflash(512).path(), Format::ZLab, Some(Path::new("nowhere")));
    assert!(message.starts_with("nowhere: "), "{message}");
    let own = dflash(512);
    edit(own.path(), |_| (), |config| config["aux_hidden_state_layer_ids"] = json!([0, 4]));
    let message = refused(own.path(), Format::ZLab, Some(&target()));
    let expected =
        "the drafter was made for another target: it reads what enters layer 4, and the target has";
    assert!(message.starts_with(expected), "{message}");
}

/// A drafter's own number of target layers was once overwritten by that of whatever target was given.
#[test]
fn a_target_of_another_depth() {
    let own = dflash(512);
    edit(own.path(), |_| (), |config| config["num_target_layers"] = json!(9));
    let message = refused(own.path(), Format::ZLab, Some(&target()));
    assert_eq!(
        message,
        "the drafter was made for another target: its num_target_layers is 9, the target has 4"
    );
}

/// The same layout once kept a null although the target was given.
#[test]
fn a_target_that_is_given_is_named() {
    let (own, parent) = (dflash(512), tempfile::tempdir().unwrap());
    let verifier = |name: &str| config(&parent.path().join(name))["speculators_config"]["verifier"].clone();
    let to = Format::Speculators;
    let exported = export(own.path(), to, None, &parent.path().join("a")).unwrap();
    assert_eq!(
        (exported.inspection.description.target, verifier("a")["name_or_path"].take()),
        (None, Value::Null)
    );
    let exported = export(own.path(), to, Some(&target()), &parent.path().join("b")).unwrap();
    assert_eq!(exported.inspection.description.target.as_deref(), Some("llama31-tiny"));
    let found = verifier("b");
    assert_eq!(found, json!({ "name_or_path": "llama31-tiny", "architectures": ["LlamaForCausalLM"] }));
    assert_eq!(exported.decoded, [""; 0]);
    // A name that is there stays.
    let named = |config: &mut Value| config["speculators_config"]["verifier"]["name_or_path"] = json!("mine");
    edit(own.path(), |_| (), named);
    export(own.path(), to, Some(&target()), &parent.path().join("c")).unwrap();
    assert_eq!(verifier("c")["name_or_path"], "mine");
}

/// A GGUF file of a target for [`dflash`] that lends a Q8_0 embedding, whose values are its scales times 1, and
/// an F32 head of twos.
fn quantised_target(file: &Path) {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    let sizes = [
        ("block_count", 4),
        ("context_length", 64),
        ("embedding_length", 64),
        ("feed_forward_length", 64),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
    ];
    bytes.extend(2u64.to_le_bytes());
    bytes.extend((2 + sizes.len() as u64).to_le_bytes());
    text(&mut bytes, "general.architecture");
    bytes.extend(8u32.to_le_bytes());
    text(&mut bytes, "llama");
    text(&mut bytes, "llama.attention.layer_norm_rms_epsilon");
    bytes.extend(6u32.to_le_bytes());
    bytes.extend(1e-5f32.to_le_bytes());
    for (key, value) in sizes {
        text(&mut bytes, &format!("llama.{key}"));
        bytes.extend([4u32, value].map(u32::to_le_bytes).concat());
    }
    let blocks = (0..512 * 2).flat_map(|_| [half::f16::ONE.to_le_bytes().to_vec(), vec![1; 32]].concat());
    let embedding: Vec<u8> = blocks.collect();
    for (name, kind, offset) in [("token_embd.weight", 8u32, 0), ("output.weight", 0, embedding.len() as u64)]
    {
        text(&mut bytes, name);
        bytes.extend(2u32.to_le_bytes());
        bytes.extend([64u64, 512].map(u64::to_le_bytes).concat());
        bytes.extend(kind.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes.extend(embedding);
    bytes.extend((0..512 * 64).flat_map(|_| 2f32.to_le_bytes()));
    fs::write(file, bytes).unwrap();
}

/// A quantised target once lent decoded values as if they were its model's.
#[test]
fn what_a_quantised_target_lends_is_told() {
    let (own, parent) = (dflash(171), tempfile::tempdir().unwrap());
    let (target, out) = (parent.path().join("tiny-Q8_0.gguf"), parent.path().join("out"));
    quantised_target(&target);
    let exported = export(own.path(), Format::Speculators, Some(&target), &out).unwrap();
    assert_eq!(exported.decoded, ["embed_tokens.weight"]);
    assert_eq!(exported.inspection.description.target.as_deref(), Some("tiny-Q8_0"));
    let (all, bytes) = (stored(&out), |x: f32| half::bf16::from_f32(x).to_le_bytes());
    assert!(all["embed_tokens.weight"].2 == bytes(1.0).repeat(512 * 64));
    assert!(all["lm_head.weight"].2 == bytes(2.0).repeat(171 * 64));
    // What the target does not lend is not told of.
    let exported = export(&out, Format::Speculators, Some(&target), &parent.path().join("again")).unwrap();
    assert_eq!(exported.decoded, [""; 0]);
}

/// Files with mixed and half-precision floats once came back in one type.
#[test]
fn every_tensor_keeps_its_type_and_unread_ones_are_named() {
    let own = dflash(171);
    let change = |tensors: &mut Stored| {
        let norm = tensors.get_mut("norm.weight").unwrap();
        *norm = (Dtype::F32, vec![64], vec![1; 256]);
        tensors.get_mut("fc.weight").unwrap().0 = Dtype::F16;
        tensors.insert("mask_embedding".into(), (Dtype::F8_E4M3, vec![3], vec![1, 2, 3]));
    };
    edit(own.path(), change, |_| ());
    let parent = tempfile::tempdir().unwrap();
    let out = parent.path().join("out");
    let exported = export(own.path(), Format::Speculators, None, &out).unwrap();
    assert_eq!(exported.left_out, ["mask_embedding"]);
    assert!(stored(&out) == without(stored(own.path()), &["mask_embedding"]));
}

/// Ids in the place of offsets once drafted tokens from all over the vocabulary.
#[test]
fn ids_in_the_place_of_offsets_become_offsets() {
    let (own, spoilt) = (dflash(171), dflash(171));
    let ids = |step: i64| (0..171).flat_map(|i: i64| (i * step).to_le_bytes()).collect::<Vec<u8>>();
    assert!(stored(own.path())["d2t"].2 == ids(2));
    edit(spoilt.path(), |t| t.get_mut("d2t").unwrap().2 = ids(3), |_| ());
    let parent = tempfile::tempdir().unwrap();
    let out = parent.path().join("out");
    export(spoilt.path(), Format::Speculators, None, &out).unwrap();
    assert!(stored(&out)["d2t"] == stored(own.path())["d2t"]);
    // Nothing shows what is meant without the other map.
    edit(spoilt.path(), |t| drop(t.remove("t2d")), |_| ());
    let message = refused(spoilt.path(), Format::Speculators, None);
    assert!(message.contains("d2t: found 171 ids ending in Some(TokenId(680))"), "{message}");
}

#[test]
fn what_cannot_be_loaded_is_not_exported() {
    let own = copy(dflash(171).path());
    edit(own.path(), |t| drop(t.remove("fc.weight")), |_| ());
    let message = refused(own.path(), Format::Speculators, None);
    assert!(
        message.contains("tensors: found tensor fc.weight is missing (expected shape [64, 128])"),
        "{message}"
    );
}
