//! The public sets of the papers: a table of where they are and how their rows become prompts.

use crate::fetch::hub::Repository;
use anyhow::{Context, anyhow, bail};
use hspec_eval::subset;
use minijinja::{Environment, Value, value::Serde};
use serde::Deserialize;
use serde_json::Value as Json;
use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
};

const TABLE: &str = include_str!("../../../assets/suites/public.toml");

/// What `assets/suites/public.toml` holds.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    /// By name.
    pub(crate) protocols: BTreeMap<String, Protocol>,
    pub(crate) sets: Vec<PublicSet>,
}

/// How a paper measures.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Protocol {
    pub(crate) k: Vec<usize>,
    pub(crate) temperature: Vec<f64>,
    #[serde(default)]
    pub(crate) context: Vec<usize>,
    pub(crate) max_new_tokens: usize,
    /// Seed of the shuffle before the first prompts are taken.
    subset_seed: Option<u32>,
    /// The most prompts of a set that says no other number.
    most: Option<usize>,
}

/// A set on the hub.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PublicSet {
    pub(crate) collection: String,
    pub(crate) name: String,
    repo: String,
    file: String,
    member: Option<String>,
    prompt: String,
    pub(crate) shorten: Option<String>,
    most: Option<usize>,
}

/// The rows of a set, and what makes a prompt of one.
pub(crate) struct Rows {
    rows: Vec<(String, Json)>,
    template: String,
    shorten: Option<String>,
}

impl Table {
    pub(crate) fn read() -> anyhow::Result<Self> {
        toml::from_str(TABLE).context("assets/suites/public.toml")
    }
}

impl PublicSet {
    /// The rows that the paper takes, in its order.
    pub(crate) fn load(&self, table: &Table) -> anyhow::Result<Rows> {
        let repository: Repository = self.repo.parse().map_err(|e: String| anyhow!(e))?;
        let path = repository.dataset_file(&self.file)?;
        let rows = self.rows(&path).with_context(|| format!("{}: {}", self.repo, self.file))?;
        if rows.is_empty() {
            bail!("{}: {} holds no row", self.repo, self.file);
        }
        // A row is known by its place in the file.
        let mut rows: Vec<_> =
            rows.into_iter().enumerate().map(|(i, row)| ((i + 1).to_string(), row)).collect();
        let protocol = table.protocols.get(&self.collection);
        if let Some(seed) = protocol.and_then(|protocol| protocol.subset_seed) {
            subset::shuffle(&mut rows, seed);
        }
        let most = self.most.or_else(|| protocol.and_then(|protocol| protocol.most));
        rows.truncate(most.unwrap_or(usize::MAX));
        Ok(Rows { rows, template: self.prompt.clone(), shorten: self.shorten.clone() })
    }

    fn rows(&self, path: &Path) -> anyhow::Result<Vec<Json>> {
        let name = self.member.as_deref().unwrap_or(&self.file);
        if name.ends_with(".parquet") {
            return parquet(path);
        }
        let file = BufReader::new(File::open(path)?);
        let Some(member) = &self.member else { return json(file, name) };
        let mut archive = tar::Archive::new(flate2::read::MultiGzDecoder::new(file));
        for entry in archive.entries()? {
            let entry = entry?;
            if entry.path()?.as_os_str() == member.as_str() {
                return json(BufReader::new(entry), name);
            }
        }
        bail!("holds no {member}")
    }
}

fn json(mut reader: impl BufRead, name: &str) -> anyhow::Result<Vec<Json>> {
    if name.ends_with(".json") {
        let mut text = String::new();
        reader.read_to_string(&mut text)?;
        return Ok(serde_json::from_str(&text)?);
    }
    let mut rows = Vec::new();
    for (i, line) in reader.lines().enumerate() {
        let line = line?;
        if !line.trim().is_empty() {
            rows.push(serde_json::from_str(&line).with_context(|| format!("line {}", i + 1))?);
        }
    }
    Ok(rows)
}

#[cfg(feature = "parquet")]
fn parquet(path: &Path) -> anyhow::Result<Vec<Json>> {
    Ok(hspec_core::prompts::parquet_rows(path)?)
}

#[cfg(not(feature = "parquet"))]
fn parquet(_: &Path) -> anyhow::Result<Vec<Json>> {
    bail!("Parquet is not built in; run `cargo run --release -p xtask --features parquet -- compare ...`")
}

impl Rows {
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(crate) fn id(&self, row: usize) -> &str {
        &self.rows[row].0
    }

    pub(crate) fn shortens(&self) -> bool {
        self.shorten.is_some()
    }

    /// How many parts the field has that may be shortened: items of a list, characters of a text.
    pub(crate) fn parts(&self, row: usize) -> anyhow::Result<usize> {
        let (id, row) = &self.rows[row];
        let path = self.shorten.as_deref().unwrap_or_default();
        match row.pointer(&pointer(path)) {
            Some(Json::Array(items)) => Ok(items.len()),
            Some(Json::String(text)) => Ok(text.chars().count()),
            _ => bail!("row {id}: no text or list {path}"),
        }
    }

    /// The prompt of a row, of its long field the first `parts`.
    pub(crate) fn prompt(&self, row: usize, parts: usize) -> anyhow::Result<String> {
        let (id, row) = &self.rows[row];
        let mut row = row.clone();
        if let Some(path) = &self.shorten {
            match row.pointer_mut(&pointer(path)) {
                Some(Json::Array(items)) => items.truncate(parts),
                Some(Json::String(text)) => *text = text.chars().take(parts).collect(),
                _ => {}
            }
        }
        let mut environment = Environment::new();
        // A field that is missing must not become an empty prompt.
        environment.set_undefined_behavior(minijinja::UndefinedBehavior::SemiStrict);
        let prompt = environment
            .render_str(&self.template, Value::from(Serde(&row)))
            .with_context(|| format!("row {id}"))?;
        if prompt.trim().is_empty() {
            bail!("row {id}: an empty prompt");
        }
        Ok(prompt)
    }
}

fn pointer(path: &str) -> String {
    path.split('.').map(|part| format!("/{part}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_names_every_set_of_both_papers() {
        let table = Table::read().unwrap();
        let names = |collection: &str| -> Vec<&str> {
            table.sets.iter().filter(|s| s.collection == collection).map(|s| s.name.as_str()).collect()
        };
        assert_eq!(
            names("hspec"),
            ["math", "qa", "dialogue", "rag", "summarization", "translation", "code", "tools"]
        );
        assert_eq!(
            names("deepspec"),
            [
                "gsm8k",
                "math500",
                "aime25",
                "humaneval",
                "mbpp",
                "livecodebench",
                "mt-bench",
                "alpaca",
                "arena-hard-v2"
            ]
        );
        assert_eq!(names("helmet").len(), 4);
        assert!(table.sets.iter().all(|set| table.protocols.contains_key(&set.collection)));
        assert_eq!(table.protocols["deepspec"].subset_seed, Some(subset::SEED));
        for set in &table.sets {
            set.repo.parse::<Repository>().unwrap();
            Environment::new().template_from_str(&set.prompt).unwrap();
        }
    }

    #[test]
    fn rows_become_prompts() {
        let table = Table::read().unwrap();
        let prompt = |name: &str, row: Json, parts| {
            let set = table.sets.iter().find(|set| set.name == name).unwrap();
            let rows = vec![("7".to_owned(), row)];
            let rows = Rows { rows, template: set.prompt.clone(), shorten: set.shorten.clone() };
            let count = if rows.shortens() { rows.parts(0).unwrap() } else { 0 };
            (count, rows.prompt(0, parts).map_err(|e| format!("{e:#}")))
        };
        let told = |name, row| prompt(name, row, 0).1;
        let alpaca = serde_json::json!({"instruction": "Add.", "input": "1 2"});
        assert_eq!(told("alpaca", alpaca).unwrap(), "Add.\n\nInput:\n1 2");
        assert_eq!(
            told("alpaca", serde_json::json!({"instruction": "Sing.", "input": ""})).unwrap(),
            "Sing."
        );
        let maths = told("math500", serde_json::json!({"problem": "1 + 1?"})).unwrap();
        assert!(maths.starts_with("1 + 1?\nPlease reason") && maths.ends_with("\\boxed{}."), "{maths}");
        let error = told("math500", serde_json::json!({"question": "1 + 1?"})).unwrap_err();
        assert!(error.contains("row 7"), "{error}");
        assert_eq!(told("mt-bench", serde_json::json!({"prompt": ["a", "b"]})).unwrap(), "a");
        let documents =
            [("A", "x"), ("B", "y")].map(|(title, text)| serde_json::json!({"title": title, "text": text}));
        let asqa = serde_json::json!({"question": "Why?", "docs": documents});
        let (count, text) = prompt("cite-asqa", asqa, 1);
        let text = text.unwrap();
        assert!(count == 2 && text.contains("Document [1] A: x") && !text.contains("[2]"), "{text}");
        let book = serde_json::json!({"context": "äbc def", "input": "Who?"});
        let (count, text) = prompt("longqa-infbench", book, 3);
        assert!(count == 7 && text.unwrap().contains("\n\näbc\n\nQuestion: Who?"));
    }

    #[test]
    fn rows_are_read_from_lines_lists_and_archives() {
        let dir = tempfile::tempdir().unwrap();
        let table = Table::read().unwrap();
        let mut set = table.sets[0].clone();
        let rows = |set: &PublicSet, name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            set.rows(&path).map_err(|e| format!("{e:#}"))
        };
        let expected = [serde_json::json!({"prompt": "a"}), serde_json::json!({"prompt": "b"})];
        assert_eq!(rows(&set, "x.jsonl", b"{\"prompt\":\"a\"}\n\n{\"prompt\":\"b\"}\n").unwrap(), expected);
        assert!(rows(&set, "x.jsonl", b"{\"prompt\":\"a\"}\nno\n").unwrap_err().contains("line 2"));
        let list = b"[{\"prompt\":\"a\"},{\"prompt\":\"b\"}]";
        set.file = "x.json".into();
        assert_eq!(rows(&set, "x.json", list).unwrap(), expected);
        let mut archive =
            tar::Builder::new(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast()));
        let mut header = tar::Header::new_gnu();
        header.set_size(list.len() as u64);
        archive.append_data(&mut header, "data/alce/x.json", &list[..]).unwrap();
        let bytes = archive.into_inner().unwrap().finish().unwrap();
        set.file = "data.tar.gz".into();
        set.member = Some("data/alce/x.json".into());
        assert_eq!(rows(&set, "data.tar.gz", &bytes).unwrap(), expected);
        set.member = Some("data/other.json".into());
        assert_eq!(rows(&set, "data.tar.gz", &bytes).unwrap_err(), "holds no data/other.json");
    }
}
