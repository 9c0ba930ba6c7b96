//! The drafter's configuration against the target's, and against what training wrote down.

use super::{
    Drafter,
    check::{Told, Verdict},
    target::{Opened, floats, list},
};
use burn::tensor::backend::Backend;
use serde_json::Value;

/// Checks every field that both know.
pub(super) fn check<B: Backend>(drafter: &Drafter<'_>, opened: &Opened<B>, told: &mut Told<'_>) {
    let (d, target) = (&drafter.outline.description, opened.target.config());
    let h_spec = d.kind == "hspec";
    told.equal("hidden size", d.hidden_size, target.hidden_size);
    told.equal("vocabulary", d.vocabulary, target.vocab_size);
    if let Some(stated) = drafter.config.get("num_target_layers").and_then(Value::as_u64) {
        told.equal("layers of the target", stated, target.num_hidden_layers as u64);
    }
    // What leaves the last layer has two meanings, before the final norm and behind it; only H-Spec reads it.
    let last = if h_spec { target.num_hidden_layers } else { target.num_hidden_layers - 1 };
    let features = d.feature_layers.clone().unwrap_or_default();
    let inside = features.iter().all(|&id| id <= last);
    told.holds("hidden layers that it reads", inside, format!("{features:?}"), format!("at most {last}"));
    let last = target.num_hidden_layers - 1;
    if h_spec {
        let inside = d.kv_layers.iter().all(|&id| id <= last);
        let found = format!("{:?}", d.kv_layers);
        told.holds("key-value layers that it reads", inside, found, format!("at most {last}"));
        let mut set: Vec<u64> = d.kv_layers.iter().map(|&id| id as u64).collect();
        set.sort_unstable();
        set.dedup();
        let stated = drafter.config["aux_hidden_state_layer_ids"].clone();
        told.equal("aux_hidden_state_layer_ids", stated, set.into());
        told.equal("width of a head", d.head_dim, target.head_dim);
        if drafter.config.get("attn_kv_head_ids").is_none_or(Value::is_null) {
            told.equal("key-value heads", d.kv_heads, target.num_key_value_heads);
        }
    }
    trained(drafter, told);
    longest(drafter, target.max_position_embeddings, told);
    for window in d.windows.iter().flatten() {
        let expected = format!("at least {}, the slots of a draft", d.k);
        told.holds("window", *window >= d.k, window.to_string(), expected);
    }
    if let Some(mask) = d.mask_token {
        let (ends, rows) = (opened.ends(), target.vocab_size);
        let expected = format!("a token below {rows} that ends no text");
        let found = format!("{} (ends of text: {})", mask.0, list(&ends));
        told.holds("mask token", mask.index() < rows && !ends.contains(&mask), found, expected);
        if mask.index() < rows {
            let row = opened.target.embedding().narrow(0, mask.index(), 1);
            let norm = floats(row).iter().map(|x| x * x).sum::<f32>().sqrt();
            told.holds(
                "embedding of the mask token",
                norm > 1e-4,
                format!("length {norm:.3}"),
                "not zero, or slots start from nothing",
            );
        }
    }
    if let Ok(inspection) = &drafter.inspection
        && !inspection.odd.is_empty()
    {
        told.add("oddities of the files", Verdict::Warning, inspection.odd.join("; "), "none");
    }
}

/// What it read while it learned.
fn trained(drafter: &Drafter<'_>, told: &mut Told<'_>) {
    let name = "layers that it was trained on";
    let record = match &drafter.record {
        Ok(Some(record)) => record,
        Ok(None) => return told.skip(name, "no provenance.json beside the drafter"),
        Err(error) => return told.add(name, Verdict::Warning, error.to_string(), "what training wrote down"),
    };
    let d = &drafter.outline.description;
    let text = |hidden: &[usize], kv: &[usize]| format!("hidden {hidden:?}, key-value {kv:?}");
    let found = text(d.feature_layers.as_deref().unwrap_or_default(), &d.kv_layers);
    told.equal(name, found, text(&record.feature_layers, &record.kv_layers));
}

fn longest(drafter: &Drafter<'_>, target: usize, told: &mut Told<'_>) {
    let Some(stated) = drafter.layer().get("max_position_embeddings").and_then(Value::as_u64) else { return };
    let verdict = if stated as usize >= target { Verdict::Ok } else { Verdict::Warning };
    told.add("longest context", verdict, stated.to_string(), format!("{target}, the target's"));
}
