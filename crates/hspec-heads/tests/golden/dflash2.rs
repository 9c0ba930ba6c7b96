//! The two parts of DFlash-2: block convolution and candidate selector.

use crate::{FORWARD, fixtures, values};
use burn::{
    backend::Autodiff,
    tensor::{Int, Tensor, TensorData, activation::softmax, backend::AutodiffBackend},
};
use hspec_goldens::{Golden, assert_close, assert_tensor};
use hspec_heads::{BlockConv, CandidateSelector};
use hspec_nn::params;

fn size(golden: &Golden, field: &str) -> usize {
    golden.notes["config"][field].as_u64().expect("a size") as usize
}

fn convolutions<B: AutodiffBackend>() {
    let device = Default::default();
    for name in fixtures("dflash2") {
        let golden = Golden::open(&format!("dspark/dflash2{name}"));
        let [h, taps, group] =
            ["hidden_size", "conv_kernel_size", "conv_group_size"].map(|field| size(&golden, field));
        for (layer, which) in
            (0..size(&golden, "layers")).flat_map(|l| ["attention_conv", "mlp_conv"].map(|which| (l, which)))
        {
            let at = |what: &str| format!("l{layer}/{which}/{what}");
            let conv = BlockConv::<B>::identity(h, taps, group, &device);
            let weight = |name: &str| Some(golden.data(&format!("weight/layers.{layer}.{which}.{name}")));
            let conv = params::fill(conv, &device, weight, |_| true).expect("the fixture has every weight");
            let (x, kernel) = conv.prepare(golden.float(&at("prepare_in"), &device));
            assert_tensor(&at("prepare_out"), x, &golden.f32s(&at("prepare_out")), FORWARD);
            assert_tensor(&at("finish_kernel"), kernel.clone(), &golden.f32s(&at("finish_kernel")), FORWARD);
            let y = conv.finish(golden.float(&at("finish_in"), &device), kernel);
            assert_tensor(&at("finish_out"), y, &golden.f32s(&at("finish_out")), FORWARD);
            let given = golden.float::<B, 3>(&at("finish_in"), &device);
            let around = conv.around(golden.float(&at("prepare_in"), &device), |_| given);
            assert_tensor(&at("around"), around, &golden.f32s(&at("finish_out")), FORWARD);
        }
    }
}

fn selectors<B: AutodiffBackend>() {
    let device = Default::default();
    for name in fixtures("dflash2") {
        let golden = Golden::open(&format!("dspark/dflash2{name}"));
        let [h, v, rank, top] =
            ["hidden_size", "vocab", "selector_rank", "selector_top_k"].map(|field| size(&golden, field));
        let selector = CandidateSelector::<B>::init(v, v, rank, h, top, &device);
        // The fixture calls the codebooks as its framework does; files do not say `.weight`.
        let weight = |name: &str| {
            let name = format!("weight/candidate_selector.{name}");
            Some(golden.data(if golden.has(&name) { name } else { format!("{name}.weight") }.as_str()))
        };
        let selector =
            params::fill(selector, &device, weight, |_| true).expect("the fixture has every weight");

        // Slot 0 is the anchor and predicts nothing.
        let logits = golden.float::<B, 3>("logits", &device);
        let [n, k, _] = logits.dims();
        let hidden = golden.float::<B, 3>("hidden", &device).narrow(1, 1, k);
        let projected = selector.hidden_projection.forward(hidden.clone());
        assert_tensor("projected_hidden", projected, &golden.f32s("projected_hidden"), FORWARD);
        let anchors = golden.ints("anchor");
        let ids = golden.ints("candidate_ids");
        let edges = golden.f32s("edge_scores");
        let place = |block: usize, slot: usize| block * k + slot;

        // Every candidate of a slot as the predecessor of the next one.
        for predecessor in 0..top {
            let before = |i: usize, t: usize| match t {
                0 => anchors[i],
                _ => ids[place(i, t - 1) * top + predecessor],
            };
            let prev: Vec<i64> = (0..n).flat_map(|i| (0..k).map(move |t| before(i, t))).collect();
            let prev = Tensor::<B, 2, Int>::from_data(TensorData::new(prev, [n, k]), &device);
            let found = selector.block(logits.clone(), prev, hidden.clone());
            assert_eq!(found.ids.into_data().iter::<i64>().collect::<Vec<_>>(), ids, "candidate_ids");
            let expected: Vec<f32> = (0..n * k)
                .flat_map(|row| &edges[(row * top + predecessor) * top..][..top])
                .copied()
                .collect();
            assert_close(&format!("edge_scores[{predecessor}]"), &values(found.scores), &expected, FORWARD);
        }
        let unary = logits.clone().gather(2, golden.int::<B, 3>("candidate_ids", &device));
        assert_tensor("unary", unary, &golden.f32s("unary"), FORWARD);

        // Walks a path and returns the proposal laws on the candidates, at a temperature.
        let walk = |temperature: f64, choose: &dyn Fn(&[f32], usize) -> i64| {
            let mut prev = anchors.clone();
            let (mut path, mut laws) = (vec![0; n * k], vec![0.0; n * k * top]);
            for slot in 0..k {
                let row = |x: &Tensor<B, 3>, width: usize| x.clone().narrow(1, slot, 1).reshape([n, width]);
                let tokens = Tensor::<B, 1, Int>::from_data(TensorData::new(prev.clone(), [n]), &device);
                let step = selector.step(row(&logits, v), tokens, row(&hidden, h));
                let q = values(softmax(step.clone().div_scalar(temperature), 1));
                let step = values(step);
                for block in 0..n {
                    let row = place(block, slot);
                    let chosen = choose(&step[block * v..][..v], row);
                    (prev[block], path[row]) = (chosen, chosen);
                    let of_block = &q[block * v..][..v];
                    let law = &mut laws[row * top..][..top];
                    law.iter_mut().zip(&ids[row * top..]).for_each(|(p, id)| *p = of_block[*id as usize]);
                    let total: f32 = law.iter().sum();
                    assert!((total - 1.0).abs() < 1e-6, "all of q lies on the candidates, found {total}");
                }
            }
            (path, laws)
        };
        let (path, _) = walk(1.0, &|scores, _| {
            (0..v).rev().max_by(|a, b| scores[*a].total_cmp(&scores[*b])).expect("a vocabulary") as i64
        });
        assert_eq!(path, golden.ints("greedy_path"), "greedy_path");
        let (_, laws) = walk(0.8, &|_, row| ids[row * top + 1]);
        let field = "q_temp08_path_of_second_candidates";
        assert_close(field, &laws, &golden.f32s(field), FORWARD);
    }
}

#[test]
fn golden_block_convolutions_on_flex() {
    convolutions::<Autodiff<burn_flex::Flex>>();
}

#[test]
fn golden_block_convolutions_on_ndarray() {
    convolutions::<Autodiff<burn_ndarray::NdArray>>();
}

#[test]
fn golden_candidate_selectors_on_flex() {
    selectors::<Autodiff<burn_flex::Flex>>();
}

#[test]
fn golden_candidate_selectors_on_ndarray() {
    selectors::<Autodiff<burn_ndarray::NdArray>>();
}
