//! Identifiers that must not be mixed up.

use serde::{Deserialize, Serialize};

/// A token of the target's vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TokenId(pub u32);

impl TokenId {
    /// As an index into rows of the target's vocabulary.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
