//! How many of the supervised tokens training looks at.
//!
//! Anchors are drawn at random, so an epoch does not hold a drafter against every token. With too few anchors for
//! long rows, most of the data is never learned from, and no loss shows it.

use hspec_attn::Anchor;
use std::{collections::HashSet, ops::Range};

/// Packed tokens that slots `slots` of the blocks at `anchors` are held against: supervised, and of the anchor's
/// document. Slot t stands for the token t behind the anchor.
pub fn judged(loss_mask: &[bool], positions: &[usize], anchors: &[Anchor], slots: Range<usize>) -> usize {
    let tokens = anchors.iter().flat_map(|anchor| {
        slots
            .clone()
            .map(|t| (anchor.index + t, anchor.position + t))
            .filter(|&(index, position)| loss_mask.get(index) == Some(&true) && positions[index] == position)
    });
    tokens.map(|(index, _)| index).collect::<HashSet<_>>().len()
}

/// Counts an epoch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Coverage {
    epoch: u64,
    judged: usize,
    supervised: usize,
}

impl Coverage {
    /// Adds a step that began in `epoch`: tokens that it was held against, of its supervised tokens. When an epoch
    /// has ended, its number and the share of its supervised tokens that was covered.
    pub fn step(&mut self, epoch: u64, judged: usize, supervised: usize) -> Option<(u64, f64)> {
        let ended = (epoch != self.epoch && self.supervised > 0).then(|| (self.epoch, self.share()));
        if epoch != self.epoch {
            *self = Self { epoch, ..Self::default() };
        }
        self.judged += judged;
        self.supervised += supervised;
        ended
    }

    /// The share so far.
    pub fn share(&self) -> f64 {
        self.judged as f64 / (self.supervised as f64).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Anchors per packed row instead of per document once halved what was learned from, unseen.
    #[test]
    fn tokens_count_once_and_blocks_end_with_their_document() {
        // Documents of 5 and 4 tokens; the first of each is the prompt.
        let positions = [0, 1, 2, 3, 4, 0, 1, 2, 3];
        let mask = positions.map(|p| p > 0);
        let anchor =
            |index: usize| Anchor { index, document: index - positions[index], position: positions[index] };
        assert_eq!(judged(&mask, &positions, &[anchor(1)], 1..4), 3);
        assert_eq!(judged(&mask, &positions, &[anchor(1), anchor(2)], 1..4), 3);
        assert_eq!(judged(&mask, &positions, &[anchor(3), anchor(7)], 1..4), 2);
        assert_eq!(judged(&mask, &positions, &[anchor(4)], 0..4), 1);
    }

    #[test]
    fn an_epoch_is_told_when_it_has_ended() {
        let mut coverage = Coverage::default();
        assert_eq!(coverage.step(0, 3, 10), None);
        assert_eq!(coverage.step(0, 2, 10), None);
        assert_eq!(coverage.share(), 0.25);
        assert_eq!(coverage.step(1, 4, 4), Some((0, 0.25)));
        assert_eq!(coverage.step(2, 1, 2), Some((1, 1.0)));
    }
}
