//! The table of token vectors that every drafter begins with.

use burn::{
    module::{Module, Param, ParamId},
    tensor::{Distribution, Int, Tensor, backend::Backend},
};

/// Standard deviation of fresh weights.
pub(super) const STD: f64 = 0.02;

/// A table of vectors.
#[derive(Module, Debug)]
pub struct Embedding<B: Backend> {
    /// `[rows, width]`.
    pub weight: Param<Tensor<B, 2>>,
}

impl<B: Backend> Embedding<B> {
    pub(super) fn random(rows: usize, width: usize, device: &B::Device) -> Self {
        let weight = Tensor::random([rows, width], Distribution::Normal(0.0, STD), device);
        Self { weight: Param::initialized(ParamId::new(), weight) }
    }

    /// `ids: [n] -> [n, width]`.
    pub fn forward(&self, ids: Tensor<B, 1, Int>) -> Tensor<B, 2> {
        self.weight.val().select(0, ids)
    }
}
