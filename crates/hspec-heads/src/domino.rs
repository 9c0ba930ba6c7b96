//! Domino's correction: a recurrence over the block's tokens.

use crate::{CausalCorrection, INIT_STD};
use burn::{
    module::{Module, Param, ParamId},
    tensor::{Distribution, Int, Tensor, activation::sigmoid, backend::Backend},
};
use hspec_nn::{Linear, silu};

/// Sizes and conventions of a [`DominoHead`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DominoConfig {
    /// Draft vocabulary, v.
    pub draft_vocab: usize,
    /// Width of the drafter's hidden states, h.
    pub hidden: usize,
    /// Width of the token embeddings, e.
    pub embedding: usize,
    /// Width of the recurrent state, g.
    pub gru_hidden_dim: usize,
    /// Width between the two projections.
    pub emb_dim: usize,
    /// Slots that predict a token and keep their base logits all the same.
    pub pure_draft_prefix_len: usize,
    /// Whether slot t predicts the token behind its position, so that its previous token is the block's
    /// own token t, and slot 0 predicts. Otherwise slot t predicts the token at its position: its
    /// previous token is the block's token t - 1, and slot 0 predicts nothing.
    pub shift_label: bool,
}

/// One layer of gated recurrent units without biases. Rows of both weights: reset, update, candidate.
#[derive(Module, Debug)]
pub struct Gru<B: Backend> {
    /// `[3·g, e]`.
    pub weight_ih_l0: Param<Tensor<B, 2>>,
    /// `[3·g, g]`.
    pub weight_hh_l0: Param<Tensor<B, 2>>,
}

impl<B: Backend> Gru<B> {
    fn random(input: usize, width: usize, device: &B::Device) -> Self {
        let weight = |columns| {
            let values = Tensor::random([3 * width, columns], Distribution::Normal(0.0, INIT_STD), device);
            Param::initialized(ParamId::new(), values)
        };
        Self { weight_ih_l0: weight(input), weight_hh_l0: weight(width) }
    }

    /// What the inputs contribute to the gates: `[m, e] -> [m, 3·g]`.
    fn inputs(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        Linear::new(self.weight_ih_l0.val(), None).forward(x)
    }

    /// The state after one input: `[m, 3·g]` and `[m, g]` to `[m, g]`.
    fn step(&self, input: Tensor<B, 2>, state: Tensor<B, 2>) -> Tensor<B, 2> {
        let [m, g] = state.dims();
        let recurrent = Linear::new(self.weight_hh_l0.val(), None).forward(state.clone());
        let part =
            |x: &Tensor<B, 2>, i: usize| x.clone().narrow(1, i * g, g).reshape([m * g]).reshape([m, g]);
        let reset = sigmoid(part(&input, 0) + part(&recurrent, 0));
        let update = sigmoid(part(&input, 1) + part(&recurrent, 1));
        let candidate = (part(&input, 2) + reset * part(&recurrent, 2)).tanh();
        // (1 - update) · candidate + update · state
        candidate.clone() + update * (state - candidate)
    }
}

/// `x · sigmoid(x)`: the second stage of [`DominoHead::embed_proj`], which has no tensor.
#[derive(Module, Clone, Debug)]
pub struct Silu;

/// The parameters of Domino's correction: see the equations at the crate's root. Field paths are the
/// tensor names of released drafters. The token embeddings are not among them: [`DominoHead::over`].
#[derive(Module, Debug)]
pub struct DominoHead<B: Backend> {
    /// Reads the embeddings of the block's tokens.
    pub prefix_gru: Gru<B>,
    /// `W₁: [emb_dim, h + g]`, SiLU, `W₂: [v, emb_dim]`.
    pub embed_proj: (Linear<B>, Silu, Linear<B>),
    /// First slot whose logits are corrected.
    pub suffix_start: usize,
    /// As [`DominoConfig::shift_label`].
    pub shift_label: bool,
}

impl<B: Backend> DominoHead<B> {
    /// Fresh weights from `N(0, 0.02)`. Sizes must be at least 1.
    pub fn init(config: &DominoConfig, device: &B::Device) -> Self {
        let c = config;
        let linear = |input, output| Linear::random(input, output, false, INIT_STD, device);
        let first = linear(c.hidden + c.gru_hidden_dim, c.emb_dim);
        Self {
            prefix_gru: Gru::random(c.embedding, c.gru_hidden_dim, device),
            embed_proj: (first, Silu, linear(c.emb_dim, c.draft_vocab)),
            suffix_start: c.pure_draft_prefix_len + usize::from(!c.shift_label),
            shift_label: c.shift_label,
        }
    }

    /// The correction, with the table `[target vocabulary, e]` that it looks tokens up in. The table is
    /// the target's, frozen and shared with whoever else embeds tokens; nothing is copied.
    pub fn over(&self, embeddings: Tensor<B, 2>) -> Domino<'_, B> {
        Domino { head: self, embeddings }
    }

    /// `W₂ silu(W₁ [hidden; state])`: `[m, h]` and `[m, g]` to `[m, v]`.
    fn project(&self, hidden: Tensor<B, 2>, state: Tensor<B, 2>) -> Tensor<B, 2> {
        let (first, Silu, second) = &self.embed_proj;
        second.forward(silu(first.forward(Tensor::cat(vec![hidden, state], 1))))
    }
}

/// A [`DominoHead`] and the embeddings it reads.
#[derive(Debug, Clone)]
pub struct Domino<'a, B: Backend> {
    head: &'a DominoHead<B>,
    embeddings: Tensor<B, 2>,
}

/// Where a [`Domino`] stands in a block.
#[derive(Debug, Clone)]
pub struct DominoState<B: Backend> {
    slot: usize,
    /// `[n, g]`.
    gru: Tensor<B, 2>,
}

impl<B: Backend> Domino<'_, B> {
    fn draft_vocab(&self) -> usize {
        self.head.embed_proj.2.shape()[0]
    }

    /// `[m] -> [m, e]`.
    fn rows(&self, tokens: Tensor<B, 1, Int>) -> Tensor<B, 2> {
        self.embeddings.clone().select(0, tokens)
    }

    /// The recurrent state that slot `slot` sees. The previous token of slot 0 belongs to the block only
    /// if slot 0 predicts; otherwise it is slot 1 that reads the block's first token.
    fn advance(&self, slot: usize, input: Tensor<B, 2>, state: Tensor<B, 2>) -> Tensor<B, 2> {
        if slot > 0 || self.head.shift_label { self.head.prefix_gru.step(input, state) } else { state }
    }
}

impl<B: Backend> CausalCorrection<B> for Domino<'_, B> {
    type State = DominoState<B>;

    fn block(&self, prev: Tensor<B, 2, Int>, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        let [n, k, h] = hidden.dims();
        let device = hidden.device();
        let first = self.head.suffix_start.min(k);
        let v = self.draft_vocab();
        if first == k {
            return Tensor::zeros([n, k, v], &device);
        }
        let inputs = self.head.prefix_gru.inputs(self.rows(prev.reshape([n * k])));
        let gates = inputs.dims()[1];
        let inputs = inputs.reshape([n, k, gates]);
        let mut state = self.start(n, &device).gru;
        let mut states = Vec::with_capacity(k - first);
        for slot in 0..k {
            let input = inputs.clone().narrow(1, slot, 1).reshape([n, gates]);
            state = self.advance(slot, input, state);
            if slot >= first {
                states.push(state.clone().unsqueeze_dim::<3>(1));
            }
        }
        let rows = n * (k - first);
        let states = Tensor::cat(states, 1).reshape([rows, gates / 3]);
        let hidden = hidden.narrow(1, first, k - first).reshape([rows, h]);
        let bias = self.head.project(hidden, states).reshape([n, k - first, v]);
        match first {
            0 => bias,
            _ => Tensor::cat(vec![Tensor::zeros([n, first, v], &device), bias], 1),
        }
    }

    fn start(&self, n: usize, device: &B::Device) -> DominoState<B> {
        let width = self.head.prefix_gru.weight_hh_l0.dims()[1];
        DominoState { slot: 0, gru: Tensor::zeros([n, width], device) }
    }

    fn step(
        &self,
        state: DominoState<B>,
        prev: Tensor<B, 1, Int>,
        hidden: Tensor<B, 2>,
    ) -> (Tensor<B, 2>, DominoState<B>) {
        let DominoState { slot, gru } = state;
        let input = self.head.prefix_gru.inputs(self.rows(prev));
        let gru = self.advance(slot, input, gru);
        let bias = if slot < self.head.suffix_start {
            Tensor::zeros([hidden.dims()[0], self.draft_vocab()], &hidden.device())
        } else {
            self.head.project(hidden, gru.clone())
        };
        (bias, DominoState { slot: slot + 1, gru })
    }

    /// The embeddings of the previous tokens, r = e.
    fn features(&self, prev: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let ([n, k], e) = (prev.dims(), self.embeddings.dims()[1]);
        self.rows(prev.reshape([n * k])).reshape([n, k, e])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hspec_nn::params;
    type B = burn_ndarray::NdArray;

    #[test]
    fn tensor_names_and_shapes_are_those_of_released_drafters() {
        let config = DominoConfig {
            draft_vocab: 5,
            hidden: 3,
            embedding: 4,
            gru_hidden_dim: 2,
            emb_dim: 6,
            pure_draft_prefix_len: 1,
            shift_label: false,
        };
        let head = DominoHead::<B>::init(&config, &Default::default());
        let found: Vec<_> = params::list(&head).into_iter().map(|p| (p.name, p.shape)).collect();
        let expected = [
            ("prefix_gru.weight_ih_l0", vec![6, 4]),
            ("prefix_gru.weight_hh_l0", vec![6, 2]),
            ("embed_proj.0.weight", vec![6, 5]),
            ("embed_proj.2.weight", vec![5, 6]),
        ];
        assert_eq!(found, expected.map(|(name, shape)| (name.to_owned(), shape)));
        assert_eq!(head.suffix_start, 2);
        let shifted = DominoConfig { shift_label: true, ..config };
        assert_eq!(DominoHead::<B>::init(&shifted, &Default::default()).suffix_start, 1);
    }
}
