//! EAGLE-3 and P-EAGLE with random weights on a tiny real target: what a session remembers is what a fresh
//! one would after the same final tokens, speculation changes no text, and files say what is wrong with them.

#![allow(clippy::unwrap_used)] // a test may panic

#[path = "support/eagle.rs"]
mod scene;

use burn::tensor::{Distribution, Tensor};
use hspec_core::{
    Error, TokenId,
    checkpoint::{StoreAs, Weights, read_json},
    config::TargetConfig,
    decode::{Decoder, Request, SamplingParams},
    drafter::{self, Drafter, Session, eagle3::Eagle3, peagle::PEagle, pruned_head},
    target::{KvCache, Target},
};
use proptest::prelude::*;
use scene::{B, configurations, random_drafter, trunk};
use serde_json::{Value, json};
use std::{ops::ControlFlow, path::Path};

fn target() -> Target<B> {
    let dir = hspec_goldens::root().join("targets/llama31-tiny");
    let file = dir.join("config.json");
    let mut config = TargetConfig::from_value(&read_json(&file).unwrap(), &file).unwrap();
    config.max_position_embeddings = 4096;
    Target::from_weights(config, &Weights::open(&dir).unwrap(), &Default::default()).unwrap()
}

fn nothing() -> KvCache<B> {
    KvCache::new(1, 1, 1, 1, 1, &Default::default())
}

/// Logits of a draft along `path`.
fn logits(session: &mut dyn Session<B>, anchor: TokenId, path: &[TokenId]) -> Vec<f32> {
    let mut all = Vec::new();
    let proposal = session.draft(anchor, &nothing(), path.len(), &mut |slot, row| {
        all.extend_from_slice(row);
        Ok(path[slot - 1])
    });
    assert_eq!(proposal.unwrap().tokens, path);
    all
}

/// What happens between two drafts.
#[derive(Debug, Clone)]
struct Round {
    /// Tokens drafted; 0 is a plain step.
    k: usize,
    /// Of which are accepted at most.
    accepted: usize,
    /// Whether the draft breaks off with an error.
    fails: bool,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Accepting, rejecting, plain steps and drafts that failed leave a session where one is that has only
    /// ever seen the final tokens, whichever way those came in.
    #[test]
    fn a_session_depends_on_the_final_tokens_only(
        which in 0usize..4, prompt in 1usize..300, cut in 0usize..300, seed in 0u32..1000,
        rounds in proptest::collection::vec((0usize..6, 0usize..6, proptest::bool::weighted(0.2)), 0..12),
    ) {
        let drafter = random_drafter(&configurations()[which].1);
        let rounds: Vec<Round> = rounds.into_iter()
            .map(|(k, accepted, fails)| Round { k, accepted: accepted.min(k), fails })
            .collect();
        let most = prompt + rounds.iter().map(|r| r.accepted + 1).sum::<usize>();
        let width = 64 * drafter.feature_layers().len();
        let features =
            Tensor::<B, 2>::random([most, width], Distribution::Normal(0.0, 1.0), &Default::default());
        let token = |i: usize| TokenId((i as u32 * 37 + seed * 11) % 512);
        let wrong = TokenId(0);
        let show = |session: &mut dyn Session<B>, from: usize, to: usize| {
            let tokens: Vec<TokenId> = (from..to).map(token).collect();
            session.observe(&tokens, features.clone().narrow(0, from, to - from));
        };

        let mut session = drafter.session(most + 8);
        let cut = cut.min(prompt - 1);
        if cut > 0 {
            show(&mut *session, 0, cut);
        }
        show(&mut *session, cut, prompt);
        let mut n = prompt;
        for round in &rounds {
            if round.k > 0 {
                let outcome = session.draft(token(n), &nothing(), round.k, &mut |slot, _| match slot {
                    s if round.fails && s == round.k => Err(Error::Mismatch("stopped".into())),
                    s if s <= round.accepted => Ok(token(n + s)),
                    _ => Ok(wrong),
                });
                prop_assert_eq!(outcome.is_err(), round.fails);
            }
            show(&mut *session, n, n + 1 + round.accepted);
            n += 1 + round.accepted;
        }
        let mut fresh = drafter.session(most + 8);
        show(&mut *fresh, 0, n);
        let path: Vec<TokenId> = (0..drafter.max_draft()).map(|i| token(n + 7 * i)).collect();
        let found = logits(&mut *session, token(n), &path);
        let expected = logits(&mut *fresh, token(n), &path);
        let largest = expected.iter().fold(1f32, |m, x| m.max(x.abs()));
        for (a, b) in found.iter().zip(&expected) {
            prop_assert!((a - b).abs() <= 2e-5 * largest, "{a} {b}");
        }
        // And the same again: a draft leaves nothing behind.
        let again = logits(&mut *session, token(n), &path);
        prop_assert!(again.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 2e-5 * largest));
    }
}

/// Each slot of EAGLE-3 depends on the tokens drafted before it, none of P-EAGLE does, and all on the
/// anchor and on features far back.
#[test]
fn slots_depend_on_what_they_should() {
    for (name, config) in configurations() {
        let drafter = random_drafter(&config);
        let (n, width) = (40, 64 * drafter.feature_layers().len());
        let features =
            Tensor::<B, 2>::random([n, width], Distribution::Normal(0.0, 1.0), &Default::default());
        let ids = |seed: u32| (0..40u32).map(|i| TokenId((i * 7 + seed) % 512)).collect::<Vec<_>>();
        let run = |features: Tensor<B, 2>, anchor: u32, second: u32| {
            let mut session = drafter.session(64);
            session.observe(&ids(1), features);
            logits(&mut *session, TokenId(anchor), &[TokenId(5), TokenId(second), TokenId(9)])
        };
        let base = run(features.clone(), 3, 6);
        let v = base.len() / 3;
        let differs = |other: &[f32], slot: usize| {
            (slot * v..(slot + 1) * v).any(|i| (base[i] - other[i]).abs() > 1e-4)
        };
        let other = run(features.clone(), 3, 7);
        assert!(!differs(&other, 0) && !differs(&other, 1), "{name}");
        assert_eq!(differs(&other, 2), drafter.kind() == "eagle3", "{name}");
        let other = run(features.clone(), 4, 6);
        assert!((0..3).all(|slot| differs(&other, slot)), "{name}: anchor");
        let first = features.clone().narrow(0, 0, 1) * -1.0;
        let other = run(Tensor::cat(vec![first, features.narrow(0, 1, n - 1)], 0), 3, 6);
        assert!((0..3).all(|slot| differs(&other, slot)), "{name}: features of the first token");
    }
}

/// What a loaded drafter computes, its weights packed, is what its weights say.
#[test]
fn packed_weights_draft_as_plain_ones() {
    for (name, config) in configurations() {
        let plain = trunk(&config);
        let packed = Eagle3 { model: plain.model.clone().prepack(), ..plain.clone() };
        assert!(format!("{:?}", packed.model.fc).contains("Panels"), "{name}");
        let width = 64 * plain.shape.feature_layers.len();
        let features =
            Tensor::<B, 2>::random([40, width], Distribution::Normal(0.0, 1.0), &Default::default());
        let ids: Vec<_> = (0..40u32).map(|i| TokenId(i * 7 % 512)).collect();
        let run = |trunk: Eagle3<B>| {
            let drafter: Box<dyn Drafter<B>> = match trunk.shape.mask_token {
                Some(_) => Box::new(PEagle::new(trunk, Path::new("test")).unwrap()),
                None => Box::new(trunk),
            };
            let mut session = drafter.session(64);
            session.observe(&ids, features.clone());
            logits(&mut *session, TokenId(3), &[TokenId(5), TokenId(6), TokenId(9)])
        };
        let (plain, packed) = (run(plain), run(packed));
        let largest = plain.iter().fold(1f32, |m, x| m.max(x.abs()));
        assert_eq!(plain.len(), packed.len());
        for (a, b) in plain.iter().zip(&packed) {
            assert!((a - b).abs() < 2e-5 * largest, "{name}: {a} {b}");
        }
    }
}

#[test]
fn a_session_without_tokens_refuses_to_draft() {
    for (_, config) in configurations() {
        let drafter = random_drafter(&config);
        let outcome = drafter.session(8).draft(TokenId(1), &nothing(), 1, &mut |_, _| Ok(TokenId(1)));
        assert!(outcome.unwrap_err().to_string().starts_with("observed tokens: found 0"));
    }
}

#[test]
fn greedy_speculation_emits_what_plain_decoding_emits() {
    let target = target();
    for (name, config) in configurations() {
        let drafter = random_drafter(&config);
        for prompt in [vec![340, 131, 399], vec![7], vec![1; 40]] {
            let prompt: Vec<TokenId> = prompt.into_iter().map(TokenId).collect();
            for k in [1, 3, 5] {
                let request = Request {
                    prompt: &prompt,
                    sampling: SamplingParams::greedy(),
                    seed: 5,
                    id: 0,
                    max_new_tokens: 40,
                    k,
                    stop_tokens: &[],
                };
                let run = |drafter: Option<&dyn Drafter<B>>| {
                    let decoder = Decoder::new(&target, drafter);
                    decoder.generate(&request, &mut |_| ControlFlow::Continue(())).unwrap()
                };
                let (plain, speculative) = (run(None), run(Some(&*drafter)));
                assert_eq!(plain.tokens, speculative.tokens, "{name}, k = {k}, prompt of {}", prompt.len());
                assert!(speculative.rounds.iter().all(|round| round.proposed <= k));
                assert!(!speculative.rounds.is_empty());
            }
        }
    }
}

/// A pruned drafter once got the whole head of the target: only the rows of its vocabulary are lent.
#[test]
fn what_a_file_leaves_out_is_lent_by_the_target() {
    let target = target();
    for (name, config) in configurations() {
        let mut trunk = trunk(&config);
        trunk.model.embed_tokens.weight = burn::module::Param::from_tensor(target.embedding());
        trunk.model.lm_head = pruned_head(&target, &trunk.vocab);
        let dir = tempfile::tempdir().unwrap();
        trunk.save(dir.path(), StoreAs::F32, false).unwrap();
        let file = Weights::open(dir.path()).unwrap();
        assert!(!file.contains("lm_head.weight"), "{name}");
        assert_eq!(file.contains("embed_tokens.weight"), name == "peagle", "P-EAGLE trains its embedding");

        let loaded = drafter::load(dir.path(), &target, &Default::default()).unwrap();
        assert_eq!(loaded.kind(), if name == "peagle" { "peagle" } else { "eagle3" });
        assert_eq!(loaded.vocabulary().is_some(), name != "deepspec");
        assert_eq!(loaded.feature_layers(), if name == "deepspec" { &[1, 2, 3][..] } else { &[1, 3] });
        let back = if name == "peagle" {
            PEagle::load(dir.path(), Some(&target), &Default::default()).unwrap().trunk
        } else {
            Eagle3::load(dir.path(), Some(&target), &Default::default()).unwrap()
        };
        let (before, after) =
            (hspec_nn::params::collect(&trunk.model), hspec_nn::params::collect(&back.model));
        assert_eq!(before, after, "{name}");

        let missing = if name == "peagle" {
            PEagle::<B>::load(dir.path(), None, &Default::default()).map(|_| ())
        } else {
            Eagle3::<B>::load(dir.path(), None, &Default::default()).map(|_| ())
        };
        let message = missing.unwrap_err().to_string();
        let tensor = if name == "peagle" { "lm_head.weight" } else { "embed_tokens.weight" };
        assert!(message.contains(&format!("tensor {tensor} is missing")), "{message}");
    }
}

#[test]
fn drafters_for_other_targets_and_of_other_kinds_are_refused() {
    let target = target();
    let refused = |edit: &dyn Fn(&mut Value), which: usize| {
        let dir = tempfile::tempdir().unwrap();
        let (_, mut config) = configurations().remove(which);
        trunk(&config).save(dir.path(), StoreAs::F32, true).unwrap();
        edit(&mut config);
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        drafter::load(dir.path(), &target, &Default::default()).err().unwrap().to_string()
    };
    for (which, (pointer, value), message) in [
        (0, ("/num_target_layers", json!(9)), "its num_target_layers is 9, the target has 4"),
        (
            1,
            // The output of the last layer, which is read behind the final norm elsewhere, was once accepted.
            ("/eagle_aux_hidden_state_layer_ids", json!([1, 4])),
            "it reads what enters layer 4, and the target has 4 layers, from 0",
        ),
        (1, ("/transformer_layer_config/vocab_size", json!(511)), "vocab_size is 511, the target's is 512"),
        (1, ("/transformer_layer_config/num_attention_heads", json!(8)), "has shape [32, 128], expected [64"),
        (1, ("/draft_vocab_size", json!(170)), "d2t: found shape [171], expected [170]"),
        (1, ("/speculators_model_type", json!("eagle4")), "speculators_model_type: found \"eagle4\""),
    ] {
        let found = refused(&|config| *config.pointer_mut(pointer).unwrap() = value.clone(), which);
        assert!(found.contains(message), "{found}");
    }
    let dir = tempfile::tempdir().unwrap();
    let configurations = configurations();
    trunk(&configurations[3].1).save(dir.path(), StoreAs::F32, true).unwrap();
    let message = Eagle3::<B>::load(dir.path(), None, &Default::default()).unwrap_err().to_string();
    assert!(message.contains("speculators_model_type: found peagle, expected eagle3"), "{message}");
    trunk(&configurations[1].1).save(dir.path(), StoreAs::F32, true).unwrap();
    let message = PEagle::<B>::load(dir.path(), None, &Default::default()).unwrap_err().to_string();
    assert!(message.contains("speculators_model_type: found eagle3, expected peagle"), "{message}");
}
