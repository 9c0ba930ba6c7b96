//! Properties of DFlash and DSpark drafters of every kind.

#![allow(clippy::unwrap_used)] // a test may panic

mod files;
mod refused;
mod scene;

use burn::tensor::{Tensor, TensorData};
use hspec_attn::KvCache;
use hspec_core::{
    TokenId,
    decode::{Decoder, Request, SamplingParams},
    drafter::{
        Drafter, Session,
        dspark::{DSpark, Layout, PackedRow},
    },
};
use hspec_goldens::{Tolerance, assert_close};
use proptest::prelude::*;
use scene::{B, HIDDEN, features};
use serde_json::json;
use std::ops::ControlFlow;

const CLOSE: Tolerance = Tolerance::Scaled(2e-5);

fn lengths(n: usize) -> KvCache<B> {
    let mut cache = KvCache::new(1, 1, 1, n, 1, &Default::default());
    cache.advance(n);
    cache
}

fn tokens(n: usize) -> Vec<TokenId> {
    (0..n as u32).map(|i| TokenId(i * 37 % 500)).collect()
}

/// Logits, confidence and tokens of a greedy draft. Draft ids of pruned vocabularies are mapped.
fn greedy(
    drafter: &DSpark<B>,
    session: &mut dyn Session<B>,
    at: usize,
    k: usize,
) -> (Vec<f32>, Vec<f32>, Vec<TokenId>) {
    let mut logits = Vec::new();
    let pick = &mut |_: usize, row: &[f32]| {
        logits.extend_from_slice(row);
        let best = (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
        Ok(drafter.vocabulary().map_or(TokenId(best as u32), |v| v[best]))
    };
    let proposal = session.draft(TokenId(7), &lengths(at), k, pick).unwrap();
    (logits, proposal.confidence, proposal.tokens)
}

/// The logits of tokens that can be drawn.
fn finite(logits: &[f32]) -> Vec<f32> {
    logits.iter().copied().filter(|l| l.is_finite()).collect()
}

#[test]
fn greedy_speculation_emits_what_plain_decoding_emits() {
    let target = scene::target();
    let prompt = tokens(5);
    let run = |drafter: Option<&dyn Drafter<B>>, k| {
        let request = Request {
            prompt: &prompt,
            sampling: SamplingParams::greedy(),
            seed: 0,
            id: 0,
            max_new_tokens: 24,
            k,
            stop_tokens: &[],
        };
        Decoder::new(&target, drafter).generate(&request, &mut |_| ControlFlow::Continue(())).unwrap()
    };
    let plain = run(None, 0).tokens;
    for config in scene::all() {
        // The weights of a file, through the door that commands use.
        let dir = scene::saved(&scene::drafter(&config));
        let drafter = hspec_core::drafter::load(dir.path(), &target, target.device()).unwrap();
        for k in [1, drafter.max_draft()] {
            let generation = run(Some(&*drafter), k);
            assert_eq!(generation.tokens, plain, "{} with k = {k}", drafter.kind());
            assert!(generation.rounds.iter().all(|round| round.proposed <= k));
        }
    }
}

#[test]
fn kinds_have_their_names() {
    let names: Vec<&str> =
        scene::all().iter().map(|config| Drafter::<B>::kind(&scene::drafter(config))).collect();
    let expected = [
        "dspark", "dspark", "dspark", "dflash", "dspark", "dspark", "dflash", "dflash", "dflash", "dflash2",
        "domino", "domino",
    ];
    assert_eq!(names, expected);
}

/// A token of context costs what the footprint says, and a block nothing.
#[test]
fn the_footprint_is_what_a_session_keeps() {
    for config in scene::all() {
        let drafter = scene::drafter(&config);
        let (capacity, shape) = (11, drafter.shape());
        let mut session = drafter.start(capacity);
        session.observe(&tokens(4), features(&drafter, 4, 1));
        greedy(&drafter, &mut session, 4, drafter.max_draft());
        let cache = session.context();
        assert_eq!((cache.capacity(), cache.len()), (capacity, 4));
        let per_layer = |layer| {
            let (keys, values) = (cache.keys(layer, 0, capacity), cache.values(layer, 0, capacity));
            keys.into_data().as_bytes().len() + values.into_data().as_bytes().len()
        };
        let kept: usize = (0..shape.rules.len()).map(per_layer).sum();
        let footprint = Drafter::<B>::footprint(&drafter);
        assert_eq!((footprint.kv_bytes_per_token * capacity, footprint.state_bytes), (kept, 0));
        let frozen = HIDDEN * (shape.vocab_size + shape.draft_vocab_size);
        assert_eq!(footprint.params_frozen, frozen);
    }
}

#[test]
fn fewer_drafts_are_the_first_of_many() {
    for config in scene::all() {
        let drafter = scene::drafter(&config);
        let mut session = drafter.start(6);
        session.observe(&tokens(6), features(&drafter, 6, 1));
        let (logits, confidence, drafted) = greedy(&drafter, &mut session, 6, drafter.max_draft());
        let (fewer, first, start) = greedy(&drafter, &mut session, 6, 2);
        let (fewer, logits) = (finite(&fewer), finite(&logits[..fewer.len()]));
        assert_close("logits", &fewer, &logits, Tolerance::Scaled(1e-6));
        assert_close("confidence", &first, &confidence[..first.len()], Tolerance::Scaled(1e-6));
        assert_eq!(start, drafted[..2]);
        // More than a block has slots is no more than a block.
        assert_eq!(greedy(&drafter, &mut session, 6, 99).2, drafted);
    }
}

/// What a loaded drafter computes, its weights packed, is what its weights say.
#[test]
fn packed_weights_draft_as_plain_ones() {
    for config in scene::all() {
        let plain = scene::drafter(&config);
        let packed = DSpark::load(scene::saved(&plain).path(), None, &Default::default()).unwrap();
        assert!(format!("{:?}", packed.model.fc).contains("Panels"), "{config}");
        let run = |drafter: &DSpark<B>| {
            let mut session = drafter.start(6);
            session.observe(&tokens(6), features(drafter, 6, 1));
            greedy(drafter, &mut session, 6, drafter.max_draft())
        };
        let (plain, packed) = (run(&plain), run(&packed));
        assert_close("logits", &finite(&packed.0), &finite(&plain.0), CLOSE);
        assert_close("confidence", &packed.1, &plain.1, CLOSE);
        assert_eq!(packed.2, plain.2);
    }
}

#[test]
fn nothing_observed_is_an_error() {
    let drafter = scene::drafter(&scene::dflash2());
    let mut session = Drafter::<B>::session(&drafter, 4);
    let error = session.draft(TokenId(1), &lengths(0), 2, &mut |_, _| Ok(TokenId(0))).unwrap_err();
    assert_eq!(error.to_string(), "observed tokens: found 0, expected at least 1");
}

/// Training and decoding run the same code: along a drafted path, a packed row gives the logits that the
/// slots had when they were drafted.
#[test]
fn a_packed_row_gives_the_logits_of_drafting() {
    for config in scene::all() {
        let drafter = scene::drafter(&config);
        let (n, shape) = (6, drafter.shape());
        let mut session = drafter.start(n);
        let context = features(&drafter, n, 3);
        session.observe(&tokens(n), context.clone());
        let (logits, confidence, drafted) = greedy(&drafter, &mut session, n, drafter.max_draft());

        // The row goes on behind the anchor with what was drafted; features from there on are hidden.
        let ids = [&tokens(n), &[TokenId(7)][..], &drafted].concat();
        let later = features(&drafter, ids.len() - n, 4) * 100;
        let positions: Vec<usize> = (0..ids.len()).collect();
        let row = PackedRow {
            ids: &ids,
            positions: &positions,
            documents: &vec![0; ids.len()],
            features: Tensor::cat(vec![context, later], 0),
        };
        let output = drafter.blocks(&row, &[n]);
        let first = shape.layout.first();
        let whole: Vec<f32> = output.logits.into_data().iter::<f32>().collect();
        let whole = &whole[first * shape.draft_vocab_size..];
        assert_eq!(whole.len(), logits.len());
        // Drafting excludes what a selector did not choose.
        let (drafted, trained): (Vec<f32>, Vec<f32>) =
            logits.iter().zip(whole).filter(|(d, _)| d.is_finite()).unzip();
        let chosen = shape.selector.map_or(shape.draft_vocab_size, |s| s.top_k);
        assert_eq!(drafted.len(), chosen * drafter.max_draft());
        assert_close("logits", &trained, &drafted, CLOSE);
        let trained: Vec<f32> =
            output.confidence.map_or(Vec::new(), |c| c.into_data().iter::<f32>().skip(first).collect());
        assert_close("confidence", &trained, &confidence, CLOSE);
        assert_eq!(output.hidden.dims(), [1, shape.block_size, HIDDEN]);
    }
}

/// Windows end where each layout's reference ends them.
#[test]
fn windows_of_the_two_layouts() {
    let speculators = scene::drafter(&scene::speculators("dspark", 3, false));
    let zlab = scene::zlab("DFlashDraftModel", json!({}));
    let mut zlab = zlab.as_object().unwrap().clone();
    zlab.insert("layer_types".into(), json!(["sliding_attention", "full_attention"]));
    zlab.insert("sliding_window".into(), json!(3));
    let zlab = scene::drafter(&zlab.into());
    let anchor = hspec_attn::Anchor::at(10);
    let seen = |drafter: &DSpark<B>| {
        let rule = drafter.shape().rules[0];
        let block: Vec<usize> = (0..5).filter(|&s| rule.block(s, 4)).collect();
        (rule.prefix(&anchor, 0), rule.prefix(&anchor, 2), block)
    };
    assert_eq!(seen(&speculators), (7..10, 7..10, vec![0, 1, 2, 3, 4]));
    assert_eq!(seen(&zlab), (8..10, 10..10, vec![2, 3, 4]));
    assert_eq!(zlab.shape().rules[1].prefix(&anchor, 2), 0..10);
    assert!(zlab.shape().rules[1].block(4, 0), "full attention is bidirectional");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// After any rounds of acceptance and rejection, the session is that of a request whose prompt was all
    /// that is final.
    #[test]
    fn a_session_after_rejections_is_a_fresh_one(
        which in 0usize..12, prompt in 1usize..6, accepted in proptest::collection::vec(0usize..5, 1..5),
    ) {
        let configs = scene::all();
        let drafter = scene::drafter(&configs[which % configs.len()]);
        let k = drafter.max_draft();
        let n = prompt + accepted.iter().map(|a| a.min(&k) + 1).sum::<usize>();
        let (ids, all) = (tokens(n), features(&drafter, n, 9));
        let mut session = drafter.start(n);
        session.observe(&ids[..prompt], all.clone().narrow(0, 0, prompt));
        let mut at = prompt;
        for accepted in accepted {
            greedy(&drafter, &mut session, at, k);
            let kept = accepted.min(k) + 1;
            session.observe(&ids[at..at + kept], all.clone().narrow(0, at, kept));
            at += kept;
        }
        let mut fresh = drafter.start(n);
        fresh.observe(&ids, all);
        let (found, expected) = (greedy(&drafter, &mut session, n, k), greedy(&drafter, &mut fresh, n, k));
        assert_close("logits", &finite(&found.0), &finite(&expected.0), CLOSE);
        assert_close("confidence", &found.1, &expected.1, CLOSE);
        prop_assert_eq!(found.2, expected.2);
    }

    /// Neither other documents, nor positions at or behind the anchor, nor any outside the window change a
    /// block.
    #[test]
    fn what_a_block_must_not_see_has_no_influence(
        which in 0usize..12, documents in proptest::collection::vec(2usize..9, 2..4), at in (0usize..4, 1usize..9),
    ) {
        let configs = scene::all();
        let drafter = scene::drafter(&configs[which % configs.len()]);
        let starts: Vec<usize> =
            documents.iter().scan(0, |at, len| Some(std::mem::replace(at, *at + len))).collect();
        let document = at.0 % documents.len();
        let anchor = starts[document] + at.1 % documents[document];
        let n: usize = documents.iter().sum();
        let of = |i: usize| starts.iter().rposition(|&start| start <= i).unwrap();
        let (positions, owners): (Vec<usize>, Vec<usize>) =
            (0..n).map(|i| (i - starts[of(i)], starts[of(i)])).unzip();
        let ids = tokens(n);
        // No layer sees further back than the widest window.
        let reach = drafter.shape().rules.iter().map(|rule| rule.window.unwrap_or(usize::MAX)).max().unwrap();
        let seen = |i: usize| owners[i] == owners[anchor] && i < anchor && anchor - i <= reach;
        let run = |change: f32| {
            let row = features(&drafter, n, 5);
            let width = row.dims()[1];
            let changed: Vec<f32> =
                (0..n * width).map(|j| if seen(j / width) { 0.0 } else { change }).collect();
            let changed = Tensor::from_data(TensorData::new(changed, [n, width]), &Default::default());
            let row = PackedRow {
                ids: &ids,
                positions: &positions,
                documents: &owners,
                features: row + changed,
            };
            let logits = drafter.blocks(&row, &[anchor]).logits;
            logits.into_data().iter::<f32>().collect::<Vec<_>>()
        };
        prop_assert_eq!(run(0.0), run(50.0));
        let anchored = drafter.shape().layout == Layout::AnchorPredicts;
        prop_assert_eq!(drafter.max_draft(), drafter.shape().block_size - usize::from(!anchored));
    }
}
