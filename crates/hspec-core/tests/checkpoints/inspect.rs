use super::{B, Stored, checkpoints, copy, dflash, edit};
use hspec_core::drafter::{
    Bytes, Drafter, Format, HSpec, dspark::DSpark, eagle3::Eagle3, inspect, peagle::PEagle,
};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::path::Path;

fn loaded(dir: &Path, kind: &str) -> hspec_core::Result<Box<dyn Drafter<B>>> {
    let device = Default::default();
    Ok(match kind {
        "hspec" => Box::new(HSpec::load(dir, None, &device)?),
        "eagle3" => Box::new(Eagle3::load(dir, None, &device)?),
        "peagle" => Box::new(PEagle::load(dir, None, &device)?),
        _ => Box::new(DSpark::load(dir, None, &device)?),
    })
}

/// The headers tell what the loaded drafter says of itself.
#[test]
fn golden_checkpoints_are_what_loading_makes_of_them() {
    for dir in checkpoints() {
        let what = inspect(&dir).unwrap();
        let d = &what.description;
        let drafter = loaded(&dir, d.kind).unwrap();
        let footprint = drafter.footprint();
        assert_eq!((d.kind, d.k), (drafter.kind(), drafter.max_draft()), "{}", dir.display());
        assert_eq!(d.feature_layers.as_deref(), Some(drafter.feature_layers()));
        assert_eq!((what.params_trainable, what.params_borrowed), (footprint.params_trainable, 0));
        assert_eq!(what.params_frozen, footprint.params_frozen);
        assert_eq!(d.kv_bytes_per_token.f32, footprint.kv_bytes_per_token);
        assert_eq!(d.state_bytes.f32, footprint.state_bytes);
        assert_eq!(d.state_bytes.bf16 * 2, footprint.state_bytes);
        let pruned = drafter.vocabulary().map_or(d.vocabulary, <[_]>::len);
        assert_eq!(d.draft_vocabulary, pruned);
        assert_eq!(what.bytes_on_disk, std::fs::metadata(dir.join("model.safetensors")).unwrap().len());
        assert_eq!(what.odd, [""; 0], "{}", dir.display());
    }
}

#[test]
fn a_pruned_drafter_that_borrows_from_its_target() {
    let what = inspect(dflash(171).path()).unwrap();
    let mut document = serde_json::to_value(&what).unwrap();
    let size = document.as_object_mut().unwrap().remove("bytes_on_disk").unwrap();
    assert!(size.as_u64().unwrap() > 2 * what.params_trainable as u64);
    let layer = 64 * (64 + 32 + 32 + 64) + 2 * 16 + 3 * 48 * 64 + 2 * 64;
    assert_eq!(
        document,
        json!({
            "kind": "dflash", "format": "speculators", "target": null, "k": 5, "block_size": 6,
            "layout": "slot_predicts_itself", "mask_token": 500, "layers": 2, "hidden_size": 64,
            "intermediate_size": 48, "attention_heads": 4, "kv_heads": 2, "head_dim": 16,
            "feature_layers": [0, 2], "kv_layers": [], "windows": [null, null], "heads": {},
            "vocabulary": 512, "draft_vocabulary": 171,
            "kv_bytes_per_token": { "bf16": 256, "f32": 512 }, "state_bytes": { "bf16": 0, "f32": 0 },
            "params_trainable": 2 * layer + 2 * 64 * 64 + 2 * 64, "params_frozen": 0,
            "params_borrowed": (512 + 171) * 64,
            "dtypes": { "BF16": 25, "BOOL": 1, "I64": 1 }, "odd": [],
        })
    );
}

#[test]
fn the_shipped_drafter() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/drafters/smollm2-135m-hspec");
    let what = inspect(&dir).unwrap();
    let d = &what.description;
    assert_eq!((d.kind, d.format, d.k), ("hspec", Format::Speculators, 7));
    assert_eq!(d.target.as_deref(), Some("smollm2-135m-instruct"));
    assert_eq!(
        serde_json::to_value(&d.pattern).unwrap(),
        json!(["mamba", "mlp", "mamba", "attention", "mlp"])
    );
    assert_eq!(d.feature_layers, Some(vec![1, 8, 15, 22, 28]));
    assert_eq!((&d.kv_layers, &d.windows), (&vec![28], &vec![Some(2048)]));
    assert_eq!(d.heads["markov"], json!({ "kind": "vanilla", "rank": 32 }));
    assert_eq!(d.heads["confidence"], json!({ "with_markov": true }));
    assert_eq!(
        (d.kv_bytes_per_token, d.state_bytes),
        (Bytes { bf16: 0, f32: 0 }, Bytes { bf16: 5760, f32: 11520 })
    );
    assert_eq!((what.params_frozen, what.params_borrowed), (0, (49152 + 12288) * 576));
    assert_eq!(what.odd, [""; 0]);
}

fn odd(tensors: impl FnOnce(&mut Stored), config: impl FnOnce(&mut Value)) -> Vec<String> {
    let dir = dflash(171);
    edit(dir.path(), tensors, config);
    inspect(dir.path()).unwrap().odd
}

fn zeros(shape: &[usize]) -> (Dtype, Vec<usize>, Vec<u8>) {
    (Dtype::BF16, shape.to_vec(), vec![0; 2 * shape.iter().product::<usize>()])
}

#[test]
fn what_is_unusual_is_told() {
    let nothing = |_: &mut Value| ();
    assert_eq!(odd(|_| (), nothing), [""; 0]);
    let unread = |t: &mut Stored| {
        t.insert("verifier_norm.weight".into(), zeros(&[64]));
        t.insert("layers.2.mlp.up_proj.weight".into(), (Dtype::F8_E4M3, vec![1], vec![0]));
    };
    assert_eq!(
        odd(unread, nothing),
        ["nothing reads 2 tensors: layers.2.mlp.up_proj.weight, verifier_norm.weight"]
    );
    assert_eq!(
        odd(
            |t| drop(t.insert("lm_head.weight".into(), zeros(&[171, 64]))),
            |c| c["tie_word_embeddings"] = json!(true)
        ),
        [
            "of the embedding and the head, the file has one: lm_head.weight",
            "tie_word_embeddings is true, and the file has an lm_head.weight, which is used",
        ]
    );
    assert_eq!(odd(|t| drop(t.remove("d2t")), nothing), ["d2t is missing; it follows from t2d"]);
    // The fixture keeps every third token, which no real vocabulary does.
    assert_eq!(
        odd(|t| drop(t.remove("t2d")), nothing),
        [
            "t2d is missing; it follows from d2t",
            "d2t ascends from entry to entry, as target ids would; it is read as offsets",
        ]
    );
    let ids = |t: &mut Stored| {
        t.get_mut("d2t").unwrap().2 = (0..171).flat_map(|i: i64| (3 * i).to_le_bytes()).collect();
        t.get_mut("t2d").unwrap().0 = Dtype::U8;
    };
    assert_eq!(
        odd(ids, nothing),
        [
            "t2d is stored as U8; published drafters have BOOL",
            "d2t has target ids in the place of offsets, as t2d shows; other readers fail on it",
        ]
    );
    assert_eq!(
        odd(|t| t.get_mut("norm.weight").unwrap().0 = Dtype::F16, nothing),
        [
            "the parameters are stored in several types: 1 F16, 24 BF16",
            "1 tensor is stored in F16, which no published drafter has",
            "dtype is bfloat16, and 1 tensor is stored in F16",
        ]
    );
    assert_eq!(
        odd(|_| (), |c| c["dtype"] = json!("float32")),
        ["dtype is float32, and 25 tensors are stored in BF16"]
    );
    let windows = |c: &mut Value| {
        let layer = &mut c["transformer_layer_config"];
        (layer["sliding_window"], layer["use_sliding_window"]) = (json!(9), json!(true));
    };
    assert_eq!(
        odd(|_| (), windows),
        [
            "sliding_window 9 is not used: layer_types has no sliding_attention",
            "use_sliding_window true is not used: layer_types has no sliding_attention",
        ]
    );
    let usage = |c: &mut Value| {
        let methods = json!([{ "proposal_type": "greedy", "speculative_tokens": 6 }]);
        c["speculators_config"]["proposal_methods"] = methods;
        c["speculators_config"]["algorithm"] = json!("eagle3");
        c.as_object_mut().unwrap().remove("sample_from_anchor");
    };
    assert_eq!(
        odd(|_| (), usage),
        [
            "speculators_config.algorithm is eagle3, the kind is dflash",
            "speculators_config asks for 6 tokens per draft, and a draft has at most 5",
            "sample_from_anchor is missing: taken as published, the anchor's slot proposes nothing",
        ]
    );
    let dir = dflash(512);
    std::fs::write(dir.path().join("model.safetensors.index.json"), "{}").unwrap();
    let maps = |t: &mut Stored| drop(t.insert("d2t".into(), (Dtype::I64, vec![512], vec![0; 4096])));
    edit(dir.path(), maps, |_| ());
    assert_eq!(
        inspect(dir.path()).unwrap().odd,
        [
            "the vocabulary is whole, and the file has maps of it",
            "model.safetensors.index.json lies beside model.safetensors and is not read",
        ]
    );
}

/// What loading refuses is refused in the same words.
#[test]
fn golden_broken_checkpoints_get_the_error_of_loading() {
    type Spoil = (fn(&mut Stored), fn(&mut Value));
    let spoils: [Spoil; 7] = [
        (|t| drop(t.remove("fc.weight")), |_| ()),
        (|t| drop(t.insert("norm.weight".into(), zeros(&[3]))), |_| ()),
        (|t| t.get_mut("norm.weight").unwrap().0 = Dtype::F8_E4M3, |_| ()),
        (|t| t.get_mut("d2t").map_or((), |map| map.2[0] = 0x7f), |_| ()),
        (|t| t.get_mut("t2d").map_or((), |map| map.2.reverse()), |_| ()),
        (|_| (), |c| c["mask_token_id"] = json!(1 << 30)),
        (|_| (), |c| c["transformer_layer_config"]["num_key_value_heads"] = json!(3)),
    ];
    let mut refused = 0;
    for dir in checkpoints() {
        let kind = inspect(&dir).unwrap().description.kind;
        for (tensors, config) in spoils {
            let spoilt = copy(&dir);
            // A type of one byte takes a tensor of as many.
            let halve = |t: &mut Stored| {
                tensors(t);
                for (dtype, shape, bytes) in t.values_mut().filter(|(dtype, ..)| *dtype == Dtype::F8_E4M3) {
                    let _ = dtype;
                    bytes.truncate(shape.iter().product());
                }
            };
            edit(spoilt.path(), halve, config);
            match (inspect(spoilt.path()), loaded(spoilt.path(), kind)) {
                (Ok(_), Ok(_)) => {}
                (Err(found), Err(expected)) => {
                    assert_eq!(found.to_string(), expected.to_string());
                    refused += 1;
                }
                (found, expected) => {
                    panic!("{}: {:?} and {:?}", dir.display(), found.err(), expected.err())
                }
            }
        }
    }
    assert!(refused > 0);
}

#[test]
fn a_folder_that_is_no_drafter() {
    let target = hspec_goldens::root().join("targets/llama31-tiny");
    let message = inspect(&target).unwrap_err().to_string();
    let expected =
        "config.json: architectures: found \"LlamaForCausalLM\", expected one of mamba_attn_hybrid, ";
    assert!(message.contains(expected), "{message}");
    let message = inspect(Path::new("nowhere")).unwrap_err().to_string();
    assert!(message.starts_with("nowhere/config.json: "), "{message}");
}
