//! What must hold of the scan for every shape: it is the recurrence, it composes, and its gradient is
//! the slope of its output.

use burn::{
    backend::Autodiff,
    tensor::{Tensor, TensorData, backend::AutodiffBackend, backend::Backend},
};
use hspec_mamba::{SsdInputs, ssd_recurrent, ssd_scan};
use proptest::prelude::*;

type B = burn_ndarray::NdArray;

/// Everything a scan reads, as plain numbers.
#[derive(Debug, Clone)]
struct Case {
    shape: Shape,
    /// x, dt, a, b, c, d, initial state.
    values: [Vec<f32>; 7],
}

#[derive(Debug, Clone, Copy)]
struct Shape {
    b: usize,
    l: usize,
    h: usize,
    p: usize,
    g: usize,
    n: usize,
}

impl Shape {
    fn dims(&self) -> [Vec<usize>; 7] {
        let Shape { b, l, h, p, g, n } = *self;
        [
            vec![b, l, h, p],
            vec![b, l, h],
            vec![h],
            vec![b, l, g, n],
            vec![b, l, g, n],
            vec![h],
            vec![b, h, p, n],
        ]
    }
}

fn cases(max_length: usize) -> impl Strategy<Value = Case> {
    let shape = (1..3usize, 1..=max_length, 1..4usize, 1..4usize, 1..4usize, 1..5usize)
        .prop_map(|(b, l, g, per_group, p, n)| Shape { b, l, h: g * per_group, p, g, n });
    shape.prop_flat_map(|shape| {
        let ranges = [-2f32..2.0, 0.001..2.0, -4.0..-0.01, -2.0..2.0, -2.0..2.0, -2.0..2.0, -2.0..2.0];
        let mut dims = shape.dims().into_iter();
        let vectors = ranges.map(|range| {
            let size = dims.next().expect("as many shapes as ranges").iter().product();
            proptest::collection::vec(range, size..=size)
        });
        vectors.prop_map(move |values| Case { shape, values })
    })
}

fn tensor<B: Backend, const D: usize>(case: &Case, index: usize) -> Tensor<B, D> {
    let data = TensorData::new(case.values[index].clone(), case.shape.dims()[index].clone());
    Tensor::from_data(data, &Default::default())
}

fn inputs<B: Backend>(case: &Case) -> (SsdInputs<B>, Tensor<B, 4>) {
    let inputs = SsdInputs {
        x: tensor(case, 0),
        dt: tensor(case, 1),
        a: tensor(case, 2),
        b: tensor(case, 3),
        c: tensor(case, 4),
        d: tensor(case, 5),
    };
    (inputs, tensor(case, 6))
}

fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// Differences are measured against the largest value: long sums round relative to their terms.
fn close(what: &str, found: &[f32], expected: &[f32], scale: f32) -> Result<(), TestCaseError> {
    prop_assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(1f32, |m, v| m.max(v.abs()));
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        prop_assert!((a - b).abs() <= scale * largest, "{what}[{i}]: {a} against {b}");
    }
    Ok(())
}

fn steps<B: Backend>(inputs: &SsdInputs<B>, start: usize, length: usize) -> SsdInputs<B> {
    SsdInputs {
        x: inputs.x.clone().narrow(1, start, length),
        dt: inputs.dt.clone().narrow(1, start, length),
        b: inputs.b.clone().narrow(1, start, length),
        c: inputs.c.clone().narrow(1, start, length),
        ..inputs.clone()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..Default::default() })]

    #[test]
    fn the_scan_is_the_recurrence(case in cases(100), with_state: bool) {
        let (inputs, state) = inputs::<B>(&case);
        let initial = with_state.then_some(state);
        let (y, state) = ssd_scan(inputs.clone(), initial.clone());
        let (expected, expected_state) = ssd_recurrent(inputs, initial);
        close("y", &values(y), &values(expected), 1e-5)?;
        close("state", &values(state), &values(expected_state), 1e-5)?;
    }

    #[test]
    fn two_halves_with_the_state_handed_over_are_the_whole(case in cases(100), at in 0f64..1.0) {
        let (inputs, state) = inputs::<B>(&case);
        let l = case.shape.l;
        prop_assume!(l > 1);
        let at = 1 + ((l - 1) as f64 * at) as usize;
        let (whole, end) = ssd_scan(inputs.clone(), Some(state.clone()));
        let (left, middle) = ssd_scan(steps(&inputs, 0, at), Some(state));
        let (right, right_end) = ssd_scan(steps(&inputs, at, l - at), Some(middle));
        close("y", &values(Tensor::cat(vec![left, right], 1)), &values(whole), 1e-5)?;
        close("state", &values(right_end), &values(end), 1e-5)?;
    }

    #[test]
    fn the_gradient_of_the_scan_is_its_slope_and_that_of_the_recurrence(
        case in cases(40), seed in 0u32..1000,
    ) {
        let scan = gradients(&case, seed, ssd_scan);
        let recurrence = gradients(&case, seed, ssd_recurrent);
        for (i, (found, expected)) in scan.iter().zip(&recurrence).enumerate() {
            close(&format!("gradient {i}"), found, expected, 2e-5)?;
            // Along one direction per input: (loss(v + εd) - loss(v - εd)) / 2ε = gradient · d.
            const EPSILON: f32 = 1e-3;
            let direction = noise(case.values[i].len(), seed + 7);
            let shifted = |sign: f32| {
                let mut case = case.clone();
                case.values[i].iter_mut().zip(&direction).for_each(|(v, d)| *v += sign * EPSILON * d);
                loss(&case, seed)
            };
            let slope = (shifted(1.0) - shifted(-1.0)) / f64::from(2.0 * EPSILON);
            let along: f64 =
                found.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
            let size: f64 = found.iter().map(|g| f64::from(g.abs())).sum();
            let limit = 2e-3 * (1.0 + size) + 1e-3 * loss(&case, seed).abs();
            prop_assert!((slope - along).abs() < limit, "input {i}: slope {slope}, gradient {along}");
        }
    }
}

/// A fixed pseudo-random sequence in [-1, 1].
fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(next).collect()
}

/// Random weights of the outputs and of the final state in the loss.
fn weights<B: Backend>(shape: Shape, seed: u32) -> (Tensor<B, 4>, Tensor<B, 4>) {
    let Shape { b, l, h, p, n, .. } = shape;
    let weight = |dims: [usize; 4], seed| {
        let data = TensorData::new(noise(dims.iter().product(), seed), dims);
        Tensor::from_data(data, &Default::default())
    };
    (weight([b, l, h, p], seed), weight([b, h, p, n], seed + 1))
}

fn loss(case: &Case, seed: u32) -> f64 {
    let (inputs, initial) = inputs::<B>(case);
    let (y, state) = ssd_scan(inputs, Some(initial));
    let (wy, ws) = weights::<B>(case.shape, seed);
    let dot = |a: Vec<f32>, b: Vec<f32>| -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(b)).sum()
    };
    dot(values(y), values(wy)) + dot(values(state), values(ws))
}

type Scan<B> = fn(SsdInputs<B>, Option<Tensor<B, 4>>) -> (Tensor<B, 4>, Tensor<B, 4>);

fn gradients(case: &Case, seed: u32, scan: Scan<Autodiff<B>>) -> Vec<Vec<f32>> {
    let (SsdInputs { x, dt, a, b, c, d }, s) = inputs::<Autodiff<B>>(case);
    let (x, dt, a, d) = (x.require_grad(), dt.require_grad(), a.require_grad(), d.require_grad());
    let (b, c, s) = (b.require_grad(), c.require_grad(), s.require_grad());
    let inputs =
        SsdInputs { x: x.clone(), dt: dt.clone(), a: a.clone(), b: b.clone(), c: c.clone(), d: d.clone() };
    let (y, state) = scan(inputs, Some(s.clone()));
    let (wy, ws) = weights(case.shape, seed);
    let all = ((y * wy).sum() + (state * ws).sum()).backward();
    fn of<B: AutodiffBackend, const D: usize>(t: &Tensor<B, D>, all: &B::Gradients) -> Vec<f32> {
        values(t.grad(all).expect("every input is tracked"))
    }
    vec![of(&x, &all), of(&dt, &all), of(&a, &all), of(&b, &all), of(&c, &all), of(&d, &all), of(&s, &all)]
}
