//! Prompt files: JSON lines with `turns`, `messages` or `prompt`, gzipped or not, and Parquet files with such
//! columns (feature `parquet`); several files in given shares.

#[cfg(feature = "parquet")]
mod parquet;
mod source;

pub use source::{PromptFile, Prompts, Share};

use crate::{Error, Result, text::Message};
use serde::Deserialize;
use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
};

/// What a gzipped file begins with.
const GZIP: [u8; 2] = [0x1f, 0x8b];
const FIELDS: &str = "an object with turns, messages or prompt";

/// One prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// The line's `id`, or its number from 1.
    pub id: String,
    /// The conversation up to where the model answers. With `messages`, all that the file has, which may end with
    /// an assistant's turn.
    pub messages: Vec<Message>,
    /// What the user says after the answers: the later of the `turns`.
    pub then: Vec<String>,
}

impl Prompt {
    /// A conversation of one turn.
    pub fn new(id: impl Into<String>, messages: Vec<Message>) -> Self {
        Self { id: id.into(), messages, then: Vec::new() }
    }
}

#[derive(Deserialize)]
struct Line {
    id: Option<serde_json::Value>,
    turns: Option<Vec<String>>,
    messages: Option<Vec<Message>>,
    prompt: Option<String>,
}

/// Reads all prompts of a file.
///
/// # Errors
/// A file that cannot be read, a line that is no JSON or has none of the three fields, an empty
/// prompt, a file without prompts.
pub fn read_prompts(path: &Path) -> Result<Vec<Prompt>> {
    let prompts = if path.extension().is_some_and(|e| e == "parquet") {
        read_parquet(path)?
    } else {
        read_lines(path)?
    };
    if prompts.is_empty() {
        return Err(Error::invalid(path, "file", "no prompt", "one JSON object per line"));
    }
    Ok(prompts)
}

#[cfg(feature = "parquet")]
pub use parquet::parquet_rows;
#[cfg(feature = "parquet")]
use parquet::read_parquet;

#[cfg(not(feature = "parquet"))]
fn read_parquet(path: &Path) -> Result<Vec<Prompt>> {
    let expected = "JSON lines; Parquet is read by builds with the feature parquet";
    Err(Error::invalid(path, "file", "Parquet", expected))
}

/// Whether a file's name says that it is gzipped.
pub fn is_gzipped(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gz"))
}

/// The text of a file, unpacked where its name says that it is gzipped.
///
/// # Errors
/// A file that cannot be read, or is not gzipped though its name says so.
pub fn open_text(path: &Path) -> Result<Box<dyn BufRead>> {
    let mut file = BufReader::new(File::open(path).map_err(Error::io(path))?);
    if !is_gzipped(path) {
        return Ok(Box::new(file));
    }
    // The decoder's own message for such a file is that it ended too early.
    if !file.fill_buf().map_err(Error::io(path))?.starts_with(&GZIP) {
        return Err(Error::invalid(path, "file", "no gzip data", "a gzipped file, as its name says"));
    }
    Ok(Box::new(BufReader::new(flate2::read::MultiGzDecoder::new(file))))
}

fn read_lines(path: &Path) -> Result<Vec<Prompt>> {
    let reader = open_text(path)?;
    let mut prompts = Vec::new();
    for (i, line) in reader.lines().enumerate() {
        let at = format!("line {}", i + 1);
        let line = line.map_err(|e| Error::invalid(path, &at, e.to_string(), "text"))?;
        // Some editors begin a file with a byte order mark.
        let line = line.trim_start_matches('\u{feff}');
        if !line.trim().is_empty() {
            let line = serde_json::from_str(line).map_err(|e| {
                // The place within the line would read like a second line number.
                let message = e.to_string();
                let found = message.rsplit_once(" at line ").map_or(&*message, |(what, _)| what);
                Error::invalid(path, &at, found, FIELDS)
            })?;
            prompts.push(prompt(line, i + 1, path, at)?);
        }
    }
    Ok(prompts)
}

/// What line (or row) `number` holds; `at` names it in errors.
fn prompt(line: Line, number: usize, path: &Path, at: String) -> Result<Prompt> {
    let id = match line.id {
        Some(serde_json::Value::String(id)) => id,
        Some(other) if !other.is_null() => other.to_string(),
        _ => number.to_string(),
    };
    let (messages, then) = match (line.messages, line.turns, line.prompt) {
        (Some(messages), None, None) => (messages, Vec::new()),
        (None, Some(turns), None) => {
            let mut turns = turns.into_iter();
            (turns.next().map(Message::user).into_iter().collect(), turns.collect())
        }
        (None, None, Some(prompt)) => (vec![Message::user(prompt)], Vec::new()),
        (None, None, None) => return Err(Error::invalid(path, at, "none of these fields", FIELDS)),
        _ => return Err(Error::invalid(path, at, "several of these fields", FIELDS)),
    };
    let blank = |text: &String| text.trim().is_empty();
    if messages.last().is_none_or(|m| blank(&m.content)) || then.iter().any(blank) {
        return Err(Error::invalid(path, at, "an empty prompt", "text"));
    }
    if messages.iter().all(Message::is_assistant) {
        return Err(Error::invalid(path, at, "no turn but the assistant's", "a prompt to be answered"));
    }
    Ok(Prompt { id, messages, then })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn read(text: &str) -> Result<Vec<Prompt>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.jsonl");
        std::fs::write(&path, text).unwrap();
        read_prompts(&path)
    }

    #[test]
    fn the_three_forms_and_gzip_are_read() {
        let text = "{\"id\":\"a\",\"turns\":[\"x\",\"y\"]}\n\n{\"prompt\":\"z\"}\n\
                    {\"id\":7,\"messages\":[{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"user\",\"content\":\"u\"}]}\n";
        let plain = read(text).unwrap();
        let ids: Vec<_> = plain.iter().map(|p| p.id.as_str()).collect();
        assert_eq!(ids, ["a", "3", "7"]);
        assert_eq!(
            (&plain[0].messages[..], &plain[0].then[..]),
            (&[Message::user("x")][..], &["y".into()][..])
        );
        assert_eq!((plain[2].messages.len(), plain[2].then.len()), (2, 0));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.jsonl.gz");
        let mut gz = flate2::write::GzEncoder::new(File::create(&path).unwrap(), flate2::Compression::fast());
        gz.write_all(text.as_bytes()).unwrap();
        gz.finish().unwrap();
        assert_eq!(read_prompts(&path).unwrap(), plain);
        std::fs::write(&path, text).unwrap();
        let error = read_prompts(&path).unwrap_err().to_string();
        assert!(
            error.ends_with("file: found no gzip data, expected a gzipped file, as its name says"),
            "{error}"
        );
    }

    #[test]
    fn bad_lines_are_named() {
        for (text, part) in [
            ("{\"prompt\":\"a\"}\n{\"q\":1}", "line 2: found none of these fields"),
            ("{\"prompt\":\"  \"}", "line 1: found an empty prompt"),
            ("{\"turns\":[]}", "line 1: found an empty prompt"),
            ("{\"turns\":[\"a\",\" \"]}", "line 1: found an empty prompt"),
            (
                "{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\"}]}",
                "line 1: found no turn but the assistant's",
            ),
            ("nope", "line 1: found expected"),
            ("\u{feff}{\"prompt\":\"\"}", "line 1: found an empty prompt"),
            ("", "file: found no prompt"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[cfg(not(feature = "parquet"))]
    #[test]
    fn parquet_without_the_feature_tells_so() {
        let error = read_prompts(Path::new("p.parquet")).unwrap_err().to_string();
        assert!(error.contains("feature parquet"), "{error}");
    }
}
