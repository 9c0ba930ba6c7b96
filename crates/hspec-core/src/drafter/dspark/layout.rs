//! Where the slots of a block point.

/// Which token a slot predicts. A block is the anchor and mask tokens behind it; slot 0 is the anchor's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Slot k predicts the token behind its position: the anchor's slot proposes too (DSpark).
    AnchorPredicts,
    /// Slot k predicts the token at its position: the anchor's slot proposes nothing (DFlash).
    SlotPredictsItself,
}

impl Layout {
    /// The first slot that predicts.
    pub fn first(self) -> usize {
        match self {
            Self::AnchorPredicts => 0,
            Self::SlotPredictsItself => 1,
        }
    }

    /// Position of the token that a slot predicts. Slot 0 of [`Layout::SlotPredictsItself`] gets the
    /// anchor's, which nobody asks for.
    pub fn label(self, anchor: usize, slot: usize) -> usize {
        anchor + slot + 1 - self.first()
    }

    /// Position of the token before the one that a slot predicts; the anchor's for the first.
    pub fn previous(self, anchor: usize, slot: usize) -> usize {
        anchor + slot.saturating_sub(self.first())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A left shift inherited from step-by-step drafters once paired slots with their neighbours' labels.
    #[test]
    fn labels_and_previous_tokens_of_both_layouts() {
        let at = |layout: Layout| -> Vec<_> {
            (layout.first()..4).map(|k| (layout.previous(10, k), layout.label(10, k))).collect()
        };
        assert_eq!(at(Layout::AnchorPredicts), [(10, 11), (11, 12), (12, 13), (13, 14)]);
        assert_eq!(at(Layout::SlotPredictsItself), [(10, 11), (11, 12), (12, 13)]);
    }
}
