//! What an export has from the target: the frozen tensors that a drafter leaves out, and its name.

use super::{
    dflash, edit,
    export::{config, refused, target, without},
    stored,
};
use hspec_core::{
    checkpoint::Weights,
    drafter::{Format, export},
};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::{fs, path::Path};

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
