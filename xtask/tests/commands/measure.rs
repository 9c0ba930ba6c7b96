//! `bench` and `parity` on a tiny target, with stand-ins for PyTorch.

use crate::scene::Scene;
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;

const WORK: [&str; 14] = [
    "decode@256",
    "decode@1024",
    "verify8@256",
    "verify8@1024",
    "prefill512",
    "decode@256:bf16",
    "decode@1024:bf16",
    "verify8@256:bf16",
    "verify8@1024:bf16",
    "prefill512:bf16",
    "draft_step",
    "train_step",
    "train_step:bf16",
    "ssd_scan",
];

const SCAN: &[&str] = &["bench", "--target", "target", "--repeats", "4", "--work", "ssd_scan", "--json"];

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// Puts a shell script into the scene as the only `python3`.
fn python(scene: &Scene, script: &str) -> String {
    let bin = scene.path("bin");
    std::fs::create_dir(&bin).unwrap();
    scene.write("bin/python3", &format!("#!/bin/sh\n{script}\n"));
    std::fs::set_permissions(bin.join("python3"), std::fs::Permissions::from_mode(0o755)).unwrap();
    bin.display().to_string()
}

#[test]
fn a_bench_measures_every_piece_of_work() {
    let scene = Scene::new();
    let args = ["bench", "--target", "target", "--repeats", "1", "--json", "--out", "out"];
    let found = scene.run(&[&args[..], &["--work"], &WORK].concat()).json();
    let rows = found["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["work"].as_str().unwrap()).collect();
    assert_eq!(names, WORK);
    for row in rows {
        let times = numbers(&row["ours_ms"]);
        assert!(times.len() == 3 && times[0] > 0.0 && times.is_sorted(), "{row}");
        assert!(row["peer"].is_null() && row["peer_ms"].is_null() && row["ratio"].is_null(), "{row}");
    }
    let median = |i: usize| rows[i]["ours_ms"][1].as_f64().unwrap();
    for (pair, ratio) in [
        ("verify8@256 / decode@256", median(2) / median(0)),
        ("verify8@1024 / decode@1024", median(3) / median(1)),
        ("draft_step / decode@256", median(10) / median(0)),
        ("verify8@1024:bf16 / decode@1024:bf16", median(8) / median(6)),
        ("draft_step / decode@256:bf16", median(10) / median(5)),
    ] {
        assert!((found["cost_ratios"][pair].as_f64().unwrap() - ratio).abs() < 1e-9, "{pair}");
    }
    assert_eq!((&found["target"], &found["weights"]), (&"target".into(), &"auto".into()));
    // Without a word about works, and without a peer, the model is not loaded a second time.
    let rest = scene.run(&["bench", "--target", "target", "--repeats", "1", "--json"]).json();
    let names = rest["rows"].as_array().unwrap().iter().map(|row| row["work"].as_str().unwrap());
    let once = |work: &&str| !work.contains(":bf16") || *work == "train_step:bf16";
    assert!(names.eq(WORK.into_iter().filter(once)));
    assert_eq!(scene.list("out"), ["speed.json", "speed.md"]);
    let written: Value =
        serde_json::from_slice(&std::fs::read(scene.path("out/speed.json")).unwrap()).unwrap();
    assert_eq!(written, found);
}

#[test]
fn a_peer_s_times_stand_beside_ours() {
    let scene = Scene::new();
    let path = python(&scene, "echo ready; while read work; do echo 1.5; done");
    let found = scene.run_with(&[SCAN, &["--peer", "torch"]].concat(), &[("PATH", &path)]).json();
    let rows = found["rows"].as_array().unwrap();
    let peers: Vec<&str> = rows.iter().map(|row| row["peer"].as_str().unwrap()).collect();
    assert_eq!(peers, ["torch-f32", "torch-bf16"]);
    for row in rows {
        assert_eq!(numbers(&row["peer_ms"]), [1.5; 3]);
        let (ours, ratio) = (numbers(&row["ours_ms"]), numbers(&row["ratio"]));
        // Our shortest run makes the greatest ratio.
        for (a, b) in [(ratio[0], 1.5 / ours[2]), (ratio[2], 1.5 / ours[0])] {
            assert!((a - b).abs() < 1e-9 * b, "{row}");
        }
    }
}

#[test]
fn without_torch_the_peer_is_skipped_with_a_message() {
    for script in [None, Some("exit 3")] {
        let scene = Scene::new();
        let path = script.map_or_else(String::new, |script| python(&scene, script));
        let ended = scene.run_with(&[SCAN, &["--peer", "torch"]].concat(), &[("PATH", &path)]);
        assert!(ended.stderr.contains("--peer torch skipped: no python3 with torch"), "{}", ended.stderr);
        assert!(ended.json()["rows"][0]["peer"].is_null());
    }
}

#[test]
fn a_peer_that_breaks_is_an_error() {
    for (script, part) in [
        ("exit 1", "torch-f32: it did not get ready"),
        ("echo ready; read work; exit 1", "torch-f32 on ssd_scan: it ended"),
        ("echo ready; read work; echo soon", "torch-f32 on ssd_scan: \"soon\" is no number"),
    ] {
        let scene = Scene::new();
        let path = python(&scene, script);
        let ended = scene.run_with(&[SCAN, &["--peer", "torch"]].concat(), &[("PATH", &path)]);
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        assert!(ended.stderr.contains(part), "no {part:?} in {}", ended.stderr);
        assert_eq!(ended.stdout, "");
    }
}

#[test]
fn a_sweep_measures_both_drafters_as_far_as_time_allows() {
    let scene = Scene::new();
    // The first cell of each drafter is always measured.
    let found = scene.run(&[SCAN, &["--sweep", "--minutes", "0"]].concat()).json();
    let cells = found["sweep"].as_array().unwrap();
    assert_eq!(cells.len(), 2 * 4 * 4);
    let measured: Vec<&Value> = cells.iter().filter(|cell| cell["ms"].is_array()).collect();
    let drafters: Vec<&str> = measured.iter().map(|cell| cell["drafter"].as_str().unwrap()).collect();
    assert_eq!(drafters, ["hspec", "dspark"]);
    assert!(measured.iter().all(|cell| cell["prefix"] == 512 && cell["concurrency"] == 1));
    assert_eq!(measured[0]["own_cache_bytes"], 0);
    assert!(measured[1]["own_cache_bytes"].as_u64().unwrap() > 0);
    for cell in cells.iter().filter(|cell| cell["ms"].is_null()) {
        assert!(cell["skipped"].as_str().unwrap().contains("it may take"), "{cell}");
    }
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let scene = Scene::new();
    for (args, code, part) in [
        (&["bench", "--work", "sleep"][..], 2, "known are decode@256, decode@1024"),
        (
            &["bench", "--work", "decode@256:bf16", "--shape", "smollm2"],
            1,
            "--work decode@256:bf16: weights are rounded where a model is loaded on the backend flex; \
             found --backend flex with --shape",
        ),
        (&["bench", "--shape", "smollm2", "--weights", "bf16"], 1, "those of --shape are random"),
        (&["bench", "--repeats", "0"], 2, "0 is not in 1.."),
        (&["bench", "--minutes=-1"], 2, "expected a number of minutes"),
        (&["bench", "--target", "target", "--shape", "smollm2"], 2, "cannot be used with"),
        (&["bench", "--shape", "smollm3"], 2, "qwen3-8b"),
        (&["bench", "--peer", "jax"], 2, "torch"),
        (&["bench", "--target", "absent"], 1, "absent"),
        (&["bench"], 1, "or give --shape"),
        (&["parity", "--goldens", "absent"], 1, "absent: found no fixtures"),
    ] {
        let ended = scene.run(args);
        assert_eq!(ended.code, Some(code), "{args:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(part), "{args:?}: no {part:?} in {}", ended.stderr);
        assert_eq!(ended.stdout, "", "{args:?}");
    }
}

#[test]
fn golden_parity_tells_the_largest_difference_of_each_component() {
    let scene = Scene::new();
    let goldens = hspec_goldens::root().canonicalize().unwrap();
    let found = scene.run(&["parity", "--json", "--goldens", goldens.to_str().unwrap()]).json();
    assert_eq!((&found["pass"], &found["backend"]), (&true.into(), &"flex".into()));
    for row in found["rows"].as_array().unwrap() {
        let [relative, tolerance] = ["relative", "tolerance"].map(|key| row[key].as_f64().unwrap());
        assert!(
            row["pass"] == true && relative <= tolerance && row["tensors"].as_u64().unwrap() > 0,
            "{row}"
        );
    }
}
