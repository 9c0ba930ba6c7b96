//! What is unusual in a checkpoint that can be read all the same, a sentence each.

use super::{
    files,
    parameters::{HEAD, Parameters},
};
use crate::{
    Result, TokenId,
    checkpoint::{Element, Weights},
    config::{LayerConfig, SpeculatorsConfig},
};
use serde_json::Value;
use std::{collections::BTreeMap, path::Path};

/// Window keys that decide nothing.
pub(super) fn in_layers(layer: &LayerConfig) -> Vec<String> {
    let sliding = layer.layer_types.iter().flatten().any(|kind| kind == "sliding_attention");
    let mut odd = Vec::new();
    if let Some(window) = layer.sliding_window.filter(|_| !sliding) {
        odd.push(format!("sliding_window {window} is not used: layer_types has no sliding_attention"));
    }
    let stated = layer.extra.get("use_sliding_window").and_then(Value::as_bool);
    if let Some(stated) = stated.filter(|&stated| stated != sliding) {
        let has = if sliding { "has" } else { "has no" };
        odd.push(format!("use_sliding_window {stated} is not used: layer_types {has} sliding_attention"));
    }
    odd
}

/// A use that the kind or its block does not allow.
pub(super) fn in_usage(usage: &SpeculatorsConfig, kind: &str, k: usize) -> Vec<String> {
    let mut odd = Vec::new();
    if usage.algorithm != kind {
        odd.push(format!("speculators_config.algorithm is {}, the kind is {kind}", usage.algorithm));
    }
    for tokens in usage.proposal_methods.iter().map(|method| method.speculative_tokens).filter(|&n| n > k) {
        odd.push(format!(
            "speculators_config asks for {tokens} tokens per draft, and a draft has at most {k}"
        ));
    }
    odd
}

/// What the files say beside or against the configuration.
pub(super) fn in_files(
    dir: &Path,
    config: &Value,
    weights: &Weights,
    parameters: &Parameters,
    pruned: bool,
) -> Result<Vec<String>> {
    let mut odd = Vec::new();
    let names = weights.names();
    let known = |name: &String| {
        name == "d2t" || name == "t2d" || parameters.0.iter().any(|parameter| parameter.name == *name)
    };
    let unread: Vec<&str> = names.iter().filter(|name| !known(name)).map(String::as_str).collect();
    if !unread.is_empty() {
        odd.push(format!("nothing reads {}: {}", count(unread.len()), shortened(&unread)));
    }
    let copies: Vec<&str> = parameters
        .0
        .iter()
        .filter(|p| p.lent())
        .map(|p| p.name.as_str())
        .filter(|n| weights.contains(n))
        .collect();
    if let [one] = *copies {
        odd.push(format!("of the embedding and the head, the file has one: {one}"));
    }
    let tied = config.get("tie_word_embeddings").is_some_and(|tied| *tied == true);
    if tied && weights.contains(HEAD) {
        odd.push(format!("tie_word_embeddings is true, and the file has an {HEAD}, which is used"));
    }
    odd.extend(in_maps(weights, pruned)?);
    odd.extend(in_types(config, weights, parameters)?);
    let index = "model.safetensors.index.json";
    if dir.join("model.safetensors").exists() && dir.join(index).exists() {
        odd.push(format!("{index} lies beside model.safetensors and is not read"));
    }
    Ok(odd)
}

fn in_maps(weights: &Weights, pruned: bool) -> Result<Vec<String>> {
    let mut odd = Vec::new();
    let (d2t, t2d) = (weights.stored("d2t")?, weights.stored("t2d")?);
    if !pruned && (d2t.is_some() || t2d.is_some()) {
        odd.push("the vocabulary is whole, and the file has maps of it".to_owned());
    }
    match (&d2t, &t2d) {
        (Some(_), None) if pruned => odd.push("t2d is missing; it follows from d2t".to_owned()),
        (None, Some(_)) => odd.push("d2t is missing; it follows from t2d".to_owned()),
        _ => {}
    }
    for (name, map, element) in [("d2t", &d2t, Element::I64), ("t2d", &t2d, Element::Bool)] {
        if let Some(map) = map.as_ref().filter(|map| map.element != element) {
            let (found, expected) = (map.element.name(), element.name());
            odd.push(format!("{name} is stored as {found}; published drafters have {expected}"));
        }
    }
    let Some(d2t) = d2t.map(|map| map.decode().iter::<i64>().collect::<Vec<_>>()) else { return Ok(odd) };
    match t2d.map(|map| map.decode()) {
        Some(t2d) => {
            let kept = (0..).zip(t2d.iter::<i64>()).filter(|(_, kept)| *kept != 0);
            let ids: Vec<TokenId> = kept.map(|(id, _)| TokenId(id)).collect();
            if d2t.len() > 1 && files::is_ids(&d2t, &ids) {
                odd.push(
                    "d2t has target ids in the place of offsets, as t2d shows; other readers fail on it"
                        .into(),
                );
            }
        }
        // Neighbouring ids have equal offsets, and any vocabulary has neighbours.
        None if d2t.len() > 1 && d2t.is_sorted_by(|a, b| a < b) => {
            odd.push("d2t ascends from entry to entry, as target ids would; it is read as offsets".into());
        }
        None => {}
    }
    Ok(odd)
}

fn in_types(config: &Value, weights: &Weights, parameters: &Parameters) -> Result<Vec<String>> {
    let mut odd = Vec::new();
    let floats = float_types(weights, parameters)?;
    if floats.len() > 1 {
        let all: Vec<String> = floats.iter().map(|(e, (n, _))| format!("{n} {}", e.name())).collect();
        odd.push(format!("the parameters are stored in several types: {}", all.join(", ")));
    }
    if let Some((tensors, _)) = floats.get(&Element::F16) {
        odd.push(format!("{} in F16, which no published drafter has", stored(*tensors)));
    }
    let stated = config.get("dtype").or(config.get("torch_dtype")).and_then(Value::as_str);
    for (element, (tensors, _)) in &floats {
        if let Some(stated) = stated.filter(|&stated| stated != dtype_word(*element)) {
            odd.push(format!("dtype is {stated}, and {} in {}", stored(*tensors), element.name()));
        }
    }
    Ok(odd)
}

/// Tensors and values of the parameters in a file, by type.
pub(super) fn float_types(
    weights: &Weights,
    parameters: &Parameters,
) -> Result<BTreeMap<Element, (usize, usize)>> {
    let mut types = BTreeMap::new();
    for parameter in &parameters.0 {
        if let Some(stored) = weights.stored(&parameter.name)? {
            let (tensors, values) = types.entry(stored.element).or_insert((0, 0));
            *tensors += 1;
            *values += parameter.size();
        }
    }
    Ok(types)
}

/// What `dtype` says for a type.
pub(super) fn dtype_word(element: Element) -> String {
    match element {
        Element::F64 => "float64".into(),
        Element::F32 => "float32".into(),
        Element::F16 => "float16".into(),
        Element::Bf16 => "bfloat16".into(),
        integer => integer.name(),
    }
}

fn count(tensors: usize) -> String {
    if tensors == 1 { "1 tensor".into() } else { format!("{tensors} tensors") }
}

fn stored(tensors: usize) -> String {
    format!("{} {} stored", count(tensors), if tensors == 1 { "is" } else { "are" })
}

/// The first few names.
fn shortened(names: &[&str]) -> String {
    const MOST: usize = 8;
    let more = if names.len() > MOST { ", .." } else { "" };
    format!("{}{more}", names[..names.len().min(MOST)].join(", "))
}
