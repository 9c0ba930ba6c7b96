//! What every causal correction can do.

use burn::tensor::{Int, Tensor, backend::Backend};

/// A bias on the draft logits that depends on the tokens of earlier slots of the block.
///
/// Notation: `n` blocks of `k` slots, `h` the drafter's hidden size (after its final norm), `v` the
/// draft vocabulary, `r` the width of the token features. Token ids are the target's.
pub trait CausalCorrection<B: Backend> {
    /// What one slot hands to the next, beside its token.
    type State;

    /// The biases `[n, k, v]` of whole blocks, slots in order from 0, for the previous tokens
    /// `[n, k]` and the hidden states `[n, k, h]`.
    fn block(&self, prev: Tensor<B, 2, Int>, hidden: Tensor<B, 3>) -> Tensor<B, 3>;

    /// The state of `n` blocks before slot 0.
    fn start(&self, n: usize, device: &B::Device) -> Self::State;

    /// The bias `[n, v]` of the next slot and the state after it, for the previous tokens `[n]` and
    /// the slot's hidden states `[n, h]`. Recurrent corrections must be stepped through slot 0 before
    /// slot 1, whether or not slot 0 predicts a token.
    fn step(
        &self,
        state: Self::State,
        prev: Tensor<B, 1, Int>,
        hidden: Tensor<B, 2>,
    ) -> (Tensor<B, 2>, Self::State);

    /// The features `[n, k, r]` of the previous tokens `[n, k]`, for the confidence head.
    fn features(&self, prev: Tensor<B, 2, Int>) -> Tensor<B, 3>;
}
