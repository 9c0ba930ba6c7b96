//! Training-time test: the steps of a draft, unrolled over all pairs of a batch at once.
//!
//! In step `i` pair `t` reads the true token of pair `t + i` and the output of its own step before, at rotary
//! position `t + i`. It sees the pairs of step 0 that a draft starting at `t` would find in its cache, and of
//! each later step only its own key: every pair drafts for itself.

use super::{Eagle3, Heads, Visible};
use crate::TokenId;
use burn::tensor::{Tensor, backend::Backend};

/// Pairs of features with the token that follows them, in rows of equal length.
#[derive(Debug)]
pub struct Pairs<'a, B: Backend> {
    /// The target's features, `[batch, T, F * H]`.
    pub features: Tensor<B, 3>,
    /// The token after each feature's position, `[batch * T]`.
    pub next: &'a [TokenId],
    /// Rotary position of each pair in step 0, `[batch * T]`.
    pub positions: &'a [usize],
    /// Who sees whom.
    pub context: Context<'a>,
}

/// Which pairs of step 0 a pair sees.
#[derive(Debug, Clone, Copy)]
pub enum Context<'a> {
    /// One document per row, padded at its end: its length in tokens, per row. The last `i` pairs of step `i`
    /// have no token left, see nothing and their attention is zero.
    Padded(&'a [usize]),
    /// Documents side by side: the number of each pair's document, `[batch * T]`; -1 is padding, which sees
    /// itself.
    Packed(&'a [i64]),
}

/// What one step computes for every pair.
#[derive(Debug, Clone)]
pub struct TttStep<B: Backend> {
    /// Output of the layers before the final norm, `[batch, T, H]`.
    pub hidden: Tensor<B, 3>,
    /// Over the draft vocabulary, `[batch, T, Vd]`.
    pub logits: Tensor<B, 3>,
}

impl<B: Backend> Eagle3<B> {
    /// Unrolls `steps` steps.
    pub fn ttt(&self, pairs: &Pairs<'_, B>, steps: usize) -> Vec<TttStep<B>> {
        let [batch, t, width] = pairs.features.dims();
        let device = pairs.features.device();
        let mut state = self.fuse(pairs.features.clone().reshape([batch * t, width]));
        // Queries, keys and values of every step so far, per layer.
        let mut past: Vec<Vec<Heads<B>>> = vec![Vec::new(); self.model.layers.len()];
        let mut unrolled = Vec::with_capacity(steps);
        for step in 0..steps {
            let sees = |b: usize, q: usize, k: usize| {
                k <= q
                    && match pairs.context {
                        Context::Padded(lengths) => q + step < lengths[b],
                        Context::Packed(documents) => {
                            let document = |i: usize| documents[b * t + i];
                            q == k || (document(q) == document(k) && document(q) >= 0)
                        }
                    }
            };
            let visible = Visible::new(batch, t, sees, &device);
            let tokens: Vec<TokenId> =
                pairs.next.chunks_exact(t).flat_map(|row| shifted(row, step)).collect();
            let positions: Vec<usize> = pairs.positions.iter().map(|p| p + step).collect();
            let out = self.run(&tokens, state, &positions, &mut |layer, heads| {
                let query = heads.q.clone();
                past[layer].push(heads);
                visible.attend(query, &past[layer][0], &past[layer][1..])
            });
            let (logits, next) = self.emit(out.clone());
            state = next;
            let split = |x: Tensor<B, 2>| {
                let width = x.dims()[1];
                x.reshape([batch, t, width])
            };
            unrolled.push(TttStep { hidden: split(out), logits: split(logits) });
        }
        unrolled
    }
}

/// A row moved left by `n`, token 0 behind its end.
fn shifted(row: &[TokenId], n: usize) -> impl Iterator<Item = TokenId> {
    let kept = row.iter().skip(n).copied();
    kept.chain(std::iter::repeat(TokenId(0))).take(row.len())
}
