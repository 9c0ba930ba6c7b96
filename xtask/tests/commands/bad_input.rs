//! What cannot be right ends with a message that says what and where, and the right exit code.

use crate::scene::Scene;
use burn::tensor::TensorData;

pub const FAILED: i32 = 1;
pub const USAGE: i32 = 2;

const PLAIN: &[&str] =
    &["generate", "--target", "target", "--prompt", "w1 w2 w3 w4 w5", "--max-new-tokens", "3"];
const DRAFTED: &[&str] =
    &["generate", "--target", "target", "--drafter", "drafter", "--prompt", "w1 w2", "--max-new-tokens", "3"];
const EVAL: &[&str] = &[
    "eval",
    "--target",
    "target",
    "--drafter",
    "drafter",
    "--prompts",
    "prompts.jsonl",
    "--max-new-tokens",
    "4",
    "--out",
    "out",
];

#[track_caller]
pub fn refused(scene: &Scene, args: &[&str], code: i32, parts: &[&str]) {
    let ended = scene.run(args);
    let message = &ended.stderr;
    assert_eq!(ended.code, Some(code), "{args:?}: {message}");
    for part in parts {
        assert!(message.contains(part), "{args:?}: no {part:?} in: {message}");
    }
    assert!(!message.contains("panicked"), "{args:?}: {message}");
    assert_eq!(ended.stdout, "", "{args:?}");
    assert_eq!(scene.list("out"), [""; 0], "{args:?}");
}

/// A change to a whole scene, and what the message must hold.
type Case<'a> = (&'a dyn Fn(&Scene), &'a [&'a str]);

#[track_caller]
fn all_refused(args: &[&str], cases: &[Case<'_>]) {
    for (spoil, parts) in cases {
        let scene = Scene::new();
        spoil(&scene);
        refused(&scene, args, FAILED, parts);
    }
}

/// One of the two maps of a pruned vocabulary would do.
fn without_maps(scene: &Scene) {
    scene.tensors("drafter", |tensors| tensors.retain(|name, _| name != "d2t" && name != "t2d"));
}

fn odd() -> TensorData {
    TensorData::new(vec![0f32; 6], [2, 3])
}

#[test]
fn targets() {
    let set = |key: &'static str, value: serde_json::Value| {
        move |scene: &Scene| scene.edit("target/config.json", |config| config[key] = value.clone())
    };
    all_refused(
        PLAIN,
        &[
            (&|s| std::fs::remove_dir_all(s.path("target")).unwrap(), &["target", "No such file"]),
            (&|s| s.remove("target/config.json"), &["target", "config.json", "found nothing"]),
            (&|s| s.remove("target/tokenizer.json"), &["target/tokenizer.json", "No such file"]),
            (&|s| s.remove("target/model.safetensors"), &["target: weights: found neither"]),
            (&|s| s.cut("target/model.safetensors"), &["target/model.safetensors: header: found"]),
            (&|s| s.cut("target/config.json"), &["target/config.json: line"]),
            (&|s| s.cut("target/tokenizer.json"), &["target/tokenizer.json: line"]),
            (
                &|s| s.tensors("target", |t| drop(t.remove("model.norm.weight"))),
                &["target: model.norm.weight: found no such tensor", "[64]"],
            ),
            (
                &|s| s.tensors("target", |t| drop(t.insert("lm_head.weight".into(), odd()))),
                &["target: lm_head.weight: found shape", "[2, 3]", "expected [512, 64]"],
            ),
            (&set("model_type", "gpt2".into()), &["target/config.json: model_type", "gpt2"]),
            (&set("hidden_act", "gelu".into()), &["target/config.json: hidden_act", "gelu"]),
            (
                &set("rope_scaling", serde_json::json!({ "rope_type": "yarn", "factor": 2.0 })),
                &["target/config.json: ", "yarn"],
            ),
            (&set("num_hidden_layers", "four".into()), &["target/config.json", "four"]),
            (
                &set("max_position_embeddings", 5.into()),
                &["prompt 1: prompt length in tokens: found 5, expected 1 to 4"],
            ),
        ],
    );
}

#[test]
fn drafters() {
    let set = |key: &'static str, value: &'static str| {
        move |scene: &Scene| scene.edit("drafter/config.json", |config| config[key] = value.into())
    };
    let cases: &[Case<'_>] = &[
        (&|s| std::fs::remove_dir_all(s.path("drafter")).unwrap(), &["drafter/config.json", "No such file"]),
        (&|s| s.cut("drafter/model.safetensors"), &["drafter/model.safetensors: header: found"]),
        (&|s| s.remove("drafter/model.safetensors"), &["drafter: weights: found neither"]),
        (
            &|s| s.tensors("drafter", |t| drop(t.remove("fc.weight"))),
            &["drafter: tensors: found tensor fc.weight is missing", "[64, 128]"],
        ),
        (
            &|s| s.tensors("drafter", |t| drop(t.insert("fc.weight".into(), odd()))),
            &["fc.weight has shape [2, 3], expected [64, 128]"],
        ),
        (&without_maps, &["drafter: d2t: found no such tensor"]),
        (
            &set("speculators_model_type", "medusa"),
            &["drafter/config.json: speculators_model_type", "medusa"],
        ),
        (&set("markov_head_type", "gru"), &["drafter/config.json: markov_head_type", "gru"]),
        (&set("block_pattern", "mamba conv mlp"), &["drafter/config.json", "block_pattern", "conv"]),
        (&set("mamba_seed_mode", "twice"), &["drafter/config.json", "twice"]),
    ];
    all_refused(DRAFTED, cases);
    all_refused(EVAL, &cases[..2]);
}

#[test]
fn drafters_to_inspect() {
    let cases: &[Case<'_>] = &[
        (&|s| std::fs::remove_dir_all(s.path("drafter")).unwrap(), &["drafter/config.json", "No such file"]),
        (&|s| s.cut("drafter/model.safetensors"), &["drafter/model.safetensors: header: found"]),
        (&|s| s.cut("drafter/config.json"), &["drafter/config.json: line"]),
        (&|s| s.remove("drafter/model.safetensors"), &["drafter: weights: found neither"]),
        (
            &|s| s.tensors("drafter", |t| drop(t.remove("fc.weight"))),
            &["drafter: tensors: found tensor fc.weight is missing", "[64, 128]"],
        ),
        (&without_maps, &["drafter: d2t: found no such tensor"]),
    ];
    for args in [&["inspect", "drafter"][..], &["inspect", "drafter", "--json"], EXPORT] {
        all_refused(args, cases);
    }
    let scene = Scene::new();
    let parts = [
        "target/config.json: architectures: found \"LlamaForCausalLM\", expected one of mamba_attn_hybrid, ",
    ];
    refused(&scene, &["inspect", "target"], FAILED, &parts);
    refused(&scene, &["inspect"], USAGE, &["<DIR>"]);
}

const EXPORT: &[&str] = &["export", "--drafter", "drafter", "--format", "speculators", "--out", "out"];

#[test]
fn layouts_that_cannot_hold_a_drafter() {
    let scene = Scene::new();
    let golden = |name: &str| hspec_goldens::root().join("dspark").join(name).display().to_string();
    let (gated, eagle) = (golden("ckpt_gated"), golden("ckpt_eagle3"));
    for (drafter, format, reason) in [
        (
            "drafter",
            "zlab",
            "zlab cannot hold this hspec drafter: H-Spec is published in the layout of speculators",
        ),
        (
            "drafter",
            "deepspec",
            "deepspec cannot hold this hspec drafter: H-Spec is published in the layout of",
        ),
        (&gated, "zlab", "zlab cannot hold this dspark drafter: it has no Markov head"),
        (&eagle, "zlab", "zlab cannot hold this eagle3 drafter: it has no EAGLE drafters"),
    ] {
        let args = ["export", "--drafter", drafter, "--format", format, "--out", "out"];
        refused(&scene, &args, FAILED, &[reason]);
    }
    let args = [EXPORT, &["--target", "other"]].concat();
    refused(&scene, &args, FAILED, &["the drafter was made for another target"]);
    let args = ["export", "--drafter", "drafter", "--format", "gguf", "--out", "out"];
    refused(&scene, &args, USAGE, &["--format", "found gguf, expected speculators, deepspec, zlab"]);

    scene.write("file", "");
    let args: Vec<&str> = EXPORT.iter().map(|&a| if a == "out" { "target" } else { a }).collect();
    refused(&scene, &args, FAILED, &["target: folder: found files in it, expected an empty folder"]);
    let args: Vec<&str> = EXPORT.iter().map(|&a| if a == "out" { "file/out" } else { a }).collect();
    refused(&scene, &args, FAILED, &["file", "Not a directory"]);
}

#[test]
fn a_drafter_of_another_target() {
    let scene = Scene::new();
    for command in [DRAFTED, EVAL] {
        let args: Vec<&str> = command.iter().map(|&a| if a == "target" { "other" } else { a }).collect();
        refused(&scene, &args, FAILED, &["drafter drafter: the drafter was made for another target"]);
    }
}

#[test]
fn prompts() {
    let write = |text: &'static str| move |scene: &Scene| scene.write("prompts.jsonl", text);
    let cases: &[Case<'_>] = &[
        (&|s| s.remove("prompts.jsonl"), &["prompts.jsonl: No such file"]),
        (&write(""), &["prompts.jsonl: file: found no prompt"]),
        (
            &write("{\"prompt\":\"w1\"}\n{\"prompt\":\" \"}\n"),
            &["prompts.jsonl: line 2: found an empty prompt"],
        ),
        (
            &write("{\"prompt\":\"w1\"}\n{\"text\":\"w1\"}\n"),
            &["prompts.jsonl: line 2: found none of these fields"],
        ),
        (&write("w1 w2\n"), &["prompts.jsonl: line 1"]),
    ];
    all_refused(EVAL, cases);
    all_refused(&["generate", "--target", "target", "--prompts", "prompts.jsonl"], cases);

    // The second prompt is too long: it is named before anything is decoded.
    let scene = Scene::new();
    scene.edit("target/config.json", |config| config["max_position_embeddings"] = 3.into());
    scene.write("prompts.jsonl", "{\"prompt\":\"w1\"}\n{\"id\":\"b\",\"prompt\":\"w1 w2 w3\"}\n");
    let length = "prompt length in tokens: found 3, expected 1 to 2";
    refused(&scene, EVAL, FAILED, &[&format!("task prompts, prompt b: {length}")]);
    let generate = ["generate", "--target", "target", "--prompts", "prompts.jsonl"];
    refused(&scene, &generate, FAILED, &[&format!("prompt b: {length}")]);
}

#[test]
fn an_output_that_cannot_be_written_is_found_before_the_work() {
    let scene = Scene::new();
    scene.write("file", "");
    // The target is missing too; the output is looked at first.
    let args: Vec<&str> = EVAL
        .iter()
        .map(|&a| match a {
            "out" => "file/out",
            "target" => "nowhere",
            _ => a,
        })
        .collect();
    refused(&scene, &args, FAILED, &["--out file/out cannot be written: ", "Not a directory"]);
}

#[test]
fn recipes() {
    const TRAIN: &[&str] = &[
        "train",
        "--recipe",
        "recipe.toml",
        "--target",
        "target",
        "--prompts",
        "prompts.jsonl",
        "--out",
        "out",
    ];
    let shipped = include_str!("../../../recipes/smollm2-135m-demo.toml");
    let recipe = |from: &'static str, to: &'static str| {
        assert!(shipped.contains(from), "{from}");
        move |scene: &Scene| scene.write("recipe.toml", &shipped.replace(from, to))
    };
    all_refused(
        TRAIN,
        &[
            (&|_| (), &["recipe.toml", "No such file"]),
            (&recipe("[train]", "[train]\nsteppes = 5"), &["recipe.toml: recipe", "steppes"]),
            (&recipe("\"muon\"", "\"adam\""), &["recipe.toml: recipe", "adam"]),
            (
                &recipe("[drafter]", "[drafter]\nkind = \"dflash\""),
                &["recipe.toml: recipe", "a drafter of kind dflash: unknown field `block_pattern`"],
            ),
            (
                &recipe("[drafter]", "[drafter]\nkind = \"medusa\""),
                &["recipe.toml: recipe", "medusa", "peagle"],
            ),
            (
                &recipe("steps = 100", "steps = 0"),
                &["recipe.toml: train.steps: found 0, expected at least 1"],
            ),
        ],
    );
    let scene = Scene::new();
    scene.write("recipe.toml", shipped);
    scene.write("file", "");
    let args: Vec<&str> = TRAIN.iter().map(|&a| if a == "out" { "file/out" } else { a }).collect();
    refused(&scene, &args, FAILED, &["--out file/out cannot be written: ", "Not a directory"]);
}

#[test]
fn more_drafts_than_the_drafter_has_slots() {
    let scene = Scene::new();
    for command in [DRAFTED, EVAL] {
        let args = [command, &["--k", "8"]].concat();
        refused(&scene, &args, FAILED, &["--k 8: the drafter proposes at most 7 tokens at once"]);
    }
}

#[test]
fn wrong_usage() {
    let scene = Scene::new();
    let with = |more: &[&'static str]| [PLAIN, more].concat();
    for (args, parts) in [
        (vec![], &["Usage: cargo xtask"][..]),
        (vec!["guess"], &["unrecognized subcommand 'guess'"]),
        (vec!["generate", "--target", "target"], &["--prompt <TEXT>", "--prompts <FILE>"]),
        (vec!["generate", "--prompt", " "], &["--prompt", "the prompt is empty"]),
        (with(&["--prompts", "prompts.jsonl"]), &["cannot be used with"]),
        (with(&["--temperature=-1"]), &["--temperature", "found -1, expected a finite number of at least 0"]),
        (with(&["--temperature", "warm"]), &["--temperature", "invalid float"]),
        (with(&["--top-p", "0"]), &["--top-p", "found 0, expected a number above 0"]),
        (with(&["--top-k", "0"]), &["--top-k", "found 0, expected at least 1"]),
        (with(&["--k", "0"]), &["--k", "0 is not in 1.."]),
        (
            vec!["generate", "--prompt", "w1", "--max-new-tokens", "0"],
            &["--max-new-tokens", "0 is not in 1.."],
        ),
        (with(&["--threads", "0"]), &["--threads", "0 is not in 1.."]),
        (with(&["--stop", ""]), &["--stop"]),
        (with(&["--backend", "tpu"]), &["--backend", "known are flex, ndarray, cuda"]),
        (vec!["eval", "--prompts", "prompts.jsonl"], &["--drafter <DIR>"]),
    ] {
        refused(&scene, &args, USAGE, parts);
    }
    // Before anything is read: neither a target nor a device.
    for command in ["generate", "bench", "parity"] {
        let mut args = vec![command, "--backend", "cuda", "--target", "absent"];
        if command == "generate" {
            args.extend(["--prompt", "w1"]);
        }
        let parts: &[&str] = match cfg!(feature = "cuda") {
            false => &["not built in", "--features cuda"],
            true if !std::path::Path::new("/dev/nvidia0").exists() => &["no NVIDIA GPU is visible"],
            true => continue,
        };
        refused(&scene, &args, FAILED, parts);
    }
}
