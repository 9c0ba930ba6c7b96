//! Sequential Temperature Scaling, calibration error and AUROC against the reference implementation.

use hspec_goldens::{Golden, Tolerance, assert_close};
use hspec_sched::{BINS, Form, StsCalibration, Verified};

const CLOSE: Tolerance = Tolerance::Absolute(1e-6);

/// Slots, and the blocks of the fixture.
fn blocks(golden: &Golden) -> (usize, Vec<Verified>) {
    let slots = golden.data("logits").shape[1];
    let logits = golden.f32s("logits");
    let accepted = golden.f32s("prefix_label");
    let block = |(logits, labels): (&[f32], &[f32])| Verified {
        logits: logits.iter().map(|&z| f64::from(z)).collect(),
        accepted: labels.iter().filter(|&&kept| kept == 1.0).count(),
    };
    (slots, logits.chunks(slots).zip(accepted.chunks(slots)).map(block).collect())
}

/// The grid in f64: the fixture's numbers are rounded, and a block near the edge of a bin would change it.
fn grid(golden: &Golden, name: &str) -> Vec<f64> {
    let stored = golden.f32s(&format!("grid/{name}"));
    let n = stored.len() as f64 - 1.0;
    let at = |i: usize| match name {
        "lin100" => 0.1 + i as f64 * (9.9 / n),
        "log49" => 10f64.powf(0.125f64.log10() + i as f64 * ((8f64.log10() - 0.125f64.log10()) / n)),
        _ => f64::from(stored[i]),
    };
    let grid: Vec<_> = (0..stored.len()).map(at).collect();
    let rounded: Vec<_> = grid.iter().map(|&t| t as f32).collect();
    assert_close(name, &rounded, &stored, CLOSE);
    grid
}

#[test]
fn golden_sts_fits() {
    let golden = Golden::open("dspark/sts");
    let (slots, blocks) = blocks(&golden);
    let results = golden.notes["results"].as_object().expect("results by name");
    assert!(!results.is_empty());
    for name in results.keys() {
        let parts: Vec<_> = name.split('_').collect();
        let form = match parts[0] {
            "logit" => Form::Logit,
            "power" => Form::Power,
            other => panic!("{name}: form {other}"),
        };
        let grid = grid(&golden, parts[1]);
        let bins = parts[2].strip_prefix("bins").and_then(|n| n.parse().ok()).expect("a number of bins");

        let fit = StsCalibration::fit(form, &blocks, &grid, bins).expect("the fixture can be fitted");
        let temperatures: Vec<_> = fit.temperatures().iter().map(|&t| t as f32).collect();
        let reference = golden.f32s(&format!("{name}/temperatures"));
        assert_close(&format!("{name}/temperatures"), &temperatures, &reference, CLOSE);

        let plain = StsCalibration::new(form, vec![]).expect("valid");
        for (what, calibration) in [("ece_before", &plain), ("ece_after", &fit)] {
            let ece = |slot| calibration.reliability(&blocks, slot, bins).expect("blocks").ece() as f32;
            let ece: Vec<_> = (0..slots).map(ece).collect();
            let what = format!("{name}/{what}");
            assert_close(&what, &ece, &golden.f32s(&what), CLOSE);
        }
        let curves = golden.f32s(&format!("{name}/ece_curve"));
        for (slot, curve) in curves.chunks(grid.len()).enumerate() {
            let ece = |&t: &f64| {
                let temperatures = [&fit.temperatures()[..slot], &[t]].concat();
                let calibration = StsCalibration::new(form, temperatures).expect("positive");
                calibration.reliability(&blocks, slot, bins).expect("blocks").ece() as f32
            };
            let found: Vec<_> = grid.iter().map(ece).collect();
            assert_close(&format!("{name}/ece_curve, slot {slot}"), &found, curve, CLOSE);
        }
    }
}

#[test]
fn golden_reliability() {
    let golden = Golden::open("dspark/sts");
    let (slots, blocks) = blocks(&golden);
    let plain = StsCalibration::new(Form::Logit, vec![]).expect("valid");
    let rows: Vec<_> =
        (0..slots).map(|slot| plain.reliability(&blocks, slot, BINS).expect("blocks")).collect();
    let column = |f: &dyn Fn(usize) -> f64| (0..slots).map(|slot| f(slot) as f32).collect::<Vec<_>>();
    for (what, found) in [
        ("ece", column(&|slot| rows[slot].ece())),
        ("auc", column(&|slot| rows[slot].auroc.expect("both outcomes"))),
        ("brier", column(&|slot| rows[slot].brier)),
        ("pred_mean", column(&|slot| rows[slot].total.predicted)),
        ("target_mean", column(&|slot| rows[slot].total.observed)),
    ] {
        let what = format!("deepspec/{what}");
        assert_close(&what, &found, &golden.f32s(&what), CLOSE);
    }
    assert!(rows.iter().all(|row| row.total.count == blocks.len()));
}
