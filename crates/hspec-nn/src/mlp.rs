//! The gated feed-forward block of Llama and Qwen3.

use crate::{Linear, WeightStorage};
use burn::{
    module::Module,
    tensor::{Tensor, backend::Backend},
};

/// `W_down (silu(W_gate x) · W_up x)`.
#[derive(Module, Debug)]
pub struct SwiGlu<B: Backend> {
    /// `[intermediate, hidden]`.
    pub gate_proj: Linear<B>,
    /// `[intermediate, hidden]`.
    pub up_proj: Linear<B>,
    /// `[hidden, intermediate]`.
    pub down_proj: Linear<B>,
}

impl<B: Backend> SwiGlu<B> {
    /// Weights from `N(0, std)`, no biases.
    pub fn random(hidden: usize, intermediate: usize, std: f64, device: &B::Device) -> Self {
        Self {
            gate_proj: Linear::random(hidden, intermediate, false, std, device),
            up_proj: Linear::random(hidden, intermediate, false, std, device),
            down_proj: Linear::random(intermediate, hidden, false, std, device),
        }
    }

    /// The same block for inference, see [`Linear::prepack`].
    #[must_use]
    pub fn prepack(self, storage: WeightStorage) -> Self {
        Self {
            gate_proj: self.gate_proj.prepack(storage),
            up_proj: self.up_proj.prepack(storage),
            down_proj: self.down_proj.prepack(storage),
        }
    }

    /// `[.., hidden] -> [.., hidden]`.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        #[cfg(feature = "flex")]
        {
            let (shape, width) = (x.dims(), x.dims()[D - 1]);
            let rows = x.clone().reshape([x.shape().num_elements() / width, width]);
            if let Some(gated) = Linear::gated(&self.gate_proj, &self.up_proj, &rows) {
                return self.down_proj.forward(gated).reshape(shape);
            }
        }
        self.down_proj.forward(gated(self.gate_proj.forward(x.clone()), self.up_proj.forward(x)))
    }
}

/// `silu(gate) · up`.
pub fn gated<B: Backend, const D: usize>(gate: Tensor<B, D>, up: Tensor<B, D>) -> Tensor<B, D> {
    #[cfg(feature = "flex")]
    if let Some(y) = crate::flex::layers::gate(&gate, &up) {
        return y;
    }
    silu(gate) * up
}

/// `x · sigmoid(x)`, written as one quotient: two to three times faster on CPU backends than their
/// scalar sigmoid, and `exp` overflowing to infinity still gives the right limit, zero.
pub fn silu<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    x.clone() / x.neg().exp().add_scalar(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_abs_diff_eq;

    #[test]
    fn silu_is_finite_at_both_ends() {
        let device = Default::default();
        let x = [-200.0f32, -1.0, 0.0, 1.0, 200.0];
        let y = silu(Tensor::<burn_flex::Flex, 1>::from_floats(x, &device));
        let y = y.into_data().to_vec::<f32>().unwrap();
        let expected = [0.0, -0.268_941_42, 0.0, 0.731_058_6, 200.0];
        for (a, b) in y.iter().zip(expected) {
            assert_abs_diff_eq!(*a, b, epsilon = 1e-6);
        }
    }
}
