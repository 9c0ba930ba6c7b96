//! Training by DeepSpec's rules.

use crate::{
    VALUES, alphas, drafter, fixtures, flags, floats, gradients, int_tensor, pick, scalar, tokens, usizes,
};
use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorData};
use hspec_core::drafter::dspark::{BlockOutput, PackedRow};
use hspec_goldens::assert_tensor;
use hspec_train::loss_deepspec::{BlockTargets, contiguous_mask, deepspec};

/// Each row of the reference's batch is a packed row of its own.
fn deepspec_training<B: AutodiffBackend>() {
    let device: B::Device = Default::default();
    for golden in fixtures("train_") {
        let what = golden.notes["checkpoint"].as_str().unwrap().to_owned();
        let at = |t: &str| format!("{what} {t}");
        let drafter = drafter::<B>(&golden);
        let (layout, k) = (drafter.shape().layout, drafter.shape().block_size);
        let shape = golden.data("target_hidden_states").shape.to_vec();
        let (batch, seq, width) = (shape[0], shape[1], shape[2]);
        let ids = tokens(&golden, "input_ids");
        let (anchors, keep) = (usizes(&golden, "anchor_positions"), flags(&golden, "block_keep_mask"));
        let blocks = anchors.len() / batch;
        let features = golden.float::<B, 3>("target_hidden_states", &device);
        let last = golden.float::<B, 3>("target_last_hidden_states", &device);
        let (positions, documents) = ((0..seq).collect::<Vec<_>>(), vec![0; seq]);
        let masks = flags(&golden, "loss_mask");

        let mut outputs: Vec<BlockOutput<B>> = Vec::new();
        // Dropped blocks are not computed at all.
        let (mut kept, mut mask, mut labels, mut targets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for b in 0..batch {
            let features = features.clone().narrow(0, b, 1).reshape([seq, width]);
            let fused = drafter.fuse(features.clone());
            let h = fused.dims()[1];
            let reference = golden.f32s("context_feature");
            let reference = &reference[b * seq * h..(b + 1) * seq * h];
            assert_tensor(&at("context_feature"), fused, reference, VALUES);
            let ids = &ids[b * seq..(b + 1) * seq];
            let row = PackedRow { ids, positions: &positions, documents: &documents, features };
            let own: Vec<usize> = (b * blocks..(b + 1) * blocks).filter(|&n| keep[n]).collect();
            let places: Vec<usize> = own.iter().map(|&n| anchors[n]).collect();
            outputs.push(drafter.blocks(&row, &places));
            mask.extend(contiguous_mask(layout, k, &places, &masks[b * seq..(b + 1) * seq], &documents));
            let label = |(&a, slot): (&usize, usize)| layout.label(a, slot).min(seq - 1);
            let slots = places.iter().flat_map(|a| (0..k).map(move |slot| (a, slot)));
            let wanted: Vec<usize> = slots.map(label).collect();
            labels.extend(wanted.iter().map(|&i| i64::from(ids[i].0)));
            let before: Vec<i64> = wanted.iter().map(|&i| i as i64 - 1).collect();
            let rows = Tensor::from_data(TensorData::new(before, [wanted.len()]), &device);
            targets.push(last.clone().narrow(0, b, 1).squeeze_dim::<2>(0).select(0, rows));
            kept.extend(own);
        }
        let n = kept.len();
        let cat = |part: fn(&BlockOutput<B>) -> Tensor<B, 3>| {
            Tensor::cat(outputs.iter().map(part).collect::<Vec<_>>(), 0)
        };
        let (hidden, base, logits) =
            (cat(|o| o.hidden.clone()), cat(|o| o.base.clone()), cat(|o| o.logits.clone()));
        for (key, found) in [("hidden", &hidden), ("base_logits", &base), ("draft_logits", &logits)] {
            let reference = pick(&golden.f32s(key), k * found.dims()[2], &kept);
            assert_tensor(&at(key), found.clone(), &reference, VALUES);
        }
        let confidence: Vec<Tensor<B, 2>> = outputs.iter().filter_map(|o| o.confidence.clone()).collect();
        let confidence = (!confidence.is_empty()).then(|| Tensor::cat(confidence, 0));
        assert_eq!(confidence.is_some(), golden.has("confidence_logits"));
        if let Some(confidence) = &confidence {
            let reference = pick(&golden.f32s("confidence_logits"), k, &kept);
            assert_tensor(&at("confidence"), confidence.clone(), &reference, VALUES);
        }
        let ints = |key: &str| -> Vec<i64> {
            let all = golden.ints(key);
            kept.iter().flat_map(|&r| all[r * k..(r + 1) * k].to_vec()).collect()
        };
        assert_eq!(mask.iter().map(|&m| i64::from(m)).collect::<Vec<_>>(), ints("eval_mask"), "{what}");
        assert_eq!(labels, ints("target_ids"), "{what}");

        // The reference's last hidden states are behind the final norm already.
        let targets = drafter.model.lm_head.forward(Tensor::cat(targets, 0));
        let v = targets.dims()[1];
        let loss = deepspec(
            BlockTargets {
                logits,
                targets: targets.reshape([n, k, v]),
                labels: int_tensor(labels, [n, k]),
                confidence,
                mask: floats(&mask, [n, k]),
            },
            layout,
            &alphas(&golden.notes["alphas"]),
        );
        scalar(&at("loss"), &loss.total, golden.f32s("loss")[0]);
        gradients(&what, &golden, &drafter, &loss.total);
    }
}

#[test]
fn golden_training_of_deepspec_flex() {
    deepspec_training::<Autodiff<burn_flex::Flex>>();
}

#[test]
fn golden_training_of_deepspec_ndarray() {
    deepspec_training::<Autodiff<burn_ndarray::NdArray>>();
}
