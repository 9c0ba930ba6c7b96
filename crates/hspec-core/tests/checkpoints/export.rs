use super::{B, Stored, TARGET, checkpoints, copy, dflash, edit, stored};
use burn::tensor::{Tensor, TensorData};
use hspec_attn::KvCache;
use hspec_core::{
    TokenId,
    checkpoint::read_json,
    drafter::{Drafter, Format, dspark::DSpark, eagle3::Eagle3, export, inspect},
};
use safetensors::Dtype;
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

pub fn target() -> PathBuf {
    hspec_goldens::root().join(TARGET)
}

pub fn config(dir: &Path) -> Value {
    read_json(&dir.join("config.json")).unwrap()
}

pub fn refused(dir: &Path, to: Format, target: Option<&Path>) -> String {
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
            // What the reference was run with, which is none of it here.
            let stamps = BTreeSet::from(["transformers_version"]);
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

/// All but some.
pub fn without(mut tensors: Stored, names: &[&str]) -> Stored {
    tensors.retain(|name, _| !names.contains(&name.as_str()));
    tensors
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
