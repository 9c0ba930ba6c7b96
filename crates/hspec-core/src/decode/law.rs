//! A distribution over the target's vocabulary.

use crate::{Error, Result, TokenId};

/// The distribution of one token: those of positive probability, by ascending id, summing to 1 up to
/// rounding. Greedy decoding needs one entry, top-k and top-p few, a pruned drafter its own
/// vocabulary.
#[derive(Debug, Clone, PartialEq)]
pub struct Law {
    tokens: Vec<TokenId>,
    probabilities: Vec<f64>,
}

impl Law {
    /// All mass on one token.
    pub fn point(token: TokenId) -> Self {
        Self { tokens: vec![token], probabilities: vec![1.0] }
    }

    /// Weights of any total, in any order, normalised; those of a token given twice are added.
    ///
    /// # Errors
    /// [`Error::Request`] if a weight is negative or not finite, or if all are zero.
    pub fn from_weights(weights: impl IntoIterator<Item = (TokenId, f64)>) -> Result<Self> {
        let weights = weights.into_iter();
        let mut tokens = Vec::with_capacity(weights.size_hint().0);
        let mut kept = Vec::with_capacity(weights.size_hint().0);
        for (token, weight) in weights {
            if !(weight.is_finite() && weight >= 0.0) {
                let found = format!("{weight} for token {}", token.0);
                return Err(refused(found, "finite weights of at least 0"));
            }
            if weight > 0.0 {
                tokens.push(token);
                kept.push(weight);
            }
        }
        if !tokens.is_sorted_by(|a, b| a < b) {
            (tokens, kept) = sorted(tokens, kept);
        }
        Self::normalised(tokens, kept).ok_or_else(|| refused("no weight above 0".into(), "at least one"))
    }

    /// `tokens` strictly ascending, weights positive. None if they add up to nothing.
    fn normalised(tokens: Vec<TokenId>, mut weights: Vec<f64>) -> Option<Self> {
        let total: f64 = weights.iter().sum();
        if !(total.is_finite() && total > 0.0) {
            return None;
        }
        weights.iter_mut().for_each(|w| *w /= total);
        Some(Self { tokens, probabilities: weights })
    }

    /// The probability of `token`; 0 outside the support.
    pub fn prob(&self, token: TokenId) -> f64 {
        self.tokens.binary_search(&token).map_or(0.0, |i| self.probabilities[i])
    }

    /// Tokens of positive probability with their probabilities, by ascending id.
    pub fn iter(&self) -> impl Iterator<Item = (TokenId, f64)> + '_ {
        self.tokens.iter().copied().zip(self.probabilities.iter().copied())
    }

    /// The first token at which the cumulative probability exceeds `u` in [0, 1).
    pub fn quantile(&self, u: f64) -> TokenId {
        let mut cumulative = 0.0;
        let found = self.iter().find(|&(_, p)| {
            cumulative += p;
            u < cumulative
        });
        // Rounding may leave the total a little below 1, and u above it.
        let last = self.tokens.last().copied().expect("a law has at least one token");
        found.map_or(last, |(token, _)| token)
    }

    /// `(p - q)+`, normalised: what a rejected draw from `q` leaves of this law `p`. Where nothing is
    /// left, p itself: a rejection then had no probability either and comes from rounding.
    pub fn residual(&self, q: &Law) -> Law {
        let (mut tokens, mut weights) = (Vec::new(), Vec::new());
        let mut others = q.iter().peekable();
        for (token, p) in self.iter() {
            while others.next_if(|&(other, _)| other < token).is_some() {}
            let q = others.next_if(|&(other, _)| other == token).map_or(0.0, |(_, q)| q);
            if p > q {
                tokens.push(token);
                weights.push(p - q);
            }
        }
        if weights.iter().sum::<f64>() <= NO_MASS {
            return self.clone();
        }
        Self::normalised(tokens, weights).unwrap_or_else(|| self.clone())
    }
}

/// Residual mass below which the difference of two laws is rounding.
const NO_MASS: f64 = 1e-12;

fn sorted(tokens: Vec<TokenId>, weights: Vec<f64>) -> (Vec<TokenId>, Vec<f64>) {
    let mut pairs: Vec<_> = tokens.into_iter().zip(weights).collect();
    // Stable, so that sums do not depend on the sort.
    pairs.sort_by_key(|&(token, _)| token);
    pairs.dedup_by(|next, kept| {
        let same = next.0 == kept.0;
        if same {
            kept.1 += next.1;
        }
        same
    });
    pairs.into_iter().unzip()
}

fn refused(found: String, expected: &str) -> Error {
    Error::Request { what: "weights of a distribution", found, expected: expected.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn law(weights: &[(u32, f64)]) -> Law {
        Law::from_weights(weights.iter().map(|&(t, w)| (TokenId(t), w))).unwrap()
    }

    #[test]
    fn normalises_sorts_and_merges() {
        let law = law(&[(7, 1.0), (2, 2.0), (7, 4.0), (3, 0.0), (0, 1.0)]);
        let entries: Vec<_> = law.iter().collect();
        assert_eq!(entries, [(TokenId(0), 0.125), (TokenId(2), 0.25), (TokenId(7), 0.625)]);
        assert_eq!(law.prob(TokenId(7)), 0.625);
        assert_eq!(law.prob(TokenId(3)), 0.0);
    }

    #[test]
    fn refuses_weights_that_are_no_distribution() {
        for weights in [vec![], vec![(0, 0.0)], vec![(0, 1.0), (1, f64::NAN)], vec![(1, -1.0), (2, 3.0)]] {
            let weights = weights.into_iter().map(|(t, w)| (TokenId(t), w));
            assert!(matches!(Law::from_weights(weights), Err(Error::Request { .. })));
        }
    }

    #[test]
    fn quantiles_cut_the_unit_interval_by_probability() {
        let law = law(&[(1, 0.25), (4, 0.5), (9, 0.25)]);
        for (u, token) in [(0.0, 1), (0.2499, 1), (0.25, 4), (0.7499, 4), (0.75, 9), (1.0, 9)] {
            assert_eq!(law.quantile(u), TokenId(token), "{u}");
        }
    }

    #[test]
    fn the_residual_is_what_q_does_not_cover() {
        let p = law(&[(0, 0.5), (1, 0.25), (2, 0.25)]);
        let q = law(&[(0, 0.25), (1, 0.5), (5, 0.25)]);
        assert_eq!(p.residual(&q), law(&[(0, 0.5), (2, 0.5)]));
        // One-hot q: p without the token. Disjoint q: p.
        assert_eq!(p.residual(&Law::point(TokenId(0))), law(&[(1, 0.5), (2, 0.5)]));
        assert_eq!(p.residual(&Law::point(TokenId(8))), p);
    }

    /// p equals q up to rounding and a rejection is forced all the same.
    #[test]
    fn without_residual_mass_p_itself_remains() {
        let p = law(&[(0, 0.1), (1, 0.2), (2, 0.7)]);
        assert_eq!(p.residual(&p), p);
        let almost = law(&[(0, 0.1), (1, 0.2 + 1e-16), (2, 0.7 - 1e-16)]);
        assert_eq!(p.residual(&almost), p);
    }
}
