//! The law of what sampling emits, exactly: every branch of drafting and verifying with a real drafter over
//! a real target is walked.

use crate::{B, Edit, config, drafter, ids, support::Explorer, target};
use burn::tensor::Tensor;
use hspec_core::{
    TokenId,
    decode::{Chance, Draft, Law, Purpose, SamplingParams, verify},
    drafter::{DraftVocab, Drafter, HSpec},
    target::{Rows, Target, Want},
};
use serde_json::json;
use std::{cell::RefCell, collections::BTreeMap, path::Path};

/// Tokens emitted so far, and how often.
type Reached = BTreeMap<Vec<TokenId>, f64>;

struct Scene<'a> {
    target: &'a Target<B>,
    drafter: &'a HSpec<B>,
    prompt: Vec<TokenId>,
    sampling: SamplingParams,
    /// The logits that a draft's law q is said to come from; the drafter's own, unless a mistake is made.
    claimed: fn(&[f32]) -> Vec<f32>,
    laws: RefCell<BTreeMap<Vec<TokenId>, Law>>,
}

const K: usize = 2;

impl Scene<'_> {
    fn position(&self, context: &[TokenId]) -> u64 {
        (self.prompt.len() + context.len()) as u64
    }

    /// The target's law behind prompt and context.
    fn law(&self, context: &[TokenId]) -> Law {
        let compute = || {
            let all = [&self.prompt, context].concat();
            let mut cache = self.target.cache(1, all.len());
            let want = Want { logits: Rows::Last, hidden: &[] };
            let logits = self.target.forward(&all, &mut cache, &want).unwrap().logits.unwrap();
            let logits: Vec<f32> = logits.into_data().to_vec().unwrap();
            self.sampling.distribution(&logits, self.position(context)).unwrap()
        };
        self.laws.borrow_mut().entry(context.to_vec()).or_insert_with(compute).clone()
    }

    /// What one round makes of a context: its last token is the anchor.
    fn round(&self, context: &[TokenId]) -> Reached {
        let Some((&anchor, before)) = context.split_last() else {
            return self.law(&[]).iter().map(|(token, p)| (vec![token], p)).collect();
        };
        let processed = [&self.prompt, before].concat();
        let mut cache = self.target.cache(1, processed.len());
        let want = Want { logits: Rows::None, hidden: self.drafter.feature_layers() };
        let pass = self.target.forward(&processed, &mut cache, &want).unwrap();
        let features = pass.hidden.into_iter().map(|h| h.squeeze_dim::<2>(0)).collect();
        let mut session = self.drafter.session(processed.len());
        session.observe(&processed, Tensor::cat(features, 1));
        let start = self.position(context);
        Explorer::law(|chance| {
            let mut drafts = Vec::new();
            let pick = &mut |slot: usize, logits: &[f32]| {
                let at = start + slot as u64 - 1;
                let q = |logits: &[f32]| {
                    self.sampling.draft_distribution(logits, self.drafter.vocabulary(), at).unwrap()
                };
                let token = chance.pick(at, Purpose::Draft, &q(logits));
                drafts.push(Draft { token, law: q(&(self.claimed)(logits)) });
                Ok(token)
            };
            session.draft(anchor, &cache, K, pick).unwrap();
            let path: Vec<TokenId> = drafts.iter().map(|d| d.token).collect();
            let row = |row: usize| Ok(self.law(&[context, &path[..row]].concat()));
            let verdict = verify(&drafts, row, start, chance).unwrap();
            [context, &path[..verdict.accepted], &[verdict.next]].concat()
        })
    }

    /// The largest difference between the law of `n` emitted tokens and the target's.
    fn deviation(&self, n: usize) -> f64 {
        let mut reached = vec![Reached::new(); n + 1];
        reached[0].insert(vec![], 1.0);
        for length in 0..n {
            for (context, weight) in reached[length].clone() {
                for (mut next, p) in self.round(&context) {
                    next.truncate(n);
                    *reached[next.len()].entry(next).or_insert(0.0) += weight * p;
                }
            }
        }
        let mut reference = Reached::from([(vec![], 1.0)]);
        for _ in 0..n {
            reference = (reference.iter())
                .flat_map(|(context, weight)| {
                    let law = self.law(context);
                    let longer = law.iter().map(|(t, p)| ([&context[..], &[t]].concat(), weight * p));
                    longer.collect::<Vec<_>>()
                })
                .collect();
        }
        let found = &reached[n];
        assert!((found.values().sum::<f64>() - 1.0).abs() < 1e-9);
        assert!(found.keys().all(|tokens| reference.contains_key(tokens)));
        let difference = |(tokens, p): (&Vec<TokenId>, &f64)| (found.get(tokens).unwrap_or(&0.0) - p).abs();
        reference.iter().map(difference).fold(0.0, f64::max)
    }
}

/// The deviation for a variant whose draft vocabulary is four tokens that the target finds likely, and one
/// that it does not.
fn deviation(edit: Edit, claimed: fn(&[f32]) -> Vec<f32>) -> f64 {
    let target = target();
    let prompt = ids(&[340, 131, 399]);
    let mut config = config(target.config(), edit);
    config.draft_vocab_size = 5;
    let drafter = drafter::<B>(config, false);
    let sampling = SamplingParams::new(0.7, Some(3), None).unwrap();
    let laws = RefCell::default();
    let scene = Scene { target: &target, drafter: &drafter, prompt, sampling, claimed, laws };
    let (mut likely, mut contexts): (Vec<TokenId>, _) = (vec![], vec![vec![]]);
    while likely.len() < 4 {
        let context = contexts.remove(0);
        for (token, _) in scene.law(&context).iter() {
            contexts.push([&context[..], &[token]].concat());
            if !likely.contains(&token) && likely.len() < 4 {
                likely.push(token);
            }
        }
    }
    likely.push((0..).map(TokenId).find(|t| !likely.contains(t)).unwrap());
    likely.sort_unstable();
    let vocab = DraftVocab::new(likely, target.config().vocab_size, Path::new("test")).unwrap();
    let mut pruned = drafter.clone();
    pruned.vocab = vocab;
    Scene { drafter: &pruned, ..scene }.deviation(3)
}

const MARKOV: Edit = |_| {};
const DOMINO: Edit = |c| {
    crate::without_markov(c);
    c["domino"] = json!({ "emb_dim": 6, "gru_hidden_dim": 5 });
};
const SELECTOR: Edit = |c| {
    crate::without_markov(c);
    c["candidate_selector"] = json!({ "selector_rank": 6, "selector_top_k": 3 });
    c["block_conv"] = json!({ "conv_kernel_size": 2, "conv_group_size": 16 });
};

#[test]
fn sampling_keeps_the_law_of_the_target() {
    for (name, edit) in [("markov", MARKOV), ("domino", DOMINO), ("selector", SELECTOR)] {
        let deviation = deviation(edit, <[f32]>::to_vec);
        assert!(deviation < 1e-9, "{name}: off by {deviation:e}");
    }
}

/// A selector draws from its candidates only; whoever verifies with the softmax over all logits is not
/// lossless (z-lab/dflash#74: the draft and the ratio must use one q).
#[test]
fn the_check_finds_a_selector_verified_with_a_law_it_did_not_draw_from() {
    let all = |logits: &[f32]| logits.iter().map(|l| if l.is_finite() { *l } else { 0.0 }).collect();
    let deviation = deviation(SELECTOR, all);
    assert!(deviation > 1e-3, "off by no more than {deviation:e}");
}
