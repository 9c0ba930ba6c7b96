//! DFlash-2's candidate selector.

use crate::{B, Weights, close, filled, floats, ids, matrix, numbers, tensor, tokens, weights};
use burn::tensor::{Int, Tensor};
use hspec_heads::CandidateSelector;
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Case {
    sizes: Sizes,
    /// `[n, k]`, ids of the target's vocabulary.
    prev: Vec<i64>,
    /// `[n, k, h]`.
    hidden: Vec<f32>,
    /// `[n, k, draft]`, few enough values that ties are common.
    logits: Vec<f32>,
    weights: Weights,
}

#[derive(Debug, Clone, Copy)]
struct Sizes {
    n: usize,
    k: usize,
    h: usize,
    rank: usize,
    vocab: usize,
    draft: usize,
    top: usize,
}

fn empty(s: Sizes) -> CandidateSelector<B> {
    CandidateSelector::init(s.vocab, s.draft, s.rank, s.h, s.top, &Default::default())
}

fn cases() -> impl Strategy<Value = Case> {
    (1..4usize, 1..5usize, 1..4usize, 1..4usize, 2..9usize, 1..8usize, 1..6usize)
        .prop_map(|(n, k, h, rank, vocab, draft, top)| Sizes { n, k, h, rank, vocab, draft, top })
        .prop_flat_map(|s| {
            let rows = s.n * s.k;
            let logits = proptest::collection::vec((-3i8..3).prop_map(f32::from), rows * s.draft);
            (tokens(s.vocab, rows), floats(rows * s.h), logits, weights(&empty(s))).prop_map(
                move |(prev, hidden, logits, weights)| Case { sizes: s, prev, hidden, logits, weights },
            )
        })
}

impl Case {
    fn selector(&self) -> CandidateSelector<B> {
        filled(empty(self.sizes), &self.weights)
    }

    fn inputs(&self) -> (Tensor<B, 3>, Tensor<B, 2, Int>, Tensor<B, 3>) {
        let Sizes { n, k, h, draft, .. } = self.sizes;
        (tensor(&self.logits, [n, k, draft]), ids(&self.prev, [n, k]), tensor(&self.hidden, [n, k, h]))
    }

    /// Candidates and scores of one row by the definition.
    fn naive(&self, row: usize) -> Vec<(i64, f32)> {
        let Sizes { h, rank, draft, top, .. } = self.sizes;
        let logits = &self.logits[row * draft..][..draft];
        let mut order: Vec<usize> = (0..draft).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a])); // stable
        let before = &self.weights["predecessor_codebook"][self.prev[row] as usize * rank..][..rank];
        let projected = matrix(&self.weights["hidden_projection.weight"], &self.hidden[row * h..][..h]);
        let query: Vec<f32> = before.iter().zip(projected).map(|(a, p)| a * p).collect();
        let edge = |id: usize| matrix(&self.weights["successor_codebook"][id * rank..][..rank], &query)[0];
        order.into_iter().take(top).map(|id| (id as i64, logits[id] + edge(id))).collect()
    }

    fn rows(&self) -> usize {
        self.sizes.n * self.sizes.k
    }
}

proptest! {
    /// Predecessors are ids of the target's vocabulary, candidates of the draft's
    /// (vllm-project/vllm-ascend#16166).
    #[test]
    fn candidates_and_scores_are_what_the_equations_say(case in cases()) {
        let (logits, prev, hidden) = case.inputs();
        let found = case.selector().block(logits, prev, hidden);
        let Sizes { n, k, draft, top, .. } = case.sizes;
        prop_assert_eq!(found.scores.dims(), [n, k, top.min(draft)]);
        let (ids, scores): (Vec<_>, Vec<_>) = (0..case.rows()).flat_map(|row| case.naive(row)).unzip();
        prop_assert_eq!(found.ids.into_data().iter::<i64>().collect::<Vec<_>>(), ids);
        close(&numbers(found.scores), &scores)?;
    }

    /// Drafting slot by slot along known tokens gives the scores of the block, and nothing elsewhere.
    #[test]
    fn a_step_is_the_block_s_slot_and_minus_infinity_outside(case in cases()) {
        let selector = case.selector();
        let (logits, prev, hidden) = case.inputs();
        let Sizes { n, k, h, draft, .. } = case.sizes;
        for slot in 0..k {
            let step = selector.step(
                logits.clone().narrow(1, slot, 1).reshape([n, draft]),
                prev.clone().narrow(1, slot, 1).reshape([n]),
                hidden.clone().narrow(1, slot, 1).reshape([n, h]),
            );
            let step = numbers(step);
            for block in 0..n {
                let mut expected = vec![f32::NEG_INFINITY; draft];
                for (id, score) in case.naive(block * k + slot) {
                    expected[id as usize] = score;
                }
                for (found, expected) in step[block * draft..].iter().zip(expected) {
                    let equal = *found == expected || (found - expected).abs() <= 1e-3;
                    prop_assert!(equal, "{found} against {expected}");
                }
            }
        }
    }

    #[test]
    fn rescored_logits_differ_at_the_candidates_only(case in cases()) {
        let (logits, prev, hidden) = case.inputs();
        let found = numbers(case.selector().rescore(logits, prev, hidden));
        let mut expected = case.logits.clone();
        for row in 0..case.rows() {
            for (id, score) in case.naive(row) {
                expected[row * case.sizes.draft + id as usize] = score;
            }
        }
        close(&found, &expected)?;
    }

    #[test]
    fn a_fresh_selector_keeps_the_logits(case in cases()) {
        let (logits, prev, hidden) = case.inputs();
        prop_assert_eq!(numbers(empty(case.sizes).rescore(logits, prev, hidden)), case.logits);
    }
}
