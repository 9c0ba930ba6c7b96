//! Models that propose tokens.

mod hspec;
mod io;
mod model;
mod vocab;

pub use hspec::{Blocks, HSpec};
pub use io::pruned_head;
pub use model::{Embedding, HSpecModel, SubLayer};
pub use vocab::DraftVocab;

use crate::{Result, TokenId};
use burn::tensor::{Tensor, backend::Backend};
use hspec_attn::KvCache;

/// A model that proposes tokens from what a target has computed.
pub trait Drafter<B: Backend> {
    /// What it is, as checkpoints name it.
    fn kind(&self) -> &'static str;

    /// Most tokens it proposes at once, k.
    fn max_draft(&self) -> usize;

    /// Hidden ids of the target that must be captured, ascending.
    fn seed_layers(&self) -> &[usize];

    /// The target's token of each draft id, where the vocabulary is pruned.
    fn vocabulary(&self) -> Option<&[TokenId]>;

    /// Proposes `k` tokens for the positions behind the anchor. For each slot, from 1, `pick` gets the
    /// slot and its logits over the draft vocabulary, given the tokens picked before, and returns its
    /// choice.
    ///
    /// # Errors
    /// What `pick` returns.
    fn draft(
        &self,
        start: &DraftStart<'_, B>,
        k: usize,
        pick: &mut dyn FnMut(usize, &[f32]) -> Result<TokenId>,
    ) -> Result<Vec<TokenId>>;

    /// What it weighs and keeps.
    fn footprint(&self) -> Footprint;
}

/// Where a draft starts.
#[derive(Debug)]
pub struct DraftStart<'a, B: Backend> {
    /// The token sampled last, which the target has not processed.
    pub anchor: TokenId,
    /// The target's hidden states at the last processed position, in the order of
    /// [`Drafter::seed_layers`]: `[1, F * H]`.
    pub seed: Tensor<B, 2>,
    /// The target's cache; its length is the anchor's position.
    pub cache: &'a KvCache<B>,
}

/// Sizes of a drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Parameters that training changes.
    pub params_trainable: usize,
    /// Copies of the target's tensors.
    pub params_frozen: usize,
    /// Bytes it keeps per token of context.
    pub kv_bytes_per_token: usize,
    /// Bytes it keeps per request between steps, whatever the context.
    pub state_bytes: usize,
}
