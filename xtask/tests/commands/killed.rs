//! A run that is killed, the hard way.

use crate::scene::Scene;
use std::{
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

const RECIPE: &str = r#"
    [data]
    max_prompt_tokens = 8
    max_new_tokens = 24
    batch = 4
    validation = 2
    [drafter]
    block_pattern = "mamba mlp mamba attention mlp"
    fusion_layers = [1, 2, 3]
    kv_layers = [3]
    intermediate_size = 32
    mamba_heads = 2
    mamba_head_dim = 8
    draft_vocab = 160
    markov_rank = 16
    mask_token = 500
    [train]
    steps = 20
    tokens_per_step = 120
    anchors_per_step = 64
    accumulate = 2
    warm_start = "attention"
    optimizer = "muon"
    lr = 5e-3
    muon_lr = 2e-2
    ce = 0.5
    tv = 0.5
    checkpoint_every = 8
    evaluate_every = 20
    evaluate_tokens = 8
"#;

fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap());
    // The record of where a checkpoint comes from bears a date.
    let entries = entries.filter(|e| e.file_name() != "provenance.json");
    let mut files: Vec<_> =
        entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect();
    files.sort();
    files
}

/// Twenty steps, and eight, `kill -9` and a continuation, leave the same bytes.
#[test]
fn a_killed_run_goes_on_to_the_same_bytes() {
    let scene = Scene::new();
    let prompts = (3..20).map(|i| format!("{{\"id\":\"p{i}\",\"prompt\":\"w{i} w{} w9\"}}\n", 7 * i));
    scene.write("prompts.jsonl", &prompts.collect::<String>());
    scene.write("target/chat_template.jinja", "{% for m in messages %}{{ m.content }} {% endfor %}");
    scene.write("recipe.toml", RECIPE);
    let train = |out: &'static str, resume: &'static [&'static str]| {
        let args = ["train", "--recipe", "recipe.toml", "--target", "target", "--prompts", "prompts.jsonl"];
        [&args[..], &["--out", out], resume].concat()
    };
    let whole = scene.run(&train("whole", &[]));
    assert_eq!(whole.code, Some(0), "{}", whole.stderr);

    let mut child = scene.command(&train("killed", &[])).stderr(Stdio::null()).spawn().unwrap();
    let (eighth, start) = (scene.path("killed/step-000008"), Instant::now());
    while !eighth.exists() {
        assert!(start.elapsed() < Duration::from_secs(120), "no checkpoint in time");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success(), "it had ended already");
    assert!(!scene.path("killed/step-000020").exists());

    let resumed = scene.run(&train("killed", &["--resume"]));
    assert_eq!(resumed.code, Some(0), "{}", resumed.stderr);
    assert!(resumed.stderr.contains("continuing after step"), "{}", resumed.stderr);
    let last = |run: &str| files(&scene.path(run).join("step-000020"));
    let (found, expected) = (last("killed"), last("whole"));
    assert_eq!(found.len(), expected.len());
    for ((name, mut found), (_, mut expected)) in found.into_iter().zip(expected) {
        // The optimisers' states are written in the order of a hash map, which differs between processes.
        if name.ends_with(".mpk") {
            found.sort_unstable();
            expected.sort_unstable();
        }
        assert!(found == expected, "{name} differs");
    }
    assert!(files(&scene.path("killed/best")) == files(&scene.path("whole/best")), "best differs");
}

/// Time that is up ends a run with a checkpoint, without an error, and says how to go on.
#[test]
fn a_run_out_of_time_says_how_to_go_on() {
    let scene = Scene::new();
    let prompts = (3..9).map(|i| format!("{{\"id\":\"p{i}\",\"prompt\":\"w{i} w{}\"}}\n", 7 * i));
    scene.write("prompts.jsonl", &prompts.collect::<String>());
    scene.write("target/chat_template.jinja", "{% for m in messages %}{{ m.content }} {% endfor %}");
    scene.write("recipe.toml", RECIPE);
    let args = ["train", "--recipe", "recipe.toml", "--target", "target", "--prompts", "prompts.jsonl"];
    let stopped = scene.run(&[&args[..], &["--out", "out", "--max-minutes", "1e-6"]].concat());
    assert_eq!(stopped.code, Some(0), "{}", stopped.stderr);
    let text = &stopped.stderr;
    assert!(text.contains("time is up after step 1 of 20") && text.contains("--resume"), "{text}");
    assert!(scene.path("out/step-000001").exists());
    let wrong = scene.run(&[&args[..], &["--out", "other", "--max-minutes", "0"]].concat());
    assert_eq!(wrong.code, Some(2), "{}", wrong.stderr);
    let many = scene.run(&[&args[..], &["--out", "other", "--devices", "3"]].concat());
    assert_eq!(many.code, Some(1), "{}", many.stderr);
    assert!(many.stderr.contains("--devices: found 3") && many.stderr.contains("2 rows"), "{}", many.stderr);
}
