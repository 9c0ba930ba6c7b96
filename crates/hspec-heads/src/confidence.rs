//! The confidence head.

use crate::INIT_STD;
use burn::{
    module::Module,
    tensor::{Tensor, backend::Backend},
};
use hspec_nn::Linear;

/// `logit = w · [hidden; features] + b`: its sigmoid estimates the probability that the target accepts
/// the slot's token, given that it accepted all tokens before it.
#[derive(Module, Debug)]
pub struct ConfidenceHead<B: Backend> {
    /// `[1, hidden (+ rank)]` with bias.
    pub proj: Linear<B>,
}

impl<B: Backend> ConfidenceHead<B> {
    /// Fresh weights from `N(0, 0.02)`, bias 0, for `input` features in all.
    pub fn init(input: usize, device: &B::Device) -> Self {
        Self { proj: Linear::random(input, 1, true, INIT_STD, device) }
    }

    /// Logits `[n, k]` from hidden states `[n, k, h]` (after the final norm) and, where the head was
    /// built with them, token features `[n, k, r]`.
    ///
    /// Gradients flow into both inputs; detach them to train this head alone.
    pub fn forward(&self, hidden: Tensor<B, 3>, features: Option<Tensor<B, 3>>) -> Tensor<B, 2> {
        let [n, k, _] = hidden.dims();
        let input = match features {
            Some(features) => Tensor::cat(vec![hidden, features], 2),
            None => hidden,
        };
        self.proj.forward(input).reshape([n, k])
    }
}
