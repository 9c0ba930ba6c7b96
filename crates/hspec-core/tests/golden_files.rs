//! The fetched model: its two forms against each other, and its tokenizer and chat template against the
//! reference implementation's.

#![allow(clippy::unwrap_used)] // a test: a panic is how it fails

use hspec_core::{
    TokenId,
    checkpoint::{Weights, model_json},
    text::{ChatTemplate, Message, TextStream, Tokenizer},
};
use proptest::{collection::vec, prelude::*};
use serde_json::Value;
use std::path::PathBuf;

/// Each model with notes on its tokenizer: the notes, and the model in each form that is there.
fn models() -> Vec<(Value, Vec<PathBuf>)> {
    let folder = hspec_goldens::root().join("targets");
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut models = Vec::new();
    for entry in entries {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let Some(name) = name.strip_suffix(".tokenizer.json") else { continue };
        let notes = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let model = hspec_goldens::model(name);
        let gguf = model.with_file_name(format!("{name}.gguf"));
        models.push((notes, [model, gguf].into_iter().filter(|p| p.exists()).collect()));
    }
    assert!(!models.is_empty(), "no *.tokenizer.json in {}", folder.display());
    models
}

fn list<'a>(notes: &'a Value, key: &str) -> &'a Vec<Value> {
    notes[key].as_array().unwrap_or_else(|| panic!("no {key}"))
}

fn ids(value: &Value) -> Vec<TokenId> {
    serde_json::from_value(value["ids"].clone()).unwrap()
}

#[test]
fn golden_strings() {
    for (notes, model) in models().iter().flat_map(|(notes, forms)| forms.iter().map(move |f| (notes, f))) {
        let tokenizer = Tokenizer::open(model).unwrap();
        for case in list(notes, "strings") {
            let text = case["text"].as_str().unwrap();
            let ids = ids(case);
            assert_eq!(tokenizer.encode(text).unwrap(), ids, "{}: {text:?}", model.display());
            for (key, skip) in [("decode_skip_special_false", false), ("decode_skip_special_true", true)] {
                let decoded = tokenizer.decode(&ids, skip).unwrap();
                assert_eq!(decoded, case[key].as_str().unwrap(), "{}: {text:?} {key}", model.display());
            }
        }
    }
}

#[test]
fn golden_chats() {
    for (notes, model) in models().iter().flat_map(|(notes, forms)| forms.iter().map(move |f| (notes, f))) {
        let tokenizer = Tokenizer::open(model).unwrap();
        let template = ChatTemplate::open(model).unwrap().expect("an instruct model has a chat template");
        for case in list(notes, "chat") {
            let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
            let rendered =
                template.render(&messages, case["add_generation_prompt"].as_bool().unwrap()).unwrap();
            assert_eq!(rendered, case["rendered"].as_str().unwrap(), "{}", model.display());
            assert_eq!(tokenizer.encode(&rendered).unwrap(), ids(case), "{}", model.display());
        }
    }
}

/// Every tensor and every derived file of the folder is what the GGUF says, bit by bit.
#[test]
fn both_forms_of_a_model_are_the_same() {
    for (_, forms) in models() {
        let [folder, gguf] = &*forms else { continue };
        let (a, b) = (Weights::open(folder).unwrap(), Weights::open(gguf).unwrap());
        assert_eq!(a.names(), b.names());
        for name in a.names() {
            assert_eq!(a.shape(&name), b.shape(&name), "{name}");
            let (a, b) = (a.tensor(&name).unwrap().unwrap(), b.tensor(&name).unwrap().unwrap());
            assert!(a.as_bytes() == b.as_bytes(), "{name} differs");
        }
        for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
            assert_eq!(model_json(folder, name).unwrap(), model_json(gguf, name).unwrap(), "{name}");
        }
        assert_eq!(Tokenizer::open(folder).unwrap().eos_ids(), Tokenizer::open(gguf).unwrap().eos_ids());
    }
}

#[test]
fn a_chat_model_stops_at_the_end_of_its_turn() {
    for (_, forms) in models() {
        let tokenizer = Tokenizer::open(&forms[0]).unwrap();
        if let Some(end_of_turn) = tokenizer.token_id("<|im_end|>") {
            assert!(tokenizer.eos_ids().contains(&end_of_turn));
        }
        assert_eq!(tokenizer.token_id("no such token"), None);
    }
}

/// Random tokens of the real vocabulary, among them halves of characters and special ones, in any split.
#[test]
fn streamed_pieces_make_up_the_text() {
    for (_, forms) in models() {
        let tokenizer = Tokenizer::open(&forms[0]).unwrap();
        let size = tokenizer.vocab_size() as u32;
        // Low ids are bytes and special tokens: make them as frequent as the many others.
        let token = prop_oneof![0..300.min(size), 0..size];
        let parts = vec(vec(token.prop_map(TokenId), 0..5), 0..20);
        proptest!(ProptestConfig::with_cases(300), |(parts in parts, skip in any::<bool>())| {
            let mut stream = TextStream::new(&tokenizer, skip);
            let mut text = String::new();
            for part in &parts {
                text += &stream.push(part).unwrap();
            }
            text += &stream.flush().unwrap();
            prop_assert_eq!(text, tokenizer.decode(&parts.concat(), skip).unwrap());
        });
    }
}
