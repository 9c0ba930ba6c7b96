//! What `generate` and `eval` write when all is right.

use crate::scene::Scene;
use serde_json::Value;

fn generate(scene: &Scene, more: &[&str]) -> Value {
    let args = ["generate", "--target", "target", "--json", "--max-new-tokens", "9"];
    scene.run(&[&args, more].concat()).json()
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn generate_writes_the_same_tokens_with_and_without_a_drafter() {
    let scene = Scene::new();
    let plain = generate(&scene, &["--prompts", "prompts.jsonl"]);
    let drafted = generate(&scene, &["--prompts", "prompts.jsonl", "--drafter", "drafter"]);
    assert_eq!((&plain["k"], &plain["drafter"]), (&0.into(), &Value::Null));
    assert_eq!((&drafted["k"], &drafted["drafter"]), (&7.into(), &"drafter".into()));
    let answers = |document: &Value| document["answers"].as_array().unwrap().clone();
    assert_eq!(answers(&plain).iter().map(|a| a["id"].clone()).collect::<Vec<_>>(), ["1", "b"]);
    for (plain, drafted) in answers(&plain).iter().zip(&answers(&drafted)) {
        assert_eq!(plain["tokens"].as_array().unwrap().len(), 9);
        assert_eq!((&plain["tokens"], &plain["text"]), (&drafted["tokens"], &drafted["text"]));
        assert_eq!(plain["finish"], "length");
        assert_eq!((&plain["target_passes"], &plain["tau"]), (&8.into(), &1.0.into()));
        assert_eq!(plain["rounds"].as_array().unwrap().len(), 0);
        let round = &drafted["rounds"][0];
        assert_eq!(round["proposed"], 7);
        assert!(round["accepted"].as_u64().unwrap() <= 7);
        assert!(drafted["tau"].as_f64().unwrap() >= 1.0 && drafted["total_ms"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(answers(&plain)[0]["prompt_tokens"], 3);
}

#[test]
fn generate_streams_the_text_that_json_reports() {
    let scene = Scene::new();
    let text = |more: &[&str]| {
        let args = ["generate", "--target", "target", "--max-new-tokens", "9", "--drafter", "drafter"];
        let ended = scene.run(&[&args, more].concat());
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert!(ended.stderr.contains("9 tokens, length"), "{}", ended.stderr);
        ended.stdout
    };
    let document = generate(&scene, &["--prompts", "prompts.jsonl"]);
    let told = |i: usize| document["answers"][i]["text"].as_str().unwrap();
    assert_eq!(text(&["--prompt", "w3 w14 w15"]), format!("{}\n", told(0)));
    let both = text(&["--prompts", "prompts.jsonl"]);
    assert_eq!(both, format!("--- 1\n{}\n--- b\n{}\n", told(0), told(1)));
}

#[test]
fn a_stop_string_ends_the_answer_before_it() {
    let scene = Scene::new();
    let prompt = ["--prompt", "w3 w14 w15", "--drafter", "drafter"];
    let whole = generate(&scene, &prompt);
    let text = whole["answers"][0]["text"].as_str().unwrap();
    // From inside a word to inside the next: across the border of two tokens.
    let words: Vec<&str> = text.split(' ').collect();
    assert_eq!(words.len(), 9, "{text}");
    let stop = format!("{} {}", &words[4][1..], &words[5][..1]);
    let stopped = generate(&scene, &[&prompt[..], &["--stop", "not there", "--stop", &stop]].concat());
    let answer = &stopped["answers"][0];
    let expected = &text[..text.find(&stop).unwrap()];
    assert_eq!((&answer["text"], &answer["finish"]), (&expected.into(), &"stop_string".into()));
    let tokens = expected.split(' ').count();
    assert_eq!(
        answer["tokens"].as_array().unwrap()[..],
        whole["answers"][0]["tokens"].as_array().unwrap()[..tokens]
    );
}

#[test]
fn sampling_depends_on_the_seed_alone() {
    let scene = Scene::new();
    let sample = |seed: &str, more: &[&str]| {
        let args = ["--prompt", "w3 w14", "--temperature", "1", "--top-p", "0.95", "--seed", seed];
        generate(&scene, &[&args, more].concat())["answers"][0]["tokens"].clone()
    };
    assert_eq!(sample("5", &[]), sample("5", &["--threads", "1"]));
    assert_ne!(sample("5", &[]), sample("6", &[]));
}

#[test]
fn eval_writes_its_report_and_nothing_else() {
    let scene = Scene::new();
    let more = ["--prompts", "prompts.jsonl", "--max-new-tokens", "9", "--out", "runs/out"];
    let args = ["eval", "--target", "target", "--drafter", "drafter", "--json"];
    let ended = scene.run(&[&args[..], &more].concat());
    let report = ended.json();
    assert_eq!(scene.list("runs/out"), ["results.json", "results.md"]);
    let file = std::fs::read_to_string(scene.path("runs/out/results.json")).unwrap();
    assert_eq!(file, ended.stdout);
    let markdown = std::fs::read_to_string(scene.path("runs/out/results.md")).unwrap();
    assert!(markdown.contains("`cargo xtask eval --target target --drafter drafter --json"), "{markdown}");
    assert_eq!(
        keys(&report),
        ["schema", "commit", "machine", "target", "k", "temperature", "max_new_tokens", "drafters"]
    );
    assert_eq!((&report["k"], &report["max_new_tokens"]), (&7.into(), &9.into()));
    let drafter = &report["drafters"][0];
    assert_eq!((&drafter["path"], &drafter["kind"]), (&"drafter".into(), &"hspec".into()));
    assert_eq!(drafter["kv_bytes_per_token"], 0);
    let task = &drafter["tasks"][0];
    assert_eq!(
        (&task["task"], &task["prompts"], &task["same_text"]),
        (&"prompts".into(), &2.into(), &2.into())
    );
    assert_eq!(task["tokens"], 16);
    assert_eq!(task["reached"].as_array().unwrap().len(), 7);

    // Two drafters, one prompt, a table for people.
    let args =
        ["eval", "--target", "target", "--drafter", "drafter", "drafter", "--max-prompts", "1", "--k", "3"];
    let ended = scene.run(&[&args[..], &more[..4]].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stdout.matches("1 of 1").count(), 2, "{}", ended.stdout);
}
