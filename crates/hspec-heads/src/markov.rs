//! The Markov head in its three kinds.

use crate::{CausalCorrection, INIT_STD};
use burn::{
    module::{Module, Param, ParamId},
    tensor::{Distribution, Int, Tensor, activation::sigmoid, backend::Backend},
};
use hspec_nn::{Linear, WeightStorage};
use std::{fmt, str::FromStr};

/// What lies between the two factors of the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MarkovKind {
    /// Nothing.
    Vanilla,
    /// A gate that reads the hidden state.
    Gated,
    /// A recurrence over the slots of the block.
    Rnn,
}

/// A word that is not a kind of Markov head.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown Markov head type {0:?}, expected vanilla, gated or rnn")]
pub struct UnknownKind(pub String);

impl FromStr for MarkovKind {
    type Err = UnknownKind;

    fn from_str(word: &str) -> Result<Self, UnknownKind> {
        match word {
            "vanilla" => Ok(Self::Vanilla),
            "gated" => Ok(Self::Gated),
            "rnn" => Ok(Self::Rnn),
            _ => Err(UnknownKind(word.to_owned())),
        }
    }
}

impl fmt::Display for MarkovKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vanilla => "vanilla",
            Self::Gated => "gated",
            Self::Rnn => "rnn",
        })
    }
}

/// One feature vector per token.
#[derive(Module, Debug)]
pub struct TokenTable<B: Backend> {
    /// `[vocabulary, width]`.
    pub weight: Param<Tensor<B, 2>>,
}

impl<B: Backend> TokenTable<B> {
    /// `[m] -> [m, width]`.
    fn rows(&self, tokens: Tensor<B, 1, Int>) -> Tensor<B, 2> {
        self.weight.val().select(0, tokens)
    }
}

/// A low-rank bias from the previous token: see the equations at the crate's root. Field paths are
/// the tensor names of released drafters.
#[derive(Module, Debug)]
pub struct MarkovHead<B: Backend> {
    /// `W₁: [target vocabulary, rank]`.
    pub markov_w1: TokenTable<B>,
    /// `W₂: [draft vocabulary, rank]`.
    pub markov_w2: Linear<B>,
    /// `[rank, hidden + rank]` with bias; present in the gated kind.
    pub gate_proj: Option<Linear<B>>,
    /// `[3·rank, 2·rank + hidden]` with bias, rows gate, candidate, output; present in the rnn kind.
    pub joint_proj: Option<Linear<B>>,
}

impl<B: Backend> MarkovHead<B> {
    /// Fresh weights from `N(0, 0.02)`, biases 0. Sizes must be at least 1.
    pub fn init(
        kind: MarkovKind,
        vocab: usize,
        draft_vocab: usize,
        rank: usize,
        hidden: usize,
        device: &B::Device,
    ) -> Self {
        let table = Tensor::random([vocab, rank], Distribution::Normal(0.0, INIT_STD), device);
        let linear = |input, output| Linear::random(input, output, true, INIT_STD, device);
        Self {
            markov_w1: TokenTable { weight: Param::initialized(ParamId::new(), table) },
            markov_w2: Linear::random(rank, draft_vocab, false, INIT_STD, device),
            gate_proj: (kind == MarkovKind::Gated).then(|| linear(hidden + rank, rank)),
            joint_proj: (kind == MarkovKind::Rnn).then(|| linear(2 * rank + hidden, 3 * rank)),
        }
    }

    /// The same head for inference, see [`Linear::prepack`].
    #[must_use]
    pub fn prepack(self, storage: WeightStorage) -> Self {
        Self {
            markov_w2: self.markov_w2.prepack(storage),
            gate_proj: self.gate_proj.map(|l| l.prepack(storage)),
            joint_proj: self.joint_proj.map(|l| l.prepack(storage)),
            ..self
        }
    }

    /// Which of the three this is.
    pub fn kind(&self) -> MarkovKind {
        match (&self.joint_proj, &self.gate_proj) {
            (Some(_), _) => MarkovKind::Rnn,
            (None, Some(_)) => MarkovKind::Gated,
            (None, None) => MarkovKind::Vanilla,
        }
    }

    /// Width of the token features.
    pub fn rank(&self) -> usize {
        self.markov_w2.shape()[1]
    }

    /// What `W₂` reads, `[m, r]`, and the state after the slot: token features `[m, r]` and hidden
    /// states `[m, h]`. Slots of a block may share the rows `m` unless the kind is recurrent.
    fn mix(
        &self,
        state: Option<Tensor<B, 2>>,
        token: Tensor<B, 2>,
        hidden: Tensor<B, 2>,
    ) -> (Tensor<B, 2>, Option<Tensor<B, 2>>) {
        if let Some(joint) = &self.joint_proj {
            let [m, r] = token.dims();
            let state = state.unwrap_or_else(|| token.zeros_like());
            let mixed = joint.forward(Tensor::cat(vec![state.clone(), token, hidden], 1));
            let part = |i: usize| mixed.clone().narrow(1, i * r, r).reshape([m * r]).reshape([m, r]);
            let (keep, candidate, output) = (sigmoid(part(0)), part(1).tanh(), part(2).tanh());
            // keep · state + (1 - keep) · candidate
            let state = keep * (state - candidate.clone()) + candidate;
            (output, Some(state))
        } else if let Some(gate) = &self.gate_proj {
            let gate = sigmoid(gate.forward(Tensor::cat(vec![hidden, token.clone()], 1)));
            (gate * token, None)
        } else {
            (token, None)
        }
    }

    /// What the biases of whole blocks are a product of: `[n, k, r]`, for [`MarkovHead::markov_w2`]. Arguments as
    /// of [`CausalCorrection::block`].
    pub fn mixed(&self, prev: Tensor<B, 2, Int>, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        let [n, k, h] = hidden.dims();
        let r = self.rank();
        let tokens = self.features(prev);
        if self.kind() == MarkovKind::Rnn {
            let mut state = None;
            let mut slots = Vec::with_capacity(k);
            for slot in 0..k {
                let token = tokens.clone().narrow(1, slot, 1).reshape([n, r]);
                let hidden = hidden.clone().narrow(1, slot, 1).reshape([n, h]);
                let (mixed, next) = self.mix(state, token, hidden);
                slots.push(mixed.unsqueeze_dim::<3>(1));
                state = next;
            }
            Tensor::cat(slots, 1)
        } else {
            let (mixed, _) = self.mix(None, tokens.reshape([n * k, r]), hidden.reshape([n * k, h]));
            mixed.reshape([n, k, r])
        }
    }
}

impl<B: Backend> CausalCorrection<B> for MarkovHead<B> {
    /// The state `[n, r]` of the recurrence; none before slot 0 (that is zeros) and in other kinds.
    type State = Option<Tensor<B, 2>>;

    fn block(&self, prev: Tensor<B, 2, Int>, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        self.markov_w2.forward(self.mixed(prev, hidden))
    }

    fn start(&self, _n: usize, _device: &B::Device) -> Self::State {
        None
    }

    fn step(
        &self,
        state: Self::State,
        prev: Tensor<B, 1, Int>,
        hidden: Tensor<B, 2>,
    ) -> (Tensor<B, 2>, Self::State) {
        let (mixed, state) = self.mix(state, self.markov_w1.rows(prev), hidden);
        (self.markov_w2.forward(mixed), state)
    }

    fn features(&self, prev: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let [n, k] = prev.dims();
        self.markov_w1.rows(prev.reshape([n * k])).reshape([n, k, self.rank()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    type B = burn_ndarray::NdArray;

    #[test]
    fn each_kind_has_its_own_parameters_and_its_word() {
        let (w1, w2) = (("markov_w1.weight", vec![9, 2]), ("markov_w2.weight", vec![5, 2]));
        let gated = [("gate_proj.weight", vec![2, 5]), ("gate_proj.bias", vec![2])];
        let rnn = [("joint_proj.weight", vec![6, 7]), ("joint_proj.bias", vec![6])];
        for (word, own) in [("vanilla", vec![]), ("gated", gated.to_vec()), ("rnn", rnn.to_vec())] {
            let kind: MarkovKind = word.parse().unwrap();
            assert_eq!(kind.to_string(), word);
            let head = MarkovHead::<B>::init(kind, 9, 5, 2, 3, &Default::default());
            assert_eq!((head.kind(), head.rank()), (kind, 2));
            let found: Vec<_> =
                hspec_nn::params::list(&head).into_iter().map(|p| (p.name, p.shape)).collect();
            let expected = [w1.clone(), w2.clone()].into_iter().chain(own);
            let expected: Vec<_> = expected.map(|(n, s)| (n.to_owned(), s)).collect();
            assert_eq!(found, expected);
        }
        let error = "lstm".parse::<MarkovKind>().unwrap_err();
        assert_eq!(error.to_string(), "unknown Markov head type \"lstm\", expected vanilla, gated or rnn");
    }
}
