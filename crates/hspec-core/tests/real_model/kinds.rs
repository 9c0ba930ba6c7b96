//! Every kind of drafter, with random weights.

use crate::{B, dspark, eagle, greedy, prompted::Prompted, scene, variants};
use hspec_core::{
    decode::{Decoder, Round},
    drafter::Drafter,
    target::Target,
};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Drafts per round.
const K: usize = 4;

/// Of H-Spec: as released, its ablations, and what it leaves to future work.
const VARIANTS: [&str; 8] = [
    "as released",
    "no seed",
    "no target cache",
    "target cache alone",
    "mamba alone",
    "one head of the cache per sub-layer",
    "domino",
    "selector and convolutions",
];

/// A configuration that was made for a tiny target, for this one.
fn resized(mut config: Value, target: &Target<B>) -> Value {
    fn walk(value: &mut Value, vocabulary: usize, hidden: usize) {
        for (key, value) in value.as_object_mut().into_iter().flatten() {
            match key.as_str() {
                "vocab_size" => *value = vocabulary.into(),
                "draft_vocab_size" => *value = (vocabulary / 3).into(),
                "hidden_size" => *value = hidden.into(),
                _ => walk(value, vocabulary, hidden),
            }
        }
    }
    walk(&mut config, target.config().vocab_size, target.config().hidden_size);
    config
}

type Named = (String, Box<dyn Drafter<B>>);

/// One after the other: each holds an embedding of the model's size.
fn drafters(target: &Target<B>) -> impl Iterator<Item = Named> {
    let blocks = [
        dspark::deepspec("rnn"),
        dspark::speculators("dspark", 3, false),
        dspark::speculators("dflash", 3, false),
        dspark::zlab("DFlashDraftModel", json!({})),
        dspark::dflash2(),
        dspark::domino(true),
    ];
    let blocks = blocks.into_iter().map(move |config| {
        let drafter = dspark::drafter(&resized(config, target));
        (Drafter::<B>::kind(&drafter).to_owned(), Box::new(drafter) as Box<dyn Drafter<B>>)
    });
    let eagles = eagle::configurations().into_iter().filter(|(name, _)| *name != "flags");
    let eagles = eagles.map(move |(name, config)| {
        let drafter = eagle::random_drafter(&resized(config, target));
        (format!("{}, {name}", drafter.kind()), drafter)
    });
    let variants = variants::VARIANTS.into_iter().filter(|(name, _)| VARIANTS.contains(name));
    let variants = variants.map(move |(name, edit)| {
        let drafter = variants::drafter::<B>(variants::config(target.config(), edit), false);
        (format!("hspec, {name}"), Box::new(drafter) as Box<dyn Drafter<B>>)
    });
    blocks.chain(eagles).chain(variants)
}

#[test]
fn every_kind_leaves_the_text_of_a_real_model_as_it_is() {
    let (target, texts) = scene();
    let mut kinds = BTreeSet::new();
    let mut variants = 0;
    for (name, drafter) in drafters(&target) {
        kinds.insert(drafter.kind());
        variants += usize::from(drafter.kind() == "hspec");
        let mut rounds: Vec<Round> = Vec::new();
        for text in &texts {
            let told = Prompted { drafter: &*drafter, text };
            let found = greedy(&Decoder::new(&target, Some(&told)), &text.prompt, K);
            assert_eq!(found.tokens, text.answer, "{name}");
            rounds.extend(found.rounds);
        }
        let some = |what: &str, f: &dyn Fn(&Round) -> bool| {
            assert!(rounds.iter().any(f), "{name}: no round {what}: {rounds:?}");
        };
        some("was rejected", &|r| r.accepted == 0);
        some("was kept at all", &|r| r.accepted > 0);
        if drafter.vocabulary().is_none() {
            some("was kept in part", &|r| 0 < r.accepted && r.accepted < K);
            some("was kept as a whole", &|r| r.accepted == K);
        }
    }
    assert_eq!(variants, VARIANTS.len());
    assert_eq!(kinds, BTreeSet::from(["dflash", "dflash2", "domino", "dspark", "eagle3", "hspec", "peagle"]));
}
