//! Rows for the coming steps: the target reads the next documents while the drafter learns from the last.
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

/// The documents of one row, and where reading stands after them.
#[derive(Debug)]
pub(crate) struct Pack<B: Backend> {
    pub packed: Packed<B>,
    pub epoch: u64,
    pub cursor: usize,
}

/// Steps of a run over these documents.
pub(crate) fn steps(training: &[Response], recipe: &Loop) -> usize {
    let Some(epochs) = recipe.epochs else { return recipe.steps.unwrap_or(0) };
    let mut reader = Reader::new(training, recipe, 0, 0);
    let mut rows = 0;
    while !reader.has_read(epochs) {
        reader.next();
        rows += 1;
    }
    usize::div_ceil(rows, recipe.accumulate)
}

/// Sends the rows of every step that `progress` has left of `steps`, until an error or until nobody listens.
pub(crate) fn feed<B: Backend>(
    mut store: FeatureStore<'_, B>,
    training: &[Response],
    recipe: &Loop,
    steps: usize,
    progress: &Progress,
    send: &SyncSender<Result<Pack<B>>>,
) {
    let mut reader = Reader::new(training, recipe, progress.epoch, progress.cursor);
    for _ in 0..steps.saturating_sub(progress.step) * recipe.accumulate {
        let documents = reader.next();
        let (epoch, cursor) = (reader.epoch, reader.cursor);
        let pack = store.pack(&documents).map(|packed| Pack { packed, epoch, cursor });
        let failed = pack.is_err();
        if send.send(pack).is_err() || failed {
            return;
        }
    }
}

/// Reads documents in the epochs' order.
struct Reader<'r> {
    training: &'r [Response],
    tokens: usize,
    seed: u64,
    epoch: u64,
    /// Place of the next document in the epoch's order.
    cursor: usize,
    order: Vec<usize>,
}

impl<'r> Reader<'r> {
    fn new(training: &'r [Response], recipe: &Loop, epoch: u64, cursor: usize) -> Self {
        let order = shuffled(training.len(), recipe.seed, epoch);
        Self { training, tokens: recipe.row_tokens(), seed: recipe.seed, epoch, cursor, order }
    }

    fn has_read(&self, epochs: u64) -> bool {
        self.epoch >= epochs || (self.epoch + 1 == epochs && self.cursor == self.order.len())
    }

    /// The documents of the next row: as many as fit, at least one.
    fn next(&mut self) -> Vec<(usize, &'r Response)> {
        let (mut documents, mut total) = (Vec::new(), 0);
        loop {
            if self.cursor == self.order.len() {
                self.epoch += 1;
                self.cursor = 0;
                self.order = shuffled(self.training.len(), self.seed, self.epoch);
            }
            let number = self.order[self.cursor];
            let document = &self.training[number];
            total += document.tokens();
            if total > self.tokens && !documents.is_empty() {
                return documents;
            }
            documents.push((number, document));
            self.cursor += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hspec_core::TokenId;

    /// An epoch that ends inside a row is finished by it.
    #[test]
    fn epochs_are_counted_in_steps() {
        let document = |n: usize| Response {
            id: n.to_string(),
            prompt_ids: vec![TokenId(1)],
            response_ids: vec![TokenId(2); 3],
            turn: 1,
            given: Vec::new(),
            finish: None,
        };
        let training: Vec<Response> = (0..5).map(document).collect();
        let recipe = |text: &str| -> Loop {
            let text = format!(
                "{text}\ntokens_per_step = 8\nanchors_per_step = 4\nwarm_start = \"none\"\n\
                 optimizer = \"adamw\"\nlr = 1e-3\nce = 1.0"
            );
            toml::from_str(&text).unwrap()
        };
        // Two documents to a row: ten readings are five rows, five are two and a half.
        assert_eq!(steps(&training, &recipe("epochs = 2")), 5);
        assert_eq!(steps(&training, &recipe("epochs = 1")), 3);
        assert_eq!(steps(&training, &recipe("epochs = 2\naccumulate = 2")), 5);
        assert_eq!(steps(&training, &recipe("steps = 7")), 7);
    }
}
