//! Who may see whom, as rules over original positions and documents.
//!
//! A row of a packed batch never decides visibility by its index alone: a prefix key is visible
//! because its document is the anchor's and its position lies before the anchor, inside the window.

use crate::Position;
use std::ops::Range;

/// Which of the two window rules of the released code applies once the prefix is longer than the
/// window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowRule {
    /// All slots see the prefix keys at positions `>= anchor - window`; block keys are never cut.
    /// The rule the weights are trained with.
    Training,
    /// Slot `t` sees keys, of prefix or block, less than `window` positions away: the rolling window of
    /// flash attention.
    Serving,
}

/// Visibility for the blocks of one attention layer (H-Spec section 3.2; DSpark and DFlash likewise).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRule {
    /// Window in tokens; none for full attention.
    pub window: Option<usize>,
    /// Which window rule.
    pub rule: WindowRule,
    /// Whether slot `t` sees only block slots `<= t`.
    pub causal: bool,
}

/// Where a block starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Anchor {
    /// Index of the anchor among the prefix keys: it may see keys before this index.
    pub index: usize,
    /// Index of the first key of the anchor's document.
    pub document: usize,
    /// Position of the anchor in its document, which its rotary embedding continues.
    pub position: Position,
}

impl Anchor {
    /// The anchor of a single document whose keys start at index 0.
    pub fn at(index: usize) -> Self {
        Self { index, document: 0, position: Position(index) }
    }
}

impl BlockRule {
    /// Indices of the prefix keys that slot `t` of the block at `anchor` sees.
    pub fn prefix(&self, anchor: &Anchor, t: usize) -> Range<usize> {
        let first = match (self.window, self.rule) {
            (None, _) => 0,
            (Some(w), WindowRule::Training) => anchor.index.saturating_sub(w),
            (Some(w), WindowRule::Serving) => (anchor.index + t + 1).saturating_sub(w),
        };
        let end = anchor.index;
        first.max(anchor.document).min(end)..end
    }

    /// Whether slot `t` sees the key of slot `s` of its own block.
    pub fn block(&self, s: usize, t: usize) -> bool {
        let causal = !self.causal || s <= t;
        let inside = match (self.window, self.rule) {
            (Some(w), WindowRule::Serving) => s + w > t && s < t + w,
            _ => true,
        };
        causal && inside
    }

    /// The slots of its own block of `k` that slot `t` sees: neighbours always, itself among them.
    pub fn own(&self, t: usize, k: usize) -> Range<usize> {
        let first = (0..t).find(|&s| self.block(s, t)).unwrap_or(t);
        let last = (t + 1..k).rev().find(|&s| self.block(s, t)).unwrap_or(t);
        first..last + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn rule(rule: WindowRule) -> BlockRule {
        BlockRule { window: Some(4), rule, causal: true }
    }

    #[test]
    fn the_two_window_rules_differ_by_t_plus_one() {
        let anchor = Anchor::at(10);
        assert_eq!(rule(WindowRule::Training).prefix(&anchor, 0), 6..10);
        assert_eq!(rule(WindowRule::Training).prefix(&anchor, 3), 6..10);
        assert_eq!(rule(WindowRule::Serving).prefix(&anchor, 0), 7..10);
        assert_eq!(rule(WindowRule::Serving).prefix(&anchor, 2), 9..10);
        assert_eq!(rule(WindowRule::Serving).prefix(&anchor, 3), 10..10);
        assert!(!rule(WindowRule::Serving).block(0, 4));
        assert!(rule(WindowRule::Serving).block(1, 4));
        assert!(rule(WindowRule::Training).block(0, 4));
    }

    /// A window of 2048 once held 2049 keys in one program and 2048 in another (vllm#3385). In serving it is of
    /// `window` keys, the query's own included; in training the weights saw as many before the anchor.
    #[test]
    fn a_window_of_w_holds_w_keys_the_query_s_own_included() {
        for (position, before, trained) in [(2, 2, 2), (3, 3, 3), (4, 3, 4), (5, 3, 4), (9, 3, 4)] {
            let anchor = Anchor::at(position);
            assert_eq!(rule(WindowRule::Serving).prefix(&anchor, 0).len(), before, "{position}");
            assert_eq!(rule(WindowRule::Training).prefix(&anchor, 0).len(), trained, "{position}");
        }
        // Inside the block too: slot 4 is as far from slot 0 as the window is wide.
        let seen = |t: usize| (0..=t).filter(|&s| rule(WindowRule::Serving).block(s, t)).count();
        assert_eq!((2..6).map(seen).collect::<Vec<_>>(), [3, 4, 4, 4]);
    }

    /// Overlapping anchors once let a block see target states of its own future.
    #[test]
    fn anchors_closer_than_a_block_see_only_keys_before_themselves() {
        let full = BlockRule { window: None, rule: WindowRule::Training, causal: true };
        for anchor in [5, 7] {
            assert_eq!(full.prefix(&Anchor::at(anchor), 3), 0..anchor);
        }
    }

    #[test]
    fn no_key_of_an_earlier_document_is_visible() {
        let anchor = Anchor { index: 10, document: 8, position: Position(2) };
        assert_eq!(rule(WindowRule::Training).prefix(&anchor, 0), 8..10);
    }

    /// In a block that is not causal, what comes too late is as far away as what came too early.
    #[test]
    fn a_rolling_window_reaches_as_far_ahead_as_back() {
        let rolling = BlockRule { window: Some(2), rule: WindowRule::Serving, causal: false };
        let seen: Vec<usize> = (0..6).filter(|&s| rolling.block(s, 3)).collect();
        assert_eq!(seen, [2, 3, 4]);
    }

    #[test]
    fn own_slots_are_those_that_the_rule_admits_one_by_one() {
        for (window, causal) in
            [(None, true), (None, false), (Some(2), true), (Some(2), false), (Some(1), true)]
        {
            for rule in [WindowRule::Training, WindowRule::Serving] {
                let rule = BlockRule { window, rule, causal };
                for t in 0..6 {
                    let seen: Vec<usize> = (0..6).filter(|&s| rule.block(s, t)).collect();
                    assert_eq!(rule.own(t, 6).collect::<Vec<_>>(), seen, "{rule:?} {t}");
                }
            }
        }
    }

    #[test]
    fn full_attention_is_bidirectional_inside_the_block_when_not_causal() {
        let full = BlockRule { window: None, rule: WindowRule::Serving, causal: false };
        assert!(full.block(7, 0));
        assert!(!BlockRule { causal: true, ..full }.block(7, 0));
    }
}
