//! Linear layers over weights stored `[out, in]`.

use burn::{
    module::{Module, Param, ParamId},
    tensor::{Distribution, Tensor, backend::Backend},
};

/// Rows up to which `(W xᵀ)ᵀ` beats `x Wᵀ` on CPU: the small operand is the one that gets packed.
const FEW_ROWS: usize = 64;
/// A single-row product with at least this many weights is split in chunks, so that CPU backends
/// whose matrix-vector kernel is serial run the chunks as a parallel batch.
const LARGE: usize = 2_100_000;
const CHUNKS: usize = 4;

/// `y = x Wᵀ + b` with `W: [out, in]`, as Hugging Face files store it.
#[derive(Module, Debug)]
pub struct Linear<B: Backend> {
    /// `[out, in]`.
    pub weight: Param<Tensor<B, 2>>,
    /// `[out]`.
    pub bias: Option<Param<Tensor<B, 1>>>,
}

impl<B: Backend> Linear<B> {
    /// Wraps a weight `[out, in]` and a bias `[out]`.
    pub fn new(weight: Tensor<B, 2>, bias: Option<Tensor<B, 1>>) -> Self {
        Self {
            weight: Param::initialized(ParamId::new(), weight),
            bias: bias.map(|b| Param::initialized(ParamId::new(), b)),
        }
    }

    /// Weights from `N(0, std)`, bias (if any) zero.
    pub fn random(input: usize, output: usize, bias: bool, std: f64, device: &B::Device) -> Self {
        let weight = Tensor::random([output, input], Distribution::Normal(0.0, std), device);
        Self::new(weight, bias.then(|| Tensor::zeros([output], device)))
    }

    /// `[.., in] -> [.., out]`. Flattens to two dimensions first: the backward pass of a batched
    /// product would materialise one weight gradient per batch entry.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        let mut shape = x.dims();
        let input = shape[D - 1];
        let rows = x.shape().num_elements() / input;
        let mut y = product(x.reshape([rows, input]), self.weight.val());
        if let Some(bias) = &self.bias {
            y = y + bias.val().unsqueeze();
        }
        shape[D - 1] = self.weight.dims()[0];
        y.reshape(shape)
    }
}

/// `x [m, in]`, `w [out, in]` -> `[m, out]`, contiguous.
fn product<B: Backend>(x: Tensor<B, 2>, w: Tensor<B, 2>) -> Tensor<B, 2> {
    #[cfg(feature = "flex")]
    let (x, w) = match crate::flex::product(x, w) {
        Ok(y) => return y,
        Err(unchanged) => unchanged,
    };
    let [m, input] = x.dims();
    let output = w.dims()[0];
    if m == 1 && output * input >= LARGE && output.is_multiple_of(CHUNKS) {
        let chunks = w.reshape([CHUNKS, output / CHUNKS, input]).swap_dims(1, 2);
        x.unsqueeze::<3>().expand([CHUNKS, 1, input]).matmul(chunks).reshape([1, output])
    } else if m <= FEW_ROWS {
        contiguous(w.matmul(x.transpose()).transpose())
    } else {
        x.matmul(w.transpose())
    }
}

/// A copy of `x` in row-major order. Elementwise work on strided views is ten times slower on CPU
/// backends, so a view that feeds more than one such operation is materialised once.
pub fn contiguous<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let shape = x.dims();
    let n = x.shape().num_elements();
    x.reshape([n]).reshape(shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_abs_diff_eq;
    use burn::tensor::TensorData;
    use proptest::prelude::*;

    fn naive(x: &[f32], w: &[f32], m: usize, i: usize, o: usize) -> Vec<f32> {
        let dot = |r: usize, c: usize| (0..i).map(|k| x[r * i + k] * w[c * i + k]).sum();
        (0..m * o).map(|n| dot(n / o, n % o)).collect()
    }

    /// On flex the fast body, on ndarray the plain one.
    fn check<B: Backend>(m: usize, i: usize, o: usize, x: &[f32], w: &[f32]) {
        let device = Default::default();
        let xt = Tensor::<B, 2>::from_data(TensorData::new(x.to_vec(), [m, i]), &device);
        let wt = Tensor::<B, 2>::from_data(TensorData::new(w.to_vec(), [o, i]), &device);
        let y = Linear::new(wt, None).forward(xt).into_data().to_vec::<f32>().unwrap();
        for (a, b) in y.iter().zip(naive(x, w, m, i, o)) {
            assert_abs_diff_eq!(*a, b, epsilon = 1e-4 * (1.0 + b.abs()));
        }
    }

    proptest! {
        #[test]
        fn every_row_count_equals_the_naive_product(
            m in 1usize..70, i in 1usize..9, o in 1usize..9,
            values in proptest::collection::vec(-2f32..2.0, 70 * 9 + 81),
        ) {
            let (x, w) = values.split_at(70 * 9);
            check::<burn_ndarray::NdArray>(m, i, o, &x[..m * i], &w[..o * i]);
            check::<burn_flex::Flex>(m, i, o, &x[..m * i], &w[..o * i]);
        }
    }

    #[test]
    fn a_large_single_row_product_equals_the_naive_one() {
        let (i, o) = (1024, LARGE / 1024 / 4 * 4 + 4);
        let x: Vec<f32> = (0..i).map(|n| ((n * 7) % 11) as f32 / 11.0 - 0.5).collect();
        let w: Vec<f32> = (0..o * i).map(|n| ((n * 13) % 17) as f32 / 17.0 - 0.5).collect();
        check::<burn_flex::Flex>(1, i, o, &x, &w);
    }
}
