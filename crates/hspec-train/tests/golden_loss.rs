//! The objective against the reference implementation: elements, terms, gradients, D-PACE, metrics.

#![allow(clippy::unwrap_used)] // a test may panic

use burn::{
    backend::Autodiff,
    tensor::{Tensor, backend::AutodiffBackend},
};
use hspec_goldens::{FORWARD, GRADIENT, Golden, assert_close, assert_tensor};
use hspec_train::{
    loss::{Agreement, LossConfig, Slots, Weighting, elements, loss},
    objective::objective,
    pack::Forward,
};

fn check<B: AutodiffBackend>() {
    let device = Default::default();
    let golden = Golden::open("hspec/loss");
    for (name, case) in golden.cases() {
        let at = |t: &str| format!("{name}/{t}");
        let number = |key: &str| case[key].as_f64().unwrap();
        let (n, k) = (number("n_blocks") as usize, number("block_size") as usize);
        let v = number("draft_vocab") as usize;
        let logits = golden.float::<B, 3>(&at("draft_logits"), &device).reshape([n, k, v]).require_grad();
        let targets = golden.float::<B, 3>(&at("target_logits"), &device).reshape([n, k, v]);
        let confidence =
            golden.float::<B, 2>(&at("confidence_logits"), &device).reshape([n, k]).require_grad();
        let mask: Vec<f32> = golden.ints(&at("loss_mask")).iter().map(|&m| m as f32).collect();
        let mask = Tensor::<B, 2>::from_data(burn::tensor::TensorData::new(mask, [n, k]), &device);
        let config = LossConfig {
            ce: case["loss"]["ce"].as_f64().unwrap(),
            tv: case["loss"]["tv"].as_f64().unwrap(),
            kl: 0.0,
            confidence: number("confidence_head_alpha"),
            weighting: Weighting::Decay { gamma: number("gamma") },
        };

        let e = elements(logits.clone(), targets.clone(), Some(confidence.clone()));
        for (key, found) in [
            ("ce_elementwise", e.ce.clone()),
            ("tv_elementwise", e.tv.clone()),
            ("accept_target", e.acceptance.clone()),
            ("conf_bce_elementwise", e.confidence.clone().unwrap()),
        ] {
            assert_tensor(&at(key), found, &golden.f32s(&at(key)), FORWARD);
        }
        let l = loss(e.clone(), mask.clone(), &config);
        for (key, found) in [
            ("ce", l.ce.clone()),
            ("tv", l.tv.clone()),
            ("confidence", l.confidence.clone()),
            ("total", l.total.clone()),
        ] {
            assert_tensor(&at(key), found, &golden.f32s(&at(key)), FORWARD);
        }
        let without = loss(elements(logits.clone(), targets.clone(), None), mask.clone(), &config);
        assert_tensor(
            &at("no confidence"),
            without.total,
            &golden.f32s(&at("total_without_confidence")),
            FORWARD,
        );
        let grads = l.total.backward();
        let grad = logits.grad(&grads).unwrap();
        assert_tensor(&at("grad logits"), grad, &golden.f32s(&at("grad.draft_logits")), GRADIENT);
        let grad = confidence.grad(&grads).unwrap();
        assert_tensor(&at("grad confidence"), grad, &golden.f32s(&at("grad.confidence_logits")), GRADIENT);

        let dpace = LossConfig { weighting: Weighting::Dpace { alpha: number("dpace_alpha") }, ..config };
        let d = loss(e, mask.clone(), &dpace);
        assert_tensor(&at("dpace_weight"), d.weights, &golden.f32s(&at("dpace_weight")), FORWARD);
        assert_tensor(&at("dpace_total"), d.total, &golden.f32s(&at("dpace_total")), FORWARD);

        // The form that training uses: every slot's target row in a table, gradients in closed form on flex.
        for (config, total) in [(config, "total"), (dpace, "dpace_total")] {
            let (x, z) = (logits.clone().detach().require_grad(), confidence.clone().detach().require_grad());
            let forward = Forward {
                logits: x.clone().into(),
                confidence: Some(z.clone()),
                base: None,
                table: targets.clone().inner().reshape([n * k, v]),
                anchors: vec![0; n],
                rows: (0..n * k).collect(),
                slots: Slots::blocks(n, k, 1),
                mask: mask.clone(),
            };
            let found = objective(forward, &config);
            assert_close(&at(total), &[found.total as f32], &golden.f32s(&at(total)), FORWARD);
            let grads = found.differentiable.backward();
            let (dx, dz) = (x.grad(&grads).unwrap(), z.grad(&grads).unwrap());
            if total == "total" {
                assert_tensor(&at(total), dx, &golden.f32s(&at("grad.draft_logits")), GRADIENT);
                assert_tensor(&at(total), dz, &golden.f32s(&at("grad.confidence_logits")), GRADIENT);
            } else {
                let plain = loss(
                    elements(logits.clone(), targets.clone(), Some(confidence.clone())),
                    mask.clone(),
                    &config,
                );
                let grads = plain.total.backward();
                let expected = |t: Tensor<B::InnerBackend, 3>| t.into_data().to_vec::<f32>().unwrap();
                assert_tensor(&at(total), dx, &expected(logits.grad(&grads).unwrap()), GRADIENT);
            }
        }

        let counted = Agreement::count(logits, targets, &mask, &Slots::blocks(n, k, 1));
        let ints = |v: &[u64]| v.iter().map(|&x| x as f32).collect::<Vec<_>>();
        assert_close(&at("acc_correct"), &ints(&counted.correct), &golden.f32s(&at("acc_correct")), FORWARD);
        assert_close(&at("acc_total"), &ints(&counted.total), &golden.f32s(&at("acc_total")), FORWARD);
        let eal = [counted.expected_length(1) as f32];
        assert_close(&at("eal"), &eal, &golden.f32s(&at("eal")), FORWARD);
        let full = [counted.correct.iter().sum::<u64>() as f32, counted.total.iter().sum::<u64>() as f32];
        assert_close(&at("full_acc"), &full, &golden.f32s(&at("full_acc")), FORWARD);
    }
}

#[test]
fn golden_loss_flex() {
    check::<Autodiff<burn_flex::Flex>>();
}

#[test]
fn golden_loss_ndarray() {
    check::<Autodiff<burn_ndarray::NdArray>>();
}
