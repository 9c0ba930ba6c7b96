//! Linear, norm and gate with their gradients, each in one pass shared out among threads.

use super::{Gradient, node, primitive, tracked, values};
use crate::{
    autocast::{Compute, compute},
    gemm::{self, Matrix},
    simd::{Body, Op, Pair, Simd, Vector, exp, gated, rms_norm},
};
use burn::tensor::{Tensor, backend::Backend};
use burn_flex::FlexTensor;
use rayon::prelude::*;

/// Rows whose gradients of a weight are summed before sums of others are added: so many whatever the number of
/// threads, as the order decides about the last bits.
const ROWS: usize = 64;
/// Elements of a task.
const ELEMENTS: usize = 1 << 14;

/// `x Wᵀ`; none unless autodiff over flex computes.
pub(crate) fn linear<B: Backend>(x: &Tensor<B, 2>, w: &Tensor<B, 2>) -> Option<Tensor<B, 2>> {
    let shape = [x.dims()[0], w.dims()[0], w.dims()[1]];
    let (x, w) = (tracked(x)?, tracked(w)?);
    let gradient = Linear { x: x.primitive.clone(), w: w.primitive.clone(), shape, compute: compute() };
    let [m, o, _] = shape;
    let y = gradient.forward();
    Some(node([x, w], primitive(y, [m, o]), gradient))
}

/// `x Wᵀ` of plain slices, `[m, in]` and `[out, in]`.
pub(crate) fn times_turned(x: &[f32], w: &[f32], [m, o, i]: [usize; 3]) -> Vec<f32> {
    gemm::product::<f32>(Body::widest(), Matrix::new(x, m, i), Matrix::new(w, o, i).turned())
}

#[derive(Clone, Debug)]
struct Linear {
    x: FlexTensor,
    w: FlexTensor,
    /// Rows, outputs, inputs.
    shape: [usize; 3],
    compute: Compute,
}

impl Linear {
    fn forward(&self) -> Vec<f32> {
        let [m, o, i] = self.shape;
        self.product(Matrix::new(values(&self.x), m, i), Matrix::new(values(&self.w), o, i).turned())
    }

    fn product(&self, a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
        match self.compute {
            Compute::F32 => gemm::product::<f32>(Body::widest(), a, b),
            Compute::Bf16 => gemm::product::<Pair>(Body::widest(), a, b),
        }
    }
}

impl Gradient<2> for Linear {
    fn backward(self, dy: &FlexTensor, [of_x, of_w]: [bool; 2]) -> [Option<FlexTensor>; 2] {
        let [m, o, i] = self.shape;
        let dy = Matrix::new(values(dy), m, o);
        let dx = || primitive(self.product(dy, Matrix::new(values(&self.w), o, i)), [m, i]);
        let dw = || primitive(self.product(dy.turned(), Matrix::new(values(&self.x), m, i)), [o, i]);
        [of_x.then(dx), of_w.then(dw)]
    }
}

/// A root-mean-square norm over the last dimension; none unless autodiff over flex computes.
pub(crate) fn norm<B: Backend, const D: usize>(
    x: &Tensor<B, D>,
    weight: &Tensor<B, 1>,
    eps: f32,
) -> Option<Tensor<B, D>> {
    let shape = x.dims();
    let (x, weight) = (tracked(x)?, tracked(weight)?);
    let y = primitive(normed(values(&x.primitive), values(&weight.primitive), eps), shape);
    let gradient = Norm { x: x.primitive.clone(), weight: weight.primitive.clone(), eps, shape };
    Some(node([x, weight], y, gradient))
}

/// `x / sqrt(mean(x²) + eps) · weight` of each row.
pub(crate) fn normed(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    struct Rows<'a>(&'a mut [f32], &'a [f32], &'a [f32], f32);
    impl Op for Rows<'_> {
        type Output = ();
        #[inline(always)]
        fn run<V: Vector>(self, _: Simd<V>) {
            let Self(y, x, weight, eps) = self;
            for (y, x) in y.chunks_mut(weight.len()).zip(x.chunks(weight.len())) {
                rms_norm(y, x, weight, eps);
            }
        }
    }
    let (mut y, body) = (vec![0f32; x.len()], Body::widest());
    let rows = |(y, x)| body.run(Rows(y, x, weight, eps));
    let size = ROWS * weight.len();
    if x.len() <= size {
        rows((y.as_mut_slice(), x));
    } else {
        y.par_chunks_mut(size).zip(x.par_chunks(size)).for_each(rows);
    }
    y
}

#[derive(Clone, Debug)]
struct Norm<const D: usize> {
    x: FlexTensor,
    weight: FlexTensor,
    eps: f32,
    shape: [usize; D],
}

impl<const D: usize> Gradient<2> for Norm<D> {
    fn backward(self, dy: &FlexTensor, _: [bool; 2]) -> [Option<FlexTensor>; 2] {
        let (x, weight, dy) = (values(&self.x), values(&self.weight), values(dy));
        let (n, body) = (weight.len(), Body::widest());
        let mut dx = vec![0f32; x.len()];
        let size = ROWS * n;
        let parts: Vec<Vec<f32>> = dx
            .par_chunks_mut(size)
            .zip(x.par_chunks(size).zip(dy.par_chunks(size)))
            .map(|(dx, (x, dy))| body.run(NormRows { dx, x, dy, weight, eps: self.eps }))
            .collect();
        [Some(primitive(dx, self.shape)), Some(primitive(total(parts, n), [n]))]
    }
}

/// Sums of `n` elements in their order.
pub(crate) fn total(parts: Vec<Vec<f32>>, n: usize) -> Vec<f32> {
    let add = |mut sum: Vec<f32>, part: Vec<f32>| {
        sum.iter_mut().zip(part).for_each(|(s, p)| *s += p);
        sum
    };
    parts.into_iter().reduce(add).unwrap_or_else(|| vec![0.0; n])
}

struct NormRows<'a> {
    dx: &'a mut [f32],
    x: &'a [f32],
    dy: &'a [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Op for NormRows<'_> {
    type Output = Vec<f32>;
    /// With `r = 1 / sqrt(mean(x²) + eps)`: `dx = r w dy - x r³ mean(w dy x)` and `dw = sum(r x dy)`.
    #[inline(always)]
    fn run<V: Vector>(self, _: Simd<V>) -> Vec<f32> {
        const LANES: usize = 16;
        let Self { dx, x, dy, weight, eps } = self;
        let n = weight.len();
        let mut dw = vec![0f32; n];
        for ((dx, x), dy) in dx.chunks_mut(n).zip(x.chunks(n)).zip(dy.chunks(n)) {
            let (mut squares, mut products) = ([0f32; LANES], [0f32; LANES]);
            for ((x, dy), w) in x.chunks(LANES).zip(dy.chunks(LANES)).zip(weight.chunks(LANES)) {
                for (l, ((x, dy), w)) in x.iter().zip(dy).zip(w).enumerate() {
                    squares[l] += x * x;
                    products[l] += x * dy * w;
                }
            }
            let mean = |lanes: [f32; LANES]| lanes.iter().sum::<f32>() / n as f32;
            let r = 1.0 / (mean(squares) + eps).sqrt();
            let pull = r * r * r * mean(products);
            for ((((dx, x), dy), w), dw) in dx.iter_mut().zip(x).zip(dy).zip(weight).zip(dw.iter_mut()) {
                *dx = r * w * dy - x * pull;
                *dw += r * x * dy;
            }
        }
        dw
    }
}

/// `silu(gate) · up`; none unless autodiff over flex computes.
pub(crate) fn gate<B: Backend, const D: usize>(
    gate: &Tensor<B, D>,
    up: &Tensor<B, D>,
) -> Option<Tensor<B, D>> {
    let shape = gate.dims();
    let (gate, up) = (tracked(gate)?, tracked(up)?);
    struct Part<'a>(&'a mut [f32], &'a [f32]);
    impl Op for Part<'_> {
        type Output = ();
        #[inline(always)]
        fn run<V: Vector>(self, _: Simd<V>) {
            gated(self.0, self.1);
        }
    }
    let (mut y, body) = (values(&gate.primitive).to_vec(), Body::widest());
    let parts = y.par_chunks_mut(ELEMENTS).zip(values(&up.primitive).par_chunks(ELEMENTS));
    parts.for_each(|(y, up)| body.run(Part(y, up)));
    let gradient = Gate { gate: gate.primitive.clone(), up: up.primitive.clone(), shape };
    Some(node([gate, up], primitive(y, shape), gradient))
}

#[derive(Clone, Debug)]
struct Gate<const D: usize> {
    gate: FlexTensor,
    up: FlexTensor,
    shape: [usize; D],
}

impl<const D: usize> Gradient<2> for Gate<D> {
    fn backward(self, dy: &FlexTensor, _: [bool; 2]) -> [Option<FlexTensor>; 2] {
        struct Part<'a>([&'a mut [f32]; 2], [&'a [f32]; 3]);
        impl Op for Part<'_> {
            type Output = ();
            #[inline(always)]
            fn run<V: Vector>(self, _: Simd<V>) {
                let Self([d_gate, d_up], [gate, up, dy]) = self;
                for ((((dg, du), g), u), dy) in d_gate.iter_mut().zip(d_up).zip(gate).zip(up).zip(dy) {
                    let s = 1.0 / (1.0 + exp(-*g));
                    *du = dy * g * s;
                    *dg = dy * u * s * (1.0 + g * (1.0 - s));
                }
            }
        }
        let (gate, up, dy) = (values(&self.gate), values(&self.up), values(dy));
        let (mut d_gate, mut d_up) = (vec![0f32; dy.len()], vec![0f32; dy.len()]);
        let body = Body::widest();
        let outputs = d_gate.par_chunks_mut(ELEMENTS).zip(d_up.par_chunks_mut(ELEMENTS));
        let inputs = gate.par_chunks(ELEMENTS).zip(up.par_chunks(ELEMENTS)).zip(dy.par_chunks(ELEMENTS));
        outputs.zip(inputs).for_each(|((dg, du), ((g, u), dy))| body.run(Part([dg, du], [g, u, dy])));
        [d_gate, d_up].map(|d| Some(primitive(d, self.shape)))
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        Compute, Linear, RmsNorm, SwiGlu,
        autocast::{autocast, product},
        params,
    };
    use burn::{
        backend::Autodiff,
        module::AutodiffModule,
        tensor::{Distribution, Tensor, TensorData, backend::AutodiffBackend},
    };
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    type Plain = Autodiff<burn_ndarray::NdArray>;
    type Fast = Autodiff<burn_flex::Flex>;

    fn random(shape: Vec<usize>) -> TensorData {
        let size = shape.iter().product::<usize>();
        let normal = Distribution::Normal(0.0, 1.0);
        let x = Tensor::<burn_ndarray::NdArray, 1>::random([size], normal, &Default::default());
        TensorData::new(x.into_data().into_vec::<f32>().unwrap(), shape)
    }

    /// A module's output, and the gradients of `sum(output · slope)` by its input and parameters.
    fn run<B: AutodiffBackend, M: AutodiffModule<B>>(
        module: M,
        values: &BTreeMap<String, TensorData>,
        [x, slope]: [&TensorData; 2],
        forward: impl Fn(&M, Tensor<B, 2>) -> Tensor<B, 2>,
    ) -> Vec<(String, Vec<f32>)> {
        let device = Default::default();
        let module = params::fill(module, &device, |n| values.get(n).cloned(), |_| true).unwrap();
        let x = Tensor::<B, 2>::from_data(x.clone(), &device).require_grad();
        let y = forward(&module, x.clone());
        let grads = (y.clone() * Tensor::from_data(slope.clone(), &device)).sum().backward();
        let mut found = vec![("y".to_owned(), y.into_data().to_vec().unwrap())];
        found.push(("x".to_owned(), x.grad(&grads).unwrap().into_data().to_vec().unwrap()));
        let slopes = params::gradients(&module, &grads);
        assert_eq!(slopes.len(), params::list(&module).len(), "every parameter has a gradient");
        found.extend(slopes.into_iter().map(|(name, slope)| (name, slope.into_vec().unwrap())));
        found
    }

    fn check<P: AutodiffModule<Plain>, F: AutodiffModule<Fast>>(
        (plain, fast): (P, F),
        [m, i, o]: [usize; 3],
        (plain_forward, fast_forward): (
            impl Fn(&P, Tensor<Plain, 2>) -> Tensor<Plain, 2>,
            impl Fn(&F, Tensor<Fast, 2>) -> Tensor<Fast, 2>,
        ),
    ) {
        let values = params::list(&plain).into_iter().map(|p| (p.name, random(p.shape))).collect();
        let (x, slope) = (random(vec![m, i]), random(vec![m, o]));
        let plain = run::<Plain, P>(plain, &values, [&x, &slope], plain_forward);
        let fast = run::<Fast, F>(fast, &values, [&x, &slope], fast_forward);
        for ((name, plain), (_, fast)) in plain.iter().zip(fast) {
            let largest = plain.iter().fold(1f32, |m, x| m.max(x.abs()));
            for (a, b) in plain.iter().zip(fast) {
                assert!((a - b).abs() < 1e-4 * largest, "{name}: {a} {b}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn gradients_of_layers_are_the_plain_ones(m in 1usize..150, i in 1usize..40, o in 1usize..40) {
            let (p, f) = (Default::default(), Default::default());
            let linear = (Linear::random(i, o, true, 1.0, &p), Linear::random(i, o, true, 1.0, &f));
            check(linear, [m, i, o], (|l: &Linear<_>, x| l.forward(x), |l: &Linear<_>, x| l.forward(x)));
            let norm = (RmsNorm::ones(i, 0.1, &p), RmsNorm::ones(i, 0.1, &f));
            check(norm, [m, i, i], (|l: &RmsNorm<_>, x| l.forward(x), |l: &RmsNorm<_>, x| l.forward(x)));
            let mlp = (SwiGlu::random(i, o, 1.0, &p), SwiGlu::random(i, o, 1.0, &f));
            check(mlp, [m, i, i], (|l: &SwiGlu<_>, x| l.forward(x), |l: &SwiGlu<_>, x| l.forward(x)));
        }
    }

    /// Rounds to bf16 by way of Burn.
    fn rounded(x: &TensorData) -> TensorData {
        x.clone().convert::<burn::tensor::bf16>().convert::<f32>()
    }

    /// What a layer computes in bf16 is what it computes in f32 of rounded factors, forwards and backwards.
    #[test]
    fn a_layer_under_autocast_rounds_the_factors_of_its_products_and_nothing_else() {
        let (m, i, o) = (37, 21, 18);
        let (x, w, slope) = (random(vec![m, i]), random(vec![o, i]), random(vec![m, o]));
        let layer =
            |w: &TensorData| Linear::<Fast>::new(Tensor::from_data(w.clone(), &Default::default()), None);
        let found = |x: &TensorData, w: &TensorData, slope: &TensorData, compute| {
            let values = [("weight".to_owned(), w.clone())].into();
            autocast(compute, || run(layer(w), &values, [x, slope], |l: &Linear<Fast>, x| l.forward(x)))
        };
        let narrow = found(&x, &w, &slope, Compute::Bf16);
        let of_rounded = found(&rounded(&x), &rounded(&w), &rounded(&slope), Compute::F32);
        let wide = found(&x, &w, &slope, Compute::F32);
        for (((name, narrow), (_, expected)), (_, wide)) in narrow.iter().zip(of_rounded).zip(wide) {
            let far =
                |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(far(narrow, &expected) < 1e-4, "{name}: {}", far(narrow, &expected));
            assert!(far(narrow, &wide) > 1e-3, "{name}: {}", far(narrow, &wide));
        }
        // In plain operations results are rounded too. (Burn's cast on flex rounds some numbers near a tie the wrong
        // way, so that these are rounded before.)
        let plain = run(
            layer(&rounded(&w)),
            &[("weight".to_owned(), rounded(&w))].into(),
            [&rounded(&x), &rounded(&slope)],
            |l: &Linear<Fast>, x| autocast(Compute::Bf16, || product(x, l.weight.val())),
        );
        for ((name, plain), (_, narrow)) in plain.iter().zip(&narrow) {
            for (a, b) in plain.iter().zip(narrow) {
                assert!((a - b).abs() <= b.abs() / 256.0 + 1e-3, "{name}: {a} {b}");
            }
        }
    }

    /// A layer that does not learn is the target's, whose logits are what is learned.
    #[test]
    fn a_layer_without_gradients_heeds_no_autocast() {
        let (x, w) = (random(vec![9, 21]), random(vec![5, 21]));
        let run = |compute| {
            let [x, w] =
                [&x, &w].map(|t| Tensor::<burn_flex::Flex, 2>::from_data(t.clone(), &Default::default()));
            autocast(compute, || Linear::new(w, None).forward(x)).into_data()
        };
        assert_eq!(run(Compute::Bf16), run(Compute::F32));
    }
}
