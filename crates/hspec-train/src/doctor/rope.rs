//! Rotary fields. Keys that are borrowed are rotated by the target's; a drafter with keys of its own inherits
//! them too, in every published recipe.

use super::{
    Drafter,
    check::{Told, Verdict},
    target::Opened,
};
use burn::tensor::backend::Backend;
use hspec_core::{Result, config::RopeParameters};
use serde_json::{Map, Value};
use std::path::Path;

/// Compares the rotary fields of every attention layer that states its own.
pub(super) fn check<B: Backend>(drafter: &Drafter<'_>, opened: &Opened<B>, told: &mut Told<'_>) {
    let name = "rotary fields";
    let file = drafter.dir.join("config.json");
    let theirs = fields(&opened.target.config().rope_parameters, 1.0);
    let stated = match stated(&drafter.config, drafter.layer(), &file) {
        Ok(stated) => stated,
        Err(error) => return told.holds(name, false, error.to_string(), text(&theirs)),
    };
    let partial = drafter.layer().get("partial_rotary_factor").and_then(Value::as_f64).unwrap_or(1.0);
    let ours: Vec<Map<String, Value>> = stated.iter().map(|stated| fields(stated, partial)).collect();
    let differs = ours.iter().find_map(|ours| {
        let (keys, of) = (ours.keys().chain(theirs.keys()), |map: &Map<String, Value>, key: &str| {
            map.get(key).cloned().unwrap_or_default()
        });
        keys.map(|key| (key.clone(), of(ours, key), of(&theirs, key))).find(|(_, a, b)| a != b)
    });
    match differs {
        Some((key, found, expected)) => {
            // A drafter with keys of its own may have been trained with whatever rotates them.
            let borrows = !drafter.outline.description.kv_layers.is_empty();
            let verdict = if borrows { Verdict::Differs } else { Verdict::Warning };
            told.add(name, verdict, format!("{key} {found}"), format!("{key} {expected}, the target's"))
        }
        None => told.holds(name, true, ours.first().map_or("none".into(), text), text(&theirs)),
    }
}

/// Those of H-Spec's attention layers, or those of all layers.
fn stated(config: &Value, layer: &Value, file: &Path) -> Result<Vec<RopeParameters>> {
    let entries = config.get("attn_rope").and_then(Value::as_array);
    let entries = entries.map(|entries| entries.iter().filter_map(Value::as_object).collect::<Vec<_>>());
    let entries = entries.or_else(|| layer.as_object().map(|layer| vec![layer])).unwrap_or_default();
    entries.into_iter().map(|entry| RopeParameters::from_config(entry, file)).collect()
}

/// All fields by name, the share that rotates spelled out.
fn fields(stated: &RopeParameters, partial: f64) -> Map<String, Value> {
    let whole = RopeParameters {
        partial_rotary_factor: Some(stated.partial_rotary_factor.unwrap_or(partial)),
        ..stated.clone()
    };
    let value = serde_json::to_value(whole).unwrap_or_default();
    value.as_object().cloned().unwrap_or_default()
}

fn text(fields: &Map<String, Value>) -> String {
    fields.iter().map(|(key, value)| format!("{key} {value}")).collect::<Vec<_>>().join(", ")
}
