//! The target's own answers as token ids, in a file that a killed run continues.
//!
//! Every line is a JSON object. The first says where the answers come from ([`Origin`]; files of older runs lack
//! it), each other is a [`Response`]: a turn of a conversation, written when it ends, in any order. The prompts'
//! tokens are stored as the target saw them and never rendered again, so that what a drafter learns is what it
//! will meet. [`documents`] puts the turns of a conversation together.

mod answer;
mod file;
mod rows;

pub use answer::{Answering, Follow, PromptTokens, Sampling, Told, answer};
pub use file::{FORMAT, Origin, read, read_documents};
pub(crate) use file::{drawn, join};

use hspec_core::{Error, Result, TokenId};
use serde::{Deserialize, Serialize};
use std::path::Path;

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

/// Refuses tokens that a target with `vocab_size` ids has no embedding of: with features from a cache, nothing else
/// looks at them before the drafter does.
///
/// # Errors
/// [`Error::Mismatch`] that names the document.
pub fn check_ids(documents: &[Response], vocab_size: usize) -> Result<()> {
    for document in documents {
        if let Some(id) = document.ids().find(|id| id.index() >= vocab_size) {
            let (name, id) = (&document.id, id.0);
            return Err(Error::Mismatch(format!(
                "document {name:?}: found token {id}, expected ids below {vocab_size}, the target's vocabulary"
            )));
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(range: std::ops::Range<u32>) -> Vec<TokenId> {
        range.map(TokenId).collect()
    }

    fn turn(id: &str, turn: usize, prompt: Vec<TokenId>, response: Vec<TokenId>) -> Response {
        Response { turn, finish: Some(Finish::Stop), ..Response::new(id, prompt, response) }
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
}
