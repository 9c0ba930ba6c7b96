//! The pruned vocabulary of a drafter.

use crate::{Error, Result, TokenId};
use std::path::Path;

/// Maps draft ids to the target's ids, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftVocab {
    targets: Vec<TokenId>,
}

impl DraftVocab {
    /// Every target id is a draft id.
    pub fn full(vocab: usize) -> Self {
        Self { targets: (0..vocab as u32).map(TokenId).collect() }
    }

    /// Keeps the given target ids, which must ascend strictly and lie below `vocab`.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the first id that does not.
    pub fn new(targets: Vec<TokenId>, vocab: usize, file: &Path) -> Result<Self> {
        let ascending = targets.windows(2).all(|w| w[0] < w[1]);
        match targets.last() {
            Some(last) if ascending && last.index() < vocab => Ok(Self { targets }),
            _ => {
                let found = format!("{} ids ending in {:?}", targets.len(), targets.last());
                Err(Error::invalid(
                    file,
                    "d2t",
                    found,
                    format!("strictly ascending target ids below {vocab}"),
                ))
            }
        }
    }

    /// From the file's encoding: `target = draft + d2t[draft]`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the ids do not ascend or leave the vocabulary.
    pub fn from_offsets(d2t: &[i64], vocab: usize, file: &Path) -> Result<Self> {
        let id = |(i, offset): (usize, &i64)| u32::try_from(offset.checked_add(i as i64)?).ok().map(TokenId);
        match d2t.iter().enumerate().map(id).collect::<Option<Vec<_>>>() {
            Some(ids) => Self::new(ids, vocab, file),
            None => Err(Error::invalid(file, "d2t", "an offset to no id at all", "offsets to target ids")),
        }
    }

    /// The file's `d2t`.
    pub fn offsets(&self) -> Vec<i64> {
        self.targets.iter().enumerate().map(|(i, t)| i64::from(t.0) - i as i64).collect()
    }

    /// The file's `t2d`: which of `vocab` target ids are kept.
    pub fn kept(&self, vocab: usize) -> Vec<bool> {
        let mut kept = vec![false; vocab];
        for t in &self.targets {
            kept[t.index()] = true;
        }
        kept
    }

    /// Number of draft ids.
    pub fn len(&self) -> usize {
        self.targets.len()
    }

    /// Whether there is no draft id; never for a vocabulary from a file.
    pub fn is_empty(&self) -> bool {
        self.targets.is_empty()
    }

    /// All target ids, by draft id.
    pub fn targets(&self) -> &[TokenId] {
        &self.targets
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn offsets_round_trip(ids in proptest::collection::btree_set(0u32..50, 1..20)) {
            let file = Path::new("x");
            let vocab = DraftVocab::new(ids.iter().copied().map(TokenId).collect(), 50, file).unwrap();
            let back = DraftVocab::from_offsets(&vocab.offsets(), 50, file).unwrap();
            prop_assert_eq!(&back, &vocab);
            let kept: Vec<u32> = (0..50).filter(|&i| vocab.kept(50)[i as usize]).collect();
            prop_assert_eq!(kept, ids.into_iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn repeated_and_foreign_ids_are_refused() {
        for offsets in [vec![0, -1], vec![0, 99], vec![-1], vec![0, i64::MAX]] {
            let error = DraftVocab::from_offsets(&offsets, 50, Path::new("model.safetensors")).unwrap_err();
            assert!(error.to_string().starts_with("model.safetensors: d2t: found"), "{error}");
        }
    }
}
