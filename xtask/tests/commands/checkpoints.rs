//! `inspect` and `export` when all is right.

use crate::scene::Scene;
use serde_json::{Value, json};

fn golden(name: &str) -> String {
    hspec_goldens::root().join(name).display().to_string()
}

fn inspect(scene: &Scene, dir: &str) -> Value {
    scene.run(&["inspect", dir, "--json"]).json()
}

#[test]
fn inspect_writes_one_document_or_a_table() {
    let scene = Scene::new();
    let document = inspect(&scene, "drafter");
    let told = |key: &str| document[key].clone();
    assert_eq!((told("kind"), told("format"), told("k")), ("hspec".into(), "speculators".into(), 7.into()));
    assert_eq!((told("feature_layers"), told("kv_layers")), (json!([1, 2]), json!([3])));
    assert_eq!((told("vocabulary"), told("params_frozen")), (512.into(), 0.into()));
    assert_eq!(told("kv_bytes_per_token"), json!({ "bf16": 0, "f32": 0 }));
    assert_eq!(told("state_bytes"), json!({ "bf16": 2 * 2 * 64, "f32": 4 * 2 * 64 }));
    let borrowed = (512 + told("draft_vocabulary").as_u64().unwrap()) * 64;
    assert_eq!(told("params_borrowed"), borrowed);
    let size = std::fs::metadata(scene.path("drafter/model.safetensors")).unwrap().len();
    assert_eq!(told("bytes_on_disk"), size);

    scene.tensors("drafter", |tensors| drop(tensors.remove("t2d")));
    let ended = scene.run(&["inspect", "drafter"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let slots = "7 tokens in a block of 8, the anchor's slot excepted";
    for part in
        ["hspec", slots, "1 2", "256 bytes in bf16, 512 in f32", "t2d is missing; it follows from d2t"]
    {
        assert!(ended.stdout.contains(part), "no {part:?} in\n{}", ended.stdout);
    }
}

#[test]
fn golden_drafters_are_inspected_with_their_own_kind() {
    let scene = Scene::new();
    for (dir, kind, format) in [
        ("hspec/full_drafter", "hspec", "speculators"),
        ("dspark/ckpt_gated", "dspark", "deepspec"),
        ("dspark/ckpt_dflash", "dflash", "deepspec"),
        ("dspark/ckpt_spec_dflash", "dflash", "speculators"),
        ("dspark/ckpt_eagle3", "eagle3", "deepspec"),
        ("dspark/ckpt_spec_peagle", "peagle", "speculators"),
    ] {
        let document = inspect(&scene, &golden(dir));
        assert_eq!((&document["kind"], &document["format"]), (&json!(kind), &json!(format)));
    }
}

#[test]
fn golden_export_there_and_back() {
    let scene = Scene::new();
    for name in ["dspark/ckpt_rnn", "dspark/ckpt_eagle3"] {
        let from = golden(name);
        let export = |drafter: &str, format: &str, out: &str| {
            let ended = scene.run(&["export", "--drafter", drafter, "--format", format, "--out", out]);
            assert_eq!(ended.code, Some(0), "{}", ended.stderr);
            assert!(ended.stdout.starts_with(&format!("{out}: ")), "{}", ended.stdout);
            assert!(ended.stdout.contains(&format!("in the layout of {format}")), "{}", ended.stdout);
        };
        export(&from, "speculators", "there");
        export("there", "deepspec", "back");
        assert_eq!(inspect(&scene, "back"), inspect(&scene, &from));
        assert_eq!(scene.list("back"), ["config.json", "model.safetensors"]);
        for dir in ["there", "back"] {
            std::fs::remove_dir_all(scene.path(dir)).unwrap();
        }
    }
}

/// Readers once found out for themselves that a file does not say which target it is for.
#[test]
fn an_export_without_a_target_tells_that_it_names_none() {
    let scene = Scene::new();
    let export = |format: &str, out: &str, more: &[&str]| {
        let args = ["export", "--drafter", "drafter", "--format", format, "--out", out];
        let ended = scene.run(&[&args[..], more].concat());
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended.stderr
    };
    assert_eq!(export("speculators", "a", &[]), "names no target; give --target so that readers find it\n");
    assert_eq!(export("speculators", "b", &["--target", "target"]), "");
    assert_eq!(inspect(&scene, "b")["target"], "target");
}

/// The current folder once failed at the very end, with the system's words.
#[test]
fn export_into_the_current_folder() {
    let scene = Scene::new();
    let (drafter, here) = (scene.path("drafter"), scene.path("here"));
    std::fs::create_dir(&here).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(["export", "--format", "speculators", "--out", ".", "--drafter"]).arg(&drafter);
    let output = command.current_dir(&here).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(scene.list("here"), ["config.json", "model.safetensors"]);
}

#[test]
fn export_with_a_target_makes_a_drafter_whole() {
    let scene = Scene::new();
    let odd = inspect(&scene, "drafter")["odd"].clone();
    scene.tensors("drafter", |tensors| {
        let other = tensors["norm.weight"].clone();
        tensors.insert("rotary.inv_freq".into(), other);
    });
    let export =
        ["export", "--drafter", "drafter", "--format", "speculators", "--out", "out", "--target", "target"];
    let ended = scene.run(&export);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(!ended.stdout.contains("the target's"), "{}", ended.stdout);
    assert_eq!(ended.stderr, "left out, because nothing reads them: rotary.inv_freq\n");
    let document = inspect(&scene, "out");
    assert_eq!((&document["params_borrowed"], &document["odd"]), (&0.into(), &odd));
    let answer = |drafter: &str| {
        let args =
            ["generate", "--target", "target", "--prompt", "w3 w14", "--json", "--max-new-tokens", "9"];
        scene.run(&[&args[..], &["--drafter", drafter]].concat()).json()["answers"][0]["rounds"].clone()
    };
    assert_eq!(answer("out"), answer("drafter"));
}
