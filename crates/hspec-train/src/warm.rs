//! What can be wrong about a recipe for a target, and a start from a drafter that exists.

use crate::{kinds, recipe::Recipe};
use burn::tensor::{DType, backend::Backend};
use hspec_core::{
    Error, Result,
    checkpoint::read_json,
    drafter::{Outline, outline},
    target::Target,
};
use hspec_nn::Compute;
use serde_json::Value;
use std::path::Path;

/// Everything about a recipe that can be wrong for a target, found before any work is done; `prompts` is their
/// number, `file` names the recipe in errors.
///
/// # Errors
/// [`Error::Invalid`] naming the field.
pub fn check<B: Backend>(recipe: &Recipe, target: &Target<B>, prompts: usize, file: &Path) -> Result<()> {
    let drafter = described(recipe, target, file)?.description;
    let refuse =
        |field: &str, found: String, expected: String| Err(Error::invalid(file, field, found, expected));
    let data = &recipe.data;
    let context = target.config().max_position_embeddings;
    if data.max_prompt_tokens.saturating_add(data.max_new_tokens) > context {
        let found = format!("{} behind {} prompt tokens", data.max_new_tokens, data.max_prompt_tokens);
        return refuse(
            "data.max_new_tokens",
            found,
            format!("at most {context} in all, the target's context"),
        );
    }
    if data.validation >= prompts {
        return refuse(
            "data.validation",
            data.validation.to_string(),
            format!("fewer than the {prompts} prompts"),
        );
    }
    let (slots, row) = (drafter.block_size.unwrap_or(drafter.k), recipe.train.row_tokens());
    if row <= slots {
        let found = match recipe.train.accumulate {
            1 => recipe.train.tokens_per_step.to_string(),
            rows => format!("{} in {rows} rows", recipe.train.tokens_per_step),
        };
        return refuse("train.tokens_per_step", found, format!("more than block_size, {slots}, in a row"));
    }
    check_compute::<B>(recipe, target.device(), file)?;
    kinds::check_warm_start(recipe, target.config(), file)?;
    if let Some(id) = recipe.drafter.mask_token() {
        let row = target.embedding().narrow(0, id as usize, 1);
        let norm: f32 = row.into_data().iter::<f32>().map(|x| x * x).sum::<f32>().sqrt();
        if norm < 1e-4 {
            let expected = "a token whose embedding is not zero, or every slot would start from nothing";
            return refuse("drafter.mask_token", id.to_string(), expected.into());
        }
    }
    Ok(())
}

/// Refuses products of a type that the backend does not know.
pub(crate) fn check_compute<B: Backend>(recipe: &Recipe, device: &B::Device, file: &Path) -> Result<()> {
    if recipe.train.compute == Compute::Bf16 && !B::supports_dtype(device, DType::BF16) {
        let expected = "\"f32\": this backend has no bf16 products";
        return Err(Error::invalid(file, "train.compute", "\"bf16\"", expected));
    }
    Ok(())
}

fn described<B: Backend>(recipe: &Recipe, target: &Target<B>, file: &Path) -> Result<Outline> {
    let config = kinds::config(recipe, target.config(), "", file)?;
    outline(&config, file, Some(target.config().num_hidden_layers))
}

/// Refuses to start from the drafter in `dir` where it is not what the recipe asks for.
///
/// # Errors
/// [`Error::Invalid`] naming the first field or tensor that differs.
pub fn check_init<B: Backend>(dir: &Path, recipe: &Recipe, target: &Target<B>, file: &Path) -> Result<()> {
    let theirs = dir.join("config.json");
    let config: Value = read_json(&theirs)?;
    let found = outline(&config, &theirs, Some(target.config().num_hidden_layers))?;
    let wanted = described(recipe, target, file)?;
    let refuse = |field: &str, found: &Value, wanted: &Value| {
        let expected = format!("{wanted}, as the recipe has it");
        Err(Error::invalid(&theirs, field, found.to_string(), expected))
    };
    let fields = |o: &Outline| serde_json::to_value(&o.description).unwrap_or_default();
    let (ours, wants) = (fields(&found), fields(&wanted));
    for (field, wants) in wants.as_object().into_iter().flatten() {
        // Layouts of files and names of targets differ between drafters of one shape.
        let free = ["format", "target"].contains(&field.as_str());
        if !free && ours[field] != *wants {
            return refuse(field, &ours[field], wants);
        }
    }
    for wanted in &wanted.tensors {
        let shape = found.tensors.iter().find(|t| t.name == wanted.name).map(|t| &t.shape);
        if shape != Some(&wanted.shape) {
            let shape = shape.map_or(Value::Null, |shape| shape.clone().into());
            return refuse(&wanted.name, &shape, &wanted.shape.clone().into());
        }
    }
    match found.tensors.iter().find(|t| !wanted.tensors.iter().any(|w| w.name == t.name)) {
        Some(more) => refuse(&more.name, &more.shape.clone().into(), &Value::Null),
        None => Ok(()),
    }
}
