//! How likely each drafted token is to be kept.

/// Survival probabilities of the drafts of several requests: `a_{r,j} = c_{r,1} .. c_{r,j}`, the
/// probability that the first j drafts of request r are all accepted, from the conditional confidences
/// c in slot order (DSpark, section 3.2).
#[derive(Debug, Clone, PartialEq)]
pub struct Survival {
    rows: Vec<Vec<f64>>,
    unusable: usize,
}

/// The j-th draft of a request, j from 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Index of the request.
    pub request: usize,
    /// j: the length of the request's draft with this token as its last.
    pub length: usize,
    /// `a_{r,j}`.
    pub survival: f64,
}

impl Survival {
    /// From one row of confidences per request; rows may differ in length. What is no probability (NaN,
    /// infinite, outside [0, 1]) counts as 0, so that nothing from that slot on is worth verifying, and
    /// is counted in [`unusable`](Self::unusable).
    pub fn new<R: AsRef<[f64]>>(confidences: &[R]) -> Self {
        let mut unusable = 0;
        let rows = confidences.iter().map(|row| {
            let product = |reached: &mut f64, c: f64| {
                *reached *= c;
                Some(*reached)
            };
            let usable = row.as_ref().iter().map(|&c| usable(c, &mut unusable));
            usable.scan(1.0, product).collect()
        });
        let rows = rows.collect();
        Self { rows, unusable }
    }

    /// Number of requests.
    pub fn requests(&self) -> usize {
        self.rows.len()
    }

    /// `a_{r,1} ..` of request r.
    ///
    /// # Panics
    /// If there is no such request.
    pub fn row(&self, request: usize) -> &[f64] {
        &self.rows[request]
    }

    /// Number of confidences that were no probability.
    pub fn unusable(&self) -> usize {
        self.unusable
    }

    /// Every draft that may survive at all, most likely first: Algorithm 1's order of admission. Among
    /// equals the earlier request comes first, and within it the earlier draft, which is never less
    /// likely than those after it: any beginning of this list is a prefix of each request's draft. Two
    /// requests of equal confidences differ in nothing but their order, so that a beginning which holds more
    /// of one than of the other cannot follow a permutation; [`PrefixScheduler`](crate::PrefixScheduler),
    /// which knows their ids, orders them by these first.
    pub fn ranked(&self) -> Vec<Candidate> {
        let of_request = |(request, row): (usize, &Vec<f64>)| {
            let candidate = move |(j, &survival)| Candidate { request, length: j + 1, survival };
            row.iter().enumerate().map(candidate).collect::<Vec<_>>()
        };
        let mut ranked: Vec<_> =
            self.rows.iter().enumerate().flat_map(of_request).filter(|c| c.survival > 0.0).collect();
        ranked.sort_by(|a, b| b.survival.total_cmp(&a.survival));
        ranked
    }

    /// Expected tokens of a round that verifies the first `lengths[r]` drafts of request r: one per
    /// request and the survivals of what is verified.
    pub fn expected_tokens(&self, lengths: &[usize]) -> f64 {
        let drafts = self.rows.iter().zip(lengths).flat_map(|(row, &length)| &row[..length.min(row.len())]);
        self.rows.len() as f64 + drafts.sum::<f64>()
    }
}

/// The confidence, or 0 where it is no probability.
pub(crate) fn usable(confidence: f64, unusable: &mut usize) -> f64 {
    if (0.0..=1.0).contains(&confidence) {
        return confidence;
    }
    *unusable += 1;
    0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A confidence of NaN or outside [0, 1] (TensorRT-LLM#15808): no verification, and a count.
    #[test]
    fn a_confidence_that_is_no_probability_counts_as_zero() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1e-9, 1.0 + 1e-9] {
            let survival = Survival::new(&[vec![0.5, bad, 0.9, bad], vec![1.0, 0.0]]);
            assert_eq!(survival.row(0), [0.5, 0.0, 0.0, 0.0]);
            assert_eq!(survival.row(1), [1.0, 0.0]);
            assert_eq!(survival.unusable(), 2);
            let ranked: Vec<_> = survival.ranked().iter().map(|c| (c.request, c.length)).collect();
            assert_eq!(ranked, [(1, 1), (0, 1)]);
        }
    }

    /// With c = 1 a draft is as likely as the one before it; an unstable sort may swap them.
    #[test]
    fn equals_keep_the_order_of_requests_and_slots() {
        let survival = Survival::new(&vec![vec![1.0; 8]; 12]);
        let ranked: Vec<_> = survival.ranked().iter().map(|c| (c.request, c.length)).collect();
        let expected: Vec<_> = (0..12).flat_map(|r| (1..=8).map(move |j| (r, j))).collect();
        assert_eq!(ranked, expected);
    }

    #[test]
    fn expected_tokens_count_the_anchors() {
        let survival = Survival::new(&[vec![0.5, 0.5], vec![0.25]]);
        assert_eq!(survival.expected_tokens(&[0, 0]), 2.0);
        assert_eq!(survival.expected_tokens(&[2, 1]), 3.0);
        assert_eq!(survival.expected_tokens(&[9, 9]), 3.0);
    }
}
