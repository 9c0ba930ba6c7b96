//! How long a block may be.

/// The number of drafts for the next round: `k`, or less where a limit is near; 0 means that this
/// token must be decoded plainly.
///
/// - `anchor` is the position of the token sampled last, which the target has not processed yet, and
///   `context` the number of positions that the target has. Verifying k drafts processes the anchor
///   and the drafts, so it writes k + 1 cache entries, at `anchor ..= anchor + k`: k is at most
///   `context - 1 - anchor`.
/// - `tokens_left` is the number of tokens that the request may still emit. A round emits at most
///   k + 1 of them.
///
/// With `anchor >= context` or `tokens_left == 0` there is nothing left to decode at all; the result
/// is 0 there too, and the caller has to stop.
pub fn draft_length(k: usize, anchor: usize, context: usize, tokens_left: usize) -> usize {
    let room = context.saturating_sub(anchor).saturating_sub(1);
    k.min(room).min(tokens_left.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Context of 4096, anchor at 4092, 5 drafts wanted (exllamav2#274, vllm#5342).
    #[test]
    fn shrinks_at_the_end_of_the_context() {
        assert_eq!(draft_length(5, 4092, 4096, 1000), 3);
        assert_eq!(draft_length(5, 4090, 4096, 1000), 5);
        assert_eq!(draft_length(5, 4095, 4096, 1000), 0);
        assert_eq!(draft_length(5, 4096, 4096, 1000), 0);
        assert_eq!(draft_length(5, 9000, 4096, 1000), 0);
    }

    #[test]
    fn never_emits_more_than_allowed() {
        assert_eq!(draft_length(7, 0, 4096, 8), 7);
        assert_eq!(draft_length(7, 0, 4096, 5), 4);
        assert_eq!(draft_length(7, 0, 4096, 1), 0);
        assert_eq!(draft_length(7, 0, 4096, 0), 0);
    }

    proptest! {
        #[test]
        fn is_the_largest_that_fits(
            k in 0usize..10, anchor in 0usize..40, context in 0usize..40, tokens_left in 0usize..12,
        ) {
            let fits = |k: usize| k == 0 || (anchor + k < context && k < tokens_left);
            let length = draft_length(k, anchor, context, tokens_left);
            prop_assert!(length <= k);
            prop_assert!(fits(length));
            prop_assert!(length == k || !fits(length + 1));
        }
    }
}
