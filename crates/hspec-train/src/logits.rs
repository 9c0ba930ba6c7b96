//! Draft logits of a row, which need not be in memory all at once.

use burn::tensor::{Tensor, backend::Backend};
use hspec_core::drafter::Term;
use hspec_nn::autocast::product;

/// Draft logits of `n` blocks of `K` slots.
#[derive(Debug, Clone)]
pub enum Logits<B: Backend> {
    /// As they are, `[n, K, Vd]`.
    Whole(Tensor<B, 3>),
    /// As a sum of products. With thousands of slots and draft ids the logits and their gradient are most of what
    /// a step has in memory; the loss on flex computes a few blocks at a time, and those slots only that count.
    Sum {
        /// What is added up.
        terms: Vec<Term<B>>,
        /// `[n, K, Vd]`.
        shape: [usize; 3],
    },
}

impl<B: Backend> Logits<B> {
    /// `[n, K, Vd]`.
    pub fn dims(&self) -> [usize; 3] {
        match self {
            Self::Whole(logits) => logits.dims(),
            Self::Sum { shape, .. } => *shape,
        }
    }

    /// All of them, `[n, K, Vd]`.
    pub fn whole(&self) -> Tensor<B, 3> {
        match self {
            Self::Whole(logits) => logits.clone(),
            Self::Sum { terms, shape } => {
                let products = terms.iter().map(|t| product(t.rows.clone(), t.weight.clone()));
                let sum = products.reduce(|a, b| a + b).expect("a sum has a term");
                sum.reshape(*shape)
            }
        }
    }
}

impl<B: Backend> From<Tensor<B, 3>> for Logits<B> {
    fn from(logits: Tensor<B, 3>) -> Self {
        Self::Whole(logits)
    }
}
