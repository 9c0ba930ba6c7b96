//! Models that propose tokens.

mod correction;
pub mod dspark;
pub mod eagle3;
mod embedding;
mod export;
mod files;
mod folder;
mod format;
mod hspec;
mod inspect;
mod odd;
mod outline;
mod parameters;
pub mod peagle;
mod registry;
mod stated;
mod vocab;
pub(crate) mod walk;

pub use embedding::Embedding;
pub use export::{Exported, export};
pub use files::pruned_head;
pub use format::Format;
pub use hspec::{Blocks, HSpec, HSpecModel, SubLayer, Term};
pub use inspect::{Inspection, inspect};
pub use outline::{Outline, TensorOutline, outline};
pub use registry::load;
pub use stated::{Bytes, Description};
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

    /// Hidden ids of the target that it reads, ascending.
    fn feature_layers(&self) -> &[usize];

    /// The target's token of each draft id, where the vocabulary is pruned.
    fn vocabulary(&self) -> Option<&[TokenId]>;

    /// What it weighs and keeps.
    fn footprint(&self) -> Footprint;

    /// What it remembers of one request of at most `capacity` tokens, for all of which it allocates memory.
    fn session(&self, capacity: usize) -> Box<dyn Session<B> + '_>;
}

/// A drafter at work on one request.
pub trait Session<B: Backend> {
    /// Takes in tokens that the target has processed and that are final, in order, with the target's
    /// hidden states at their positions in the order of [`Drafter::feature_layers`]: `[n, F * H]`.
    /// Rejected drafts never come here.
    fn observe(&mut self, tokens: &[TokenId], features: Tensor<B, 2>);

    /// Proposes at most `k >= 1` tokens for the positions behind `anchor`, the token sampled last, which the
    /// target has not processed: its position is `cache.len()`. For each slot, from 1, `pick` gets the
    /// slot and its logits over the draft vocabulary, given the tokens picked before, and returns its
    /// choice.
    ///
    /// # Errors
    /// What `pick` returns; a request of which nothing has been observed.
    fn draft(
        &mut self,
        anchor: TokenId,
        cache: &KvCache<B>,
        k: usize,
        pick: &mut dyn FnMut(usize, &[f32]) -> Result<TokenId>,
    ) -> Result<Proposal>;
}

/// What a drafter proposes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Proposal {
    /// The tokens behind the anchor.
    pub tokens: Vec<TokenId>,
    /// Per token, the logit of the probability that the target accepts it, given that it accepted those
    /// before; empty without a confidence head.
    pub confidence: Vec<f32>,
}

/// Sizes of a drafter. A session that keeps something per token allocates it for its whole capacity at once.
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
