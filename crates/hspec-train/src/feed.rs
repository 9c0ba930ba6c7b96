//! Packs for the coming steps: the target reads the next documents while the drafter learns from the last.
//!
//! The order of documents is fixed by the seed and by where the run stands, so that nothing computed
//! depends on who is faster.

use crate::{
    features::FeatureStore,
    pack::{Packed, shuffled},
    recipe::Loop,
    responses::Response,
    run_dir::Progress,
};
use burn::tensor::backend::Backend;
use hspec_core::Result;
use std::sync::mpsc::SyncSender;

/// The documents of one step, and where reading stands after them.
#[derive(Debug)]
pub(crate) struct Pack<B: Backend> {
    pub packed: Packed<B>,
    pub epoch: u64,
    pub cursor: usize,
}

/// Sends a pack for every step that `progress` has left, until an error or until nobody listens.
pub(crate) fn feed<B: Backend>(
    mut store: FeatureStore<'_, B>,
    training: &[Response],
    recipe: &Loop,
    mut progress: Progress,
    send: &SyncSender<Result<Pack<B>>>,
) {
    for _ in progress.step..recipe.steps {
        let documents = next_documents(training, recipe.tokens_per_step, recipe.seed, &mut progress);
        let (epoch, cursor) = (progress.epoch, progress.cursor);
        let pack = store.pack(&documents).map(|packed| Pack { packed, epoch, cursor });
        let failed = pack.is_err();
        if send.send(pack).is_err() || failed {
            return;
        }
    }
}

/// The documents of the next step, in the epochs' order: as many as fit, at least one.
fn next_documents<'r>(
    training: &'r [Response],
    tokens: usize,
    seed: u64,
    progress: &mut Progress,
) -> Vec<(usize, &'r Response)> {
    let mut order = shuffled(training.len(), seed, progress.epoch);
    let (mut documents, mut total) = (Vec::new(), 0);
    loop {
        if progress.cursor == order.len() {
            progress.epoch += 1;
            progress.cursor = 0;
            order = shuffled(training.len(), seed, progress.epoch);
        }
        let number = order[progress.cursor];
        let document = &training[number];
        total += document.tokens();
        if total > tokens && !documents.is_empty() {
            return documents;
        }
        documents.push((number, document));
        progress.cursor += 1;
    }
}
