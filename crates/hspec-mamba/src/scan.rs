//! The parallel scan: the dual form within a chunk, the state handed from chunk to chunk.

use crate::recurrence::{SsdInputs, to_heads};
use burn::tensor::{Tensor, backend::Backend};
use hspec_nn::contiguous;

/// Steps per chunk. A chunk costs the square of its length, a hand-over costs the size of the state;
/// a drafter's block (8 slots) is always a single chunk.
const CHUNK: usize = 32;

/// The same function as [`ssd_recurrent`](crate::ssd_recurrent), computed in parallel.
///
/// Takes at least one step and, optionally, the state `[b, h, p, n]` before the first (default
/// zeros); returns `y: [b, l, h, p]` in the type of `x` and the state after the last step in f32.
pub fn ssd_scan<B: Backend>(
    inputs: SsdInputs<B>,
    initial: Option<Tensor<B, 4>>,
) -> (Tensor<B, 4>, Tensor<B, 4>) {
    let dtype = inputs.x.dtype();
    let inputs = inputs.in_f32();
    let l = inputs.dt.dims()[1];
    let mut state = inputs.state(initial);
    let mut outputs = Vec::with_capacity(l.div_ceil(CHUNK));
    for start in (0..l).step_by(CHUNK) {
        let (y, next) = chunk(inputs.steps(start, CHUNK.min(l - start)), state);
        outputs.push(y);
        state = next;
    }
    (Tensor::cat(outputs, 1).cast(dtype), state)
}

/// One chunk by matrix products.
///
/// Everything elementwise is done on decays, keys, queries and scores, which are small next to `x`,
/// and on operands whose broadcast runs over whole rows: CPU backends vectorise only those.
fn chunk<B: Backend>(inputs: SsdInputs<B>, state: Tensor<B, 4>) -> (Tensor<B, 4>, Tensor<B, 4>) {
    let SsdInputs { x, dt, a, b: keys, c: queries, d } = inputs;
    let [b, l, h, _] = x.dims();
    let sums = Sums::new(l, &x.device());

    let dt = contiguous(dt.swap_dims(1, 2));
    let rates = a.reshape([h, 1]).repeat_dim(1, l).reshape([1, h * l]);
    let log_decay = (dt.clone().reshape([b, h * l]) * rates).reshape([b * h, l]);

    let keys = to_heads(keys, h) * dt.reshape([b, h, l, 1]);
    let queries = to_heads(queries, h);
    let scores = queries.clone().matmul(keys.clone().swap_dims(2, 3)).reshape([b * h, l * l]);
    let decay = log_decay.clone().matmul(sums.between).exp() * sums.causal;
    // The direct path D x adds D to the diagonal.
    let diagonal = (sums.diagonal.repeat_dim(0, h) * d.reshape([h, 1])).reshape([1, h * l * l]);
    let mixing = ((scores * decay).reshape([b, h * l * l]) + diagonal).reshape([b, h, l, l]);

    let decay_from_start = log_decay.clone().matmul(sums.through).exp().reshape([b, h, l, 1]);
    let decay_to_end = log_decay.clone().matmul(sums.after).exp().reshape([b, h, l, 1]);
    let decay_in_all = log_decay.sum_dim(1).exp().reshape([b, h, 1, 1]);

    let x = x.swap_dims(1, 2);
    let from_state = (queries * decay_from_start).matmul(state.clone().swap_dims(2, 3));
    let y = mixing.matmul(x.clone()) + from_state;
    let written = x.swap_dims(2, 3).matmul(keys * decay_to_end);
    (y.swap_dims(1, 2), state * decay_in_all + written)
}

/// Constant 0/1 matrices that turn one log decay per step `k` into sums over ranges of steps. A
/// product with them adds exactly the terms of a range, where differences of running sums would
/// cancel, and keeps both directions of the pass in matrix products.
struct Sums<B: Backend> {
    /// `[l, l·l]`: column `(i, j)` sums `j < k ≤ i`.
    between: Tensor<B, 2>,
    /// `[l, l]`: column `i` sums `k ≤ i`.
    through: Tensor<B, 2>,
    /// `[l, l]`: column `j` sums `k > j`.
    after: Tensor<B, 2>,
    /// `[1, l·l]`: one where `j ≤ i`.
    causal: Tensor<B, 2>,
    /// `[1, l·l]`: one where `j = i`.
    diagonal: Tensor<B, 2>,
}

impl<B: Backend> Sums<B> {
    fn new(l: usize, device: &B::Device) -> Self {
        let ones = || Tensor::<B, 2>::ones([l, l], device);
        let (through, after) = (ones().triu(0), ones().tril(-1));
        let between = through.clone().unsqueeze_dim::<3>(2) * after.clone().unsqueeze_dim::<3>(1);
        Self {
            between: between.reshape([l, l * l]),
            through,
            after,
            causal: ones().tril(0).reshape([1, l * l]),
            diagonal: ones().tril(0).triu(0).reshape([1, l * l]),
        }
    }
}
