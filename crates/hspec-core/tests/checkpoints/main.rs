//! Telling what checkpoints are, and writing them in other layouts.

#![allow(clippy::unwrap_used)] // a test may panic

mod export;
mod folder;
mod inspect;
mod lent;

use hspec_core::{
    TokenId,
    checkpoint::{StoreAs, read_json},
    drafter::{
        DraftVocab,
        dspark::{DSpark, DSparkConfig, DSparkModel},
    },
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

type B = burn_flex::Flex;

/// Every drafter among the fixtures.
fn checkpoints() -> Vec<PathBuf> {
    let mut all = vec![hspec_goldens::root().join("hspec/full_drafter")];
    let folders = std::fs::read_dir(hspec_goldens::root().join("dspark")).unwrap();
    // A folder there may be a cache of features.
    all.extend(folders.map(|entry| entry.unwrap().path()).filter(|path| path.join("config.json").exists()));
    all.sort();
    assert!(all.len() > 1, "no checkpoints");
    all
}

/// A file's tensors as it stores them.
type Stored = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn stored(dir: &Path) -> Stored {
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |(name, t): (&str, TensorView<'_>)| {
        (name.to_owned(), (t.dtype(), t.shape().to_vec(), t.data().to_vec()))
    };
    file.iter().map(tensor).collect()
}

/// Changes the tensors of a file, and the configuration beside it.
fn edit(dir: &Path, tensors: impl FnOnce(&mut Stored), config: impl FnOnce(&mut Value)) {
    let mut all = stored(dir);
    tensors(&mut all);
    let views = all
        .iter()
        .map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    std::fs::write(dir.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    let mut value: Value = read_json(&dir.join("config.json")).unwrap();
    config(&mut value);
    std::fs::write(dir.join("config.json"), value.to_string()).unwrap();
}

/// A copy of a checkpoint that may be spoilt.
fn copy(dir: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(dir.join(file), copy.path().join(file)).unwrap();
    }
    copy
}

const TARGET: &str = "targets/llama31-tiny";

/// A small DFlash drafter in the layout of speculators for [`TARGET`], its whole vocabulary or every third
/// token, without the frozen tensors.
fn dflash(kept: usize) -> tempfile::TempDir {
    let config = json!({
        "speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [0, 2], "block_size": 6, "mask_token_id": 500, "draft_vocab_size": kept,
        "sample_from_anchor": false, "tie_word_embeddings": false,
        "transformer_layer_config": {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
            "model_type": "qwen3", "rope_parameters": { "rope_theta": 10000.0, "rope_type": "default" },
        },
        "speculators_config": {
            "algorithm": "dflash", "default_proposal_method": "greedy", "proposal_methods": [],
            "verifier": { "name_or_path": null },
        },
    });
    let (file, device) = (Path::new("config.json"), Default::default());
    let config = DSparkConfig::from_value(&config, file).unwrap();
    let model = DSparkModel::<B>::init(&config.shape(file).unwrap(), &device);
    let vocab = match kept {
        512 => DraftVocab::full(512),
        _ => DraftVocab::new((0..kept as u32).map(|i| TokenId(3 * i)).collect(), 512, file).unwrap(),
    };
    let dir = tempfile::tempdir().unwrap();
    DSpark::new(config, model, vocab, file).unwrap().save(dir.path(), StoreAs::Bf16, false).unwrap();
    dir
}
