//! `provenance.json` beside a checkpoint: what made it, of what.

use crate::{features::Reads, recipe::Recipe, responses::Response, run_dir::write_json};
use burn::tensor::backend::Backend;
use hspec_core::{
    Result,
    checkpoint::{Weights, read_json},
    provenance::{Machine, utc_date},
};
use hspec_nn::params::fingerprint;
use serde::{Deserialize, Serialize};
use std::{path::Path, time::SystemTime};

/// Name of the file.
const FILE: &str = "provenance.json";

/// Where a checkpoint comes from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Version of this crate.
    pub hspec: String,
    /// Commit of the source; "unknown" outside a repository.
    pub commit: String,
    /// Day on which it was written, UTC.
    pub date: String,
    /// Processor, and threads that computed.
    pub machine: Machine,
    /// Burn's name of the backend.
    pub backend: String,
    /// The devices that shared the rows of a step.
    pub devices: Vec<String>,
    /// Hash of the target's final norm.
    pub target: String,
    /// Hash of the resolved recipe.
    pub recipe: String,
    /// Hash of the responses: their tokens, their order, and which of them were supervised.
    pub responses: String,
    /// The drafter that the run began with; none where it began from new weights, or an older version began it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init: Option<Init>,
    /// Hidden ids of the target that it learned to read.
    pub feature_layers: Vec<usize>,
    /// Layers whose keys and values it learned to read.
    pub kv_layers: Vec<usize>,
    /// Steps done.
    pub step: usize,
    /// Simulated tau where it was measured at this step.
    pub simulated_tau: Option<f64>,
}

/// A drafter that a run began with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Init {
    /// Its folder, as it was named.
    pub drafter: String,
    /// Hash of its tensors' names and values.
    pub weights: String,
}

impl Init {
    /// Of the drafter in `dir`.
    ///
    /// # Errors
    /// Weights that cannot be read.
    pub fn new(dir: &Path) -> Result<Self> {
        let weights = Weights::open(dir)?;
        let mut hashes = Vec::new();
        for name in weights.names() {
            let bytes = weights.tensor(&name)?.map(|tensor| tensor.bytes.to_vec()).unwrap_or_default();
            hashes.push(fingerprint(name.bytes().chain(bytes)));
        }
        let hashes = hashes.into_iter().flat_map(u64::to_le_bytes);
        Ok(Self { drafter: dir.display().to_string(), weights: format!("{:016x}", fingerprint(hashes)) })
    }
}

impl Record {
    /// Of a run before its first step, on some devices of a backend.
    pub fn new<B: Backend>(
        commit: &str,
        devices: &[B::Device],
        target: String,
        recipe: &Recipe,
        responses: &[Response],
        reads: &Reads,
    ) -> Self {
        Self {
            hspec: env!("CARGO_PKG_VERSION").into(),
            commit: commit.into(),
            date: utc_date(SystemTime::now()),
            machine: Machine::this(rayon::current_num_threads()),
            backend: devices.first().map(|device| B::name(device)).unwrap_or_default(),
            devices: devices.iter().map(|device| format!("{device:?}")).collect(),
            target,
            recipe: format!("{:016x}", fingerprint(recipe.resolved().bytes())),
            responses: hash(responses),
            init: None,
            feature_layers: reads.hidden.clone(),
            kv_layers: reads.kv.clone(),
            step: 0,
            simulated_tau: None,
        }
    }

    /// Writes it beside a checkpoint of `step`.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn write(&self, checkpoint: &Path, step: usize, simulated_tau: Option<f64>) -> Result<()> {
        let date = utc_date(SystemTime::now());
        write_json(&checkpoint.join(FILE), &Self { step, simulated_tau, date, ..self.clone() })
    }

    /// The record beside a checkpoint; none where there is none, as beside drafters from elsewhere.
    ///
    /// # Errors
    /// One that cannot be read.
    pub fn read(checkpoint: &Path) -> Result<Option<Self>> {
        let file = checkpoint.join(FILE);
        file.exists().then(|| read_json(&file)).transpose()
    }
}

fn hash(responses: &[Response]) -> String {
    let document = |response: &Response| {
        let ids = response.ids().zip(response.loss_mask());
        ids.flat_map(|(id, supervised)| [id.0, u32::from(supervised)]).chain([u32::MAX]).collect::<Vec<_>>()
    };
    let words = responses.iter().flat_map(document);
    format!("{:016x}", fingerprint(words.flat_map(u32::to_le_bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hspec_core::TokenId;

    #[test]
    fn the_hash_of_responses_depends_on_tokens_masks_and_order() {
        let response = |prompt: usize| {
            let ids: Vec<TokenId> = (0..6).map(TokenId).collect();
            Response::new("a", ids[..prompt].to_vec(), ids[prompt..].to_vec())
        };
        let (a, b) = (response(2), response(3));
        let hashes =
            [hash(&[a.clone(), b.clone()]), hash(&[b.clone(), a.clone()]), hash(&[a.clone(), a.clone()])];
        assert!(hashes[0] != hashes[1] && hashes[1] != hashes[2] && hashes[0] != hashes[2]);
        // Names are no part of what is learned.
        assert_eq!(hash(&[Response { id: "z".into(), ..a.clone() }]), hash(&[a]));
    }
}
