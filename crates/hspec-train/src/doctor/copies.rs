//! The drafter's copies of the target's tensors.

use super::{
    Drafter,
    check::{Compared, Told},
    target::{Opened, finite, floats},
};
use burn::tensor::backend::Backend;
use hspec_core::{Result, TokenId, checkpoint::Weights, drafter};

/// Half of bf16's last place: copies may be rounded.
const ROUNDED: f32 = 1.0 / 256.0;

/// A copy beside what it is one of.
struct Copy {
    /// Numbers that differ by more than rounding.
    others: usize,
    numbers: usize,
    compared: Compared,
}

/// Compares the copies that the files hold, and makes sure that all numbers are finite.
pub(super) fn check<B: Backend>(drafter: &Drafter<'_>, opened: &Opened<B>, told: &mut Told<'_>) {
    if told
        .attempt("drafter weights", "finite numbers", || Ok((finite(&Weights::open(drafter.dir)?)?, ())))
        .is_none()
    {
        return;
    }
    let own = |name: &str| drafter.outline.tensors.iter().any(|t| t.name == name && t.trained);
    for (name, tensor) in
        [("copy of the embedding", "embed_tokens.weight"), ("copy of the output head", "lm_head.weight")]
    {
        if own(tensor) {
            told.skip(name, "this kind trains it");
            continue;
        }
        match copy(drafter, opened, tensor) {
            Ok(Some(Copy { others, numbers, compared })) => {
                let found = format!("{others} of {numbers} numbers are others");
                told.measured(
                    name,
                    others == 0,
                    (found, "the target's, rounded at most"),
                    compared.difference,
                );
            }
            Ok(None) => told.skip(name, "the file leaves it to the target"),
            Err(error) => told.holds(name, false, error.to_string(), "the target's"),
        }
    }
}

fn copy<B: Backend>(drafter: &Drafter<'_>, opened: &Opened<B>, tensor: &str) -> Result<Option<Copy>> {
    let target = &opened.target;
    let Some(found) = Weights::open(drafter.dir)?.tensor(tensor)? else { return Ok(None) };
    let found: Vec<f32> = found.iter::<f32>().collect();
    let expected = if tensor == "embed_tokens.weight" {
        floats(target.embedding())
    } else {
        let loaded = drafter::load(drafter.dir, target, target.device())?;
        let all: Vec<TokenId> = (0..target.config().vocab_size as u32).map(TokenId).collect();
        let kept: Vec<usize> = loaded.vocabulary().unwrap_or(&all).iter().map(|id| id.index()).collect();
        floats(target.head().rows(&kept))
    };
    if found.len() != expected.len() {
        let sizes = (format!("{} numbers", found.len()), format!("{} numbers", expected.len()));
        return Err(hspec_core::Error::invalid(drafter.dir, tensor, sizes.0, sizes.1));
    }
    let rounded = |a: f32, b: f32| (a - b).abs() <= ROUNDED * b.abs();
    let others = found.iter().zip(&expected).filter(|(a, b)| !rounded(**a, **b)).count();
    Ok(Some(Copy { others, numbers: expected.len(), compared: Compared::of(&found, &expected) }))
}
