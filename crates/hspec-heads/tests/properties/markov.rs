//! The Markov head in its three kinds, and the confidence head.

use crate::{
    B, Weights, affine, close, filled, floats, ids, numbers, sigmoid, stepped, tensor, tokens, weights,
};
use burn::tensor::{Int, Tensor, TensorData};
use hspec_heads::{CausalCorrection, ConfidenceHead, MarkovHead, MarkovKind};
use hspec_nn::params;
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Case {
    kind: MarkovKind,
    sizes: Sizes,
    /// `[n, k]`.
    prev: Vec<i64>,
    /// `[n, k, h]`.
    hidden: Vec<f32>,
    weights: Weights,
}

#[derive(Debug, Clone, Copy)]
struct Sizes {
    n: usize,
    k: usize,
    h: usize,
    r: usize,
    v: usize,
    draft: usize,
}

fn empty(kind: MarkovKind, s: Sizes) -> MarkovHead<B> {
    MarkovHead::init(kind, s.v, s.draft, s.r, s.h, &Default::default())
}

fn cases() -> impl Strategy<Value = Case> {
    let kind = prop_oneof![Just(MarkovKind::Vanilla), Just(MarkovKind::Gated), Just(MarkovKind::Rnn)];
    let sizes = (1..4usize, 1..6usize, 1..5usize, 1..4usize, 1..9usize, 1..7usize)
        .prop_map(|(n, k, h, r, v, draft)| Sizes { n, k, h, r, v, draft });
    (kind, sizes).prop_flat_map(|(kind, s)| {
        let parts = (tokens(s.v, s.n * s.k), floats(s.n * s.k * s.h), weights(&empty(kind, s)));
        parts.prop_map(move |(prev, hidden, weights)| Case { kind, sizes: s, prev, hidden, weights })
    })
}

impl Case {
    fn head(&self) -> MarkovHead<B> {
        filled(empty(self.kind, self.sizes), &self.weights)
    }

    fn prev(&self) -> Tensor<B, 2, Int> {
        ids(&self.prev, [self.sizes.n, self.sizes.k])
    }

    fn hidden(&self) -> Tensor<B, 3> {
        tensor(&self.hidden, [self.sizes.n, self.sizes.k, self.sizes.h])
    }

    /// The equations, number by number.
    fn naive(&self) -> Vec<f32> {
        let Sizes { n, k, h, r, draft, .. } = self.sizes;
        let mut biases = Vec::new();
        for block in 0..n {
            let mut state = vec![0f32; r];
            for slot in 0..k {
                let row = block * k + slot;
                let e = &self.weights["markov_w1.weight"][self.prev[row] as usize * r..][..r];
                let hidden = &self.hidden[row * h..][..h];
                let mixed: Vec<f32> = match self.kind {
                    MarkovKind::Vanilla => e.to_vec(),
                    MarkovKind::Gated => {
                        let gate = affine(&self.weights, "gate_proj", &[hidden, e].concat());
                        e.iter().zip(gate).map(|(e, g)| e * sigmoid(g)).collect()
                    }
                    MarkovKind::Rnn => {
                        let z = affine(&self.weights, "joint_proj", &[&state, e, hidden].concat());
                        for i in 0..r {
                            let keep = sigmoid(z[i]);
                            state[i] = keep * state[i] + (1.0 - keep) * z[r + i].tanh();
                        }
                        z[2 * r..].iter().map(|o| o.tanh()).collect()
                    }
                };
                let bias = affine(&self.weights, "markov_w2", &mixed);
                assert_eq!(bias.len(), draft);
                biases.extend(bias);
            }
        }
        biases
    }
}

proptest! {
    #[test]
    fn a_block_is_what_the_equations_say(case in cases()) {
        let found = case.head().block(case.prev(), case.hidden());
        let Sizes { n, k, draft, .. } = case.sizes;
        prop_assert_eq!(found.dims(), [n, k, draft]);
        close(&numbers(found), &case.naive())?;
    }

    #[test]
    fn a_block_is_its_steps_in_order(case in cases()) {
        let (head, prev, hidden) = (case.head(), case.prev(), case.hidden());
        let steps = stepped(&head, &prev, &hidden);
        close(&numbers(steps), &numbers(head.block(prev, hidden)))?;
    }

    #[test]
    fn a_confidence_is_one_dot_product(case in cases(), with_features: bool) {
        let (head, hidden) = (case.head(), case.hidden());
        let Sizes { n, k, h, r, .. } = case.sizes;
        let features = with_features.then(|| head.features(case.prev()));
        let input = if with_features { h + r } else { h };
        let confidence = ConfidenceHead::<B>::init(input, &Default::default());
        let source = |name: &str| Some(match name {
            "proj.weight" => TensorData::new((1..=input).map(|i| i as f32 / 4.0).collect(), [1, input]),
            _ => TensorData::new(vec![0.5f32], [1]),
        });
        let confidence = params::fill(confidence, &Default::default(), source, |_| false).unwrap();
        let found = confidence.forward(hidden, features).into_data().to_vec::<f32>().unwrap();
        let expected: Vec<f32> = (0..n * k)
            .map(|row| {
                let e = &case.weights["markov_w1.weight"][case.prev[row] as usize * r..][..r];
                let all = case.hidden[row * h..][..h].iter().chain(if with_features { e } else { &[] });
                0.5 + all.enumerate().map(|(i, x)| x * (i + 1) as f32 / 4.0).sum::<f32>()
            })
            .collect();
        close(&found, &expected)?;
    }
}
