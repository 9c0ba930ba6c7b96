//! The short causal convolution in front of the scan.

use burn::{
    module::{Module, Param, ParamId},
    tensor::{Distribution, Tensor, backend::Backend},
};

/// `y[t, c] = bias[c] + Σ_j weight[c, 0, j] · x[t - (kernel - 1) + j, c]`, with zeros before the first
/// step: each channel is filtered on its own and nothing is carried over from one call to the next.
#[derive(Module, Debug)]
pub struct CausalConv1d<B: Backend> {
    /// `[channels, 1, kernel]`.
    pub weight: Param<Tensor<B, 3>>,
    /// `[channels]`.
    pub bias: Param<Tensor<B, 1>>,
}

impl<B: Backend> CausalConv1d<B> {
    /// Weights from `N(0, std)`, biases zero.
    pub fn random(channels: usize, kernel: usize, std: f64, device: &B::Device) -> Self {
        let weight = Tensor::random([channels, 1, kernel], Distribution::Normal(0.0, std), device);
        Self {
            weight: Param::initialized(ParamId::new(), weight),
            bias: Param::initialized(ParamId::new(), Tensor::zeros([channels], device)),
        }
    }

    /// `[b, l, channels] -> [b, l, channels]`, by Horner's scheme in the shift by one step: whole rows
    /// are multiplied and added, and only the running sum is ever moved.
    pub fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let [b, l, channels] = x.dims();
        let kernel = self.weight.dims()[2];
        let x = x.reshape([b * l, channels]);
        let taps = self.weight.val().reshape([channels, kernel]).transpose();
        let tap = |j| taps.clone().narrow(0, j, 1).reshape([1, channels]);

        // Taps that reach further back than the sequence is long meet zeros only.
        let first = kernel.saturating_sub(l);
        let mut sum = x.clone() * tap(first);
        for j in first + 1..kernel {
            sum = later(sum.reshape([b, l * channels]), channels).reshape([b * l, channels]);
            sum = sum + x.clone() * tap(j);
        }
        (sum + self.bias.val().unsqueeze()).reshape([b, l, channels])
    }
}

/// `[b, l·channels]` moved one step later, zeros first.
fn later<B: Backend>(x: Tensor<B, 2>, channels: usize) -> Tensor<B, 2> {
    let [b, width] = x.dims();
    let zeros = Tensor::zeros([b, channels], (&x.device(), x.dtype()));
    Tensor::cat(vec![zeros, x.narrow(1, 0, width - channels)], 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_abs_diff_eq;
    use burn::tensor::TensorData;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn equals_the_sum_over_taps(
            (b, l, c, k) in (1usize..3, 1usize..7, 1usize..4, 1usize..6),
            values in proptest::collection::vec(-2f32..2.0, 2 * 6 * 3 + 3 * 5 + 3),
        ) {
            type B = burn_ndarray::NdArray;
            let device = Default::default();
            let (x, rest) = values.split_at(b * l * c);
            let (weight, rest) = rest.split_at(c * k);
            let bias = &rest[..c];
            let conv = CausalConv1d::<B> {
                weight: Param::from_data(TensorData::new(weight.to_vec(), [c, 1, k]), &device),
                bias: Param::from_data(TensorData::new(bias.to_vec(), [c]), &device),
            };
            let xs = Tensor::from_data(TensorData::new(x.to_vec(), [b, l, c]), &device);
            let y = conv.forward(xs).into_data().to_vec::<f32>().unwrap();
            for (index, y) in y.iter().enumerate() {
                let (row, t, channel) = (index / (l * c), index / c % l, index % c);
                let mut expected = bias[channel];
                for j in (0..k).filter(|j| t + j + 1 >= k) {
                    expected += weight[channel * k + j] * x[(row * l + t + j + 1 - k) * c + channel];
                }
                assert_abs_diff_eq!(*y, expected, epsilon = 1e-4);
            }
        }
    }
}
