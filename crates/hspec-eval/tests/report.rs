//! The report's JSON layout, its figures by hand, and its Markdown.

use hspec_eval::{Acceptance, DrafterFacts, DrafterReport, Machine, PromptRun, Report, Settings};
use serde_json::Value;

/// Rounds given as (proposed, accepted), k = 2.
fn run(rounds: &[(usize, usize)], seconds: f64, plain_seconds: f64) -> PromptRun {
    let mut acceptance = Acceptance::new(2);
    rounds.iter().for_each(|&(proposed, accepted)| acceptance.record(proposed, accepted, false));
    let plain_tokens = acceptance.tokens();
    let (draft_seconds, verify_seconds) = (seconds / 4.0, seconds / 2.0);
    PromptRun {
        acceptance,
        verified: Vec::new(),
        seconds,
        draft_seconds,
        verify_seconds,
        plain_seconds,
        plain_tokens,
        same_text: true,
    }
}

fn facts() -> DrafterFacts {
    DrafterFacts {
        path: "drafters/x".into(),
        kind: "hspec".into(),
        params_trainable: 12,
        params_frozen: 34,
        kv_bytes_per_token: 0,
        state_bytes: 56,
    }
}

fn report() -> Report {
    let gsm8k = vec![run(&[(2, 2), (2, 0)], 0.4, 0.8), run(&[(2, 1), (2, 1)], 0.4, 1.2)];
    let mut other = run(&[(2, 0), (0, 0), (2, 0)], 1.2, 0.6);
    other.same_text = false;
    // Ends with its first token: nothing to time.
    let silent = run(&[], 0.0, 0.0);
    let tasks = [("gsm8k".to_owned(), gsm8k), ("a|b".to_owned(), vec![other, silent])];
    let drafter = DrafterReport::new(facts(), &tasks, 1).expect("tokens to time");
    let settings =
        Settings { target: "models/t".into(), k: 2, temperature: 0.0, max_new_tokens: 128, schedule: None };
    let machine = Machine { cpu: "some".into(), threads: 2 };
    Report::new("abc1234".into(), machine, settings, vec![drafter])
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn figures_by_hand() {
    let drafter = &report().drafters[0];
    let [gsm8k, other] = &drafter.tasks[..] else { panic!("two tasks") };
    assert_eq!((gsm8k.prompts, gsm8k.rounds, gsm8k.tokens, gsm8k.tau), (2, 4, 8, 2.0));
    assert_eq!((&gsm8k.reached[..], &gsm8k.accepted[..]), (&[4, 3][..], &[3, 1][..]));
    assert_eq!(gsm8k.conditional, [0.75, 1.0 / 3.0]);
    assert_eq!(gsm8k.survival, [0.75, 0.25]);
    assert_eq!((gsm8k.ms_per_token, gsm8k.ms_per_token_plain), (100.0, 250.0));
    assert_eq!((gsm8k.draft_ms, gsm8k.verify_ms), (50.0, 100.0));
    assert_eq!((gsm8k.same_text, other.same_text), (2, 1));
    assert_eq!((other.prompts, other.rounds, other.tau), (2, 3, 1.0));
    assert_eq!((&other.reached[..], &other.conditional[..]), (&[2, 0][..], &[0.0, 0.0][..]));
    assert_eq!(drafter.mean_tau, 1.5);
    // 2.6 seconds plainly, 2.0 with the drafter, the same 11 tokens.
    approx::assert_relative_eq!(drafter.speedup, 1.3, max_relative = 1e-12);
    let [low, high] = drafter.speedup_ci;
    // Resamples of one prompt alone: 0.5, 2 and 3.
    assert!((0.5..1.3).contains(&low) && high > 1.3 && high <= 3.0, "{low} {high}");
}

#[test]
fn sampled_texts_of_other_lengths_compare_time_per_token() {
    let mut longer = run(&[(2, 2), (2, 2)], 0.6, 0.6);
    // Twelve tokens in 0.6 s plainly, six with the drafter.
    longer.plain_tokens = 12;
    let drafter = DrafterReport::new(facts(), &[("t".to_owned(), vec![longer])], 0).expect("timed");
    approx::assert_relative_eq!(drafter.speedup, 0.5, max_relative = 1e-12);
    approx::assert_relative_eq!(drafter.speedup_ci[0], 0.5, max_relative = 1e-12);
    assert_eq!(drafter.interval(), None, "one prompt says nothing of how prompts differ");
}

#[test]
fn json_has_the_documented_layout_in_its_order() {
    let text = report().to_json();
    let json: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(
        keys(&json),
        ["schema", "commit", "machine", "target", "k", "temperature", "max_new_tokens", "drafters"]
    );
    assert_eq!(json["schema"], 1);
    assert_eq!(keys(&json["machine"]), ["cpu", "threads"]);
    let drafter = &json["drafters"][0];
    assert_eq!(
        keys(drafter),
        [
            "path",
            "kind",
            "params_trainable",
            "params_frozen",
            "kv_bytes_per_token",
            "state_bytes",
            "mean_tau",
            "speedup",
            "speedup_ci",
            "tasks"
        ]
    );
    assert_eq!(drafter["speedup_ci"].as_array().map(Vec::len), Some(2));
    let task = &drafter["tasks"][0];
    assert_eq!(
        keys(task),
        [
            "task",
            "prompts",
            "rounds",
            "tokens",
            "tau",
            "proposed",
            "reached",
            "accepted",
            "survival",
            "conditional",
            "ms_per_token",
            "ms_per_token_plain",
            "draft_ms",
            "verify_ms",
            "same_text"
        ]
    );
    for list in ["reached", "accepted", "survival", "conditional"] {
        assert_eq!(task[list].as_array().map(Vec::len), Some(2), "{list}");
    }
    assert!(task["same_text"].is_u64() && task["ms_per_token"].is_f64());
    let read: Report = serde_json::from_str(&text).expect("a report");
    assert_eq!(read, report());
}

#[test]
fn markdown_says_where_it_comes_from_and_what_it_counts() {
    let text = report().to_markdown("cargo xtask eval --k 2", "2025-01-31");
    for line in [
        "- command: `cargo xtask eval --k 2`",
        "- date: 2025-01-31",
        "- machine: some, 2 threads",
        "- commit: abc1234",
        "- target: models/t; k = 2, temperature 0, at most 128 new tokens",
        "## drafters/x (hspec)",
        "| gsm8k | 2 | 4 | 8 | 2.00 | 2.00 | 100.00 | 250.00 | 2.50 | 50.00 | 100.00 | 2 of 2 |",
        "| task |  | 1 | 2 |",
        "| gsm8k | conditional | 0.750 (3/4) | 0.333 (1/3) |",
        "| gsm8k | survival | 0.750 | 0.250 |",
        "| a\\|b | conditional | 0.000 (0/2) | – |",
    ] {
        assert!(text.lines().any(|l| l == line), "no line {line}\n{text}");
    }
    assert!(text.contains("Mean tau 1.50 (bonus included); speed-up 1.30, 95 % interval "), "{text}");
}

#[test]
fn a_task_without_anything_to_time_is_an_error() {
    for runs in [vec![], vec![run(&[], 0.0, 0.0)]] {
        let error = DrafterReport::new(facts(), &[("quiet".to_owned(), runs)], 0).expect_err("no tokens");
        assert!(error.to_string().starts_with("task quiet: "), "{error}");
    }
    let error = DrafterReport::new(facts(), &[], 0).expect_err("no tasks");
    assert!(error.to_string().contains("no prompts"), "{error}");
}
