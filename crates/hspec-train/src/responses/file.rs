//! Files of responses: where the answers come from, and the answers.

use super::{Response, documents};
use crate::{feature_cache::key, pack::shuffled, select::SELECTION};
use hspec_core::{
    Error, Result,
    prompts::{is_gzipped, open_text},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::HashSet,
    io::BufRead,
    path::{Path, PathBuf},
};

/// Where answers come from. Answers rendered with one chat template are of no use to a drafter that will
/// decode with another, so the template's hash is checked when they are used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// [`FORMAT`].
    pub format: String,
    /// Hash of the target.
    pub target: String,
    /// Hash of its chat template.
    pub template: String,
    /// Temperature of the answers.
    pub temperature: f64,
    /// Tokens that they were drawn among.
    pub top_k: Option<usize>,
    /// Probability that they were drawn among.
    pub top_p: Option<f64>,
    /// Seed.
    pub seed: u64,
    /// Longest answer.
    pub max_new_tokens: usize,
}

/// Names the format of files of responses, and its version.
pub const FORMAT: &str = "hspec-responses-1";

impl Origin {
    /// Refuses answers that were made in another way; `file` holds them.
    ///
    /// # Errors
    /// The first field that differs.
    pub fn expect(&self, expected: &Self, file: &Path) -> Result<()> {
        self.expect_template(&expected.template, file)?;
        let (found, expected) = (serde_json::json!(self), serde_json::json!(expected));
        let (Some(found), Some(expected)) = (found.as_object(), expected.as_object()) else { return Ok(()) };
        match found.iter().find(|(field, value)| expected.get(*field) != Some(value)) {
            Some((field, value)) => {
                let expected = expected.get(field).map(ToString::to_string).unwrap_or_default();
                Err(Error::invalid(file, format!("line 1, {field}"), value.to_string(), expected))
            }
            None => Ok(()),
        }
    }

    /// Refuses answers to prompts that another chat template rendered.
    ///
    /// # Errors
    /// If the template's hash is another.
    pub fn expect_template(&self, hash: &str, file: &Path) -> Result<()> {
        if self.template == hash {
            return Ok(());
        }
        let expected = format!("{hash}, the hash of the target's chat template");
        Err(Error::invalid(file, "line 1, template", &self.template, expected))
    }
}

/// The documents of files of responses, in a random order that depends on the seed alone and not on which answer
/// ended first; at most `max`, unless it is 0. `target` is the hash of the target that the drafter will meet
/// ([`target_hash`](crate::run_dir::target_hash)), and `template` that of its chat template; none where it has no
/// template. Answers of another target are learned from with a warning: acceptance will suffer.
///
/// # Errors
/// Those of [`read`], and [`Origin::expect_template`]'s.
pub fn read_documents(
    paths: &[PathBuf],
    target: &str,
    template: Option<&str>,
    seed: u64,
    max: usize,
) -> Result<Vec<Response>> {
    let mut all = Vec::new();
    for path in paths {
        join(&mut all, read_file(path, target, template)?, path);
    }
    Ok(drawn(all, seed, max))
}

/// Adds the documents of a further file. Those of an earlier one are not taken twice: they would count double,
/// and be learned from though they are held out.
pub(crate) fn join(all: &mut Vec<Response>, more: Vec<Response>, path: &Path) {
    let known: HashSet<String> = all.iter().map(key).collect();
    let before = all.len() + more.len();
    all.extend(more.into_iter().filter(|document| !known.contains(&key(document))));
    if all.len() < before {
        tracing::warn!("{}: {} documents stand in an earlier file", path.display(), before - all.len());
    }
}

/// The documents of one file, ordered by their ids.
fn read_file(path: &Path, target: &str, template: Option<&str>) -> Result<Vec<Response>> {
    let (origin, mut responses) = read(path)?;
    if let Some(other) = origin.as_ref().map(|origin| &origin.target).filter(|other| *other != target) {
        tracing::warn!(
            "{} has the answers of another target: its hash is {other}, not {target}",
            path.display()
        );
    }
    match (origin, template) {
        (Some(origin), Some(template)) => origin.expect_template(template, path)?,
        (None, _) => {
            tracing::warn!("{} does not say which chat template it was made with", path.display());
        }
        _ => {}
    }
    responses.sort_by(|a, b| (&a.id, a.turn).cmp(&(&b.id, b.turn)));
    Ok(documents(responses))
}

/// Documents in a random order that depends on the seed; at most `max`, unless it is 0.
pub(crate) fn drawn(documents: Vec<Response>, seed: u64, max: usize) -> Vec<Response> {
    let mut documents: Vec<Option<Response>> = documents.into_iter().map(Some).collect();
    let order = shuffled(documents.len(), seed, SELECTION);
    let wanted = if max == 0 { order.len() } else { max };
    order.into_iter().take(wanted).filter_map(|i| documents[i].take()).collect()
}

/// Reads a file of responses as they were written, gzipped or not. A last line cut off by a kill is dropped; a gzipped
/// file has none.
///
/// # Errors
/// A file that cannot be read, a damaged line before the last, or a response that cannot be learned from.
pub fn read(path: &Path) -> Result<(Option<Origin>, Vec<Response>)> {
    let scanned = scan(path)?;
    if scanned.responses.is_empty() {
        return Err(Error::invalid(path, "file", "no response", "at least one"));
    }
    Ok((scanned.origin, scanned.responses))
}

pub(super) struct Scanned {
    pub(super) origin: Option<Origin>,
    pub(super) responses: Vec<Response>,
    /// Bytes of all whole lines.
    pub(super) whole: u64,
}

pub(super) fn scan(path: &Path) -> Result<Scanned> {
    let mut reader = open_text(path)?;
    let mut scanned = Scanned { origin: None, responses: Vec::new(), whole: 0 };
    let mut seen = HashSet::new();
    let mut line = String::new();
    for number in 1.. {
        line.clear();
        let n = reader.read_line(&mut line).map_err(Error::io(path))?;
        // Nobody is killed in the middle of a line and finishes the file all the same.
        if line.is_empty() || !(line.ends_with('\n') || is_gzipped(path)) {
            break;
        }
        let at = format!("line {number}");
        let damaged =
            |e: serde_json::Error, expected| Err(Error::invalid(path, &at, e.to_string(), expected));
        if number == 1 && line.contains("\"format\"") {
            match serde_json::from_str::<Origin>(&line) {
                Ok(origin) if origin.format == FORMAT => scanned.origin = Some(origin),
                Ok(origin) => return Err(Error::invalid(path, "line 1, format", origin.format, FORMAT)),
                Err(e) => return damaged(e, "where the responses come from"),
            }
        } else {
            let response: Response = match serde_json::from_str(&line) {
                Ok(response) => response,
                Err(e) => return damaged(e, "a response with its token ids"),
            };
            response.check(path, &at)?;
            if !seen.insert((response.id.clone(), response.turn)) {
                let found = format!("a second response {:?}, turn {}", response.id, response.turn);
                return Err(Error::invalid(path, at, found, "each once"));
            }
            scanned.responses.push(response);
        }
        scanned.whole += n as u64;
    }
    Ok(scanned)
}

#[cfg(test)]
mod tests {
    use super::{super::Finish, *};
    use hspec_core::TokenId;
    use std::io::Write as _;

    fn ids(range: std::ops::Range<u32>) -> Vec<TokenId> {
        range.map(TokenId).collect()
    }

    fn file(text: &str) -> Result<(Option<Origin>, Vec<Response>)> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("responses.jsonl");
        std::fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn files_of_older_runs_are_read() {
        let (origin, responses) =
            file("{\"id\":\"a\",\"prompt_ids\":[1,2],\"response_ids\":[3]}\n{\"id\":\"b\",\"pro").unwrap();
        assert_eq!((origin, responses), (None, vec![Response::new("a", ids(1..3), ids(3..4))]));
    }

    #[test]
    fn gzipped_files_are_read_and_damaged_ones_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.jsonl.gz");
        let line = |id| format!("{{\"id\":\"{id}\",\"prompt_ids\":[1,2],\"response_ids\":[3]}}");
        let pack = |text: String| {
            let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            packed.write_all(text.as_bytes()).unwrap();
            packed.finish().unwrap()
        };
        // Of two members, as `cat` makes of two files, and without the newline that a text may lack at its end.
        let packed = [pack(line("a") + "\n"), pack(line("b"))].concat();
        std::fs::write(&path, &packed).unwrap();
        let answer = |id| Response::new(id, ids(1..3), ids(3..4));
        assert_eq!(read(&path).unwrap().1, [answer("a"), answer("b")]);
        for damaged in [&packed[..packed.len() - 9], line("a").as_bytes()] {
            std::fs::write(&path, damaged).unwrap();
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains("r.jsonl.gz"), "{error}");
        }
    }

    #[test]
    fn the_answers_that_come_with_the_project_are_read() {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/answers/smollm2-135m-own.jsonl.gz");
        let (origin, answers) = read(&path).unwrap();
        let origin = origin.unwrap();
        assert_eq!((&*origin.target, &*origin.template), ("ea814bed6299e304", "aa6bbad65461afae"));
        let supervised: usize = answers.iter().map(Response::supervised).sum();
        assert_eq!((answers.len(), supervised), (6932, 810_184));
    }

    /// Masks of nothing and of everything once trained for days without an error.
    #[test]
    fn samples_without_and_with_only_supervised_tokens_are_refused_by_name() {
        for (line, part) in [
            (r#"{"id":"a","prompt_ids":[1],"response_ids":[]}"#, "response \"a\": found no supervised token"),
            (r#"{"id":"a","prompt_ids":[],"response_ids":[1]}"#, "found nothing but supervised tokens"),
            (
                r#"{"id":"a","prompt_ids":[1],"response_ids":[1],"given":[[0,1]]}"#,
                "found no supervised token",
            ),
            (r#"{"id":"a","prompt_ids":[1],"response_ids":[1],"given":[[0,2]]}"#, "found 0..2 in given"),
            (r#"{"id":"a","prompt_ids":[1]}"#, "expected a response with its token ids"),
            ("", "found no response"),
            (r#"{"format":"hspec-responses-9"}"#, "missing field"),
        ] {
            let good = r#"{"id":"b","prompt_ids":[1],"response_ids":[2]}"#;
            let text = if line.is_empty() { String::new() } else { format!("{line}\n{good}\n") };
            let error = file(&text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let twice = r#"{"id":"b","prompt_ids":[1],"response_ids":[2]}"#;
        let error = file(&format!("{twice}\n{twice}\n")).unwrap_err().to_string();
        assert!(error.contains("line 2: found a second response \"b\""), "{error}");
    }

    /// A template that thinks in one place and not in the other once made training data that serving never
    /// shows.
    #[test]
    fn answers_rendered_with_another_template_are_refused() {
        let origin = Origin {
            format: FORMAT.into(),
            target: "t".into(),
            template: "one".into(),
            temperature: 0.7,
            top_k: None,
            top_p: Some(0.9),
            seed: 3,
            max_new_tokens: 8,
        };
        let path = Path::new("r.jsonl");
        let error = origin.expect_template("two", path).unwrap_err().to_string();
        assert_eq!(
            error,
            "r.jsonl: line 1, template: found one, expected two, the hash of the target's chat template"
        );
        let other = Origin { temperature: 1.0, ..origin.clone() };
        let error = origin.expect(&other, path).unwrap_err().to_string();
        assert_eq!(error, "r.jsonl: line 1, temperature: found 0.7, expected 1.0");
        origin.expect(&origin.clone(), path).unwrap();
        let line = serde_json::to_string(&origin).unwrap();
        let answer = r#"{"id":"b","prompt_ids":[1],"response_ids":[2],"finish":"length"}"#;
        let (read, responses) = file(&format!("{line}\n{answer}\n")).unwrap();
        assert_eq!((read, responses[0].finish), (Some(origin), Some(Finish::Length)));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.jsonl");
        std::fs::write(&path, format!("{line}\n{answer}\n")).unwrap();
        assert!(read_documents(std::slice::from_ref(&path), "t", Some("two"), 0, 0).is_err());
        assert_eq!(read_documents(&[path], "u", Some("one"), 0, 0).unwrap(), responses);
    }

    #[test]
    fn documents_of_a_file_do_not_depend_on_which_answer_ended_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.jsonl");
        let line = |id: u32, turn| {
            let prompt = if turn == 1 { ids(id..id + 3) } else { ids(id..id + 6) };
            let response = if turn == 1 { ids(id + 3..id + 5) } else { ids(9..10) };
            serde_json::to_string(&Response { turn, ..Response::new(id.to_string(), prompt, response) })
                .unwrap()
                + "\n"
        };
        let mut lines: Vec<String> = (20..28).flat_map(|id| [line(id, 1), line(id, 2)]).collect();
        std::fs::write(&path, lines.concat()).unwrap();
        let documents =
            |seed, max| read_documents(std::slice::from_ref(&path), "t", None, seed, max).unwrap();
        let all = documents(1, 0);
        assert_eq!(all.len(), 8);
        assert!(all.iter().all(|d| (d.tokens(), d.supervised()) == (7, 3)));
        lines.reverse();
        std::fs::write(&path, lines.concat()).unwrap();
        assert_eq!(documents(1, 0), all);
        assert_eq!(documents(1, 3), all[..3]);
        assert_ne!(documents(2, 0), all);
    }

    /// Prompts of two files may bear the same id, and even begin alike, and are no conversation for that.
    #[test]
    fn answers_of_several_files_are_mixed_and_none_is_taken_twice() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, more: &[u32]| {
            let line = |id: u32| {
                let prompt = [&ids(id..id + 2)[..], &more.iter().map(|x| TokenId(*x)).collect::<Vec<_>>()];
                Response::new(id.to_string(), prompt.concat(), ids(9..10))
            };
            let lines = (0..20).map(|id| serde_json::to_string(&line(id)).unwrap() + "\n");
            let path = dir.path().join(name);
            std::fs::write(&path, lines.collect::<String>()).unwrap();
            path
        };
        let (first, second) = (write("a.jsonl", &[]), write("b.jsonl", &[9, 1000]));
        let files = [first.clone(), second.clone()];
        let mixed = read_documents(&files, "t", None, 0, 0).unwrap();
        let of_second = |documents: &[Response]| documents.iter().filter(|d| d.prompt_ids.len() == 4).count();
        assert_eq!((mixed.len(), of_second(&mixed)), (40, 20));
        assert!((5..=15).contains(&of_second(&mixed[..20])));
        let again = [first.clone(), second.clone(), first.clone()];
        assert_eq!(read_documents(&again, "t", None, 0, 0).unwrap(), mixed);
        std::fs::write(&second, "{\n").unwrap();
        let error = read_documents(&[first, second], "t", None, 0, 0).unwrap_err().to_string();
        assert!(error.contains("b.jsonl: line 1"), "{error}");
    }
}
