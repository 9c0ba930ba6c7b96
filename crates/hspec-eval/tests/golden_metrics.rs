//! Acceptance counts against the reference implementation's evaluator.

use hspec_eval::{
    Acceptance, DrafterFacts, Machine,
    comparison::{
        Cell, DrafterEntry, Manifest, PromptEntry, Record, Results, TargetFacts, TaskEntry, Timing,
    },
};
use serde_json::Value;

fn lengths(value: &Value) -> Vec<usize> {
    let list = value.as_array().expect("a list of lengths");
    list.iter().map(|n| n.as_u64().expect("a length") as usize).collect()
}

fn counts(value: &Value) -> Vec<u64> {
    lengths(value).into_iter().map(|n| n as u64).collect()
}

fn assert_rates(what: &str, found: &[f64], reference: &Value) {
    let reference = reference.as_array().expect("a list of rates");
    assert_eq!(found.len(), reference.len(), "{what}");
    for (found, reference) in found.iter().zip(reference) {
        let difference = (found - reference.as_f64().expect("a rate")).abs();
        assert!(difference < 1e-12, "{what}: {found}, expected {reference}");
    }
}

#[test]
fn golden_metrics() {
    let path = hspec_goldens::root().join("dspark/metrics.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let golden: Value = serde_json::from_str(&text).expect("JSON");
    let (summary, row) = (&golden["summary"], &golden["row"]);

    let k = counts(&summary["proposals_at_pos"]).len();
    let mut total = Acceptance::new(k);
    for response in golden["responses"].as_array().expect("responses") {
        let mut of_response = Acceptance::new(k);
        let emitted = lengths(&response["acceptance_lengths"]);
        let proposed = lengths(&response["proposal_lengths"]);
        let accepted = lengths(&response["accepted_draft_lengths"]);
        for ((emitted, proposed), accepted) in emitted.into_iter().zip(proposed).zip(accepted) {
            // A round without a bonus token is one that an accepted stop token ended.
            let stopped = emitted == accepted;
            of_response.record(proposed, accepted, stopped);
        }
        total.merge(&of_response);
    }

    assert_eq!(total.rounds(), summary["proposal_count"].as_u64().expect("a count"));
    assert_eq!(total.tokens(), summary["acceptance_length_sum"].as_u64().expect("a count"));
    assert_eq!(total.proposed(), counts(&summary["proposals_at_pos"]));
    assert_eq!(total.accepted(), counts(&summary["accepted_at_pos"]));
    let proposals: u64 = total.proposed().iter().sum();
    assert_eq!(proposals, summary["proposal_length_sum"].as_u64().expect("a count"));

    assert_rates("tau", &[total.tau()], &Value::from(vec![row["acceptance_length"].clone()]));
    assert_rates("survival", &total.survival(), &row["accept_rates_by_position"]);
    assert_rates("conditional", &total.conditional(), &golden["conditional_accept"]);
}

/// The same through the records of a comparison.
#[test]
fn golden_metrics_of_a_comparison() {
    let path = hspec_goldens::root().join("dspark/metrics.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let golden: Value = serde_json::from_str(&text).expect("JSON");
    let k = counts(&golden["summary"]["proposals_at_pos"]).len();
    let timing = Timing { total: 1.0, draft: 0.2, target: 0.7, sampling: 0.1 };
    let cell = Cell { drafter: "d".into(), task: "t".into(), k, temperature: 1.0, context: None };
    let responses = golden["responses"].as_array().expect("responses");
    let record = |(i, response): (usize, &Value)| {
        let accepted = lengths(&response["accepted_draft_lengths"]);
        let emitted = lengths(&response["acceptance_lengths"]);
        Record {
            cell: cell.clone(),
            prompt: i.to_string(),
            seed: 0,
            prompt_tokens: 1,
            // Only the last round of a response can have been ended by a stop token.
            stopped: emitted.last() == accepted.last(),
            rounds: lengths(&response["proposal_lengths"]).into_iter().zip(accepted).collect(),
            confidence: Vec::new(),
            same_text: true,
            plain_tokens: 1,
            plain: timing,
            drafted: timing,
            peak_bytes: None,
        }
    };
    let records: Vec<Record> = responses.iter().enumerate().map(record).collect();
    let prompt = |i: usize| PromptEntry { id: i.to_string(), tokens: 1, fingerprint: String::new() };
    let facts = DrafterFacts {
        path: "d".into(),
        kind: "dspark".into(),
        params_trainable: 0,
        params_frozen: 0,
        kv_bytes_per_token: 0,
        state_bytes: 0,
    };
    let manifest = Manifest {
        schema: 1,
        command: String::new(),
        date: String::new(),
        commit: String::new(),
        machine: Machine { cpu: String::new(), threads: 1 },
        target: TargetFacts { path: "t".into(), fingerprint: String::new(), kv_bytes_per_token: 1 },
        max_new_tokens: 1,
        ks: vec![k],
        temperatures: vec![1.0],
        seeds: vec![0],
        drafters: vec![DrafterEntry { name: "d".into(), fingerprint: String::new(), facts }],
        tasks: vec![TaskEntry {
            task: "t".into(),
            context: None,
            prompts: (0..records.len()).map(prompt).collect(),
        }],
        missing: Vec::new(),
    };
    let results = Results::new(manifest, &records).expect("sound records");
    let all = &results.settings[0].drafters[0].all;
    let row = &golden["row"];
    let tau = all.tau.expect("rounds").value;
    assert_rates("tau", &[tau], &Value::from(vec![row["acceptance_length"].clone()]));
    let values = |list: &[Option<hspec_eval::comparison::Estimate>]| -> Vec<f64> {
        list.iter().map(|share| share.map_or(0.0, |share| share.value)).collect()
    };
    assert_rates("survival", &values(&all.survival), &row["accept_rates_by_position"]);
    assert_rates("conditional", &values(&all.conditional), &golden["conditional_accept"]);
}
