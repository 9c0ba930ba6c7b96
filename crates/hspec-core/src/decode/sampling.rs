//! From logits to the law that a token is sampled from.

use super::Law;
use crate::{Error, Result, TokenId};
use std::cmp::Ordering;

/// Below this temperature decoding is greedy.
const GREEDY_BELOW: f64 = 1e-5;

/// How a request samples: temperature, then the `top_k` most probable tokens, then the smallest set of
/// most probable tokens whose total reaches `top_p`. Ties go to the lower id.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParams {
    temperature: f64,
    top_k: Option<usize>,
    top_p: Option<f64>,
}

impl SamplingParams {
    /// Temperature 0 (or below 1e-5) is greedy decoding, whatever the rest says.
    ///
    /// # Errors
    /// [`Error::Request`] unless the temperature is finite and at least 0, `top_k` at least 1 and
    /// `top_p` in (0, 1].
    pub fn new(temperature: f64, top_k: Option<usize>, top_p: Option<f64>) -> Result<Self> {
        let refused = |what, found: String, expected: &str| {
            Err(Error::Request { what, found, expected: expected.into() })
        };
        if !(temperature.is_finite() && temperature >= 0.0) {
            return refused("temperature", temperature.to_string(), "a finite number of at least 0");
        }
        if top_k == Some(0) {
            return refused("top-k", "0".into(), "at least 1");
        }
        if let Some(p) = top_p.filter(|&p| !(p > 0.0 && p <= 1.0)) {
            return refused("top-p", p.to_string(), "a number above 0, at most 1");
        }
        // A total of 1 keeps every token; rounding must not make it lose one.
        Ok(Self { temperature, top_k, top_p: top_p.filter(|&p| p < 1.0) })
    }

    /// Always the most probable token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_k: None, top_p: None }
    }

    /// Whether the most probable token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW
    }

    /// The temperature.
    pub fn temperature(&self) -> f64 {
        self.temperature
    }

    /// The law of the token at `position` (named in errors) from the target's logits, one per token of
    /// its vocabulary: computed in f64; greedy, a point on the first maximum. Logits of -inf are
    /// tokens that cannot occur.
    ///
    /// # Errors
    /// [`Error::Request`] if there is no logit, if one is NaN or +inf, or if all are -inf.
    pub fn distribution(&self, logits: &[f32], position: u64) -> Result<Law> {
        let best = first_maximum("target logits", logits, position)?;
        let id = |i: usize| TokenId(i as u32);
        if self.is_greedy() {
            return Ok(Law::point(id(best)));
        }
        if self.top_k.is_none() && self.top_p.is_none() {
            return Law::from_weights(self.weights(logits, best).enumerate().map(|(i, w)| (id(i), w)));
        }
        // Adding 0 makes one zero of the two, which the total order would tell apart.
        let mut kept: Vec<_> = logits.iter().enumerate().map(|(i, &l)| (id(i), f64::from(l + 0.0))).collect();
        if let Some(k) = self.top_k {
            keep_most_probable(&mut kept, k);
        }
        let max = f64::from(logits[best]);
        kept.iter_mut().for_each(|(_, l)| *l = ((*l - max) / self.temperature).exp());
        if let Some(p) = self.top_p {
            keep_nucleus(&mut kept, p);
        }
        Law::from_weights(kept)
    }

    /// The law that a drafter's token is drawn from: its logits at this request's temperature, and no
    /// truncation, which only the target's law needs. `targets[i]` is the target's token of logit i
    /// where the draft vocabulary is pruned; none where the vocabularies are the same.
    ///
    /// # Errors
    /// Those of [`distribution`](Self::distribution); [`Error::Mismatch`] if `targets` has another
    /// length than `logits`.
    pub fn draft_distribution(
        &self,
        logits: &[f32],
        targets: Option<&[TokenId]>,
        position: u64,
    ) -> Result<Law> {
        if let Some(targets) = targets.filter(|t| t.len() != logits.len()) {
            let (found, expected) = (logits.len(), targets.len());
            return Err(Error::Mismatch(format!(
                "{found} draft logits for a draft vocabulary of {expected}"
            )));
        }
        let best = first_maximum("draft logits", logits, position)?;
        let id = |i: usize| targets.map_or(TokenId(i as u32), |t| t[i]);
        if self.is_greedy() {
            return Ok(Law::point(id(best)));
        }
        Law::from_weights(self.weights(logits, best).enumerate().map(|(i, w)| (id(i), w)))
    }

    /// `exp((l - max) / T)` in order, `max` being `logits[best]`.
    fn weights<'a>(&self, logits: &'a [f32], best: usize) -> impl ExactSizeIterator<Item = f64> + 'a {
        let (max, temperature) = (f64::from(logits[best]), self.temperature);
        logits.iter().map(move |&l| ((f64::from(l) - max) / temperature).exp())
    }
}

/// Index of the first maximum, having looked at every logit.
fn first_maximum(what: &'static str, logits: &[f32], position: u64) -> Result<usize> {
    let refused = |found: String| {
        let found = format!("{found} at position {position}");
        Err(Error::Request { what, found, expected: "numbers below infinity, not all -inf".into() })
    };
    let number = |x: &f32| *x < f32::INFINITY;
    // In lanes, which the compiler turns into vectors: a vocabulary is long.
    const LANES: usize = 16;
    let (mut lanes, mut numbers) = ([f32::NEG_INFINITY; LANES], true);
    let chunks = logits.chunks_exact(LANES);
    let mut max = chunks.remainder().iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
    numbers &= chunks.remainder().iter().all(number);
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = if *x > *lane { *x } else { *lane };
            numbers &= number(x);
        }
    }
    max = lanes.iter().fold(max, |a, b| a.max(*b));
    if !numbers && let Some((i, logit)) = logits.iter().enumerate().find(|(_, x)| !number(x)) {
        return refused(format!("{logit} for token {i}"));
    }
    match logits.iter().position(|x| *x == max) {
        Some(best) if max > f32::NEG_INFINITY => Ok(best),
        _ => refused(format!("no finite one among {}", logits.len())),
    }
}

/// Most probable first, the lower id first among equals: no result depends on how a sort works.
fn descending(a: &(TokenId, f64), b: &(TokenId, f64)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

fn keep_most_probable(entries: &mut Vec<(TokenId, f64)>, k: usize) {
    if k < entries.len() {
        entries.select_nth_unstable_by(k, descending);
        entries.truncate(k);
    }
}

/// Keeps the most probable entries up to the one that brings the total to `p` of all weight.
fn keep_nucleus(entries: &mut Vec<(TokenId, f64)>, p: f64) {
    let needed = p * entries.iter().map(|e| e.1).sum::<f64>();
    // The set is small as a rule, so sort a growing head and not the whole vocabulary.
    let mut head = 64;
    loop {
        head = head.min(entries.len());
        if head < entries.len() {
            entries.select_nth_unstable_by(head, descending);
        }
        entries[..head].sort_unstable_by(descending);
        let mut total = 0.0;
        let before = |e: &(TokenId, f64)| {
            let below = total < needed;
            total += e.1;
            below
        };
        let kept = entries[..head].iter().map(before).take_while(|&below| below).count();
        if kept < head || head == entries.len() {
            entries.truncate(kept);
            return;
        }
        head *= 8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_abs_diff_eq;
    use proptest::prelude::*;

    fn params(temperature: f64, top_k: Option<usize>, top_p: Option<f64>) -> SamplingParams {
        SamplingParams::new(temperature, top_k, top_p).unwrap()
    }

    /// Logits of these probabilities.
    fn logs(probabilities: &[f64]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln() as f32).collect()
    }

    fn assert_law(law: &Law, expected: &[f64]) {
        for (t, &p) in expected.iter().enumerate() {
            assert_abs_diff_eq!(law.prob(TokenId(t as u32)), p, epsilon = 1e-6);
        }
        let support = expected.iter().filter(|&&p| p > 0.0).count();
        assert_eq!(law.iter().count(), support, "{law:?}");
    }

    #[test]
    fn refuses_parameters_outside_their_range() {
        for (t, k, p, what) in [
            (f64::NAN, None, None, "temperature"),
            (f64::INFINITY, None, None, "temperature"),
            (-0.1, None, None, "temperature"),
            (1.0, Some(0), None, "top-k"),
            (1.0, None, Some(0.0), "top-p"),
            (1.0, None, Some(-0.5), "top-p"),
            (1.0, None, Some(1.01), "top-p"),
            (1.0, None, Some(f64::NAN), "top-p"),
            (0.0, Some(0), None, "top-k"),
        ] {
            let error = SamplingParams::new(t, k, p).unwrap_err();
            assert!(error.to_string().starts_with(what), "{error}");
        }
    }

    #[test]
    fn greedy_is_a_point_on_the_first_maximum() {
        let logits = [1.0, 3.0, -2.0, 3.0];
        for t in [0.0, 9e-6] {
            let params = params(t, Some(2), Some(0.5));
            assert!(params.is_greedy());
            assert_eq!(params.distribution(&logits, 0).unwrap(), Law::point(TokenId(1)));
        }
        assert!(!params(1e-5, None, None).is_greedy());
        // Just above the border it is a softmax, which does not overflow.
        assert_law(&params(1e-5, None, None).distribution(&logits, 0).unwrap(), &[0.0, 0.5, 0.0, 0.5]);
    }

    #[test]
    fn temperature_divides_the_logits() {
        let logits = logs(&[0.8, 0.2]);
        assert_law(&params(1.0, None, None).distribution(&logits, 0).unwrap(), &[0.8, 0.2]);
        // T = 1/2 squares the odds.
        let (a, b) = (0.64, 0.04);
        let expected = [a / (a + b), b / (a + b)];
        assert_law(&params(0.5, None, None).distribution(&logits, 0).unwrap(), &expected);
    }

    #[test]
    fn top_k_keeps_k_and_prefers_lower_ids() {
        let logits = logs(&[0.1, 0.4, 0.1, 0.3, 0.1]);
        let law = params(1.0, Some(3), None).distribution(&logits, 0).unwrap();
        assert_law(&law, &[0.125, 0.5, 0.0, 0.375, 0.0]);
        let all = params(1.0, Some(9), None).distribution(&logits, 0).unwrap();
        assert_law(&all, &[0.1, 0.4, 0.1, 0.3, 0.1]);
        // The two zeros are one number.
        let one = params(1.0, Some(1), None).distribution(&[-0.0, 0.0], 0).unwrap();
        assert_eq!(one, Law::point(TokenId(0)));
        // At any temperature, one token is the maximum.
        let one = params(1e30, Some(1), None).distribution(&[1.0, 2.0], 0).unwrap();
        assert_eq!(one, Law::point(TokenId(1)));
    }

    #[test]
    fn top_p_keeps_the_token_that_reaches_the_total() {
        let logits = logs(&[0.1, 0.5, 0.25, 0.15]);
        for (p, expected) in [
            (0.4, [0.0, 1.0, 0.0, 0.0]),
            (0.6, [0.0, 2.0 / 3.0, 1.0 / 3.0, 0.0]),
            (0.76, [0.0, 0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9]),
            (1.0, [0.1, 0.5, 0.25, 0.15]),
        ] {
            assert_law(&params(1.0, None, Some(p)).distribution(&logits, 0).unwrap(), &expected);
        }
        // After top-k the total is that of the tokens kept: 0.5 of 0.75 is 2/3.
        let law = params(1.0, Some(2), Some(0.66)).distribution(&logits, 0).unwrap();
        assert_law(&law, &[0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn logits_that_mean_nothing_name_the_position() {
        for logits in [
            &[0.0, f32::NAN][..],
            &[f32::NAN, 0.0],
            &[f32::INFINITY, 0.0],
            &[f32::NEG_INFINITY, f32::NEG_INFINITY],
            &[],
        ] {
            for params in [SamplingParams::greedy(), params(1.0, Some(1), Some(0.5))] {
                let error = params.distribution(logits, 321).unwrap_err().to_string();
                assert!(error.starts_with("target logits") && error.contains("position 321"), "{error}");
                let error = params.draft_distribution(logits, None, 321).unwrap_err().to_string();
                assert!(error.starts_with("draft logits") && error.contains("position 321"), "{error}");
            }
        }
        let masked = [f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY];
        assert_eq!(params(1.0, None, None).distribution(&masked, 0).unwrap(), Law::point(TokenId(1)));
    }

    #[test]
    fn a_pruned_draft_law_is_zero_elsewhere() {
        let targets = [TokenId(2), TokenId(5), TokenId(9)];
        let logits = logs(&[0.2, 0.5, 0.3]);
        // Truncation is the target's affair.
        let law = params(1.0, Some(1), Some(0.1)).draft_distribution(&logits, Some(&targets), 0).unwrap();
        assert_law(&law, &[0.0, 0.0, 0.2, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.3]);
        let law = SamplingParams::greedy().draft_distribution(&logits, Some(&targets), 0).unwrap();
        assert_eq!(law, Law::point(TokenId(5)));
        let error = SamplingParams::greedy().draft_distribution(&logits, Some(&targets[..2]), 0);
        assert!(matches!(error, Err(Error::Mismatch(_))));
    }

    proptest! {
        /// Against a sort of the whole vocabulary, large enough to need several heads.
        #[test]
        fn equals_a_full_sort(
            seed in any::<u64>(), n in 1usize..700, spread in 0.0f32..4.0,
            temperature in 0.2f64..3.0,
            top_k in proptest::option::of(1usize..800), top_p in proptest::option::of(0.01f64..1.0),
        ) {
            let mut state = seed;
            let logits: Vec<f32> = (0..n).map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                // Few values, so that there are ties.
                ((state >> 60) as f32 / 4.0) * spread
            }).collect();
            let mut order: Vec<usize> = (0..n).collect();
            order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap());
            order.truncate(top_k.unwrap_or(n));
            let weight = |i: usize| (f64::from(logits[i]) / temperature).exp();
            let all: f64 = order.iter().map(|&i| weight(i)).sum();
            let mut total = 0.0;
            let mut kept = vec![];
            for &i in &order {
                // Where the total falls on the border, rounding decides: leave those cases out.
                prop_assume!((total / all - top_p.unwrap_or(2.0)).abs() > 1e-9);
                if total / all >= top_p.unwrap_or(2.0) {
                    break;
                }
                total += weight(i);
                kept.push(i);
            }
            let law = params(temperature, top_k, top_p).distribution(&logits, 0).unwrap();
            prop_assert_eq!(law.iter().count(), kept.len());
            for i in kept {
                let found = law.prob(TokenId(i as u32));
                prop_assert!((found - weight(i) / total).abs() < 1e-12, "{}: {}", i, found);
            }
        }
    }
}
