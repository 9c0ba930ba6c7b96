//! The tokenizer of a model.

use super::special_token;
use crate::{
    checkpoint::{model_json, read_json},
    error::{Error, Result},
    ids::TokenId,
};
use serde_json::Value;
use std::{path::Path, sync::Arc};

/// The tokenizer of a model. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    eos: Arc<[TokenId]>,
}

impl Tokenizer {
    /// Opens the tokenizer of a model's folder or GGUF file.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::Invalid`] where `tokenizer.json` (or a GGUF's metadata) is absent or
    /// wrong, or where an end-of-text token is none of the vocabulary.
    pub fn open(model: &Path) -> Result<Self> {
        let tokenizer = match model_json(model, "tokenizer.json")? {
            Some(tokenizer) => tokenizer,
            // Absent: reading it gives the error that says so.
            None => read_json(&model.join("tokenizer.json"))?,
        };
        let invalid = |found: String| {
            Error::invalid(model, "tokenizer.json", found, "a tokenizer of the form that Hugging Face writes")
        };
        let mut inner: tokenizers::Tokenizer =
            serde_json::from_value(tokenizer).map_err(|e| invalid(e.to_string()))?;
        // Settings for batches of training examples; a prompt is neither cut nor padded.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| invalid(e.to_string()))?;
        let eos = eos_ids(model, &inner)?;
        Ok(Self { inner: Arc::new(inner), eos: eos.into() })
    }

    /// Tokens of a text. Special tokens written out in it are recognised; none are added.
    ///
    /// # Errors
    /// [`Error::Request`] where the tokenizer cannot express the text.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>> {
        let encoding = self.inner.encode_fast(text, false).map_err(inexpressible)?;
        Ok(encoding.get_ids().iter().copied().map(TokenId).collect())
    }

    /// Tokens of a text with the bytes that each stands for.
    pub(super) fn encoding(&self, text: &str) -> Result<tokenizers::Encoding> {
        self.inner.encode(text, false).map_err(inexpressible)
    }

    /// The text of tokens. Bytes that are no UTF-8 become U+FFFD; ids beyond the vocabulary count as
    /// nothing. `skip_special` leaves special tokens out.
    ///
    /// # Errors
    /// [`Error::Request`] where the tokenizer's decoder refuses the tokens.
    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> Result<String> {
        let ids: Vec<u32> = tokens.iter().map(|t| t.0).collect();
        self.inner.decode(&ids, skip_special).map_err(|e| Error::Request {
            what: "tokens",
            found: e.to_string(),
            expected: "tokens that the tokenizer can decode".to_owned(),
        })
    }

    /// Number of tokens, added ones included. A model may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Tokens that end a response: those of `generation_config.json` (or else `config.json`) and the
    /// tokenizer's own `eos_token`, which in chat models ends a turn. May be empty.
    pub fn eos_ids(&self) -> Vec<TokenId> {
        self.eos.to_vec()
    }

    /// Whether a token ends a response.
    pub(super) fn ends(&self, id: u32) -> bool {
        self.eos.contains(&TokenId(id))
    }

    /// Whether a token begins with white space, as vocabularies write it.
    pub(super) fn spaced(&self, id: u32) -> bool {
        self.inner.id_to_token(id).is_some_and(|token| token.starts_with(['Ġ', 'Ċ', 'ĉ', '▁']))
    }

    /// The id of a token written as in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<TokenId> {
        self.inner.token_to_id(token).map(TokenId)
    }
}

fn inexpressible(error: tokenizers::Error) -> Error {
    Error::Request {
        what: "text",
        found: error.to_string(),
        expected: "a text that the tokenizer can express".to_owned(),
    }
}

fn eos_ids(model: &Path, tokenizer: &tokenizers::Tokenizer) -> Result<Vec<TokenId>> {
    let mut ids = Vec::new();
    for name in ["generation_config.json", "config.json"] {
        let config = model_json(model, name)?.unwrap_or_default();
        let listed = match config.get("eos_token_id") {
            None | Some(Value::Null) => continue,
            Some(Value::Array(list)) => list.clone(),
            Some(one) => vec![one.clone()],
        };
        for id in listed {
            let known = id.as_u64().and_then(|id| u32::try_from(id).ok());
            let known = known.ok_or_else(|| {
                Error::invalid(
                    model.join(name),
                    "eos_token_id",
                    id.to_string(),
                    "a token id or a list of them",
                )
            })?;
            ids.push(TokenId(known));
        }
        break;
    }
    let config = model_json(model, "tokenizer_config.json")?.unwrap_or_default();
    if let Some(token) = special_token(&config, "eos_token") {
        let id = tokenizer.token_to_id(token).ok_or_else(|| {
            Error::invalid(
                model.join("tokenizer_config.json"),
                "eos_token",
                token,
                "a token of the vocabulary",
            )
        })?;
        ids.push(TokenId(id));
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}
