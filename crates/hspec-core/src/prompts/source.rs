//! Several prompt files, each with its share of the prompts.

use super::{Prompt, read_prompts};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::{
    ops::Range,
    path::{Path, PathBuf},
    str::FromStr,
};

/// A prompt file and the weight of its share: `FILE` or `FILE:WEIGHT` on a command line, in a recipe a text
/// with the file's name or a table of `file` and `weight`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub struct PromptFile {
    /// The file.
    pub file: PathBuf,
    /// Its weight beside those of the other files; none where prompts are drawn from all files alike.
    pub weight: Option<f64>,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    File(PathBuf),
    Weighted(Weighted),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Weighted {
    file: PathBuf,
    weight: f64,
}

impl From<Written> for PromptFile {
    fn from(written: Written) -> Self {
        match written {
            Written::File(file) => Self { file, weight: None },
            Written::Weighted(Weighted { file, weight }) => Self { file, weight: Some(weight) },
        }
    }
}

impl From<PromptFile> for Written {
    fn from(prompts: PromptFile) -> Self {
        match prompts {
            PromptFile { file, weight: None } => Self::File(file),
            PromptFile { file, weight: Some(weight) } => Self::Weighted(Weighted { file, weight }),
        }
    }
}

impl FromStr for PromptFile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = Self { file: text.into(), weight: None };
        let Some((file, weight)) = text.rsplit_once(':') else { return Ok(plain) };
        let Ok(weight) = weight.parse::<f64>() else {
            // A drive, or a name with a colon in it.
            return if weight.is_empty() {
                Err("there is no weight behind the colon".into())
            } else {
                Ok(plain)
            };
        };
        if Path::new(text).exists() {
            let otherwise = format!("to mean {file} with a weight, write it into a recipe");
            return Err(format!("there is a file of this whole name; {otherwise}"));
        }
        if file.is_empty() || !is_weight(weight) {
            return Err("expected FILE or FILE:WEIGHT, with a finite weight above 0".into());
        }
        Ok(Self { file: file.into(), weight: Some(weight) })
    }
}

fn is_weight(weight: f64) -> bool {
    weight.is_finite() && weight > 0.0
}

/// The prompts of several files.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompts {
    /// All of them. With several files an id says which one it is from: many files only number their lines.
    pub prompts: Vec<Prompt>,
    /// Which of them are from which file, where files have weights.
    pub shares: Vec<Share>,
}

/// The prompts of a file that has a weight.
#[derive(Debug, Clone, PartialEq)]
pub struct Share {
    /// The file's name.
    pub file: String,
    /// Its prompts.
    pub prompts: Range<usize>,
    /// Its part of all prompts, from 0 to 1.
    pub part: f64,
}

impl Prompts {
    /// Prompts that are drawn alike.
    pub fn new(prompts: Vec<Prompt>) -> Self {
        Self { prompts, shares: Vec::new() }
    }

    /// Reads files.
    ///
    /// # Errors
    /// Those of [`read_prompts`]; a weight that is no number above 0; weights for some files only; a file
    /// named twice.
    pub fn read(files: &[PromptFile]) -> Result<Self> {
        let expected = "prompt files that all have a weight, or none";
        let bad = |file: &PromptFile, found: String, expected: &str| {
            Err(Error::invalid(&file.file, "weight", found, expected))
        };
        for (i, file) in files.iter().enumerate() {
            match file.weight {
                Some(weight) if !is_weight(weight) => {
                    return bad(file, weight.to_string(), "a finite number above 0");
                }
                weight if weight.is_some() != files[0].weight.is_some() => {
                    let found = if weight.is_some() { "one, but others have none" } else { "none" };
                    return bad(file, found.into(), expected);
                }
                _ => {}
            }
            if files[..i].iter().any(|other| other.file == file.file) {
                return Err(Error::invalid(&file.file, "prompts", "the file twice", "each file once"));
            }
        }
        let total: f64 = files.iter().filter_map(|file| file.weight).sum();
        let mut all = Self::new(Vec::new());
        for PromptFile { file, weight } in files {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            let from = all.prompts.len();
            all.prompts.extend(read_prompts(file)?.into_iter().map(|mut prompt| {
                if files.len() > 1 {
                    prompt.id = format!("{name}:{}", prompt.id);
                }
                prompt
            }));
            let prompts = from..all.prompts.len();
            let share = |weight| Share { file: file.display().to_string(), prompts, part: weight / total };
            all.shares.extend(weight.map(share));
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_stands_behind_the_last_colon() {
        let parse = |text: &str| text.parse::<PromptFile>();
        let file = |file: &str, weight| Ok(PromptFile { file: file.into(), weight });
        assert_eq!(parse("a.jsonl"), file("a.jsonl", None));
        assert_eq!(parse("a.jsonl:0.6"), file("a.jsonl", Some(0.6)));
        assert_eq!(parse("c:d.jsonl"), file("c:d.jsonl", None));
        assert_eq!(parse("c:d.jsonl:3"), file("c:d.jsonl", Some(3.0)));
        for text in ["a:", "a:0", "a:-1", "a:nan", "a:inf", ":1"] {
            assert!(parse(text).is_err(), "{text}");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("odd:2");
        std::fs::write(&path, "").unwrap();
        assert!(parse(path.to_str().unwrap()).unwrap_err().contains("a file of this whole name"));
    }

    #[test]
    fn shares_are_for_all_files_or_for_none() {
        let dir = tempfile::tempdir().unwrap();
        for (name, n) in [("a.jsonl", 2), ("b.jsonl", 3)] {
            std::fs::write(dir.path().join(name), "{\"prompt\":\"x\"}\n".repeat(n)).unwrap();
        }
        let file = |name: &str, weight| PromptFile { file: dir.path().join(name), weight };
        let read = |files: &[PromptFile]| Prompts::read(files).map_err(|e| e.to_string());
        let prompts = read(&[file("a.jsonl", Some(3.0)), file("b.jsonl", Some(2.0))]).unwrap();
        let parts: Vec<_> = prompts.shares.iter().map(|s| (s.prompts.clone(), s.part)).collect();
        assert_eq!(parts, [(0..2, 0.6), (2..5, 0.4)]);
        assert_eq!(prompts.prompts[4].id, "b.jsonl:3");
        let plain = read(&[file("a.jsonl", None)]).unwrap();
        assert_eq!((plain.shares.len(), &*plain.prompts[1].id), (0, "2"));
        for (files, part) in [
            (
                [file("a.jsonl", Some(1.0)), file("b.jsonl", None)],
                "found none, expected prompt files that all",
            ),
            ([file("a.jsonl", None), file("b.jsonl", Some(1.0))], "found one, but others have none"),
            ([file("a.jsonl", Some(0.0)), file("b.jsonl", Some(1.0))], "weight: found 0"),
            ([file("a.jsonl", None), file("a.jsonl", None)], "the file twice"),
        ] {
            let error = read(&files).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
