//! Masks and losses of DeepSpec by themselves.

use crate::{VALUES, alphas, assert_gradient, flags, floats, scalar, usizes};
use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use hspec_core::drafter::dspark::Layout;
use hspec_goldens::{Golden, assert_close};
use hspec_train::loss_deepspec::{
    BlockTargets, anchor_candidates, contiguous_mask, deepspec, expected_lengths,
};

#[test]
fn golden_supervision_masks_of_deepspec() {
    let golden = Golden::open("dspark/eval_mask");
    let [rows, block] = {
        let shape = golden.data("eval_mask").shape.to_vec();
        [shape[0] * shape[1], shape[2]]
    };
    let batch = golden.data("loss_mask").shape.to_vec()[0];
    let (blocks, masks) = (rows / batch, flags(&golden, "loss_mask"));
    let (anchors, keep) = (usizes(&golden, "anchor_positions"), flags(&golden, "block_keep_mask"));
    let seq = masks.len() / batch;
    let candidates = flags(&golden, "anchor_candidates");
    let mut found = Vec::new();
    for b in 0..batch {
        let (loss_mask, documents) = (&masks[b * seq..(b + 1) * seq], vec![0; seq]);
        // The last token can be no anchor; the reference leaves it out.
        let own = anchor_candidates(loss_mask, &documents);
        assert!(!own[seq - 1]);
        let width = candidates.len() / batch;
        assert_eq!(own[..width], candidates[b * width..(b + 1) * width]);
        for n in b * blocks..(b + 1) * blocks {
            found.extend(match keep[n] {
                true => {
                    contiguous_mask(Layout::AnchorPredicts, block, &anchors[n..=n], loss_mask, &documents)
                }
                false => vec![false; block],
            });
        }
    }
    assert_eq!(found, flags(&golden, "eval_mask"));
}

fn deepspec_losses<B: AutodiffBackend>() {
    let device = Default::default();
    let golden = Golden::open("dspark/loss_dspark");
    let shape = golden.data("draft_logits").shape.to_vec();
    let (n, k, v) = (shape[0] * shape[1], shape[2], shape[3]);
    for (name, case) in golden.notes["cases"].as_object().unwrap() {
        let at = |t: &str| format!("{name}/{t}");
        let logits = golden.float::<B, 4>("draft_logits", &device).reshape([n, k, v]).require_grad();
        let confidence = golden.float::<B, 3>("confidence_logits", &device).reshape([n, k]).require_grad();
        let masked = name == "all_masked";
        let mask: Vec<bool> = flags(&golden, "eval_mask").iter().map(|&m| m && !masked).collect();
        let config = alphas(case);
        let loss = deepspec(
            BlockTargets {
                logits: logits.clone(),
                targets: golden.float::<B, 4>("target_logits", &device).reshape([n, k, v]),
                labels: golden.int::<B, 3>("target_ids", &device).reshape([n, k]),
                confidence: Some(confidence.clone()),
                mask: floats(&mask, [n, k]),
            },
            Layout::AnchorPredicts,
            &config,
        );
        scalar(&at("loss"), &loss.total, golden.f32s(&at("loss"))[0]);
        // A term of weight 0 is not computed by the reference.
        for (term, weight, found) in [
            ("ce_loss", config.ce, &loss.ce),
            ("l1_loss", config.distance, &loss.l1),
            ("confidence_loss", config.confidence, &loss.confidence),
        ] {
            if weight != 0.0 {
                scalar(&at(term), found, golden.f32s(&at(&format!("{term}_num")))[0]);
                scalar(&at(term), &loss.weight, golden.f32s(&at(&format!("{term}_den")))[0]);
            }
        }
        if !masked {
            let mask: Vec<f32> = mask.iter().map(|&m| f32::from(u8::from(m))).collect();
            let acceptance: Vec<f32> = loss.acceptance.clone().into_data().iter::<f32>().collect();
            let tau = expected_lengths(Layout::AnchorPredicts, k, &acceptance, &mask);
            let tau: Vec<f32> = tau.iter().map(|&t| t as f32).collect();
            assert_close(&at("tau"), &tau, &golden.f32s("tau_prob_per_block"), VALUES);
        }
        let grads = loss.total.backward();
        let values = |t: Tensor<B::InnerBackend, 1>| t.into_data().iter::<f32>().collect::<Vec<f32>>();
        let found = values(logits.grad(&grads).unwrap().reshape([n * k * v]));
        assert_gradient(&at("draft"), &found, &golden.f32s(&at("grad_draft_logits")));
        let found = values(confidence.grad(&grads).unwrap().reshape([n * k]));
        assert_gradient(&at("confidence"), &found, &golden.f32s(&at("grad_confidence_logits")));
    }
}

#[test]
fn golden_losses_of_deepspec_flex() {
    deepspec_losses::<Autodiff<burn_flex::Flex>>();
}

#[test]
fn golden_losses_of_deepspec_ndarray() {
    deepspec_losses::<Autodiff<burn_ndarray::NdArray>>();
}
