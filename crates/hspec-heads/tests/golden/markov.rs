//! The Markov heads in their three kinds and the confidence head (DSpark, whose heads H-Spec shares).

use crate::{FORWARD, assert_gradient, fixtures, values};
use burn::{
    backend::Autodiff,
    tensor::{Int, Tensor, backend::AutodiffBackend},
};
use hspec_goldens::{Golden, assert_close};
use hspec_heads::{CausalCorrection, ConfidenceHead, MarkovHead, MarkovKind};
use hspec_nn::params;

fn heads<B: AutodiffBackend>() {
    let device = Default::default();
    for word in fixtures("head_") {
        let kind: MarkovKind = word.parse().unwrap_or_else(|e| panic!("head_{word}: {e}"));
        let golden = Golden::open(&format!("dspark/head_{kind}"));
        let size = |field: &str| golden.notes["dims"][field].as_u64().expect("a size") as usize;
        let (v, r, h, k) = (size("V"), size("R"), size("H"), size("K"));
        let n = size("B") * size("N");
        let head = MarkovHead::<B>::init(kind, v, v, r, h, &device);
        let weight = |name: &str| {
            let name = format!("weight/{name}");
            golden.has(&name).then(|| golden.data(&name))
        };
        let head = params::fill(head, &device, weight, |_| true).expect("the fixture has every weight");
        let hidden = golden.float::<B, 4>("hidden_states", &device).reshape([n, k, h]).require_grad();
        let base = golden.float::<B, 4>("base_logits", &device).reshape([n, k, v]).require_grad();
        let prev = golden.int::<B, 3>("prev_token_ids", &device).reshape([n, k]);

        // A whole block, teacher forced.
        let logits = base.clone() + head.block(prev.clone(), hidden.clone());
        assert_close("logits", &values(logits.clone()), &golden.f32s("logits"), FORWARD);
        let features = values(head.features(prev.clone()));
        assert_close("prev_embeddings", &features, &golden.f32s("prev_embeddings"), FORWARD);
        let projection = golden.float::<B, 4>("loss_projection", &device).reshape([n, k, v]);
        let gradients = (logits * projection).sum().backward();
        assert_gradient(&golden, "grad/base_logits", &base, &gradients);
        assert_gradient(&golden, "grad/markov_w1.weight", &head.markov_w1.weight.val(), &gradients);
        assert_gradient(&golden, "grad/markov_w2.weight", &head.markov_w2.weight.val(), &gradients);
        if let Some(gate) = &head.gate_proj {
            let bias = gate.bias.as_ref().expect("the gate has a bias");
            assert_gradient(&golden, "grad/gate_proj.weight", &gate.weight.val(), &gradients);
            assert_gradient(&golden, "grad/gate_proj.bias", &bias.val(), &gradients);
        }
        if let Some(joint) = &head.joint_proj {
            let bias = joint.bias.as_ref().expect("the joint projection has a bias");
            assert_gradient(&golden, "grad/joint_proj.weight", &joint.weight.val(), &gradients);
            assert_gradient(&golden, "grad/joint_proj.bias", &bias.val(), &gradients);
        }
        if kind == MarkovKind::Vanilla {
            assert!(hidden.grad(&gradients).is_none(), "the vanilla head does not read hidden states");
            assert!(golden.f32s("grad/hidden_states").iter().all(|g| *g == 0.0));
        } else {
            assert_gradient(&golden, "grad/hidden_states", &hidden, &gradients);
        }

        steps(&golden, &head, prev.clone(), hidden.clone(), &base);
        confidence(&golden, &head, prev, hidden);
    }
}

/// Slot by slot: the recurrent states of every slot, and the greedy path of each sequence's block 0.
fn steps<B: AutodiffBackend>(
    golden: &Golden,
    head: &MarkovHead<B>,
    prev: Tensor<B, 2, Int>,
    hidden: Tensor<B, 3>,
    base: &Tensor<B, 3>,
) {
    let device = hidden.device();
    let ([n, k, h], v, r) = (hidden.dims(), base.dims()[2], head.rank());
    let at = |slot: usize| hidden.clone().narrow(1, slot, 1).reshape([n, h]);

    let mut state = head.start(n, &device);
    for slot in 0..k {
        let token = prev.clone().narrow(1, slot, 1).reshape([n]);
        let (bias, next) = head.step(state, token, at(slot));
        if slot == 0 {
            let logits = values(bias + base.clone().narrow(1, 0, 1).reshape([n, v]));
            assert_close("step0_logits", &logits, &golden.f32s("step0_logits"), FORWARD);
        }
        if let Some(state) = &next {
            let states = golden.float::<B, 4>("states", &device).reshape([n, k, r]);
            let expected = values(states.narrow(1, slot, 1));
            assert_close(&format!("states, slot {slot}"), &values(state.clone()), &expected, FORWARD);
        }
        state = next;
    }

    let first = golden.ints("greedy/first_prev");
    let blocks = n / first.len();
    for (sequence, first) in first.iter().enumerate() {
        let block = sequence * blocks;
        let of_block = |x: Tensor<B, 3>, slot: usize, width: usize| {
            x.narrow(0, block, 1).narrow(1, slot, 1).reshape([1, width])
        };
        let (mut state, mut token) = (head.start(1, &device), *first);
        for slot in 0..k {
            let prev = Tensor::<B, 1, Int>::from_ints([token], &device);
            let (bias, next) = head.step(state, prev, of_block(hidden.clone(), slot, h));
            let logits = values(bias + of_block(base.clone(), slot, v));
            let row = sequence * k + slot;
            let expected = golden.f32s("greedy/logits")[row * v..][..v].to_vec();
            assert_close("greedy/logits", &logits, &expected, FORWARD);
            let best = (0..v).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).expect("a vocabulary");
            token = best as i64;
            assert_eq!(token, golden.ints("greedy/tokens")[row], "greedy token of slot {slot}");
            state = next;
        }
    }
}

fn confidence<B: AutodiffBackend>(
    golden: &Golden,
    head: &MarkovHead<B>,
    prev: Tensor<B, 2, Int>,
    hidden: Tensor<B, 3>,
) {
    let device = hidden.device();
    let ([n, k, h], r) = (hidden.dims(), head.rank());
    let confidence = ConfidenceHead::<B>::init(h + r, &device);
    let weight = |name: &str| Some(golden.data(&name.replace("proj.", "conf/")));
    let confidence =
        params::fill(confidence, &device, weight, |_| true).expect("the fixture has every weight");
    let logits = confidence.forward(hidden.clone(), Some(head.features(prev)));
    assert_close("conf/logits", &values(logits.clone()), &golden.f32s("conf/logits"), FORWARD);
    let projection = golden.float::<B, 3>("conf/loss_projection", &device).reshape([n, k]);
    let gradients = (logits * projection).sum().backward();
    let bias = confidence.proj.bias.as_ref().expect("the confidence head has a bias");
    assert_gradient(golden, "conf/grad/weight", &confidence.proj.weight.val(), &gradients);
    assert_gradient(golden, "conf/grad/bias", &bias.val(), &gradients);
    assert_gradient(golden, "conf/grad/hidden_states", &hidden, &gradients);
    assert_gradient(golden, "conf/grad/markov_w1.weight", &head.markov_w1.weight.val(), &gradients);
}

#[test]
fn golden_heads_on_flex() {
    heads::<Autodiff<burn_flex::Flex>>();
}

#[test]
fn golden_heads_on_ndarray() {
    heads::<Autodiff<burn_ndarray::NdArray>>();
}
