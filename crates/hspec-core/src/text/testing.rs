//! A small byte-level tokenizer for tests that need no model.

use super::Tokenizer;
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

/// The character that stands for a byte in byte-level BPE.
fn alphabet() -> Vec<char> {
    let printable = |b: &u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 0u32;
    (0..=255u8)
        .map(|b| {
            if printable(&b) {
                char::from(b)
            } else {
                others += 1;
                char::from_u32(255 + others).unwrap()
            }
        })
        .collect()
}

/// Token 0 is the special `<end>`, tokens 1..=256 are the bytes, the others some common pieces.
pub(super) fn tokenizer() -> Tokenizer {
    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(build);
    TOKENIZER.clone()
}

fn build() -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path());
    Tokenizer::open(dir.path()).unwrap()
}

/// Writes its file into a folder.
pub(super) fn write(dir: &std::path::Path) {
    let alphabet = alphabet();
    let mut vocabulary = Map::from_iter([("<end>".to_owned(), Value::from(0))]);
    for &c in &alphabet {
        vocabulary.insert(c.to_string(), vocabulary.len().into());
    }
    let space = alphabet[usize::from(b' ')];
    let mut merges = Vec::new();
    for (left, right) in
        [("t", "h"), ("th", "e"), (&*space.to_string(), "the"), ("o", "n"), ("Ã", "¤"), ("Ã", "¶")]
    {
        vocabulary.insert(format!("{left}{right}"), vocabulary.len().into());
        merges.push(json!([left, right]));
    }
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let special = json!({
        "id": 0, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    });
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [special], "normalizer": null,
        "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    });
    std::fs::write(dir.join("tokenizer.json"), file.to_string()).unwrap();
}
