//! Why a drafter whose loss looks good is never accepted: an ordered list of checks of a target, a drafter, and
//! what one takes from the other. The first that differs is the one to mend.
//!
//! 1. The target: its files, its vocabulary, its chat template; whether what training captures of it
//!    ([`Features`](crate::features::Features)) gives back its logits, and whether decoding sees the same.
//! 2. The drafter's configuration against the target's, field by field, and against what training wrote down
//!    ([`Record`]).
//! 3. Its vocabulary and its copies of the target's tensors.
//! 4. Its forward pass in training ([`Learner::forward`](crate::kinds::Learner::forward)) against the one that
//!    decodes ([`Session`](hspec_core::drafter::Session)), and whether other layers of the target would suit it
//!    better than those that it reads.

mod check;
mod copies;
mod fields;
mod forward;
mod layers;
mod rope;
mod sample;
mod target;
mod vocabulary;

pub use check::{Check, Diagnosis, Verdict};

use crate::record::Record;
use burn::tensor::backend::AutodiffBackend;
use check::Told;
use hspec_core::{
    Result,
    checkpoint::read_json,
    drafter::{Inspection, Outline, inspect, outline},
    target::WeightStorage,
};
use serde_json::Value;
use std::path::Path;

/// What is examined.
#[derive(Debug, Clone, Copy)]
pub struct Doctor<'a> {
    /// The target's folder or GGUF file.
    pub target: &'a Path,
    /// The drafter's folder.
    pub drafter: &'a Path,
    /// Answers of the target, from `cargo xtask distill` or a run's folder.
    pub responses: Option<&'a Path>,
    /// A prompt in the place of those built in, where there are no answers.
    pub prompt: Option<&'a str>,
    /// How the target's matrices are stored.
    pub storage: WeightStorage,
}

impl Doctor<'_> {
    /// Runs every check that can be run, in order, and tells of each. What cannot be run, because something
    /// before it is broken, counts as skipped.
    pub fn examine<A: AutodiffBackend>(&self, device: &A::Device, tell: &mut dyn FnMut(&Check)) -> Diagnosis {
        let mut told = Told::new(tell);
        let opened = target::open::<A::InnerBackend>(self, device, &mut told);
        let documents = opened.as_ref().map(|opened| sample::documents(self, opened, &mut told));
        if let (Some(opened), Some(documents)) = (&opened, &documents) {
            target::hidden_states(opened, documents, &mut told);
        }
        let drafter = told.attempt("drafter files", "a configuration of a known kind", || {
            let read = Drafter::read(self.drafter, opened.as_ref().map(target::Opened::layers))?;
            let d = &read.outline.description;
            Ok((format!("{}, {} layers of {}, {} drafts", d.kind, d.layers, d.hidden_size, d.k), read))
        });
        let (Some(opened), Some(documents), Some(drafter)) = (&opened, &documents, &drafter) else {
            told.skip("the rest", "it needs a target and a drafter that can be read");
            return told.end();
        };
        fields::check(drafter, opened, &mut told);
        rope::check(drafter, opened, &mut told);
        vocabulary::check(drafter, opened, &mut told);
        copies::check(drafter, opened, &mut told);
        forward::check::<A>(drafter, opened, documents, &mut told);
        told.end()
    }
}

/// What can be known of a drafter without loading it.
struct Drafter<'a> {
    dir: &'a Path,
    config: Value,
    outline: Outline,
    /// An error where the file is not one that training wrote.
    record: Result<Option<Record>>,
    /// What its files hold; an error where they cannot be right.
    inspection: Result<Inspection>,
}

impl<'a> Drafter<'a> {
    fn read(dir: &'a Path, target_layers: Option<usize>) -> Result<Self> {
        let file = dir.join("config.json");
        let config: Value = read_json(&file)?;
        let outline = outline(&config, &file, target_layers)?;
        Ok(Self { dir, config, outline, record: Record::read(dir), inspection: inspect(dir) })
    }

    /// Its layers' configuration, wherever the layout has it.
    fn layer(&self) -> &Value {
        self.config.get("transformer_layer_config").unwrap_or(&self.config)
    }
}
