//! What all kinds of drafter share when their files are read and written.

use super::DraftVocab;
use crate::{
    Error, Result, TokenId,
    checkpoint::{StoreAs, Weights, write_atomic, write_safetensors},
    target::Target,
};
use burn::{
    module::Module,
    tensor::{TensorData, backend::Backend},
};
use hspec_nn::{Linear, params};
use serde_json::Value;
use std::{collections::BTreeMap, path::Path};

/// The vocabulary that a checkpoint's `d2t` states, or where it has none its `t2d`: `kept` of `vocab` ids.
///
/// # Errors
/// [`Error::Invalid`] for maps that are missing though the vocabulary is pruned, of another size, that leave
/// the vocabulary, or that contradict each other.
pub(super) fn vocabulary(weights: &Weights, vocab: usize, kept: usize) -> Result<DraftVocab> {
    let file = weights.path();
    let ints = |name: &str, expected: usize| match weights.tensor(name)? {
        Some(map) if map.num_elements() == expected => Ok(Some(map.iter::<i64>().collect::<Vec<_>>())),
        Some(map) => {
            let found = format!("shape {:?}", map.shape.to_vec());
            Err(Error::invalid(file, name, found, format!("[{expected}]")))
        }
        None => Ok(None),
    };
    let flags: Option<Vec<bool>> = ints("t2d", vocab)?.map(|f| f.iter().map(|&f| f != 0).collect());
    let flagged = |flags: &[bool]| -> Vec<TokenId> {
        (0..vocab as u32).filter(|&id| flags[id as usize]).map(TokenId).collect()
    };
    let found = match (ints("d2t", kept)?, &flags) {
        // Some files have ids in the place of offsets; the two agree for no vocabulary of more than one id.
        (Some(ids), Some(flags)) if is_ids(&ids, &flagged(flags)) => {
            DraftVocab::new(flagged(flags), vocab, file)?
        }
        (Some(offsets), _) => DraftVocab::from_offsets(&offsets, vocab, file)?,
        (None, Some(flags)) => DraftVocab::new(flagged(flags), vocab, file)?,
        (None, None) if kept == vocab => DraftVocab::full(vocab),
        (None, None) => {
            let expected = format!("offsets of {kept} draft ids: the vocabulary is pruned");
            return Err(Error::invalid(file, "d2t", "no such tensor", expected));
        }
    };
    if flags.is_some_and(|flags| flags != found.kept(vocab)) || found.len() != kept {
        return Err(Error::invalid(
            file,
            "t2d",
            "other ids",
            format!("the {kept} ids of the draft vocabulary"),
        ));
    }
    Ok(found)
}

/// Whether a `d2t` states these target ids themselves.
pub(super) fn is_ids(d2t: &[i64], ids: &[TokenId]) -> bool {
    d2t.iter().copied().eq(ids.iter().map(|id| i64::from(id.0)))
}

/// Fills a fresh model from a checkpoint; the embedding and the head, where it has none, from `target`.
///
/// # Errors
/// [`Error::Invalid`] naming the first tensor that is missing or has another shape.
pub(super) fn fill<B: Backend, M: Module<B>>(
    fresh: M,
    weights: &Weights,
    target: Option<&Target<B>>,
    vocab: &DraftVocab,
    device: &B::Device,
) -> Result<M> {
    let mut failed = None;
    let source = |name: &str| match weights.tensor(name) {
        Ok(Some(data)) => Some(data),
        Ok(None) => target.and_then(|t| borrowed(name, t, vocab)),
        Err(error) => {
            failed = Some(error);
            None
        }
    };
    let model = params::fill(fresh, device, source, |_| false);
    match failed {
        Some(error) => Err(error),
        None => {
            model.map_err(|e| Error::invalid(weights.path(), "tensors", e.to_string(), "the configuration's"))
        }
    }
}

/// The rows of the target's head that a pruned vocabulary keeps, `[Vd, H]`.
pub fn pruned_head<B: Backend>(target: &Target<B>, vocab: &DraftVocab) -> Linear<B> {
    let ids: Vec<usize> = vocab.targets().iter().map(|id| id.index()).collect();
    Linear::new(target.head().rows(&ids), None)
}

/// The target's tensor that stands for a frozen one.
fn borrowed<B: Backend>(name: &str, target: &Target<B>, vocab: &DraftVocab) -> Option<TensorData> {
    match name {
        "embed_tokens.weight" => Some(target.embedding().into_data()),
        "lm_head.weight" => Some(pruned_head(target, vocab).weight.val().into_data()),
        _ => None,
    }
}

/// Writes `config.json` and `model.safetensors` into `dir`, with the maps of a vocabulary that keeps only a
/// part of `vocab_size` ids.
///
/// # Errors
/// When the folder cannot be written; an older file is then left whole.
pub(super) fn write(
    dir: &Path,
    mut config: Value,
    mut tensors: BTreeMap<String, TensorData>,
    vocab: &DraftVocab,
    vocab_size: usize,
    store: StoreAs,
) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
    if vocab.len() < vocab_size {
        tensors.insert("d2t".into(), TensorData::new(vocab.offsets(), [vocab.len()]));
        tensors.insert("t2d".into(), TensorData::new(vocab.kept(vocab_size), [vocab_size]));
    }
    write_safetensors(&dir.join("model.safetensors"), &tensors, store)?;
    config["dtype"] = match store {
        StoreAs::F32 => "float32".into(),
        StoreAs::Bf16 => "bfloat16".into(),
    };
    let config = format!("{config:#}");
    write_atomic(&dir.join("config.json"), |out| out.write_all(config.as_bytes()))
}
