//! The draft vocabulary: its maps, and whether an answer can end in it.

use super::{
    Drafter,
    check::{Told, Verdict},
    target::{Opened, list},
};
use burn::tensor::backend::Backend;
use hspec_core::{Error, TokenId, checkpoint::Weights};

/// Checks the maps as reading does, and what they keep.
pub(super) fn check<B: Backend>(drafter: &Drafter<'_>, opened: &Opened<B>, told: &mut Told<'_>) {
    let d = &drafter.outline.description;
    let (kept, all) = (d.draft_vocabulary, d.vocabulary);
    let name = "vocabulary maps";
    match &drafter.inspection {
        Err(Error::Invalid { field, found, expected, .. }) if field == "d2t" || field == "t2d" => {
            told.holds(name, false, format!("{field}: {found}"), expected.clone());
            return;
        }
        Err(error) => {
            told.holds("tensors of the drafter", false, error.to_string(), "the configuration's");
            return;
        }
        Ok(_) if kept == all => told.add(name, Verdict::Ok, "the whole vocabulary", "ids or maps of them"),
        Ok(_) => {
            told.add(name, Verdict::Ok, format!("{kept} of {all} ids, ascending"), "ids or maps of them")
        }
    }
    let ends = opened.ends();
    if kept < all && !ends.is_empty() {
        let kept = targets(drafter).unwrap_or_default();
        let reached: Vec<TokenId> =
            ends.iter().copied().filter(|id| kept.binary_search(id).is_ok()).collect();
        let verdict = if reached.is_empty() { Verdict::Warning } else { Verdict::Ok };
        let found = if reached.is_empty() { "none".into() } else { list(&reached) };
        told.add("ends of text that can be drafted", verdict, found, format!("some of {}", list(&ends)));
    }
}

/// The kept ids, ascending, of maps that have been checked.
fn targets(drafter: &Drafter<'_>) -> Option<Vec<TokenId>> {
    let weights = Weights::open(drafter.dir).ok()?;
    let ints = |name: &str| Some(weights.tensor(name).ok()??.iter::<i64>().collect::<Vec<_>>());
    if let Some(flags) = ints("t2d") {
        return Some((0..).zip(flags).filter(|(_, kept)| *kept != 0).map(|(id, _)| TokenId(id)).collect());
    }
    let offsets = ints("d2t")?;
    (0..).zip(offsets).map(|(i, offset): (i64, i64)| u32::try_from(i + offset).ok().map(TokenId)).collect()
}
