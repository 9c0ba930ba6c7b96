//! A model's tokenizer and chat template, from the metadata to Hugging Face's files.

use super::Gguf;
use crate::error::Result;
use serde_json::{Map, Value, json};

/// `token_type` of tokens that control the model, and of tokens that a user added.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// How Qwen2's and Llama 3's tokenizers cut a text before merging; they differ in how many digits stay
/// together.
fn split_pattern(digits: &str) -> String {
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
        digits,
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
    .concat()
}

impl Gguf {
    /// What `tokenizer.json` of the same model says: byte-level BPE from the file's tokens and merges.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where tokens, types or merges are absent or no lists of the right things,
    /// and where the tokenizer is not byte-level BPE with a known way of cutting the text.
    pub fn tokenizer_json(&self) -> Result<Value> {
        let model = self.text("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(self.invalid("tokenizer.ggml.model", model, "gpt2, which is byte-level BPE"));
        }
        let cutting = self.text("tokenizer.ggml.pre")?;
        let bytes = |use_regex: bool| {
            json!({
                "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                "use_regex": use_regex,
            })
        };
        let split = |digits| {
            let pattern = json!({"Regex": split_pattern(digits)});
            json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false})
        };
        let (first, second) = match cutting {
            "smollm" => (json!({"type": "Digits", "individual_digits": true}), bytes(true)),
            "qwen2" => (split(r"\p{N}"), bytes(false)),
            "llama-bpe" => (split(r"\p{N}{1,3}"), bytes(false)),
            other => return Err(self.invalid("tokenizer.ggml.pre", other, "smollm, qwen2 or llama-bpe")),
        };

        let tokens = self.strings("tokenizer.ggml.tokens")?;
        let vocabulary: Map<String, Value> =
            tokens.iter().enumerate().map(|(id, &token)| (token.to_owned(), id.into())).collect();
        if vocabulary.len() != tokens.len() {
            let found = format!("{} different ones among {}", vocabulary.len(), tokens.len());
            return Err(self.invalid("tokenizer.ggml.tokens", found, "each token once"));
        }
        let merges = self.strings("tokenizer.ggml.merges")?;
        let merges = merges.iter().map(|merge| match merge.split_once(' ') {
            Some((left, right)) if [left, right].iter().all(|part| vocabulary.contains_key(*part)) => {
                Ok(json!([left, right]))
            }
            _ => Err(self.invalid("tokenizer.ggml.merges", *merge, "two tokens with a space between")),
        });
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added_tokens()?.into_iter().map(|(_, token)| token).collect::<Value>(),
            "normalizer": if cutting == "qwen2" { json!({"type": "NFC"}) } else { Value::Null },
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [first, second]},
            "post_processor": null,
            "decoder": bytes(true),
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": cutting == "llama-bpe",
                "merges": merges.collect::<Result<Value>>()?,
                "vocab": vocabulary,
            },
        }))
    }

    /// What `tokenizer_config.json` says: special tokens and the chat template.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where a special token's id is none of the vocabulary.
    pub fn tokenizer_config(&self) -> Result<Value> {
        let added: Map<String, Value> = self
            .added_tokens()?
            .into_iter()
            .map(|(id, mut token)| {
                if let Some(token) = token.as_object_mut() {
                    token.remove("id");
                }
                (id.to_string(), token)
            })
            .collect();
        let mut config = json!({
            "add_bos_token": self.metadata("tokenizer.ggml.add_bos_token").cloned().unwrap_or(false.into()),
            "add_prefix_space": false,
            "added_tokens_decoder": added,
            "clean_up_tokenization_spaces": false,
            "model_max_length": self.count("context_length")?,
            "tokenizer_class": "PreTrainedTokenizerFast",
        });
        let special = self.special_tokens()?;
        let template =
            self.metadata("tokenizer.chat_template").map(|t| ("chat_template".to_owned(), t.clone()));
        if let (Some(config), Some(special)) = (config.as_object_mut(), special.as_object()) {
            config.extend(special.clone().into_iter().chain(template));
        }
        Ok(config)
    }

    /// What `special_tokens_map.json` says.
    pub(super) fn special_tokens(&self) -> Result<Value> {
        let tokens = self.strings("tokenizer.ggml.tokens")?;
        let mut special = Map::new();
        for (name, key) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")] {
            let key = format!("tokenizer.ggml.{key}_token_id");
            let Some(id) = self.metadata(&key) else { continue };
            let index = id.as_u64().and_then(|id| usize::try_from(id).ok());
            let Some(token) = index.and_then(|index| tokens.get(index)) else {
                let expected = format!("an id below {}", tokens.len());
                return Err(self.invalid(&key, id.to_string(), expected));
            };
            special.insert(format!("{name}_token"), (*token).into());
        }
        Ok(special.into())
    }

    /// Tokens that are recognised whole in a text, with their ids.
    fn added_tokens(&self) -> Result<Vec<(usize, Value)>> {
        let tokens = self.strings("tokenizer.ggml.tokens")?;
        let Some(types) = self.metadata("tokenizer.ggml.token_type").and_then(Value::as_array) else {
            return Ok(Vec::new());
        };
        if types.len() != tokens.len() {
            let expected = format!("{}, one for each token", tokens.len());
            return Err(self.invalid(
                "tokenizer.ggml.token_type",
                format!("{} types", types.len()),
                expected,
            ));
        }
        let added = tokens.iter().zip(types).enumerate().filter_map(|(id, (token, kind))| {
            let special = match kind.as_i64()? {
                CONTROL => true,
                USER_DEFINED => false,
                _ => return None,
            };
            let token = json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special,
            });
            Some((id, token))
        });
        Ok(added.collect())
    }

    fn text(&self, key: &str) -> Result<&str> {
        let text = self.metadata(key).and_then(Value::as_str);
        text.ok_or_else(|| self.invalid(key, "no text", "a text"))
    }

    fn strings(&self, key: &str) -> Result<Vec<&str>> {
        let list = self.metadata(key).and_then(Value::as_array);
        let strings = list.and_then(|list| list.iter().map(Value::as_str).collect());
        strings.ok_or_else(|| self.invalid(key, "no list of texts", "a list of texts"))
    }
}
