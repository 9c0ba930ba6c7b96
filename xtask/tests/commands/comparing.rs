//! `compare` and `report`.

use crate::scene::Scene;
use hspec_core::checkpoint::{StoreAs, Weights, write_safetensors};
use serde_json::{Value, json};
use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

const COMPARE: &[&str] =
    &["compare", "--target", "target", "--drafters", "drafter", "--json", "--max-new-tokens", "9"];

fn compare(scene: &Scene, out: &str, more: &[&str]) -> Value {
    scene.run(&[COMPARE, &["--out", out], more].concat()).json()
}

/// What must repeat: everything but times, memory, and the command itself.
fn acceptance(results: &Value) -> Value {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(map) => {
                for key in ["time", "memory", "command"] {
                    map.remove(key);
                }
                map.values_mut().for_each(strip);
            }
            Value::Array(list) => list.iter_mut().for_each(strip),
            _ => {}
        }
    }
    let mut results = results.clone();
    strip(&mut results);
    results
}

#[test]
fn a_comparison_repeats_and_its_pages_can_be_made_again() {
    let scene = Scene::new();
    let more = ["--suite", "prompts.jsonl", "--k", "3", "7", "--temperature", "0", "1", "--seeds", "2"];
    let results = compare(&scene, "one", &more);
    let settings = results["settings"].as_array().unwrap();
    assert_eq!(settings.len(), 4);
    assert_eq!(results["unmeasured"], 0);
    for setting in settings {
        let all = &setting["drafters"][0]["all"];
        assert_eq!((&all["prompts"], &all["answers"]), (&2.into(), &4.into()));
        assert!(all["tau"]["value"].as_f64().unwrap() >= 1.0 && all["time"]["speedup"]["value"].is_f64());
        let ece = all["confidence"]["ece"].as_f64().unwrap();
        assert!(all["confidence"]["predictions"].as_u64() > Some(0) && (0.0..=1.0).contains(&ece));
        if setting["temperature"] == 0.0 {
            assert_eq!(all["same_text"], 4);
        }
    }
    assert_eq!(acceptance(&compare(&scene, "two", &more)), acceptance(&results));
    assert_eq!(
        scene.list("one"),
        ["headline.svg", "manifest.json", "records.jsonl", "report.html", "results.json", "results.md"]
    );
    let read = |name: &str| std::fs::read_to_string(scene.path(name)).unwrap();
    let (json, markdown, html) = (read("one/results.json"), read("one/results.md"), read("one/report.html"));
    assert!(markdown.contains("## k = 3, temperature 0 (greedy)") && html.contains("<svg"));

    // From the journal, and from results.json alone.
    for gone in [&["results.json", "results.md", "report.html"][..], &["manifest.json", "report.html"]] {
        gone.iter().for_each(|name| scene.remove(&format!("one/{name}")));
        let ended = scene.run(&["report", "one"]);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert!(ended.stdout.contains("k = 7, temperature 1\n  drafter: tau "), "{}", ended.stdout);
        assert_eq!((read("one/results.md"), read("one/report.html")), (markdown.clone(), html.clone()));
    }
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), results);
}

/// Killed in the middle, with half a line in the journal, and continued.
#[test]
fn a_comparison_that_was_killed_goes_on_where_it_was() {
    let scene = Scene::new();
    let prompts: String = (0..60).map(|i| format!("{{\"prompt\":\"w{i} w{}\"}}\n", 2 * i + 1)).collect();
    scene.write("prompts.jsonl", &prompts);
    let more = ["--suite", "prompts.jsonl", "--seeds", "2"];
    let whole = acceptance(&compare(&scene, "whole", &more));
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args([COMPARE, &["--out", "cut"], &more].concat()).current_dir(scene.path(""));
    command.env_remove("CARGO_MANIFEST_DIR").stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let journal = scene.path("cut/records.jsonl");
    let lines = || std::fs::read(&journal).unwrap_or_default().iter().filter(|b| **b == b'\n').count();
    let start = Instant::now();
    while lines() < 5 {
        assert!(start.elapsed() < Duration::from_secs(60), "nothing is measured");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let before = lines();
    assert!((5..120).contains(&before), "{before}: killed too late to show anything");
    assert!(!scene.path("cut/results.json").exists());
    let mut text = std::fs::read(&journal).unwrap();
    text.extend(b"{\"drafter\":\"dra");
    std::fs::write(&journal, &text).unwrap();
    // What there is can be looked at.
    let partial = scene.run(&["report", "cut", "--json"]).json();
    assert_eq!(partial["unmeasured"], 120 - before);
    assert_eq!(acceptance(&compare(&scene, "cut", &more)), whole);
    assert_eq!(lines(), 120);
}

#[test]
fn what_would_mix_different_measurements_is_refused() {
    let scene = Scene::new();
    let more = ["--suite", "prompts.jsonl"];
    compare(&scene, "out", &more);
    // More may be added.
    let more_ks = compare(&scene, "out", &["--suite", "prompts.jsonl", "--k", "7", "2"]);
    assert_eq!(more_ks["settings"].as_array().unwrap().len(), 2);
    let refused = |args: &[&str], part: &str| {
        let ended = scene.run(&[COMPARE, &["--out", "out"], &more, args].concat());
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        assert!(ended.stderr.contains(part), "no {part:?} in {}", ended.stderr);
    };
    scene.write("prompts.jsonl", "{\"prompt\":\"w3 w14 w16\"}\n{\"id\":\"b\",\"prompt\":\"w92 w65\"}\n");
    refused(&[], "task prompts: its prompts have changed; take another --out");
    let ended = scene.run(&[COMPARE, &["--out", "target"], &more].concat());
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("expected an empty folder, or that of a comparison"), "{}", ended.stderr);
    assert!(!scene.path("target/records.jsonl").exists());
    scene.write("prompts.jsonl", "{\"prompt\":\"w3 w14 w15\"}\n{\"id\":\"b\",\"prompt\":\"w92 w65\"}\n");
    scene.tensors("drafter", |tensors| drop(tensors.remove("t2d")));
    refused(&[], "drafter drafter: its files have changed");
    let long = scene.run(&[
        "compare",
        "--target",
        "target",
        "--drafters",
        "drafter",
        "--suite",
        "prompts.jsonl",
        "--out",
        "out",
    ]);
    assert!(long.stderr.contains("max_new_tokens: found 128, expected 9"), "{}", long.stderr);
}

#[test]
fn what_cannot_be_had_is_named_and_never_skipped_silently() {
    let scene = Scene::new();
    let run = |args: &[&str], code: i32, part: &str| {
        let ended = scene.run(&[COMPARE, &["--out", "out"], args].concat());
        assert_eq!(ended.code, Some(code), "{}", ended.stderr);
        assert!(ended.stderr.contains(part), "no {part:?} in {}", ended.stderr);
    };
    run(&["--suite", "hspec:qa"], 1, "--suite qa cannot be had; --skip-missing goes on without it");
    run(&["--suite", "hspec:qa"], 1, "hub:datasets/RedHatAI/speculator_benchmarks");
    run(&["--suite", "hspec:poems"], 1, "hspec has no set of this name");
    run(&["--suite", "hspec:qa", "--skip-missing"], 1, "none of the sets can be had");
    run(&["--suite", "synthetic"], 1, "say how long its prompts are to be");
    run(
        &["--suite", "synthetic", "--context", "999999"],
        1,
        "--context 999999: the target's context ends at",
    );
    run(&["--suite", "synthetic", "--context", "12"], 1, "there is room for 3");
    run(&["--suite", "prompts.jsonl", "--k", "8"], 1, "--k 8: drafter drafter proposes at most 7");
    run(&["--protocol", "mine"], 2, "possible values");
    let results = compare(&scene, "out", &["--suite", "hspec:qa", "prompts.jsonl", "--skip-missing"]);
    assert_eq!(results["manifest"]["missing"][0]["set"], "qa");
    let page = std::fs::read_to_string(scene.path("out/report.html")).unwrap();
    assert!(page.contains("Not measured: qa"), "the page tells of the gap");
}

#[test]
fn a_public_set_is_read_from_the_hub_s_cache() {
    let scene = Scene::new();
    let repository = scene.path("hf/hub/datasets--HuggingFaceH4--mt_bench_prompts");
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let snapshot = repository.join("snapshots").join(commit).join("raw");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(repository.join("refs")).unwrap();
    std::fs::write(repository.join("refs/main"), commit).unwrap();
    let rows: String = (0..3).map(|i| format!("{{\"prompt\":[\"w{i} w7\",\"w9\"]}}\n")).collect();
    std::fs::write(snapshot.join("question.jsonl"), rows).unwrap();
    let more = ["--suite", "deepspec:mt-bench", "--protocol", "deepspec"];
    let results = compare(&scene, "out", &more);
    let task = &results["manifest"]["tasks"][0];
    // The order of DeepSpec's shuffle, not the file's.
    let mut order = vec!["1", "2", "3"];
    hspec_eval::subset::shuffle(&mut order, hspec_eval::subset::SEED);
    let ids: Vec<&str> =
        task["prompts"].as_array().unwrap().iter().map(|p| p["id"].as_str().unwrap()).collect();
    assert_eq!((ids, &task["task"]), (order, &json!("mt-bench")));
    let manifest = &results["manifest"];
    assert_eq!((&manifest["ks"], &manifest["temperatures"]), (&json!([7]), &json!([1.0])));
}

#[test]
fn made_prompts_fill_the_context_and_the_drafter_s_memory_does_not_grow() {
    let scene = Scene::new();
    let more = ["--suite", "synthetic", "--context", "400..800", "--max-prompts", "2"];
    let results = compare(&scene, "out", &more);
    let mut contexts = Vec::new();
    for setting in results["settings"].as_array().unwrap() {
        let memory = &setting["drafters"][0]["all"]["memory"];
        let context = setting["context"].as_u64().unwrap();
        let longest = memory["longest_context"].as_u64().unwrap();
        assert!(longest <= context && longest > context - 90, "{longest} of {context}");
        contexts.push((context, memory["drafter_bytes"].as_u64().unwrap()));
    }
    let state = results["manifest"]["drafters"][0]["state_bytes"].as_u64().unwrap();
    assert_eq!(contexts, [(400, state), (800, state)]);
}

/// A target of the same shape with weights of its own and another chat template.
#[test]
fn a_fine_tuned_target_takes_the_same_drafter() {
    let scene = Scene::new();
    std::fs::create_dir(scene.path("tuned")).unwrap();
    for file in ["config.json", "tokenizer.json"] {
        std::fs::copy(scene.path("target").join(file), scene.path("tuned").join(file)).unwrap();
    }
    scene.write("tuned/chat_template.jinja", "w5 w6 {{ messages[0].content }} w7");
    let weights = Weights::open(&scene.path("target")).unwrap();
    let tensors = weights.names().into_iter().map(|name| {
        let mut tensor = weights.tensor(&name).unwrap().unwrap().convert::<f32>();
        let values = tensor.as_mut_slice::<f32>().unwrap();
        values.iter_mut().enumerate().for_each(|(i, v)| *v *= 1.0 + 0.02 * (i % 5) as f32);
        (name, tensor)
    });
    write_safetensors(&scene.path("tuned/model.safetensors"), &tensors.collect(), StoreAs::F32).unwrap();
    let run = |target: &str, out: &str| {
        let args =
            ["compare", "--target", target, "--drafters", "drafter", "--json", "--max-new-tokens", "9"];
        scene.run(&[&args[..], &["--suite", "prompts.jsonl", "--out", out]].concat()).json()
    };
    let (base, tuned) = (run("target", "base"), run("tuned", "transfer"));
    let all = |results: &Value| results["settings"][0]["drafters"][0]["all"].clone();
    for results in [&base, &tuned] {
        assert_eq!(all(results)["same_text"], 2, "the text is the tuned target's own");
    }
    let lengths = |results: &Value| results["manifest"]["tasks"][0]["prompts"][0]["tokens"].clone();
    assert_eq!((lengths(&base), lengths(&tuned)), (3.into(), 6.into()));
    let fingerprint = |results: &Value| results["manifest"]["target"]["fingerprint"].clone();
    assert_ne!(fingerprint(&base), fingerprint(&tuned));
    // One that is not of the same shape is refused by name.
    let args =
        ["compare", "--target", "other", "--drafters", "drafter", "--suite", "prompts.jsonl", "--out", "no"];
    let ended = scene.run(&args);
    assert!(ended.code == Some(1) && ended.stderr.contains("drafter drafter: "), "{}", ended.stderr);
}
