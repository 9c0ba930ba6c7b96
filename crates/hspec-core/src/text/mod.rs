//! Text to tokens and back: the tokenizer, the chat template, and streaming text that never breaks a
//! character or runs past a stop string.

mod chat;
mod clock;
mod spans;
mod stop;
mod stream;
#[cfg(test)]
mod testing;
mod tokenizer;

pub use chat::{ChatTemplate, Message};
pub use spans::Rendered;
pub use stop::{Piece, StopHit, StopStrings};
pub use stream::TextStream;
pub use tokenizer::Tokenizer;

use serde_json::Value;

/// A special token as `tokenizer_config.json` writes it: a text, or an object with its `content`.
fn special_token<'a>(config: &'a Value, name: &str) -> Option<&'a str> {
    let token = config.get(name)?;
    token.as_str().or_else(|| token.get("content")?.as_str())
}
