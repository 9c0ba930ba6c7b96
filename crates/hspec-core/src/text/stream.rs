//! Text of a growing list of tokens.

use super::Tokenizer;
use crate::{error::Result, ids::TokenId};

/// What a decoder writes for bytes that are no character (yet).
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// Turns tokens into text as they come, however they are split into calls: what [`push`](Self::push) and
/// [`flush`](Self::flush) return, one after the other, is what [`Tokenizer::decode`] makes of all tokens at
/// once. A character whose bytes are spread over tokens comes when it is whole.
///
/// Why this holds: bytes turned into text with replacement can change afterwards only in a replacement
/// character at the very end. So that one is held back, and once a text ends without one, what follows
/// decodes independently of it; the last such stretch stays as context for decoders that treat the first
/// token of a text in a way of its own (a leading space).
pub struct TextStream {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// The last finished stretch and what came after it.
    window: Vec<TokenId>,
    /// Tokens of the window that belong to the finished stretch.
    finished: usize,
    /// Bytes of the window's text that have been given out.
    given: usize,
}

impl TextStream {
    /// A stream of no tokens yet; `skip_special` leaves special tokens out of the text.
    pub fn new(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        Self { tokenizer: tokenizer.clone(), skip_special, window: Vec::new(), finished: 0, given: 0 }
    }

    /// The text that these tokens make certain.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, tokens: &[TokenId]) -> Result<String> {
        self.window.extend_from_slice(tokens);
        let text = self.decode(&self.window)?;
        let certain = text.strip_suffix(REPLACEMENT).unwrap_or(&text);
        let delta = certain.get(self.given..).unwrap_or_default().to_owned();
        self.given += delta.len();
        if certain.len() == text.len() && !delta.is_empty() {
            self.window.drain(..self.finished);
            self.finished = self.window.len();
            self.given = self.decode(&self.window)?.len();
        }
        Ok(delta)
    }

    /// The rest: a broken character at the end, as a replacement character. The stream begins anew.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn flush(&mut self) -> Result<String> {
        let text = self.decode(&self.window)?;
        let rest = text.get(self.given..).unwrap_or_default().to_owned();
        (self.finished, self.given) = (0, 0);
        self.window.clear();
        Ok(rest)
    }

    fn decode(&self, tokens: &[TokenId]) -> Result<String> {
        self.tokenizer.decode(tokens, self.skip_special)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::testing;
    use proptest::{collection::vec, prelude::*};

    fn streamed(tokenizer: &Tokenizer, skip: bool, parts: &[Vec<TokenId>]) -> Vec<String> {
        let mut stream = TextStream::new(tokenizer, skip);
        let mut pieces: Vec<String> = parts.iter().map(|part| stream.push(part).unwrap()).collect();
        pieces.push(stream.flush().unwrap());
        pieces
    }

    #[test]
    fn a_character_comes_when_it_is_whole_and_other_text_at_once() {
        let tokenizer = testing::tokenizer();
        // "é" and "😀" byte by byte, between words.
        let ids = tokenizer.encode("the é😀!").unwrap();
        let parts: Vec<_> = ids.iter().map(|&id| vec![id]).collect();
        let pieces = streamed(&tokenizer, true, &parts);
        assert_eq!(pieces, ["the", " ", "", "é", "", "", "", "😀", "!", ""]);
    }

    #[test]
    fn a_broken_character_comes_as_replacement_at_the_end_or_before_other_text() {
        let tokenizer = testing::tokenizer();
        let ids = tokenizer.encode("é!").unwrap();
        let parts = [vec![ids[0]], vec![ids[2]], vec![ids[0]]];
        assert_eq!(streamed(&tokenizer, true, &parts), ["", "\u{fffd}!", "", "\u{fffd}"]);
    }

    #[test]
    fn special_tokens_are_left_out_or_written_even_inside_a_character() {
        let tokenizer = testing::tokenizer();
        let ids = tokenizer.encode("é<end>").unwrap();
        let parts = [vec![ids[0]], vec![ids[2]], vec![ids[1]]];
        assert_eq!(streamed(&tokenizer, true, &parts), ["", "", "é", ""]);
        assert_eq!(streamed(&tokenizer, false, &parts), ["", "\u{fffd}<end>", "", "\u{fffd}"]);
    }

    proptest! {
        /// Any tokens, also such that make no UTF-8, in any split.
        #[test]
        fn the_pieces_make_up_the_text(
            parts in vec(vec((0u32..264).prop_map(TokenId), 0..5), 0..30),
            skip in any::<bool>(),
        ) {
            let tokenizer = testing::tokenizer();
            let whole = tokenizer.decode(&parts.concat(), skip).unwrap();
            prop_assert_eq!(streamed(&tokenizer, skip, &parts).concat(), whole);
        }

        /// Of a text that is right, all whole characters are given out at once.
        #[test]
        fn nothing_whole_is_held_back(text in "[a-cäö😀 the]{0,20}") {
            let tokenizer = testing::tokenizer();
            let mut stream = TextStream::new(&tokenizer, true);
            let (mut given, mut ids) = (String::new(), Vec::new());
            for id in tokenizer.encode(&text).unwrap() {
                ids.push(id);
                given += &stream.push(&[id]).unwrap();
                let so_far = tokenizer.decode(&ids, true).unwrap();
                prop_assert_eq!(&*given, so_far.trim_end_matches(REPLACEMENT));
            }
            prop_assert_eq!(given, text);
        }
    }
}
