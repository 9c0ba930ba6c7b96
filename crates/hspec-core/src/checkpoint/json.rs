//! JSON files of a model, from its folder or derived from a GGUF's metadata.

use super::Gguf;
use crate::error::{Error, Result};
use serde::de::DeserializeOwned;
use std::path::Path;

/// Reads a JSON file.
///
/// # Errors
/// [`Error::Io`] where it cannot be read, [`Error::Invalid`] with line, column and what was wrong where it
/// is no JSON or not of the form `T` has.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = std::fs::read(path).map_err(Error::io(path))?;
    serde_json::from_slice(&bytes).map_err(|e| {
        let at = format!("line {}, column {}", e.line(), e.column());
        // serde_json ends its message with the place, which `field` already says.
        let message = e.to_string();
        let found = message.rsplit_once(" at line ").map_or(&*message, |(what, _)| what);
        Error::invalid(path, at, found, "JSON with the fields this file has")
    })
}

/// Whether `path` names a GGUF file rather than a folder.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) && !path.is_dir()
}

/// One of the JSON files of a model: read from its folder, or made from the metadata where `model` is a
/// GGUF file. `name` is `config.json`, `generation_config.json`, `tokenizer.json`,
/// `tokenizer_config.json` or `special_tokens_map.json`; `None` where the folder has no such file.
///
/// # Errors
/// As [`read_json`] and [`Gguf::open`]; an absent folder is an error.
pub fn model_json(model: &Path, name: &str) -> Result<Option<serde_json::Value>> {
    if is_gguf(model) {
        return Gguf::open(model)?.json(name);
    }
    std::fs::metadata(model).map_err(Error::io(model))?;
    let file = model.join(name);
    if file.try_exists().map_err(Error::io(&file))? { read_json(&file).map(Some) } else { Ok(None) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    struct Layers {
        #[allow(dead_code)]
        layers: u32,
    }

    #[test]
    fn an_error_names_file_line_and_cause() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, "{\n  \"layers\": \"four\"\n}").unwrap();
        let message = read_json::<Layers>(&path).unwrap_err().to_string();
        for part in ["config.json", "line 2", "invalid type: string \"four\", expected u32"] {
            assert!(message.contains(part), "{message}");
        }
        let message = read_json::<Layers>(&dir.path().join("absent.json")).unwrap_err().to_string();
        assert!(message.contains("absent.json"), "{message}");
    }

    #[test]
    fn a_folder_without_the_file_is_no_error_but_an_absent_folder_is() {
        let dir = tempfile::tempdir().unwrap();
        assert!(model_json(dir.path(), "config.json").unwrap().is_none());
        assert!(matches!(model_json(&dir.path().join("no"), "config.json"), Err(Error::Io { .. })));
    }
}
