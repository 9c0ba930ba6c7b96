//! The target's own answers as token ids, in a file that a killed run continues.
//!
//! Every line is a JSON object. The first says where the answers come from ([`Origin`]; files of older runs lack
//! it), each other is a [`Response`]: a turn of a conversation, written when it ends, in any order. The prompts'
//! tokens are stored as the target saw them and never rendered again, so that what a drafter learns is what it
//! will meet. [`documents`] puts the turns of a conversation together.

mod answer;
mod rows;

pub use answer::{Answering, PromptTokens, Sampling, Told, answer};

use crate::{pack::shuffled, select::SELECTION};
use hspec_core::{Error, Result, TokenId};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
};

/// A prompt and the target's answer to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Response {
    /// The prompt's id.
    pub id: String,
    /// Which answer of the conversation, from 1.
    #[serde(default = "first", skip_serializing_if = "is_first")]
    pub turn: usize,
    /// Tokens of the rendered prompt.
    pub prompt_ids: Vec<TokenId>,
    /// Tokens of the answer, a stop token included. In a [document](documents) of several turns, everything
    /// behind the first prompt.
    pub response_ids: Vec<TokenId>,
    /// Half-open ranges of `response_ids` that are not supervised: the turns between answers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given: Vec<[usize; 2]>,
    /// How the answer ended; older runs did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish: Option<Finish>,
}

fn first() -> usize {
    1
}

fn is_first(turn: &usize) -> bool {
    *turn == 1
}

/// How an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// At a token that ends it.
    Stop,
    /// At the longest length allowed.
    Length,
    /// It is no answer of the target's, but stood in the prompt file.
    Given,
}

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

impl Response {
    /// An answer to a conversation's first prompt.
    pub fn new(id: impl Into<String>, prompt_ids: Vec<TokenId>, response_ids: Vec<TokenId>) -> Self {
        Self { id: id.into(), turn: 1, prompt_ids, response_ids, given: Vec::new(), finish: None }
    }

    /// A document of these tokens, up to the last that `mask` holds for; those are supervised.
    pub fn supervised_by(id: impl Into<String>, ids: &[TokenId], mask: &[bool]) -> Self {
        let first = mask.iter().position(|m| *m).unwrap_or(ids.len());
        let end = mask.iter().rposition(|m| *m).map_or(ids.len(), |last| last + 1);
        let mut response = Self::new(id, ids[..first].to_vec(), ids[first..end].to_vec());
        for i in (first..end).filter(|&i| !mask[i]).map(|i| i - first) {
            match response.given.last_mut() {
                Some([_, to]) if *to == i => *to = i + 1,
                _ => response.given.push([i, i + 1]),
            }
        }
        response
    }

    /// All its tokens.
    pub fn ids(&self) -> impl Iterator<Item = TokenId> {
        self.prompt_ids.iter().chain(&self.response_ids).copied()
    }

    /// Number of its tokens.
    pub fn tokens(&self) -> usize {
        self.prompt_ids.len() + self.response_ids.len()
    }

    /// Which of its tokens are supervised.
    pub fn loss_mask(&self) -> Vec<bool> {
        let prompt = self.prompt_ids.len();
        let mut mask: Vec<bool> = (0..self.tokens()).map(|i| i >= prompt).collect();
        for &[from, to] in &self.given {
            mask[prompt + from..prompt + to].fill(false);
        }
        mask
    }

    /// Its supervised tokens.
    pub fn supervised_ids(&self) -> impl Iterator<Item = TokenId> + Clone {
        let given = |i: usize| self.given.iter().any(|&[from, to]| (from..to).contains(&i));
        self.response_ids.iter().copied().enumerate().filter(move |(i, _)| !given(*i)).map(|(_, id)| id)
    }

    /// How many of its tokens are supervised.
    pub fn supervised(&self) -> usize {
        self.response_ids.len() - self.given.iter().map(|[from, to]| to - from).sum::<usize>()
    }

    /// Refuses what cannot be learned from: nothing supervised, or everything; `file` and `at` say where it
    /// stands.
    ///
    /// # Errors
    /// [`Error::Invalid`] that names the sample.
    pub fn check(&self, file: &Path, at: &str) -> Result<()> {
        let refuse = |found: &str, expected: &str| {
            Err(Error::invalid(file, format!("{at}, response {:?}", self.id), found, expected))
        };
        let mut end = 0;
        for &[from, to] in &self.given {
            if !(end <= from && from < to && to <= self.response_ids.len()) {
                return refuse(&format!("{from}..{to} in given"), "ranges of its response, ascending");
            }
            end = to;
        }
        if self.supervised() == 0 {
            return refuse("no supervised token", "an answer");
        }
        if self.prompt_ids.is_empty() {
            return refuse("nothing but supervised tokens", "a prompt before them");
        }
        Ok(())
    }

    /// Whether `next` is the same conversation, one turn later, token by token.
    fn continues_as(&self, next: &Self) -> bool {
        let own = self.tokens();
        self.id == next.id
            && next.prompt_ids.len() >= own
            && self.ids().zip(&next.prompt_ids).all(|(a, b)| a == *b)
    }

    fn append(&mut self, next: Self) {
        let between = &next.prompt_ids[self.tokens()..];
        let from = self.response_ids.len();
        if !between.is_empty() {
            self.given.push([from, from + between.len()]);
        }
        self.response_ids.extend(between);
        let from = self.response_ids.len();
        self.given.extend(next.given.iter().map(|[a, b]| [a + from, b + from]));
        self.response_ids.extend(next.response_ids);
        self.finish = next.finish;
    }
}

/// Puts the turns of each conversation, which follow each other in `responses`, together: one document where
/// every prompt continues what came before, token by token, and several where a chat template rewrites earlier
/// turns (as those do that drop thoughts).
pub fn documents(responses: Vec<Response>) -> Vec<Response> {
    let mut documents: Vec<Response> = Vec::new();
    for next in responses {
        match documents.last_mut() {
            Some(last) if last.continues_as(&next) => last.append(next),
            _ => documents.push(next),
        }
    }
    documents
}

/// The documents of a file of responses, in a random order that depends on the seed alone and not on which answer
/// ended first; at most `max`, unless it is 0. `template` is the hash of the chat template that the drafter will
/// meet; none where the target has no template.
///
/// # Errors
/// Those of [`read`], and [`Origin::expect_template`]'s.
pub fn read_documents(path: &Path, template: Option<&str>, seed: u64, max: usize) -> Result<Vec<Response>> {
    let (origin, mut responses) = read(path)?;
    match (origin, template) {
        (Some(origin), Some(template)) => origin.expect_template(template, path)?,
        (None, _) => {
            tracing::warn!("{} does not say which chat template it was made with", path.display());
        }
        _ => {}
    }
    responses.sort_by(|a, b| (&a.id, a.turn).cmp(&(&b.id, b.turn)));
    Ok(drawn(documents(responses), seed, max))
}

/// Documents in a random order that depends on the seed; at most `max`, unless it is 0.
pub(crate) fn drawn(documents: Vec<Response>, seed: u64, max: usize) -> Vec<Response> {
    let mut documents: Vec<Option<Response>> = documents.into_iter().map(Some).collect();
    let order = shuffled(documents.len(), seed, SELECTION);
    let wanted = if max == 0 { order.len() } else { max };
    order.into_iter().take(wanted).filter_map(|i| documents[i].take()).collect()
}

/// Reads a file of responses as they were written. A last line cut off by a kill is dropped.
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

struct Scanned {
    origin: Option<Origin>,
    responses: Vec<Response>,
    /// Bytes of all whole lines.
    whole: u64,
}

fn scan(path: &Path) -> Result<Scanned> {
    let mut reader = BufReader::new(File::open(path).map_err(Error::io(path))?);
    let mut scanned = Scanned { origin: None, responses: Vec::new(), whole: 0 };
    let mut seen = std::collections::HashSet::new();
    let mut line = String::new();
    for number in 1.. {
        line.clear();
        let n = reader.read_line(&mut line).map_err(Error::io(path))?;
        if !line.ends_with('\n') {
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
    use super::*;

    fn ids(range: std::ops::Range<u32>) -> Vec<TokenId> {
        range.map(TokenId).collect()
    }

    fn turn(id: &str, turn: usize, prompt: Vec<TokenId>, response: Vec<TokenId>) -> Response {
        Response { turn, finish: Some(Finish::Stop), ..Response::new(id, prompt, response) }
    }

    fn file(text: &str) -> Result<(Option<Origin>, Vec<Response>)> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("responses.jsonl");
        std::fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn a_mask_becomes_a_document() {
        let mask = [false, true, false, false, true, false];
        let response = Response::supervised_by("x", &ids(1..7), &mask);
        assert_eq!((response.tokens(), &response.given[..]), (5, &[[1, 3]][..]));
        assert_eq!(response.loss_mask(), mask[..5]);
        assert_eq!(
            (response.supervised(), response.supervised_ids().collect()),
            (2, vec![TokenId(2), TokenId(5)])
        );
    }

    /// Turns that continue each other are one document in which only answers are supervised; one that was
    /// rewritten stands alone.
    #[test]
    fn turns_become_documents() {
        let responses = vec![
            turn("a", 1, ids(0..2), ids(5..6)),
            turn("b", 1, ids(0..4), ids(4..7)),
            turn("b", 2, ids(0..9), ids(9..11)),
            turn("b", 3, ids(20..24), ids(24..25)),
        ];
        let found = documents(responses);
        let summary: Vec<_> = found.iter().map(|d| (d.id.as_str(), d.tokens(), d.supervised())).collect();
        assert_eq!(summary, [("a", 3, 1), ("b", 11, 5), ("b", 5, 1)]);
        assert_eq!(found[1].ids().collect::<Vec<_>>(), ids(0..11));
        let supervised: Vec<usize> = (0..11).filter(|&i| found[1].loss_mask()[i]).collect();
        assert_eq!(supervised, [4, 5, 6, 9, 10]);
    }

    #[test]
    fn files_of_older_runs_are_read() {
        let (origin, responses) =
            file("{\"id\":\"a\",\"prompt_ids\":[1,2],\"response_ids\":[3]}\n{\"id\":\"b\",\"pro").unwrap();
        assert_eq!((origin, responses), (None, vec![Response::new("a", ids(1..3), ids(3..4))]));
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
        assert!(read_documents(&path, Some("two"), 0, 0).is_err());
        assert_eq!(read_documents(&path, Some("one"), 0, 0).unwrap(), responses);
    }

    #[test]
    fn documents_of_a_file_do_not_depend_on_which_answer_ended_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.jsonl");
        let line = |id: u32, turn| {
            let prompt = if turn == 1 { ids(id..id + 3) } else { ids(id..id + 6) };
            let response = if turn == 1 { ids(id + 3..id + 5) } else { ids(9..10) };
            serde_json::to_string(&self::turn(&id.to_string(), turn, prompt, response)).unwrap() + "\n"
        };
        let mut lines: Vec<String> = (20..28).flat_map(|id| [line(id, 1), line(id, 2)]).collect();
        std::fs::write(&path, lines.concat()).unwrap();
        let all = read_documents(&path, None, 1, 0).unwrap();
        assert_eq!(all.len(), 8);
        assert!(all.iter().all(|d| (d.tokens(), d.supervised()) == (7, 3)));
        lines.reverse();
        std::fs::write(&path, lines.concat()).unwrap();
        assert_eq!(read_documents(&path, None, 1, 0).unwrap(), all);
        assert_eq!(read_documents(&path, None, 1, 3).unwrap(), all[..3]);
        assert_ne!(read_documents(&path, None, 2, 0).unwrap(), all);
    }
}
