//! The doctor passes drafters of every kind and names what was broken first.

use super::{B, kinds, recipe, responses, target, train};
use burn::{backend::Autodiff, tensor::TensorData};
use hspec_core::{
    checkpoint::{StoreAs, Weights, write_safetensors},
    drafter::HSpec,
    target::{Target, WeightStorage},
};
use hspec_train::doctor::{Diagnosis, Doctor, Verdict};
use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, path::Path};

/// A target with a tokenizer of words beside it.
fn target_folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let from = hspec_goldens::root().join("targets/llama31-tiny");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(from.join(file), dir.path().join(file)).unwrap();
    }
    let words = target().config().vocab_size;
    let vocabulary: Map<String, Value> = (0..words).map(|i| (format!("w{i}"), i.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "pre_tokenizer": { "type": "WhitespaceSplit" },
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "w0" },
    });
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    dir
}

fn examine(target: &Path, drafter: &Path) -> Diagnosis {
    let prompt = (1..30).map(|i| format!("w{} ", i * 13 % 480)).collect::<String>();
    let doctor =
        Doctor { target, drafter, responses: None, prompt: Some(&prompt), storage: WeightStorage::Lossless };
    doctor.examine::<Autodiff<B>>(&Default::default(), &mut |_| {})
}

fn first(diagnosis: &Diagnosis) -> Option<&'static str> {
    diagnosis.first_difference().map(|check| check.name)
}

fn verdict(diagnosis: &Diagnosis, name: &str) -> Verdict {
    let found = diagnosis.checks.iter().find(|check| check.name == name);
    found.unwrap_or_else(|| panic!("no check {name} in {diagnosis:#?}")).verdict
}

/// Drafters that a run left, one of each kind and of H-Spec's variants.
#[test]
fn drafters_of_every_kind_pass() {
    let _alone = crate::alone();
    let (target, folder) = (target(), target_folder());
    let responses = responses(&target, &recipe(|r| r));
    for (name, drafter, loop_of) in kinds::KINDS {
        let dir = tempfile::tempdir().unwrap();
        train(&target, &kinds::recipe_of(drafter, loop_of, 1), &responses, dir.path(), false);
        let best = dir.path().join("best");
        let diagnosis = examine(folder.path(), &best);
        assert_eq!(first(&diagnosis), None, "{name}: {diagnosis:#?}");
        for check in ["training forward against decoding", "layers that it was trained on", "rotary fields"] {
            assert_eq!(verdict(&diagnosis, check), Verdict::Ok, "{name}: {check}");
        }
        // Without the record, layers are told by what the drafter makes of them.
        std::fs::remove_file(best.join("provenance.json")).unwrap();
        let diagnosis = examine(folder.path(), &best);
        assert_eq!(first(&diagnosis), None, "{name}: {diagnosis:#?}");
        assert_eq!(verdict(&diagnosis, "layers that suit it"), Verdict::Ok, "{name}");
    }
}

/// A copy of a drafter with something broken.
struct Patient(tempfile::TempDir);

impl Patient {
    /// With its copies of the target's tensors in the file.
    fn new(best: &Path, target: &Target<B>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let whole = HSpec::load(best, Some(target), &Default::default()).unwrap();
        whole.save(dir.path(), StoreAs::F32, true).unwrap();
        std::fs::copy(best.join("provenance.json"), dir.path().join("provenance.json")).unwrap();
        Self(dir)
    }

    fn config(self, change: impl FnOnce(&mut Value)) -> Self {
        let file = self.0.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        change(&mut config);
        std::fs::write(file, config.to_string()).unwrap();
        self
    }

    fn tensor(self, name: &str, change: impl FnOnce(TensorData) -> TensorData) -> Self {
        let weights = Weights::open(self.0.path()).unwrap();
        let all = weights.names().into_iter();
        let mut tensors: BTreeMap<String, TensorData> =
            all.map(|n| (n.clone(), weights.tensor(&n).unwrap().unwrap())).collect();
        let changed = change(tensors.remove(name).unwrap());
        tensors.insert(name.into(), changed);
        write_safetensors(&self.0.path().join("model.safetensors"), &tensors, StoreAs::F32).unwrap();
        self
    }

    fn number(self, name: &str, at: usize, change: impl FnOnce(f32) -> f32) -> Self {
        self.tensor(name, |data| {
            let mut numbers: Vec<f32> = data.iter::<f32>().collect();
            numbers[at] = change(numbers[at]);
            TensorData::new(numbers, data.shape.to_vec())
        })
    }
}

#[test]
fn what_was_broken_is_named_first() {
    let _alone = crate::alone();
    let (target, folder) = (target(), target_folder());
    let recipe = recipe(|r| r.replace("steps = 8", "steps = 1"));
    let responses = responses(&target, &recipe);
    let run = tempfile::tempdir().unwrap();
    train(&target, &recipe, &responses, run.path(), false);
    let patient = || Patient::new(&run.path().join("best"), &target);
    let whole = examine(folder.path(), patient().0.path());
    assert_eq!(first(&whole), None, "{whole:#?}");
    assert_eq!(verdict(&whole, "copy of the output head"), Verdict::Ok);
    // A file of that name which something else wrote hides nothing.
    let foreign = patient();
    std::fs::write(foreign.0.path().join("provenance.json"), "{}").unwrap();
    let foreign = examine(folder.path(), foreign.0.path());
    assert_eq!(verdict(&foreign, "layers that it was trained on"), Verdict::Warning);
    assert_eq!(verdict(&foreign, "training forward against decoding"), Verdict::Ok);

    let map = |data: TensorData| {
        let mut offsets: Vec<i64> = data.iter::<i64>().collect();
        offsets[80..].iter_mut().for_each(|offset| *offset += 1);
        TensorData::new(offsets, data.shape.to_vec())
    };
    let rope = |config: &mut Value| config["attn_rope"][0]["rope_parameters"]["rope_theta"] = json!(1e4);
    for (patient, expected) in [
        (
            patient().config(|c| c["latent_fusion_layer_ids"] = json!([0, 1, 2])),
            "layers that it was trained on",
        ),
        (patient().config(|c| c["attn_kv_layer_ids"] = json!([2])), "aux_hidden_state_layer_ids"),
        (patient().config(rope), "rotary fields"),
        (patient().config(|c| c["mask_token_id"] = json!(900)), "drafter files"),
        (patient().config(|c| c["transformer_layer_config"]["hidden_size"] = json!(32)), "hidden size"),
        (patient().tensor("d2t", map), "vocabulary maps"),
        (patient().number("lm_head.weight", 77, |x| x + 0.01), "copy of the output head"),
        (patient().number("embed_tokens.weight", 5, |x| 2.0 * x), "copy of the embedding"),
        (patient().number("fc.weight", 5, |_| f32::NAN), "drafter weights"),
    ] {
        let diagnosis = examine(folder.path(), patient.0.path());
        assert_eq!(first(&diagnosis), Some(expected), "{diagnosis:#?}");
    }

    // A target that lost a number, and none at all.
    let weights = Weights::open(folder.path()).unwrap();
    let mut tensors: BTreeMap<String, TensorData> =
        weights.names().into_iter().map(|n| (n.clone(), weights.tensor(&n).unwrap().unwrap())).collect();
    let norm = tensors["model.norm.weight"].clone();
    let numbers = norm.iter::<f32>().enumerate().map(|(i, x)| if i == 3 { f32::INFINITY } else { x });
    tensors.insert(
        "model.norm.weight".into(),
        TensorData::new(numbers.collect::<Vec<_>>(), norm.shape.to_vec()),
    );
    drop(weights);
    write_safetensors(&folder.path().join("model.safetensors"), &tensors, StoreAs::F32).unwrap();
    let diagnosis = examine(folder.path(), patient().0.path());
    assert_eq!(first(&diagnosis), Some("target weights"), "{diagnosis:#?}");
    let diagnosis = examine(&folder.path().join("missing"), patient().0.path());
    assert_eq!(first(&diagnosis), Some("target files"), "{diagnosis:#?}");
}

/// Answers rendered with another template, and masks that are off by one, are told.
#[test]
fn answers_that_a_drafter_will_not_meet_are_named() {
    let _alone = crate::alone();
    let (target, folder) = (target(), target_folder());
    let template =
        "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}w6 w7 {% endif %}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    std::fs::write(folder.path().join("generation_config.json"), "{\"eos_token_id\": 2}").unwrap();
    let hash = hspec_core::text::ChatTemplate::open(folder.path()).unwrap().unwrap().hash().to_owned();
    let recipe = recipe(|r| r.replace("steps = 8", "steps = 1"));
    let run = tempfile::tempdir().unwrap();
    train(&target, &recipe, &responses(&target, &recipe), run.path(), false);
    let file = run.path().join("given.jsonl");
    let examine = |template: &str, prompt: &[u32], answer: &[u32]| {
        let origin = json!({
            "format": "hspec-responses-1", "target": "x", "template": template, "temperature": 0.0,
            "top_k": null, "top_p": null, "seed": 0, "max_new_tokens": 30,
        });
        let response = json!({ "id": "a", "prompt_ids": prompt, "response_ids": answer, "finish": "stop" });
        std::fs::write(&file, format!("{origin}\n{response}\n")).unwrap();
        let doctor = Doctor {
            target: folder.path(),
            drafter: &run.path().join("best"),
            responses: Some(&file),
            prompt: None,
            storage: WeightStorage::Lossless,
        };
        doctor.examine::<Autodiff<B>>(&Default::default(), &mut |_| {})
    };
    let answer: Vec<u32> = (20..50).chain([2]).collect();
    let good = examine(&hash, &[9, 6, 7], &answer);
    assert_eq!(first(&good), None, "{good:#?}");
    assert_eq!(verdict(&good, "starts of supervised answers"), Verdict::Ok);
    for (template, prompt, answer, expected) in [
        ("0", vec![9, 6, 7], answer.clone(), "chat template of the responses"),
        (&*hash, vec![9, 6], [&[7], &answer[..]].concat(), "starts of supervised answers"),
        (&*hash, vec![9, 6, 7], answer[..30].to_vec(), "ends of supervised answers"),
        (&*hash, vec![9, 6, 7], [&[999], &answer[..]].concat(), "tokens of the responses"),
    ] {
        let diagnosis = examine(template, &prompt, &answer);
        assert_eq!(first(&diagnosis), Some(expected), "{diagnosis:#?}");
    }
}

/// The shipped drafter passes on the real model. With keys of the layer before, which nothing in its files tells, it
/// is found out by what it makes of them.
#[test]
fn the_shipped_drafter_passes_and_a_shifted_layer_is_found_out() {
    let target = hspec_goldens::model("smollm2-135m-instruct");
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/drafters/smollm2-135m-hspec");
    let dir = tempfile::tempdir().unwrap();
    let examine = |change: &dyn Fn(&mut Value)| {
        let config = std::fs::read(shipped.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&config).unwrap();
        change(&mut config);
        std::fs::copy(shipped.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let doctor = Doctor {
            target: &target,
            drafter: dir.path(),
            responses: None,
            prompt: None,
            storage: WeightStorage::Lossless,
        };
        doctor.examine::<Autodiff<B>>(&Default::default(), &mut |_| {})
    };
    let whole = examine(&|_| {});
    assert_eq!(first(&whole), None, "{whole:#?}");
    assert_eq!(verdict(&whole, "first draft token"), Verdict::Ok);
    let shifted = examine(&|c| {
        c["attn_kv_layer_ids"] = json!([27]);
        c["aux_hidden_state_layer_ids"] = json!([27]);
    });
    assert_eq!(first(&shifted), Some("layers that suit it"), "{shifted:#?}");
}
