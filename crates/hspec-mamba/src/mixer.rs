//! The Mamba-2 mixer.

// Fields carry the tensor names of checkpoints, and the derived record types repeat them.
#![allow(non_snake_case)]

use crate::{CausalConv1d, MambaConfig, SsdInputs, softplus, ssd_scan};
use burn::{
    module::{Module, Param, ParamId},
    tensor::{DType, Tensor, backend::Backend},
};
use hspec_nn::{Linear, RmsNorm, WeightStorage, contiguous, silu};

/// Standard deviation of fresh weights.
const INIT_STD: f64 = 0.02;
/// The gated norm's epsilon; it does not follow the model's `rms_norm_eps`.
const NORM_EPS: f64 = 1e-5;

/// Input projection, causal convolution, state space scan, gated norm, output projection:
///
/// ```text
/// [gate | xBC | Δ] = W_in u                   x, B, C = split(silu(conv(xBC)))
/// y = SSD(x, softplus(Δ + bias), -exp(A_log), B, C, D)
/// out = W_out RMSNorm(y · silu(gate))         the gate comes before the statistics
/// ```
///
/// Field paths are the tensor names of released drafters.
#[derive(Module, Debug)]
pub struct Mamba2Mixer<B: Backend> {
    /// `[2·d_inner + 2·n_groups·d_state + num_heads, hidden]`: gate, x, B, C, step sizes.
    pub in_proj: Linear<B>,
    /// Over the channels of x, B and C.
    pub conv1d: CausalConv1d<B>,
    /// `[num_heads]`: logarithm of the negated decay rate.
    pub A_log: Param<Tensor<B, 1>>,
    /// `[num_heads]`: direct path.
    pub D: Param<Tensor<B, 1>>,
    /// `[num_heads]`: added to the step sizes before the softplus.
    pub dt_bias: Param<Tensor<B, 1>>,
    /// Over the whole inner width.
    pub norm: RmsNorm<B>,
    /// `[hidden, d_inner]`.
    pub out_proj: Linear<B>,
    /// The one size that the shapes above do not determine.
    n_groups: usize,
}

impl<B: Backend> Mamba2Mixer<B> {
    /// Fresh weights: matrices and convolution from `N(0, 0.02)`, biases 0, norm and D one, and decay
    /// rates `-1, -2, .., -num_heads`. The config must be [valid](MambaConfig::validate).
    pub fn init(config: &MambaConfig, device: &B::Device) -> Self {
        let heads = config.num_heads;
        let param = |value: Tensor<B, 1>| Param::initialized(ParamId::new(), value);
        let rates: Vec<f32> = (1..=heads).map(|q| (q as f32).ln()).collect();
        Self {
            in_proj: Linear::random(config.hidden, config.in_proj_dim(), false, INIT_STD, device),
            conv1d: CausalConv1d::random(config.conv_dim(), config.conv_kernel, INIT_STD, device),
            A_log: param(Tensor::from_floats(rates.as_slice(), device)),
            D: param(Tensor::ones([heads], device)),
            dt_bias: param(Tensor::zeros([heads], device)),
            norm: RmsNorm::ones(config.d_inner(), NORM_EPS, device),
            out_proj: Linear::random(config.d_inner(), config.hidden, false, INIT_STD, device),
            n_groups: config.n_groups,
        }
    }

    /// The same mixer for inference, see [`Linear::prepack`].
    #[must_use]
    pub fn prepack(self, storage: WeightStorage) -> Self {
        Self { in_proj: self.in_proj.prepack(storage), out_proj: self.out_proj.prepack(storage), ..self }
    }

    /// The sizes, read off the weights.
    pub fn config(&self) -> MambaConfig {
        let [hidden, d_inner] = self.out_proj.shape();
        let [conv_dim, _, conv_kernel] = self.conv1d.weight.dims();
        let [num_heads] = self.A_log.dims();
        MambaConfig {
            hidden,
            d_state: (conv_dim - d_inner) / (2 * self.n_groups),
            num_heads,
            head_dim: d_inner / num_heads,
            n_groups: self.n_groups,
            conv_kernel,
        }
    }

    /// `x: [b, l, hidden]` and the state before the first step, `[b, num_heads, head_dim, d_state]`
    /// (default zeros), to the output `[b, l, hidden]` and the state after the last step. The
    /// convolution always starts from zeros, whatever the state.
    pub fn forward(&self, x: Tensor<B, 3>, initial: Option<Tensor<B, 4>>) -> (Tensor<B, 3>, Tensor<B, 4>) {
        let [b, l, hidden] = x.dims();
        let MambaConfig { d_state: n, num_heads: h, head_dim: p, n_groups: g, .. } = self.config();
        let (d_inner, conv_dim) = (h * p, h * p + 2 * g * n);

        let u = self.in_proj.forward(x.reshape([b * l, hidden]));
        #[cfg(feature = "flex")]
        if let Some((y, state)) = self.with_parameters(|parameters| {
            crate::flex::mix(&u, parameters, initial.as_ref(), &self.config(), b)
        }) {
            return (self.out_proj.forward(self.norm.forward(y)).reshape([b, l, hidden]), state);
        }
        let part = |start, length| contiguous(u.clone().narrow(1, start, length));
        let gate = part(0, d_inner);
        let xbc = part(d_inner, conv_dim).reshape([b, l, conv_dim]);
        let dt = part(d_inner + conv_dim, h).cast(DType::F32);

        let xbc = silu(self.conv1d.forward(xbc));
        let part = |start, length| xbc.clone().narrow(2, start, length);
        let dt = softplus(dt + self.dt_bias.val().cast(DType::F32).unsqueeze());
        let inputs = SsdInputs {
            x: part(0, d_inner).reshape([b, l, h, p]),
            dt: dt.reshape([b, l, h]),
            a: self.A_log.val().cast(DType::F32).exp().neg(),
            b: part(d_inner, g * n).reshape([b, l, g, n]),
            c: part(d_inner + g * n, g * n).reshape([b, l, g, n]),
            d: self.D.val(),
        };
        let (y, state) = ssd_scan(inputs, initial);

        let y = self.norm.forward(y.reshape([b * l, d_inner]) * silu(gate));
        (self.out_proj.forward(y).reshape([b, l, hidden]), state)
    }

    /// [`Mamba2Mixer::forward`] without the state after the last step.
    pub fn output(&self, x: Tensor<B, 3>, initial: Option<Tensor<B, 4>>) -> Tensor<B, 3> {
        #[cfg(feature = "flex")]
        if hspec_nn::flex::is_tracked::<B>() {
            let [b, l, hidden] = x.dims();
            let u = self.in_proj.forward(x.clone().reshape([b * l, hidden]));
            let mixed =
                self.with_parameters(|p| crate::flex::output(&u, p, initial.as_ref(), &self.config(), b));
            if let Some(y) = mixed {
                return self.out_proj.forward(self.norm.forward(y)).reshape([b, l, hidden]);
            }
        }
        self.forward(x, initial).0
    }

    /// Calls a body for what lies between the projections, up to the norm.
    #[cfg(feature = "flex")]
    fn with_parameters<R>(&self, body: impl FnOnce(&crate::flex::Parameters<'_, B>) -> R) -> R {
        body(&crate::flex::Parameters {
            conv: (&self.conv1d.weight.val(), &self.conv1d.bias.val()),
            a_log: &self.A_log.val(),
            d: &self.D.val(),
            dt_bias: &self.dt_bias.val(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{
        backend::Autodiff,
        tensor::{Distribution, TensorData, backend::AutodiffBackend},
    };
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    type B = burn_ndarray::NdArray;

    /// A mixer's output under autodiff, and gradients of a weighted sum of it by every value.
    fn slopes<A: AutodiffBackend>(
        config: &MambaConfig,
        values: &BTreeMap<String, TensorData>,
    ) -> BTreeMap<String, TensorData> {
        let device = Default::default();
        let source = |name: &str| values.get(name).cloned();
        let mixer = Mamba2Mixer::<A>::init(config, &device);
        let mixer = hspec_nn::params::fill(mixer, &device, source, |_| true).unwrap();
        let x = Tensor::<A, 3>::from_data(values["x"].clone(), &device).require_grad();
        let state = values.get("state").map(|s| Tensor::<A, 4>::from_data(s.clone(), &device).require_grad());
        let y = mixer.output(x.clone(), state.clone());
        let weights: Vec<f32> = (0..y.shape().num_elements()).map(|i| (i as f32 * 0.7).sin()).collect();
        let weights = Tensor::<A, 3>::from_data(TensorData::new(weights, y.dims()), &device);
        let grads = (y.clone() * weights).sum().backward();
        let mut found = hspec_nn::params::gradients(&mixer, &grads);
        assert_eq!(found.len(), 8);
        found.insert("y".into(), y.into_data());
        found.insert("x".into(), x.grad(&grads).unwrap().into_data());
        found.extend(state.map(|s| ("state".to_owned(), s.grad(&grads).unwrap().into_data())));
        found
    }

    /// A mixer's output and last state on a backend, from values of another.
    fn run<B: Backend>(config: &MambaConfig, values: &BTreeMap<String, TensorData>) -> [Vec<f32>; 2] {
        let device = Default::default();
        let source = |name: &str| values.get(name).cloned();
        let mixer = Mamba2Mixer::<B>::init(config, &device);
        let mixer = hspec_nn::params::fill(mixer, &device, source, |_| false).unwrap();
        let input = |name: &str| values[name].clone();
        let state = values.get("state").map(|state| Tensor::from_data(state.clone(), &device));
        let (y, state) =
            mixer.prepack(WeightStorage::F32).forward(Tensor::from_data(input("x"), &device), state);
        [y.into_data().to_vec().unwrap(), state.into_data().to_vec().unwrap()]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn the_body_for_flex_equals_the_plain_one(
            (b, l, n, per_group, groups, p, kernel) in
                (1usize..3, 1usize..40, 1usize..5, 1usize..3, 1usize..4, 1usize..6, 1usize..6),
            with_state: bool,
        ) {
            let heads = per_group * groups;
            let config = MambaConfig {
                hidden: 7, d_state: n, num_heads: heads, head_dim: p, n_groups: groups, conv_kernel: kernel,
            };
            let device = Default::default();
            let random = |shape: Vec<usize>| {
                let size = shape.iter().product::<usize>();
                let values = Tensor::<B, 1>::random([size], Distribution::Normal(0.0, 0.7), &device);
                TensorData::new(values.into_data().to_vec::<f32>().unwrap(), shape)
            };
            let mixer = Mamba2Mixer::<B>::init(&config, &device);
            let mut values: BTreeMap<String, TensorData> =
                hspec_nn::params::list(&mixer).into_iter().map(|p| (p.name, random(p.shape))).collect();
            values.insert("x".into(), random(vec![b, l, 7]));
            if with_state {
                values.insert("state".into(), random(vec![b, heads, p, n]));
            }
            let (plain, fast) = (run::<B>(&config, &values), run::<burn_flex::Flex>(&config, &values));
            for (plain, fast) in plain.iter().zip(fast) {
                let largest = plain.iter().fold(1f32, |m, x| m.max(x.abs()));
                for (a, b) in plain.iter().zip(fast) {
                    prop_assert!((a - b).abs() < 2e-5 * largest, "{} {}", a, b);
                }
            }
            let plain = slopes::<Autodiff<B>>(&config, &values);
            let fast = slopes::<Autodiff<burn_flex::Flex>>(&config, &values);
            for (name, plain) in plain {
                let (plain, fast) = (plain.to_vec::<f32>().unwrap(), fast[&name].to_vec::<f32>().unwrap());
                let largest = plain.iter().fold(1f32, |m, x| m.max(x.abs()));
                for (a, b) in plain.iter().zip(fast) {
                    prop_assert!((a - b).abs() < 1e-4 * largest, "{}: {} {}", name, a, b);
                }
            }
        }
    }

    #[test]
    fn parameters_carry_checkpoint_names_and_fresh_values() {
        let config =
            MambaConfig { hidden: 6, d_state: 2, num_heads: 3, head_dim: 4, n_groups: 3, conv_kernel: 4 };
        let mixer = Mamba2Mixer::<B>::init(&config, &Default::default());
        assert_eq!(mixer.config(), config);
        let shapes: Vec<_> = hspec_nn::params::list(&mixer).into_iter().map(|p| (p.name, p.shape)).collect();
        let expected: [(&str, &[usize]); 8] = [
            ("in_proj.weight", &[39, 6]),
            ("conv1d.weight", &[24, 1, 4]),
            ("conv1d.bias", &[24]),
            ("A_log", &[3]),
            ("D", &[3]),
            ("dt_bias", &[3]),
            ("norm.weight", &[12]),
            ("out_proj.weight", &[6, 12]),
        ];
        assert_eq!(shapes, expected.map(|(name, shape)| (name.to_owned(), shape.to_vec())));
        let rates = mixer.A_log.val().exp().into_data().to_vec::<f32>().unwrap();
        for (rate, expected) in rates.iter().zip([1.0, 2.0, 3.0]) {
            approx::assert_abs_diff_eq!(*rate, expected, epsilon = 1e-5);
        }
    }
}
