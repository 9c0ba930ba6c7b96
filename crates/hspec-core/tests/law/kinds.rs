//! Every kind of drafter and head.

use crate::{B, K, deviation, dspark, eagle, emitted, reference, shrunk, target};
use hspec_core::{decode::Decoder, drafter::Drafter};
use std::collections::BTreeSet;

const VOCAB: usize = 4;

fn check(drafters: impl IntoIterator<Item = (String, Box<dyn Drafter<B>>)>) {
    let target = target(VOCAB, 4, 1.0);
    let reference = reference(&target, K + 2);
    for (name, drafter) in drafters {
        let found = emitted(&Decoder::new(&target, Some(&*drafter)), 1);
        let off = deviation(&found.law, &reference);
        // Rows of one pass and of several differ in their last bits.
        assert!(off < 1e-6, "{name}: off by {off:e}");
        let lengths: BTreeSet<usize> = found.law.keys().map(Vec::len).collect();
        assert_eq!(lengths, (2..=K + 2).collect(), "{name}: every number of drafts is accepted somewhere");
    }
}

#[test]
fn block_drafters_keep_the_law_of_the_target() {
    check(dspark::all().into_iter().enumerate().map(|(i, config)| {
        let drafter = dspark::drafter(&shrunk(config, VOCAB));
        let name = format!("{}, configuration {i}", Drafter::<B>::kind(&drafter));
        (name, Box::new(drafter) as Box<dyn Drafter<B>>)
    }));
}

#[test]
fn eagle_drafters_keep_the_law_of_the_target() {
    check(eagle::configurations().into_iter().map(|(name, config)| {
        let drafter = eagle::random_drafter(&shrunk(config, VOCAB));
        (format!("{}, {name}", drafter.kind()), drafter)
    }));
}
