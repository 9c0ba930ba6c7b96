//! Training by the rules of speculators.

use crate::{LOSS, VALUES, drafter, fixtures, flags, floats, gradients, scalar, tokens, usizes};
use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorData};
use hspec_core::drafter::dspark::{Kind, PackedRow};
use hspec_goldens::{Tolerance, assert_close, assert_tensor};
use hspec_nn::{Linear, RmsNorm};
use hspec_train::loss::elements;
use hspec_train::loss_deepspec::{BlockLossConfig, expected_lengths, slot_mask, speculators};

fn speculators_training<B: AutodiffBackend>() {
    let device: B::Device = Default::default();
    for golden in fixtures("train_spec_") {
        let what = golden.notes["checkpoint"].as_str().unwrap().to_owned();
        let at = |t: &str| format!("{what} {t}");
        let drafter = drafter::<B>(&golden);
        let (layout, k) = (drafter.shape().layout, drafter.shape().block_size);
        let ids = tokens(&golden, "input_ids");
        let t = ids.len();
        let owners = golden.ints("document_ids");
        let documents: Vec<usize> =
            (0..t).map(|i| (0..=i).rev().take_while(|&j| owners[j] == owners[i]).last().unwrap()).collect();
        let positions = usizes(&golden, "position_ids");
        let features = golden.float::<B, 3>("hidden_states", &device).squeeze_dim::<2>(0);
        let row = PackedRow { ids: &ids, positions: &positions, documents: &documents, features };
        let anchors = usizes(&golden, "anchor_positions");
        let n = anchors.len();
        let output = drafter.blocks(&row, &anchors);
        for (key, found) in
            [("hidden", &output.hidden), ("base_logits", &output.base), ("final_logits", &output.logits)]
        {
            assert_tensor(&at(key), found.clone(), &golden.f32s(key), VALUES);
        }
        assert_eq!(output.confidence.is_some(), golden.has("confidence_logits"));
        if let Some(confidence) = &output.confidence {
            assert_tensor(&at("confidence"), confidence.clone(), &golden.f32s("confidence_logits"), VALUES);
        }
        let valid = flags(&golden, "anchor_valid");
        let loss_mask: Vec<bool> = golden.f32s("loss_mask").iter().map(|&m| m != 0.0).collect();
        let mask = slot_mask(layout, k, &anchors, &valid, &loss_mask);
        let mask = floats::<B>(&mask, [n, k]);
        let exact = Tolerance::Absolute(0.0);
        assert_tensor(&at("mask"), mask.clone(), &golden.f32s("aligned_loss_mask"), exact);

        // The reference's last hidden states are before the final norm.
        let eps = drafter.shape().rms_norm_eps;
        let norm = RmsNorm::new(golden.float::<B, 1>("verifier_norm", &device), eps);
        let head = Linear::new(golden.float::<B, 2>("verifier_lm_head", &device), None);
        let last = golden.float::<B, 3>("verifier_last_hidden_states", &device).squeeze_dim::<2>(0);
        let wanted: Vec<i64> = anchors
            .iter()
            .flat_map(|&a| (0..k).map(move |slot| ((layout.label(a, slot) + t - 1) % t) as i64))
            .collect();
        let rows = Tensor::from_data(TensorData::new(wanted, [n * k]), &device);
        let targets = head.forward(norm.forward(last)).select(0, rows);
        assert_tensor(&at("targets"), targets.clone(), &golden.f32s("targets"), VALUES);

        let v = targets.dims()[1];
        let terms = elements(output.logits, targets.reshape([n, k, v]), output.confidence);
        let dspark = drafter.shape().kind == Kind::DSpark;
        let config = BlockLossConfig {
            ce: 0.1,
            distance: 0.9,
            confidence: f64::from(u8::from(dspark)),
            gamma: Some(4.0),
        };
        let flags: Vec<f32> = mask.clone().into_data().iter::<f32>().collect();
        let loss = speculators(terms, mask.clone(), layout, &config);
        scalar(&at("loss"), &loss.total, golden.f32s("loss")[0]);
        for (key, found) in [("ce", &loss.ce), ("tv", &loss.tv), ("confidence", &loss.confidence)] {
            let key = format!("metric/{key}_loss_sum");
            if golden.has(&key) {
                scalar(&at(&key), found, golden.f32s(&key)[0]);
            }
        }
        if dspark {
            let rate = (loss.elements.acceptance.clone() * mask).sum();
            scalar(&at("accept_rate"), &rate, golden.f32s("metric/accept_rate_sum")[0]);
            let acceptance: Vec<f32> = loss.elements.acceptance.clone().into_data().iter::<f32>().collect();
            let lengths = expected_lengths(layout, k, &acceptance, &flags);
            let valid = lengths.iter().zip(&valid).filter(|(_, valid)| **valid);
            let total: f64 = valid.map(|(length, _)| length).sum();
            let reference = golden.f32s("metric/accept_len_sum");
            assert_close(&at("accept_len"), &[total as f32], &reference, LOSS);
        }
        gradients(&what, &golden, &drafter, &loss.total);
    }
}

#[test]
fn golden_training_of_speculators_flex() {
    speculators_training::<Autodiff<burn_flex::Flex>>();
}

#[test]
fn golden_training_of_speculators_ndarray() {
    speculators_training::<Autodiff<burn_ndarray::NdArray>>();
}
