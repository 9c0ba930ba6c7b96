//! Domino's correction.

use crate::{
    B, Weights, affine, close, filled, floats, ids, matrix, numbers, sigmoid, stepped, tensor, tokens,
    weights,
};
use burn::tensor::{Int, Tensor};
use hspec_heads::{CausalCorrection, DominoConfig, DominoHead};
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Case {
    config: DominoConfig,
    n: usize,
    k: usize,
    vocab: usize,
    /// `[n, k]`.
    prev: Vec<i64>,
    /// `[n, k, h]`.
    hidden: Vec<f32>,
    /// `[vocab, e]`.
    embeddings: Vec<f32>,
    weights: Weights,
}

fn cases() -> impl Strategy<Value = Case> {
    let config = (1..7usize, 1..5usize, 1..4usize, 1..4usize, 1..4usize, 0..4usize, any::<bool>()).prop_map(
        |(draft_vocab, hidden, embedding, gru_hidden_dim, emb_dim, pure_draft_prefix_len, shift_label)| {
            DominoConfig {
                draft_vocab,
                hidden,
                embedding,
                gru_hidden_dim,
                emb_dim,
                pure_draft_prefix_len,
                shift_label,
            }
        },
    );
    (config, 1..4usize, 1..6usize, 2..9usize).prop_flat_map(|(config, n, k, vocab)| {
        let head = DominoHead::<B>::init(&config, &Default::default());
        let parts = (
            tokens(vocab, n * k),
            floats(n * k * config.hidden),
            floats(vocab * config.embedding),
            weights(&head),
        );
        parts.prop_map(move |(prev, hidden, embeddings, weights)| Case {
            config,
            n,
            k,
            vocab,
            prev,
            hidden,
            embeddings,
            weights,
        })
    })
}

impl Case {
    fn head(&self) -> DominoHead<B> {
        filled(DominoHead::init(&self.config, &Default::default()), &self.weights)
    }

    fn table(&self) -> Tensor<B, 2> {
        tensor(&self.embeddings, [self.vocab, self.config.embedding])
    }

    fn prev(&self) -> Tensor<B, 2, Int> {
        ids(&self.prev, [self.n, self.k])
    }

    fn hidden(&self) -> Tensor<B, 3> {
        tensor(&self.hidden, [self.n, self.k, self.config.hidden])
    }

    /// The equations, number by number.
    fn naive(&self) -> Vec<f32> {
        let c = &self.config;
        let (g, w) = (c.gru_hidden_dim, &self.weights);
        let mut biases = Vec::new();
        for block in 0..self.n {
            let mut state = vec![0f32; g];
            for slot in 0..self.k {
                let row = block * self.k + slot;
                if c.shift_label || slot > 0 {
                    let x = &self.embeddings[self.prev[row] as usize * c.embedding..][..c.embedding];
                    let (i, r) = (
                        matrix(&w["prefix_gru.weight_ih_l0"], x),
                        matrix(&w["prefix_gru.weight_hh_l0"], &state),
                    );
                    for j in 0..g {
                        let (reset, update) = (sigmoid(i[j] + r[j]), sigmoid(i[g + j] + r[g + j]));
                        let candidate = (i[2 * g + j] + reset * r[2 * g + j]).tanh();
                        state[j] = (1.0 - update) * candidate + update * state[j];
                    }
                }
                let start = c.pure_draft_prefix_len + if c.shift_label { 0 } else { 1 };
                if slot < start {
                    biases.extend(vec![0.0; c.draft_vocab]);
                    continue;
                }
                let hidden = &self.hidden[row * c.hidden..][..c.hidden];
                let middle = affine(w, "embed_proj.0", &[hidden, &state].concat());
                let middle: Vec<f32> = middle.into_iter().map(|x| x * sigmoid(x)).collect();
                biases.extend(affine(w, "embed_proj.2", &middle));
            }
        }
        biases
    }
}

proptest! {
    #[test]
    fn a_block_is_what_the_equations_say(case in cases()) {
        let (head, table) = (case.head(), case.table());
        let found = head.over(table).block(case.prev(), case.hidden());
        prop_assert_eq!(found.dims(), [case.n, case.k, case.config.draft_vocab]);
        close(&numbers(found), &case.naive())?;
    }

    #[test]
    fn a_block_is_its_steps_in_order(case in cases()) {
        let (head, table) = (case.head(), case.table());
        let domino = head.over(table);
        let steps = stepped(&domino, &case.prev(), &case.hidden());
        close(&numbers(steps), &numbers(domino.block(case.prev(), case.hidden())))?;
    }

    #[test]
    fn no_slot_sees_the_tokens_behind_it(case in cases(), from in 0..6usize) {
        let (head, table) = (case.head(), case.table());
        let domino = head.over(table);
        let from = from.min(case.k);
        let mut other = case.clone();
        for (i, token) in other.prev.iter_mut().enumerate() {
            if i % case.k >= from {
                *token = (*token + 1) % case.vocab as i64;
            }
        }
        let before = |c: &Case| numbers(domino.block(c.prev(), c.hidden()).narrow(1, 0, from.max(1)));
        if from > 0 {
            close(&before(&case), &before(&other))?;
        }
    }

    #[test]
    fn features_are_the_embeddings_of_the_previous_tokens(case in cases()) {
        let (head, table) = (case.head(), case.table());
        let found = numbers(head.over(table).features(case.prev()));
        let e = case.config.embedding;
        let rows = case.prev.iter().flat_map(|&t| &case.embeddings[t as usize * e..][..e]);
        prop_assert_eq!(found, rows.copied().collect::<Vec<_>>());
    }
}
