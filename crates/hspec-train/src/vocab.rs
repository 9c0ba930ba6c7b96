//! The pruned vocabulary, by counted responses.

use crate::responses::Response;
use hspec_core::TokenId;

/// The `required` tokens and the most frequent response tokens (ties: the lower id), filled up with the
/// lowest unused ids: `size` in all, ascending. A vocabulary without the tokens that end an answer could never
/// draft an end.
pub fn most_frequent(
    responses: &[Response],
    required: &[TokenId],
    vocab: usize,
    size: usize,
) -> Vec<TokenId> {
    let mut counts = vec![0u64; vocab];
    for token in responses.iter().flat_map(Response::supervised_ids) {
        if let Some(count) = counts.get_mut(token.index()) {
            *count += 1;
        }
    }
    for token in required {
        if let Some(count) = counts.get_mut(token.index()) {
            *count = u64::MAX;
        }
    }
    let mut ids: Vec<u32> = (0..vocab as u32).collect();
    // Stable, so that ties and the unused ids at the end stay in ascending order.
    ids.sort_by_key(|&id| std::cmp::Reverse(counts[id as usize]));
    ids.truncate(size);
    ids.sort_unstable();
    ids.into_iter().map(TokenId).collect()
}

/// Share of the response tokens that a vocabulary holds.
pub fn coverage(responses: &[Response], kept: &[TokenId]) -> f64 {
    let tokens = responses.iter().flat_map(Response::supervised_ids);
    let inside = tokens.clone().filter(|t| kept.binary_search(t).is_ok()).count();
    inside as f64 / (tokens.count() as f64).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_tokens_first_then_the_lowest_unused() {
        let ids = |v: &[u32]| v.iter().copied().map(TokenId).collect::<Vec<_>>();
        let response = Response::new("a", ids(&[9]), ids(&[7, 5, 7, 6, 5]));
        let responses = [response];
        assert_eq!(most_frequent(&responses, &[], 10, 2), ids(&[5, 7]));
        assert_eq!(most_frequent(&responses, &[], 10, 5), ids(&[0, 1, 5, 6, 7]));
        assert_eq!(coverage(&responses, &ids(&[5, 7])), 0.8);
        // The end of an answer is kept though no answer had one.
        assert_eq!(most_frequent(&responses, &ids(&[9]), 10, 2), ids(&[5, 9]));
    }
}
