//! From prompt files to the prompts of a run, as tokens.

use crate::{pack::shuffled, recipe::Recipe, responses::PromptTokens};
use hspec_core::{
    Error, Result,
    prompts::Prompt,
    text::{ChatTemplate, Tokenizer},
};

/// The stream of the seed that picks prompts; documents use the epochs' numbers.
const STREAM: u64 = u64::MAX;

/// The prompts that a recipe uses, and how many were left out for their length.
#[derive(Debug)]
pub struct Selection {
    /// Rendered, tokenised, in random order.
    pub prompts: Vec<PromptTokens>,
    /// Prompts longer than the recipe allows.
    pub too_long: usize,
}

/// Renders prompts with the target's chat template, drops long ones, and draws as many as the recipe
/// wants.
///
/// # Errors
/// A prompt that cannot be rendered or encoded, two prompts with one id, or none left.
pub fn select(
    prompts: &[Prompt],
    recipe: &Recipe,
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
) -> Result<Selection> {
    let mut ids = std::collections::HashSet::new();
    if let Some(twice) = prompts.iter().find(|p| !ids.insert(&p.id)) {
        return Err(Error::Mismatch(format!("two prompts have the id {:?}", twice.id)));
    }
    let wanted = match recipe.data.max_prompts {
        0 => prompts.len(),
        n => n,
    };
    let mut selection = Selection { prompts: Vec::new(), too_long: 0 };
    for number in shuffled(prompts.len(), recipe.train.seed, STREAM) {
        if selection.prompts.len() == wanted {
            break;
        }
        let prompt = &prompts[number];
        let tokens = tokenizer.encode(&template.render(&prompt.messages, true)?)?;
        if tokens.len() > recipe.data.max_prompt_tokens {
            selection.too_long += 1;
        } else {
            selection.prompts.push(PromptTokens { id: prompt.id.clone(), ids: tokens });
        }
    }
    if selection.prompts.is_empty() {
        return Err(Error::Mismatch(format!(
            "no prompt is left: {} of {} are longer than {} tokens",
            selection.too_long,
            prompts.len(),
            recipe.data.max_prompt_tokens
        )));
    }
    Ok(selection)
}
