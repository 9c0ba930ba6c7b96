//! Stop strings in streamed text.

use super::TextStream;
use crate::{
    error::{Error, Result},
    ids::TokenId,
};

/// A [`TextStream`] that ends before the first of some strings, wherever in the tokens it lies. Text that
/// may turn out to be the beginning of one is held back until it is certain.
///
/// The string that is complete first counts, and of two complete at the same place the longer one: the
/// result depends on the text alone, not on how it is cut into tokens or calls.
pub struct StopStrings {
    stream: TextStream,
    stops: Vec<String>,
    /// All text so far, and how many bytes of it have been given out.
    text: String,
    given: usize,
    /// Bytes of text that were certain after each token.
    ends: Vec<usize>,
    hit: Option<StopHit>,
}

/// Text that is ready, and whether the response ends with it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Piece {
    /// What comes after the text of the pieces before.
    pub text: String,
    /// The stop string that was met; there is no text after it.
    pub stop: Option<StopHit>,
}

/// Where a response ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopHit {
    /// Which of the stop strings.
    pub stop: usize,
    /// How many tokens, from the first, the text before the stop string takes. The last of them may hold
    /// the beginning of the stop string too.
    pub tokens: usize,
}

impl StopStrings {
    /// Watches a stream of no tokens yet for `stops`, of which there may be none.
    ///
    /// # Errors
    /// [`Error::Request`] where a stop string is empty.
    pub fn new(stream: TextStream, stops: &[String]) -> Result<Self> {
        if stops.iter().any(String::is_empty) {
            let expected = "strings of at least one character".to_owned();
            return Err(Error::Request { what: "stop strings", found: "an empty one".to_owned(), expected });
        }
        let stops = stops.to_vec();
        Ok(Self { stream, stops, text: String::new(), given: 0, ends: Vec::new(), hit: None })
    }

    /// Takes tokens and gives the text that is certain. After a stop string everything is ignored.
    ///
    /// # Errors
    /// As [`TextStream::push`].
    pub fn push(&mut self, tokens: &[TokenId]) -> Result<Piece> {
        let mut piece = Piece { text: String::new(), stop: self.hit };
        for &token in tokens {
            if self.hit.is_some() {
                break;
            }
            let delta = self.stream.push(&[token])?;
            self.ends.push(self.text.len() + delta.len());
            self.extend(&delta, &mut piece);
        }
        Ok(piece)
    }

    /// The end of the tokens: gives what was held back.
    ///
    /// # Errors
    /// As [`TextStream::flush`].
    pub fn flush(&mut self) -> Result<Piece> {
        let mut piece = Piece { text: String::new(), stop: self.hit };
        if self.hit.is_none() {
            let rest = self.stream.flush()?;
            if let Some(end) = self.ends.last_mut() {
                *end += rest.len();
            }
            self.extend(&rest, &mut piece);
        }
        if self.hit.is_none() {
            piece.text.push_str(&self.text[self.given..]);
            self.given = self.text.len();
        }
        Ok(piece)
    }

    fn extend(&mut self, delta: &str, piece: &mut Piece) {
        let searched = self.text.len();
        self.text.push_str(delta);
        let limit = match self.find(searched) {
            Some((start, stop)) => {
                let tokens = self.ends.partition_point(|&end| end < start);
                self.hit = Some(StopHit { stop, tokens: if start == 0 { 0 } else { tokens + 1 } });
                piece.stop = self.hit;
                start
            }
            None => self.text.len() - self.held(),
        };
        piece.text.push_str(&self.text[self.given..limit]);
        self.given = limit;
    }

    /// Start and number of the stop string that ends first, after `searched` bytes.
    fn find(&self, searched: usize) -> Option<(usize, usize)> {
        let found = self.stops.iter().enumerate().filter_map(|(number, stop)| {
            // An occurrence that ends after `searched` begins after this.
            let mut from = (searched + 1).saturating_sub(stop.len());
            while !self.text.is_char_boundary(from) {
                from += 1;
            }
            let start = from + self.text[from..].find(stop.as_str())?;
            Some((start + stop.len(), start, number))
        });
        found.min().map(|(_, start, number)| (start, number))
    }

    /// Bytes at the end that may be the beginning of a stop string.
    fn held(&self) -> usize {
        let text = self.text.as_bytes();
        let longest = |stop: &String| {
            let most = (stop.len() - 1).min(text.len() - self.given);
            (1..=most).rev().find(|&n| text.ends_with(&stop.as_bytes()[..n])).unwrap_or(0)
        };
        self.stops.iter().map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{Tokenizer, testing};
    use proptest::{collection::vec, prelude::*};

    fn watch(tokenizer: &Tokenizer, stops: &[&str]) -> StopStrings {
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        StopStrings::new(TextStream::new(tokenizer, true), &stops).unwrap()
    }

    #[test]
    fn a_stop_string_across_tokens_ends_the_text() {
        let tokenizer = testing::tokenizer();
        let mut stops = watch(&tokenizer, &["zz", "b the", "hem"]);
        let mut push = |text: &str| stops.push(&tokenizer.encode(text).unwrap()).unwrap();
        assert_eq!(push("ab"), Piece { text: "a".into(), stop: None });
        assert_eq!(push("c"), Piece { text: "bc".into(), stop: None });
        assert_eq!(push("b"), Piece { text: String::new(), stop: None });
        // " the" is one token; it completes "b the" before "hem" could be.
        let hit = StopHit { stop: 1, tokens: 3 };
        assert_eq!(push(" them"), Piece { text: String::new(), stop: Some(hit) });
        assert_eq!(push("more"), Piece { text: String::new(), stop: Some(hit) });
        assert_eq!(stops.flush().unwrap(), Piece { text: String::new(), stop: Some(hit) });
    }

    #[test]
    fn what_was_held_back_comes_at_the_end() {
        let tokenizer = testing::tokenizer();
        let mut stops = watch(&tokenizer, &["##"]);
        assert_eq!(stops.push(&tokenizer.encode("a#").unwrap()).unwrap().text, "a");
        assert_eq!(stops.flush().unwrap(), Piece { text: "#".into(), stop: None });
    }

    #[test]
    fn a_token_that_holds_text_and_stop_string_counts() {
        let tokenizer = testing::tokenizer();
        let mut stops = watch(&tokenizer, &["he"]);
        // One token " the": the text " t" takes it.
        let piece = stops.push(&tokenizer.encode(" the").unwrap()).unwrap();
        assert_eq!(piece, Piece { text: " t".into(), stop: Some(StopHit { stop: 0, tokens: 1 }) });
        let mut stops = watch(&tokenizer, &[" t"]);
        let piece = stops.push(&tokenizer.encode(" the").unwrap()).unwrap();
        assert_eq!(piece, Piece { text: String::new(), stop: Some(StopHit { stop: 0, tokens: 0 }) });
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        let tokenizer = testing::tokenizer();
        let stream = TextStream::new(&tokenizer, true);
        assert!(matches!(StopStrings::new(stream, &[String::new()]), Err(Error::Request { .. })));
    }

    /// Character by character: the first prefix that ends with a stop string, the longest one of those.
    fn first_stop(text: &str, stops: &[String]) -> Option<(usize, usize)> {
        let mut ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
        ends.find_map(|end| {
            let ending = stops.iter().enumerate().filter(|(_, stop)| text[..end].ends_with(stop.as_str()));
            let (number, stop) =
                ending.max_by_key(|(number, stop)| (stop.len(), std::cmp::Reverse(*number)))?;
            Some((end - stop.len(), number))
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]
        #[test]
        fn any_split_ends_where_the_text_says(
            text in "[abä thé]{0,16}",
            stops in vec("[abä the]{1,4}", 0..4),
            cuts in vec(any::<bool>(), 40),
        ) {
            let tokenizer = testing::tokenizer();
            let ids = tokenizer.encode(&text).unwrap();
            let mut watched = StopStrings::new(TextStream::new(&tokenizer, true), &stops).unwrap();
            let (mut given, mut stop, mut part) = (String::new(), None, Vec::new());
            for (id, &cut) in ids.iter().zip(cuts.iter().cycle()) {
                part.push(*id);
                if cut {
                    let piece = watched.push(&std::mem::take(&mut part)).unwrap();
                    given += &piece.text;
                    stop = piece.stop;
                }
            }
            for piece in [watched.push(&part).unwrap(), watched.flush().unwrap()] {
                given += &piece.text;
                stop = piece.stop;
            }
            let expected = first_stop(&text, &stops);
            prop_assert_eq!(&*given, &text[..expected.map_or(text.len(), |(start, _)| start)]);
            prop_assert_eq!(stop.map(|s| s.stop), expected.map(|(_, number)| number));
            if let (Some(stop), Some((start, _))) = (stop, expected) {
                let covers = |n: usize| {
                    let text = tokenizer.decode(&ids[..n], true).unwrap();
                    text.trim_end_matches('\u{fffd}').len() >= start
                };
                prop_assert_eq!(stop.tokens, (0..=ids.len()).find(|&n| covers(n)).unwrap());
            }
        }

        /// Only what may begin a stop string is held back, and all of that.
        #[test]
        fn no_more_is_held_back_than_needed(text in "[ab]{0,12}", stops in vec("[ab]{1,4}", 1..3)) {
            let tokenizer = testing::tokenizer();
            let mut watched = StopStrings::new(TextStream::new(&tokenizer, true), &stops).unwrap();
            let mut given = String::new();
            for (n, &id) in tokenizer.encode(&text).unwrap().iter().enumerate() {
                let piece = watched.push(&[id]).unwrap();
                given += &piece.text;
                if piece.stop.is_some() {
                    break;
                }
                let so_far = &text[..=n];
                let begins = |held: &str| stops.iter().any(|stop| stop.starts_with(held));
                let held = (0..so_far.len()).find(|&at| begins(&so_far[at..])).unwrap_or(so_far.len());
                prop_assert_eq!(&*given, &so_far[..held]);
            }
        }
    }
}
