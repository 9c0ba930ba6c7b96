//! DFlash-2's convolution over the slots of a block.

use burn::{
    module::{Module, Param, ParamId},
    tensor::{Tensor, backend::Backend},
};
use hspec_nn::Linear;

/// Two short causal convolutions around a sub-layer (DFlash-2): one over the slots of its input, one
/// over those of its output. What lies before the block is zero.
///
/// ```text
/// out[t, c] = Σ_o (base[side, o, c] + delta[t, side, o, group(c)]) · x[t - o, c]
/// delta     = W_k input,  for both sides from the sub-layer's input before the convolution
/// ```
///
/// A channel has its own base kernel; consecutive channels share the dynamic part in groups.
#[derive(Module, Debug)]
pub struct BlockConv<B: Backend> {
    /// `[2, taps, channels]`: side (input, output), tap (the slot itself, the one before), channel.
    pub base_kernel: Param<Tensor<B, 3>>,
    /// `W_k: [2·taps·groups, channels]`, rows by side, then tap, then group.
    pub kernel_projection: Linear<B>,
}

impl<B: Backend> BlockConv<B> {
    /// The identity, which training departs from: one at the slot itself, zero elsewhere, no dynamic
    /// part. `group_size` must divide `channels`; sizes must be at least 1.
    pub fn identity(channels: usize, taps: usize, group_size: usize, device: &B::Device) -> Self {
        let own = Tensor::ones([2, 1, channels], device);
        let before = (taps > 1).then(|| Tensor::zeros([2, taps - 1, channels], device));
        let base = Tensor::cat(std::iter::once(own).chain(before).collect(), 1);
        let dynamic = Tensor::zeros([2 * taps * (channels / group_size), channels], device);
        Self {
            base_kernel: Param::initialized(ParamId::new(), base),
            kernel_projection: Linear::new(dynamic, None),
        }
    }

    /// `sub_layer` between the two convolutions, for its normed input `[n, k, channels]`; the result is
    /// what the residual stream gains.
    pub fn around(
        &self,
        x: Tensor<B, 3>,
        sub_layer: impl FnOnce(Tensor<B, 3>) -> Tensor<B, 3>,
    ) -> Tensor<B, 3> {
        let (x, output_kernel) = self.prepare(x);
        self.finish(sub_layer(x), output_kernel)
    }

    /// The convolved input `[n, k, channels]` and the dynamic kernel `[n, k, taps, groups]` for
    /// [`BlockConv::finish`].
    pub fn prepare(&self, x: Tensor<B, 3>) -> (Tensor<B, 3>, Tensor<B, 4>) {
        let [n, k, _] = x.dims();
        let [_, taps, _] = self.base_kernel.dims();
        let groups = self.kernel_projection.shape()[0] / (2 * taps);
        let delta = self.kernel_projection.forward(x.clone()).reshape([n, k, 2, taps * groups]);
        let side = |s: usize| delta.clone().narrow(2, s, 1).reshape([n, k, taps, groups]);
        (self.convolve(x, side(0), 0), side(1))
    }

    /// The convolved output `[n, k, channels]` of the sub-layer.
    pub fn finish(&self, y: Tensor<B, 3>, output_kernel: Tensor<B, 4>) -> Tensor<B, 3> {
        self.convolve(y, output_kernel, 1)
    }

    fn convolve(&self, x: Tensor<B, 3>, delta: Tensor<B, 4>, side: usize) -> Tensor<B, 3> {
        let [n, k, channels] = x.dims();
        let [_, _, taps, groups] = delta.dims();
        let size = channels / groups;
        let base = self.base_kernel.val().narrow(0, side, 1);
        let terms = (0..taps.min(k)).map(|tap| {
            let seen = x.clone().narrow(1, 0, k - tap);
            let seen = match tap {
                0 => seen,
                _ => Tensor::cat(vec![Tensor::zeros([n, tap, channels], &x.device()), seen], 1),
            };
            let base = base.clone().narrow(1, tap, 1).reshape([1, groups, size]);
            let delta = delta.clone().narrow(2, tap, 1).reshape([n * k, groups, 1]);
            (base + delta) * seen.reshape([n * k, groups, size])
        });
        let sum = terms.reduce(|sum, term| sum + term).expect("a kernel has at least one tap");
        sum.reshape([n, k, channels])
    }
}
