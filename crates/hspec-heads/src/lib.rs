//! The small parts of a block drafter that restore the order inside a block, and its confidence.
//!
//! A block drafter predicts all slots at once, so the logits of a slot know nothing of the token drawn
//! one slot earlier. A [`CausalCorrection`] adds a bias that does (DSpark; H-Spec, arXiv 2609.24197):
//!
//! ```text
//! logits_t = base_t + W₂ f(W₁[prev_t], hidden_t)
//! vanilla: f = e          gated: f = e · σ(W_g [hidden; e] + b)
//! rnn:     f = tanh(out),  [gate; cand; out] = W_j [s; e; hidden] + b,
//!          s ← σ(gate) s + (1 - σ(gate)) tanh(cand),  s = 0 before slot 0
//! ```
//!
//! with `e = W₁[prev]`. `prev` is an id of the *target's* vocabulary; the bias lives in the draft
//! vocabulary. [`MarkovHead`] is all three. [`Domino`] (arXiv 2605.29707) remembers the whole block: a
//! recurrence `s` over the embeddings of its tokens, read from a table that the head borrows,
//!
//! ```text
//! s ← GRU(embedding[prev_t], s),   logits_t = base_t + W₂ silu(W₁ [hidden_t; s])
//! ```
//!
//! Training asks for the biases of a whole block ([`CausalCorrection::block`]), drafting walks the same
//! slots one by one ([`CausalCorrection::step`]); the two agree.
//!
//! DFlash-2 has two parts of its own: a [`BlockConv`] around each sub-layer mixes a slot with the one
//! before it, and a [`CandidateSelector`] chooses among the best few tokens of a slot by the token before.
//! The selector is no additive bias (it needs the logits themselves and excludes all other tokens) and so
//! no [`CausalCorrection`], but it is used the same way. A [`ConfidenceHead`] predicts how likely the
//! target is to accept a slot, given that it accepted the slots before it.
//!
//! ```
//! use burn::tensor::{Distribution, Int, Tensor};
//! use hspec_heads::{CausalCorrection, MarkovHead, MarkovKind};
//! type B = burn_ndarray::NdArray;
//!
//! let device = Default::default();
//! // Target vocabulary 100, draft vocabulary 20, rank 4, hidden size 8.
//! let head = MarkovHead::<B>::init(MarkovKind::Vanilla, 100, 20, 4, 8, &device);
//! let prev = Tensor::<B, 2, Int>::from_ints([[71, 3, 15]], &device);
//! let hidden = Tensor::random([1, 3, 8], Distribution::Normal(0.0, 1.0), &device);
//! let bias = head.block(prev, hidden.clone());
//! assert_eq!(bias.dims(), [1, 3, 20]);
//!
//! let first = Tensor::<B, 1, Int>::from_ints([71], &device);
//! let (step, _state) = head.step(head.start(1, &device), first, hidden.narrow(1, 0, 1).squeeze_dim(1));
//! assert_eq!(step.into_data(), bias.narrow(1, 0, 1).reshape([1, 20]).into_data());
//! ```

mod block_conv;
mod confidence;
mod correction;
mod domino;
mod markov;
mod selector;

pub use block_conv::BlockConv;
pub use confidence::ConfidenceHead;
pub use correction::CausalCorrection;
pub use domino::{Domino, DominoConfig, DominoHead, DominoState, Gru, Silu};
pub use markov::{MarkovHead, MarkovKind, TokenTable, UnknownKind};
pub use selector::{CandidateSelector, Candidates};

/// Standard deviation of fresh weights.
const INIT_STD: f64 = 0.02;
