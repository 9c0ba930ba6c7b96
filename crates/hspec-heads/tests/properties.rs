//! For every shape and kind: a block is its steps in order, and both are what the equations say.

use burn::tensor::{Int, Tensor, TensorData};
use hspec_heads::{CausalCorrection, ConfidenceHead, MarkovHead, MarkovKind};
use hspec_nn::params;
use proptest::prelude::*;
use std::collections::BTreeMap;

type B = burn_ndarray::NdArray;

#[derive(Debug, Clone)]
struct Case {
    kind: MarkovKind,
    sizes: Sizes,
    /// `[n, k]`.
    prev: Vec<i64>,
    /// `[n, k, h]`.
    hidden: Vec<f32>,
    /// By parameter name.
    weights: BTreeMap<String, Vec<f32>>,
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
        let floats = |size| proptest::collection::vec(-2f32..2.0, size..=size);
        let weights: Vec<_> = params::list(&empty(kind, s))
            .into_iter()
            .map(|p| (Just(p.name), floats(p.shape.iter().product())))
            .collect();
        let tokens = proptest::collection::vec(0..s.v as i64, s.n * s.k..=s.n * s.k);
        (tokens, floats(s.n * s.k * s.h), weights).prop_map(move |(prev, hidden, weights)| Case {
            kind,
            sizes: s,
            prev,
            hidden,
            weights: weights.into_iter().collect(),
        })
    })
}

impl Case {
    fn head(&self) -> MarkovHead<B> {
        let head = empty(self.kind, self.sizes);
        let shapes: BTreeMap<_, _> = params::list(&head).into_iter().map(|p| (p.name, p.shape)).collect();
        let source =
            |name: &str| Some(TensorData::new(self.weights.get(name)?.clone(), shapes[name].clone()));
        params::fill(head, &Default::default(), source, |_| false).expect("every weight is given")
    }

    fn prev(&self) -> Tensor<B, 2, Int> {
        let data = TensorData::new(self.prev.clone(), [self.sizes.n, self.sizes.k]);
        Tensor::from_data(data, &Default::default())
    }

    fn hidden(&self) -> Tensor<B, 3> {
        let Sizes { n, k, h, .. } = self.sizes;
        Tensor::from_data(TensorData::new(self.hidden.clone(), [n, k, h]), &Default::default())
    }

    /// The equations, number by number.
    fn naive(&self) -> Vec<f32> {
        let Sizes { n, k, h, r, draft, .. } = self.sizes;
        let affine = |name: &str, x: &[f32]| -> Vec<f32> {
            let weight = &self.weights[&format!("{name}.weight")];
            let bias = self.weights.get(&format!("{name}.bias"));
            let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| w * x).sum::<f32>();
            let rows = weight.chunks(x.len()).enumerate();
            rows.map(|(i, row)| dot(row) + bias.map_or(0.0, |b| b[i])).collect()
        };
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
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
                        let gate = affine("gate_proj", &[hidden, e].concat());
                        e.iter().zip(gate).map(|(e, g)| e * sigmoid(g)).collect()
                    }
                    MarkovKind::Rnn => {
                        let z = affine("joint_proj", &[&state, e, hidden].concat());
                        for i in 0..r {
                            let keep = sigmoid(z[i]);
                            state[i] = keep * state[i] + (1.0 - keep) * z[r + i].tanh();
                        }
                        z[2 * r..].iter().map(|o| o.tanh()).collect()
                    }
                };
                let bias = affine("markov_w2", &mixed);
                assert_eq!(bias.len(), draft);
                biases.extend(bias);
            }
        }
        biases
    }
}

fn close(found: &[f32], expected: &[f32]) -> Result<(), TestCaseError> {
    prop_assert_eq!(found.len(), expected.len());
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        prop_assert!((a - b).abs() <= 1e-4, "[{i}]: {a} against {b}");
    }
    Ok(())
}

proptest! {
    #[test]
    fn a_block_is_what_the_equations_say(case in cases()) {
        let found = case.head().block(case.prev(), case.hidden());
        let Sizes { n, k, draft, .. } = case.sizes;
        prop_assert_eq!(found.dims(), [n, k, draft]);
        close(&found.into_data().to_vec::<f32>().unwrap(), &case.naive())?;
    }

    #[test]
    fn a_block_is_its_steps_in_order(case in cases()) {
        let (head, prev, hidden) = (case.head(), case.prev(), case.hidden());
        let Sizes { n, k, h, .. } = case.sizes;
        let mut state = head.start(n, &Default::default());
        let mut biases = Vec::new();
        for slot in 0..k {
            let token = prev.clone().narrow(1, slot, 1).reshape([n]);
            let (bias, next) = head.step(state, token, hidden.clone().narrow(1, slot, 1).reshape([n, h]));
            biases.push(bias.unsqueeze_dim::<3>(1));
            state = next;
        }
        let steps = Tensor::cat(biases, 1).into_data().to_vec::<f32>().unwrap();
        close(&steps, &head.block(prev, hidden).into_data().to_vec::<f32>().unwrap())?;
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
