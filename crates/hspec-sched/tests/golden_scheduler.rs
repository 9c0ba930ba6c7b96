//! Prefix scheduling against cases worked out from the paper's text.

use hspec_sched::{Drafted, Load, Plan, Policy, PrefixScheduler, Survival, ThroughputProfile};
use hspec_sched::{admit, budget, early_stop, whole_path};
use serde_json::Value;

fn notes() -> Value {
    let path = hspec_goldens::root().join("dspark/scheduler.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).expect("JSON")
}

fn cases<'a>(notes: &'a Value, kind: &str) -> &'a Vec<Value> {
    let cases = notes[kind].as_array().unwrap_or_else(|| panic!("{kind}: no list"));
    assert!(!cases.is_empty(), "{kind}");
    cases
}

fn list<T: serde::de::DeserializeOwned>(value: &Value) -> Vec<T> {
    serde_json::from_value(value.clone()).unwrap_or_else(|e| panic!("{value}: {e}"))
}

fn profile(sps: &Value) -> ThroughputProfile {
    let row = |(tokens, rate): (&String, &Value)| {
        (tokens.parse().expect("a number of tokens"), rate.as_f64().expect("a rate"))
    };
    let mut rows: Vec<_> = sps.as_object().expect("rates by tokens").iter().map(row).collect();
    rows.sort_by_key(|row: &(usize, f64)| row.0);
    ThroughputProfile::from_steps_per_second(&rows).expect("a profile")
}

fn assert_close(what: &str, found: f64, reference: &Value) {
    let reference = reference.as_f64().unwrap_or_else(|| panic!("{what}: no number"));
    assert!((found - reference).abs() <= 1e-6 * reference.abs().max(1.0), "{what}: {found}, not {reference}");
}

fn assert_plan(what: &str, found: &Plan, reference: &Value) {
    assert_eq!(found.lengths, list::<usize>(&reference["lengths"]), "{what}");
    assert_close(what, found.tokens_per_second, &reference["theta"]);
}

#[test]
fn golden_algorithm_1() {
    for case in cases(&notes(), "cases") {
        let name = case["name"].as_str().expect("a name");
        let profile = profile(&case["sps"]);
        let survival = Survival::new(&list::<Vec<f64>>(&case["confidences"]));
        for (row, reference) in list::<Vec<f64>>(&case["survival"]).iter().enumerate() {
            // JSON numbers are read to within their last bit.
            assert!(survival.row(row).len() == reference.len(), "{name}");
            for (a, reference) in survival.row(row).iter().zip(reference) {
                assert!((a - reference).abs() < 1e-14, "{name}: {a}, not {reference}");
            }
        }
        let ranked = survival.ranked();
        let order: Vec<_> = ranked.iter().map(|c| (c.request, c.length)).collect();
        assert_eq!(order, list::<(usize, usize)>(&case["paper"]["order"]), "{name}");
        // Theta along the way, as far as the reference went.
        for kind in ["paper", "no_early_stop"] {
            for (drafts, theta) in list::<Value>(&case[kind]["theta_path"]).iter().enumerate() {
                let tokens = survival.expected_tokens(&admit(&survival, drafts));
                let found = tokens * profile.steps_per_second(survival.requests() + drafts);
                assert_close(name, found, theta);
            }
        }
        assert_plan(name, &early_stop(&survival, &profile), &case["paper"]);
        assert_plan(name, &whole_path(&survival, &profile), &case["no_early_stop"]);
        assert_close(name, whole_path(&survival, &profile).tokens_per_second, &case["brute_force"]["theta"]);
    }
}

#[test]
fn golden_stale_budget() {
    for case in cases(&notes(), "async_cases") {
        let name = case["name"].as_str().expect("a name");
        let profile = profile(&case["sps"]);
        let old = list::<Vec<f64>>(&case["confidences_two_steps_ago"]);
        let now = list::<Vec<f64>>(&case["confidences_now"]);
        let stale = whole_path(&Survival::new(&old), &profile).lengths;
        assert_eq!(stale, list::<usize>(&case["old_lengths"]), "{name}");
        assert_eq!(stale.iter().sum::<usize>() as u64, case["budget_K"], "{name}");

        let mut scheduler = PrefixScheduler::new(Policy::StaleBudget { profile }).expect("valid");
        let mut round = |rows: &[Vec<f64>]| {
            let drafted: Vec<_> =
                (10..).zip(rows).map(|(id, confidences)| Drafted { id, confidences }).collect();
            scheduler.round(&drafted).lengths
        };
        round(&old);
        round(&now);
        assert_eq!(round(&now), list::<usize>(&case["lengths"]), "{name}");
    }
}

#[test]
fn golden_serving_budget() {
    for case in cases(&notes(), "vllm_adaptive") {
        let name = case["name"].as_str().expect("a name");
        let cost: Vec<_> = list::<f64>(&case["verify_cost_ms"]).into_iter().enumerate().collect();
        let verify = ThroughputProfile::from_milliseconds(&cost).expect("a profile").monotone();
        let survival = Survival::new(&list::<Vec<f64>>(&case["confidences"]));
        let count = |key: &str| case[key].as_u64().expect("a count") as usize;
        let load = Load {
            sampling: count("num_sampling_requests"),
            tokens: count("num_non_draft_tokens"),
            draft_ms: case["draft_cost_ms"].as_f64().expect("milliseconds"),
        };
        let budget = budget(&survival, load, &verify).unwrap();
        assert_eq!(budget as u64, case["budget"], "{name}");
        assert_eq!(admit(&survival, budget), list::<usize>(&case["lengths"]), "{name}");
    }
}
