//! P-EAGLE (arXiv 2602.01469): EAGLE-3 that proposes all tokens in one pass.
//!
//! Behind the pair of the anchor come pairs of a mask token and of one learned vector in the place of the
//! target's features; depth `j` predicts what step `j` of EAGLE-3 would, without knowing the tokens between:
//!
//! ```text
//! depth 0:     [embed(token t + 1) ; fc(g_t)]            causal over the pairs before
//! depth j > 0: [embed(MASK) ; fc(mask_hidden)]           sees those, and depths 0..j of its own anchor
//! ```

mod cod;
mod session;
mod train;

pub use cod::{Cod, Samples};
pub use train::PackedPairs;

// Its configuration is that of EAGLE-3 with a mask token.
pub(super) use super::eagle3::state;
use super::{eagle3::Eagle3, registry::Source};
use crate::{Error, Result, TokenId, checkpoint::StoreAs, target::Target};
use burn::tensor::{Tensor, backend::Backend};
use std::path::Path;

/// What files call this kind.
pub(super) const WORDS: &[&str] = &["peagle"];

/// A loaded P-EAGLE drafter.
#[derive(Debug, Clone)]
pub struct PEagle<B: Backend> {
    /// Its layers and files, which are those of EAGLE-3.
    pub trunk: Eagle3<B>,
    mask: TokenId,
}

impl<B: Backend> PEagle<B> {
    /// Makes a P-EAGLE drafter of a trunk; `file` names its configuration in errors.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a trunk without a mask token.
    pub fn new(trunk: Eagle3<B>, file: &Path) -> Result<Self> {
        match trunk.shape.mask_token.filter(|_| trunk.model.mask_hidden.is_some()) {
            Some(mask) => Ok(Self { trunk, mask }),
            None => Err(Error::invalid(file, "speculators_model_type", "eagle3", "peagle")),
        }
    }

    /// Loads a drafter directory in the layout of speculators. The embedding and the head, where the file
    /// leaves them out, are taken from `target`.
    ///
    /// # Errors
    /// Files that are missing, damaged, incomplete, of another kind, or made for another target.
    pub fn load(dir: &Path, target: Option<&Target<B>>, device: &B::Device) -> Result<Self> {
        Self::open(Source::read(dir, target, device)?)
    }

    pub(super) fn open(source: Source<'_, B>) -> Result<Self> {
        let file = source.file.clone();
        Self::new(Eagle3::trunk(source)?, &file)
    }

    /// As [`Eagle3::save`].
    ///
    /// # Errors
    /// When the folder cannot be written; an older file is then left whole.
    pub fn save(&self, dir: &Path, store: StoreAs, with_frozen: bool) -> Result<()> {
        self.trunk.save(dir, store, with_frozen)
    }

    /// The state of a position that the target has not processed: `[1, H]`.
    fn masked(&self) -> Tensor<B, 2> {
        let hidden = self.trunk.model.mask_hidden.as_ref().expect("checked when the drafter was made");
        self.trunk.fuse(hidden.val().squeeze_dim(0))
    }
}
