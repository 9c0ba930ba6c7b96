//! Acceptance counts against the reference implementation's evaluator.

use hspec_eval::Acceptance;
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
