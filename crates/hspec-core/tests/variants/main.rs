//! Every variant of the H-Spec drafter, with random weights: the released form, its ablations, and the
//! extensions that H-Spec leaves to future work. Each trains, drafts, can be written and read again, and
//! leaves the target's output as it is.

#![allow(clippy::unwrap_used)] // a test may panic

mod decoding;
mod files;
mod law;
mod scene;
#[path = "../support/mod.rs"]
mod support;
mod training;

use hspec_core::{
    TokenId,
    checkpoint::{Weights, read_json},
    config::TargetConfig,
    target::Target,
};
use scene::{Edit, VARIANTS, config, drafter, released, without_markov};

type B = burn_flex::Flex;

fn target() -> Target<B> {
    let dir = hspec_goldens::root().join("targets/qwen3-tiny-untied");
    let file = dir.join("config.json");
    let config = TargetConfig::from_value(&read_json(&file).unwrap(), &file).unwrap();
    Target::from_weights(config, &Weights::open(&dir).unwrap(), &Default::default()).unwrap()
}

fn ids(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().copied().map(TokenId).collect()
}
