//! Root-mean-square normalisation.

use burn::{
    module::{Module, Param, ParamId},
    tensor::{DType, Tensor, backend::Backend},
};

/// `y = x / sqrt(mean(x²) + eps) · weight` over the last dimension; the statistics are taken in
/// f32 and the normalised value is cast back before the weight is applied.
#[derive(Module, Debug)]
pub struct RmsNorm<B: Backend> {
    /// `[n]`.
    pub weight: Param<Tensor<B, 1>>,
    /// Added to the mean square.
    pub eps: f64,
}

impl<B: Backend> RmsNorm<B> {
    /// Wraps a weight `[n]`.
    pub fn new(weight: Tensor<B, 1>, eps: f64) -> Self {
        Self { weight: Param::initialized(ParamId::new(), weight), eps }
    }

    /// A norm whose weights are all one.
    pub fn ones(n: usize, eps: f64, device: &B::Device) -> Self {
        Self::new(Tensor::ones([n], device), eps)
    }

    /// `[.., n] -> [.., n]`.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        #[cfg(feature = "flex")]
        if let Some(y) = self.fast(&x) {
            return y;
        }
        let dtype = x.dtype();
        let x = x.cast(DType::F32);
        // A division: the reciprocal of some CPU backends is an estimate good to five digits.
        let rms = (x.clone() * x.clone()).mean_dim(D - 1).add_scalar(self.eps).sqrt();
        (x / rms).cast(dtype) * self.weight.val().unsqueeze()
    }

    /// In one pass over the rows; none unless the tensors are flex's.
    #[cfg(feature = "flex")]
    fn fast<const D: usize>(&self, x: &Tensor<B, D>) -> Option<Tensor<B, D>> {
        use crate::flex::{contiguous, layers, tensor, values};
        let (weight, eps) = (self.weight.val(), self.eps as f32);
        if let Some(y) = layers::norm(x, &weight, eps) {
            return Some(y);
        }
        let (rows, weight) = (contiguous(x)?, contiguous(&weight)?);
        Some(tensor(layers::normed(values(&rows), values(&weight), eps), x.dims()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_abs_diff_eq;
    use burn::tensor::Distribution;

    #[test]
    fn divides_by_the_root_mean_square_and_scales() {
        check::<burn_ndarray::NdArray>();
        check::<burn_flex::Flex>();
    }

    fn check<B: Backend>() {
        let device = Default::default();
        let norm = RmsNorm::new(Tensor::<B, 1>::from_floats([1.0, 2.0], &device), 0.5);
        let y = norm.forward(Tensor::<B, 2>::from_floats([[3.0, 4.0]], &device));
        let y = y.into_data().to_vec::<f32>().unwrap();
        let rms = (12.5f32 + 0.5).sqrt();
        assert_abs_diff_eq!(y[0], 3.0 / rms, epsilon = 1e-6);
        assert_abs_diff_eq!(y[1], 8.0 / rms, epsilon = 1e-6);
        // Longer than a register, and rows enough for several threads.
        let (m, n) = (1500, 37);
        let x = Tensor::<B, 2>::random([m, n], Distribution::Normal(0.0, 3.0), &device);
        let weight = Tensor::<B, 1>::random([n], Distribution::Normal(0.0, 1.0), &device);
        let y = RmsNorm::new(weight.clone(), 1e-5).forward(x.clone()).into_data().to_vec::<f32>().unwrap();
        let (x, w) = (x.into_data().to_vec::<f32>().unwrap(), weight.into_data().to_vec::<f32>().unwrap());
        for (y, x) in y.chunks(n).zip(x.chunks(n)) {
            let mean = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / n as f64;
            for ((y, x), w) in y.iter().zip(x).zip(&w) {
                let expected = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*w);
                assert_abs_diff_eq!(f64::from(*y), expected, epsilon = 1e-5);
            }
        }
    }
}
