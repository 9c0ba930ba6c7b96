//! Prompt files: JSON lines with `turns`, `messages` or `prompt`, gzipped or not.

use crate::{Error, Result, text::Message};
use serde::Deserialize;
use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    path::Path,
};

/// What a gzipped file begins with.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// One prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// The line's `id`, or its number from 1.
    pub id: String,
    /// The conversation up to where the model answers.
    pub messages: Vec<Message>,
}

#[derive(Deserialize)]
struct Line {
    id: Option<serde_json::Value>,
    turns: Option<Vec<String>>,
    messages: Option<Vec<Message>>,
    prompt: Option<String>,
}

/// Reads all prompts of a file. Of several user `turns` the first is taken: later ones would need the
/// answers between them.
///
/// # Errors
/// A file that cannot be read, a line that is no JSON or has none of the three fields, an empty
/// prompt, a file without prompts.
pub fn read_prompts(path: &Path) -> Result<Vec<Prompt>> {
    let mut file = BufReader::new(File::open(path).map_err(Error::io(path))?);
    let gzipped = path.extension().is_some_and(|e| e == "gz");
    // The decoder's own message for such a file is that it ended too early.
    if gzipped && !file.fill_buf().map_err(Error::io(path))?.starts_with(&GZIP) {
        return Err(Error::invalid(path, "file", "no gzip data", "a gzipped file, as its name says"));
    }
    let reader: Box<dyn Read> =
        if gzipped { Box::new(flate2::read::MultiGzDecoder::new(file)) } else { Box::new(file) };
    let mut prompts = Vec::new();
    for (i, line) in BufReader::new(reader).lines().enumerate() {
        let line =
            line.map_err(|e| Error::invalid(path, format!("line {}", i + 1), e.to_string(), "text"))?;
        // Some editors begin a file with a byte order mark.
        let line = line.trim_start_matches('\u{feff}');
        if !line.trim().is_empty() {
            prompts.push(parse(line, i + 1, path)?);
        }
    }
    if prompts.is_empty() {
        return Err(Error::invalid(path, "file", "no prompt", "one JSON object per line"));
    }
    Ok(prompts)
}

fn parse(line: &str, number: usize, path: &Path) -> Result<Prompt> {
    let at = format!("line {number}");
    let fields = "an object with turns, messages or prompt";
    let parsed: Line = serde_json::from_str(line).map_err(|e| {
        // The place within the line would read like a second line number.
        let message = e.to_string();
        let found = message.rsplit_once(" at line ").map_or(&*message, |(what, _)| what);
        Error::invalid(path, &at, found, fields)
    })?;
    let id = match parsed.id {
        Some(serde_json::Value::String(id)) => id,
        Some(other) if !other.is_null() => other.to_string(),
        _ => number.to_string(),
    };
    let messages = match (parsed.messages, parsed.turns, parsed.prompt) {
        (Some(messages), None, None) => messages,
        (None, Some(turns), None) => turns.into_iter().take(1).map(Message::user).collect(),
        (None, None, Some(prompt)) => vec![Message::user(prompt)],
        (None, None, None) => return Err(Error::invalid(path, at, "none of them", fields)),
        _ => return Err(Error::invalid(path, at, "several of them", fields)),
    };
    if messages.last().is_none_or(|m| m.content.trim().is_empty()) {
        return Err(Error::invalid(path, at, "an empty prompt", "text"));
    }
    Ok(Prompt { id, messages })
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
        assert_eq!(plain[0].messages, [Message::user("x")]);
        assert_eq!(plain[2].messages.len(), 2);
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
            ("{\"prompt\":\"a\"}\n{\"q\":1}", "line 2: found none of them"),
            ("{\"prompt\":\"  \"}", "line 1: found an empty prompt"),
            ("{\"turns\":[]}", "line 1: found an empty prompt"),
            ("nope", "line 1: found expected"),
            ("\u{feff}{\"prompt\":\"\"}", "line 1: found an empty prompt"),
            ("", "file: found no prompt"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
