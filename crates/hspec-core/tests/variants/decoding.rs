//! Drafting and decoding.

use crate::{B, VARIANTS, config, drafter, ids, target};
use burn::tensor::{Tensor, TensorData};
use hspec_attn::{Anchor, Prefix};
use hspec_core::{
    TokenId,
    decode::{Decoder, Request, SamplingParams},
    drafter::{Blocks, Drafter, HSpec},
    target::{KvCache, Rows, Target, Want},
};
use hspec_goldens::{Tolerance, assert_close};
use std::ops::ControlFlow;

#[test]
fn greedy_speculation_emits_what_plain_decoding_emits() {
    let target = target();
    let generate = |prompt: &[TokenId], drafter: Option<&dyn Drafter<B>>, k| {
        let request = Request {
            prompt,
            sampling: SamplingParams::greedy(),
            seed: 0,
            id: 0,
            max_new_tokens: 24,
            k,
            stop_tokens: &[],
        };
        let generation =
            Decoder::new(&target, drafter).generate(&request, &mut |_| ControlFlow::Continue(())).unwrap();
        (generation.tokens, generation.rounds.len())
    };
    for prompt in [ids(&[340, 131, 399]), ids(&[1; 40])] {
        let (plain, _) = generate(&prompt, None, 0);
        for (name, edit) in VARIANTS {
            let drafter = drafter::<B>(config(target.config(), edit), false);
            for k in [1, 4, 7] {
                let (speculative, rounds) = generate(&prompt, Some(&drafter), k);
                assert_eq!(speculative, plain, "{name}, k = {k}, prompt of {}", prompt.len());
                assert!(rounds > 0, "{name} drafted nothing");
            }
        }
    }
}

/// A target that has processed a prompt, and the seed it leaves: `[n, F * H]`.
fn processed(target: &Target<B>, drafter: &HSpec<B>, prompt: &[TokenId]) -> (KvCache<B>, Tensor<B, 2>) {
    let mut cache = target.cache(1, prompt.len() + 8);
    let want = Want { logits: Rows::None, hidden: drafter.feature_layers() };
    let pass = target.forward(prompt, &mut cache, &want).unwrap();
    let features = pass.hidden.into_iter().map(|h| h.squeeze_dim::<2>(0)).collect();
    (cache, Tensor::cat(features, 1))
}

/// What is drafted slot by slot is what the training forward gives for the drafted path; only a selector
/// leaves out what is not among its candidates.
#[test]
fn drafting_walks_the_training_forward() {
    let target = target();
    let prompt = ids(&[340, 131, 399, 12, 77]);
    for (name, edit) in VARIANTS {
        let drafter = drafter::<B>(config(target.config(), edit), false);
        let (cache, features) = processed(&target, &drafter, &prompt);
        let k = drafter.max_draft();
        let anchor = TokenId(42);
        let mut session = drafter.session(cache.capacity());
        session.observe(&prompt, features.clone());
        let mut drafted: Vec<Vec<f32>> = Vec::new();
        let proposal = session
            .draft(anchor, &cache, k, &mut |_, logits| {
                drafted.push(logits.to_vec());
                // Not the best one: the path must matter.
                let mut order: Vec<usize> = (0..logits.len()).collect();
                order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
                Ok(drafter.vocabulary().unwrap()[order[1]])
            })
            .unwrap();

        let prefixes: Vec<Prefix<B>> =
            drafter.config.attn_kv_layer_ids.iter().map(|&layer| cache.lend(layer)).collect();
        let hidden = drafter.forward(&Blocks {
            anchors: &[Anchor::at(prompt.len())],
            tokens: &[anchor],
            seeds: features.narrow(0, prompt.len() - 1, 1),
            prefixes: &prefixes,
            slots: k + 1,
        });
        let previous: Vec<i64> =
            [&[anchor, anchor], &proposal.tokens[..k - 1]].concat().iter().map(|t| t.0.into()).collect();
        let previous = Tensor::from_data(TensorData::new(previous, [1, k + 1]), &Default::default());
        let logits = drafter.corrected_logits(hidden.clone(), previous.clone());
        let logits: Vec<f32> = logits.into_data().to_vec().unwrap();
        let v = drafter.config.draft_vocab_size;
        let selector = drafter.model.candidate_selector.as_ref();
        for (slot, drafted) in (1..).zip(&drafted) {
            let expected = &logits[slot * v..][..v];
            let kept: Vec<usize> = (0..v).filter(|&i| drafted[i] > f32::NEG_INFINITY).collect();
            assert_eq!(kept.len(), selector.map_or(v, |s| s.top_k), "{name}, slot {slot}");
            let some = |row: &[f32]| kept.iter().map(|&i| row[i]).collect::<Vec<_>>();
            let what = format!("{name}, slot {slot}");
            assert_close(&what, &some(drafted), &some(expected), Tolerance::Scaled(1e-5));
        }
        let confidence = drafter.confidence_logits(hidden, previous);
        let confidence = confidence.map_or(vec![], |c| c.into_data().to_vec::<f32>().unwrap()[1..].to_vec());
        assert_close(name, &proposal.confidence, &confidence, Tolerance::Scaled(1e-5));
    }
}

/// Each part changes what is drafted: no variant silently drafts as another does.
#[test]
fn no_two_variants_draft_alike() {
    let target = target();
    let prompt = ids(&[340, 131, 399, 12, 77]);
    let mut drafts: Vec<(&str, Vec<f32>)> = Vec::new();
    for (name, edit) in VARIANTS {
        let drafter = drafter::<B>(config(target.config(), edit), false);
        let (cache, features) = processed(&target, &drafter, &prompt);
        let mut session = drafter.session(cache.capacity());
        session.observe(&prompt, features);
        let mut logits = Vec::new();
        let pick = &mut |_, row: &[f32]| {
            logits.extend_from_slice(row);
            Ok(TokenId(9))
        };
        session.draft(TokenId(42), &cache, 7, pick).unwrap();
        if let Some((other, _)) = drafts.iter().find(|(_, known)| *known == logits) {
            panic!("{name} drafts as {other}");
        }
        drafts.push((name, logits));
    }
}
