//! The doctor's lines, its document, and how it ends.

use crate::scene::Scene;

const DOCTOR: &[&str] =
    &["doctor", "--target", "target", "--drafter", "drafter", "--prompt", "w3 w14 w15 w92 w65 w35"];

#[test]
fn a_drafter_passes_until_something_is_broken() {
    let scene = Scene::new();
    // The scene's drafter states other layers than it reads.
    let ended = scene.run(DOCTOR);
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.stderr.contains("differs: aux_hidden_state_layer_ids: found [1,2], expected [3]"),
        "{}",
        ended.stderr
    );
    scene.edit("drafter/config.json", |c| c["aux_hidden_state_layer_ids"] = c["attn_kv_layer_ids"].clone());
    let document = scene.run(&[DOCTOR, &["--json"]].concat()).json();
    assert!(document["first_difference"].is_null(), "{document:#}");
    let checks = document["checks"].as_array().unwrap();
    let verdict = |name: &str| checks.iter().find(|check| check["name"] == name).unwrap()["verdict"].clone();
    assert_eq!(verdict("training forward against decoding"), "ok");
    assert_eq!(verdict("layers that it was trained on"), "skipped");

    scene.edit("drafter/config.json", |config| {
        config["transformer_layer_config"]["rope_parameters"]["rope_theta"] = 123.0.into();
    });
    let ended = scene.run(DOCTOR);
    assert_eq!(ended.code, Some(1));
    let first = ended.stdout.lines().find(|line| line.starts_with("DIFFERS")).unwrap_or_default();
    assert!(first.contains("rotary fields: rope_theta 123.0; expected rope_theta"), "{}", ended.stdout);
    // What comes after it is told all the same.
    assert!(ended.stdout.contains("training forward against decoding"), "{}", ended.stdout);
    assert!(ended.stderr.contains("the first thing that differs: rotary fields: found"), "{}", ended.stderr);
    let json = scene.run(&[DOCTOR, &["--json"]].concat());
    assert_eq!(json.code, Some(1));
    let document: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(document["first_difference"], "rotary fields");

    let both = scene.run(&[DOCTOR, &["--responses", "r.jsonl"]].concat());
    assert_eq!(both.code, Some(2), "{}", both.stderr);
}
