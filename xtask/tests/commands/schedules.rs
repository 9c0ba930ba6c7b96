//! Schedules and calibrations of `generate` and `eval`.

use crate::{
    bad_input::{FAILED, USAGE, refused},
    scene::Scene,
};
use serde_json::Value;

const GENERATE: &[&str] =
    &["generate", "--target", "target", "--prompt", "w3 w14 w15", "--max-new-tokens", "16"];
const EVAL: &[&str] = &[
    "eval",
    "--target",
    "target",
    "--drafter",
    "drafter",
    "--prompts",
    "prompts.jsonl",
    "--max-new-tokens",
    "12",
    "--json",
];

fn generate(scene: &Scene, more: &[&str]) -> Value {
    scene.run(&[GENERATE, &["--drafter", "drafter", "--json"], more].concat()).json()
}

/// A pass costs as much as its tokens, or the same however many they are.
fn profiles(scene: &Scene) {
    scene.write("dear.json", r#"{"milliseconds": [[1, 1.0], [8, 80.0]]}"#);
    scene.write("free.json", r#"{"steps_per_second": [[1, 100.0], [8, 100.0]]}"#);
}

/// A head that has learnt nothing says 0.5 or so of every draft.
#[test]
fn a_schedule_decides_how_many_drafts_are_verified() {
    let scene = Scene::new();
    profiles(&scene);
    let plain = scene.run(&[GENERATE, &["--json"]].concat()).json();
    assert_eq!(plain["schedule"], Value::Null);
    for (args, verified) in [
        (&[][..], 7),
        (&["--schedule", "fixed=2"], 2),
        (&["--schedule", "fixed=0"], 0),
        (&["--schedule", "threshold=0.1"], 7),
        (&["--schedule", "threshold=0.9"], 0),
        (&["--schedule", "early-stop", "--profile", "free.json"], 7),
        (&["--schedule", "early-stop", "--profile", "dear.json"], 0),
        (&["--schedule", "stale-budget", "--profile", "free.json"], 7),
        (&["--schedule", "stale-budget", "--profile", "dear.json"], 0),
    ] {
        let found = generate(&scene, args);
        let answer = &found["answers"][0];
        assert_eq!(answer["tokens"], plain["answers"][0]["tokens"], "{args:?}");
        assert_eq!(answer["rounds"][0]["proposed"], verified, "{args:?}");
        assert_eq!(answer["unusable_confidences"], 0);
        assert_eq!(found["schedule"].as_str().is_some(), !args.is_empty());
    }
    let named = generate(&scene, &["--schedule", "early-stop", "--profile", "free.json"]);
    assert_eq!(named["schedule"], "early-stop, profile free.json");
}

#[test]
fn a_calibration_is_fitted_by_one_evaluation_and_used_by_the_next() {
    let scene = Scene::new();
    let ended = scene.run(&[EVAL, &["--fit-calibration", "fits/sts.json", "--out", "fitted"]].concat());
    let report = ended.json();
    let (drafter, fit) = (&report["drafters"][0], &report["drafters"][0]["calibration"]);
    assert_eq!(fit["rounds"], drafter["tasks"][0]["proposed"][0]);
    let text = std::fs::read_to_string(scene.path("fits/sts.json")).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&file["form"], &file["temperatures"]), (&"logit".into(), &fit["temperatures"]));
    let sum = |key: &str| -> f64 { fit[key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).sum() };
    assert_eq!(fit["ece_before"].as_array().unwrap().len(), 7);
    // Half of the drafts, it says; next to none is.
    assert!(fit["ece_before"][0].as_f64().unwrap() > 0.3, "{fit}");
    assert!(sum("ece_after") <= sum("ece_before"), "{fit}");
    let markdown = std::fs::read_to_string(scene.path("fitted/results.md")).unwrap();
    assert!(markdown.contains("Calibration of the confidences, fitted to these"), "{markdown}");

    // A temperature of 1e-6 makes sure what was 0.5 or so: each draft is in or out for its sign alone.
    scene.write("sharp.json", &format!(r#"{{"form": "logit", "temperatures": {:?}}}"#, [1e-6; 7]));
    let verified = |file: &str| {
        let schedule = ["--schedule", "threshold=0.4", "--calibration", file, "--out", "scheduled"];
        let report = scene.run(&[EVAL, &schedule].concat()).json();
        assert_eq!(report["schedule"], format!("threshold=0.4, calibration {file}"));
        let task = &report["drafters"][0]["tasks"][0];
        assert_eq!(task["same_text"], 2);
        let markdown = std::fs::read_to_string(scene.path("scheduled/results.md")).unwrap();
        assert!(markdown.contains(&format!("- schedule: threshold=0.4, calibration {file}\n")), "{markdown}");
        task["proposed"].clone()
    };
    assert_ne!(verified("fits/sts.json"), verified("sharp.json"));

    let table = [&EVAL[..EVAL.len() - 1], &["--fit-calibration", "sts.json"]].concat();
    let ended = scene.run(&table);
    assert!(ended.stdout.contains("calibration error of the survival by slot"), "{}", ended.stdout);
    assert!(ended.stdout.contains("drafts a round"), "{}", ended.stdout);
}

#[test]
fn schedules_that_cannot_be() {
    let scene = Scene::new();
    profiles(&scene);
    scene.write("sts.json", r#"{"form": "logit", "temperatures": [1.0]}"#);
    scene.write("bad.json", r#"{"milliseconds": [[1, -1.0]], "temperatures": []}"#);
    let drafted = [GENERATE, &["--drafter", "drafter"]].concat();
    for (more, code, parts) in [
        (&["--schedule", "luck"][..], USAGE, &["--schedule", "found luck, expected fixed=N"][..]),
        (&["--schedule", "threshold=2"], USAGE, &["confidence threshold: found 2"]),
        (&["--schedule", "early-stop"], USAGE, &["--profile <FILE>"]),
        (&["--profile", "free.json"], USAGE, &["--schedule <POLICY>"]),
        (&["--calibration", "sts.json"], USAGE, &["--schedule <POLICY>"]),
        (
            &["--schedule", "fixed=1", "--calibration", "sts.json"],
            FAILED,
            &["--calibration: --schedule fixed=1 does not look at confidences"],
        ),
        (
            &["--schedule", "threshold=0.5", "--profile", "free.json"],
            FAILED,
            &["--profile: --schedule threshold=0.5 does not look at what a pass costs"],
        ),
        (
            &["--schedule", "stale-budget", "--profile", "nowhere.json"],
            FAILED,
            &["--profile: nowhere.json: No such file"],
        ),
        (&["--schedule", "early-stop", "--profile", "bad.json"], FAILED, &["--profile: bad.json: "]),
        (
            &["--schedule", "threshold=0.5", "--calibration", "bad.json"],
            FAILED,
            &["--calibration: bad.json: unknown field `milliseconds`"],
        ),
    ] {
        refused(&scene, &[&drafted[..], more].concat(), code, parts);
    }
    refused(&scene, &[GENERATE, &["--schedule", "fixed=1"]].concat(), USAGE, &["--drafter <DIR>"]);
    let fit = ["--fit-calibration", "sts.json"];
    let scheduled = [EVAL, &fit, &["--schedule", "fixed=1"]].concat();
    refused(&scene, &scheduled, USAGE, &["'--fit-calibration <FILE>' cannot be used with '--schedule"]);
    let two = [EVAL, &fit, &["--drafter", "drafter"]].concat();
    refused(&scene, &two, FAILED, &["--fit-calibration: found 2 drafters, expected one"]);
    let folder = [EVAL, &["--fit-calibration", "target"]].concat();
    refused(&scene, &folder, FAILED, &["--fit-calibration target cannot be written: found a folder"]);
}

#[test]
fn a_drafter_without_confidences() {
    let scene = Scene::new();
    scene.edit("drafter/config.json", |config| config["enable_confidence_head"] = false.into());
    scene.tensors("drafter", |tensors| tensors.retain(|name, _| !name.starts_with("confidence_head")));
    assert_eq!(generate(&scene, &["--schedule", "fixed=1"])["answers"][0]["rounds"][0]["proposed"], 1);
    let head = "schedule: found a drafter without a confidence head, expected one with it, or a fixed length";
    let threshold = ["--schedule", "threshold=0.5"];
    let drafted = [GENERATE, &["--drafter", "drafter", "--json"], &threshold].concat();
    refused(&scene, &drafted, FAILED, &[head]);
    refused(&scene, &[EVAL, &threshold].concat(), FAILED, &[head]);
    let fit = [EVAL, &["--fit-calibration", "sts.json"]].concat();
    refused(
        &scene,
        &fit,
        FAILED,
        &["--fit-calibration: calibration: no draft was verified, or the drafter has"],
    );
}
