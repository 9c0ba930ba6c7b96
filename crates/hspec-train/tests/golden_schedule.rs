//! Learning rates against the reference implementation.

#![allow(clippy::unwrap_used)] // a test may panic

use hspec_core::checkpoint::read_json;
use hspec_train::schedule::Schedule;
use serde_json::Value;

const PEAK: f64 = 6e-4;

#[test]
fn golden_deepspec_learning_rates() {
    let file = hspec_goldens::root().join("dspark/lr_schedule.json");
    let golden: Value = read_json(&file).unwrap();
    let runs = golden["lrs"].as_object().unwrap();
    assert!(!runs.is_empty());
    for (name, rates) in runs {
        // "total50_warmup0.04"
        let (steps, warmup) = name.strip_prefix("total").unwrap().split_once("_warmup").unwrap();
        let (steps, warmup) = (steps.parse().unwrap(), warmup.parse().unwrap());
        let rates = rates.as_array().unwrap();
        assert_eq!(rates.len(), steps);
        for (step, rate) in rates.iter().enumerate() {
            let found = PEAK * Schedule::Deepspec.scale(step, steps, warmup);
            assert!(
                (found - rate.as_f64().unwrap()).abs() < 1e-12,
                "{name}, step {step}: {found} for {rate}"
            );
        }
    }
}
