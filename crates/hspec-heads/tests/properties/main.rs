//! For every shape: a block is its steps in order, no slot sees a later token, and both are what the
//! equations say.

mod block_conv;
mod domino;
mod markov;
mod selector;

use burn::{
    module::Module,
    tensor::{Int, Tensor, TensorData},
};
use hspec_heads::CausalCorrection;
use hspec_nn::params;
use proptest::prelude::*;
use std::collections::BTreeMap;

type B = burn_ndarray::NdArray;

/// Values of parameters by name.
type Weights = BTreeMap<String, Vec<f32>>;

fn floats(n: usize) -> impl Strategy<Value = Vec<f32>> {
    proptest::collection::vec(-2f32..2.0, n..=n)
}

fn tokens(vocab: usize, n: usize) -> impl Strategy<Value = Vec<i64>> {
    proptest::collection::vec(0..vocab as i64, n..=n)
}

/// Values for every parameter of a module.
fn weights<M: Module<B>>(module: &M) -> impl Strategy<Value = Weights> + use<M> {
    let each = params::list(module).into_iter().map(|p| (Just(p.name), floats(p.shape.iter().product())));
    each.collect::<Vec<_>>().prop_map(|weights| weights.into_iter().collect())
}

fn filled<M: Module<B>>(module: M, weights: &Weights) -> M {
    let shapes: BTreeMap<_, _> = params::list(&module).into_iter().map(|p| (p.name, p.shape)).collect();
    let source = |name: &str| Some(TensorData::new(weights.get(name)?.clone(), shapes[name].clone()));
    params::fill(module, &Default::default(), source, |_| false).expect("every weight is given")
}

fn tensor<const D: usize>(values: &[f32], shape: [usize; D]) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &Default::default())
}

fn ids<const D: usize>(values: &[i64], shape: [usize; D]) -> Tensor<B, D, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &Default::default())
}

fn numbers<const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().to_vec::<f32>().expect("f32")
}

/// `W x + b` with the named weight and its bias, if there is one.
fn affine(weights: &Weights, name: &str, x: &[f32]) -> Vec<f32> {
    let bias = weights.get(&format!("{name}.bias"));
    let rows = matrix(&weights[&format!("{name}.weight")], x).into_iter().enumerate();
    rows.map(|(i, y)| y + bias.map_or(0.0, |b| b[i])).collect()
}

fn matrix(weight: &[f32], x: &[f32]) -> Vec<f32> {
    weight.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn close(found: &[f32], expected: &[f32]) -> Result<(), TestCaseError> {
    prop_assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(1f32, |m, x| m.max(x.abs()));
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        prop_assert!((a - b).abs() <= 1e-4 * scale, "[{i}]: {a} against {b}");
    }
    Ok(())
}

/// The biases `[n, k, v]` of a block, asked for slot by slot.
fn stepped<C: CausalCorrection<B>>(
    correction: &C,
    prev: &Tensor<B, 2, Int>,
    hidden: &Tensor<B, 3>,
) -> Tensor<B, 3> {
    let [n, k, h] = hidden.dims();
    let mut state = correction.start(n, &Default::default());
    let mut biases = Vec::new();
    for slot in 0..k {
        let token = prev.clone().narrow(1, slot, 1).reshape([n]);
        let (bias, next) = correction.step(state, token, hidden.clone().narrow(1, slot, 1).reshape([n, h]));
        biases.push(bias.unsqueeze_dim::<3>(1));
        state = next;
    }
    Tensor::cat(biases, 1)
}
