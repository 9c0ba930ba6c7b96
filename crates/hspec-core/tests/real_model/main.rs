//! SmolLM2 with drafters of every kind: greedy text is the one of plain decoding, whatever is drafted and
//! however many drafts a schedule lets through. That the law is kept, at any temperature, is shown exactly on
//! tiny targets (`law`, `lossless`, `variants`).

#![allow(clippy::unwrap_used)] // a test may panic

#[path = "../dspark/scene.rs"]
#[allow(dead_code)] // parts that only its own tests need
mod dspark;
#[path = "../support/eagle.rs"]
mod eagle;
mod kinds;
mod prompted;
mod schedules;
#[path = "../variants/scene.rs"]
mod variants;

use dspark::B;
use hspec_core::{
    TokenId,
    decode::{Decoder, Generation, Request, SamplingParams},
    prompts::read_prompts,
    target::Target,
    text::{ChatTemplate, Tokenizer},
};
use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
};

/// Tokens of an answer; an end of text does not end it.
const NEW: usize = 20;

fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets")
}

/// A prompt, and what the target answers by itself.
struct Text {
    prompt: Vec<TokenId>,
    answer: Vec<TokenId>,
}

/// The model and the plain answers to the first two prompts, which all drafters share.
fn scene() -> (Target<B>, Vec<Text>) {
    let model = hspec_goldens::model("smollm2-135m-instruct");
    let target = Target::load(&model, &Default::default()).unwrap();
    let tokenizer = Tokenizer::open(&model).unwrap();
    let chat = ChatTemplate::open(&model).unwrap().unwrap();
    let prompts = read_prompts(&assets().join("prompts/demo.jsonl")).unwrap();
    let text = |messages: &[_]| {
        let prompt = tokenizer.encode(&chat.render(messages, true).unwrap()).unwrap();
        let answer = greedy(&Decoder::new(&target, None), &prompt, 0).tokens;
        assert_eq!(answer.len(), NEW);
        Text { prompt, answer }
    };
    let texts = prompts[..2].iter().map(|prompt| text(&prompt.messages)).collect();
    (target, texts)
}

fn greedy(decoder: &Decoder<'_, B>, prompt: &[TokenId], k: usize) -> Generation {
    let request = Request {
        prompt,
        sampling: SamplingParams::greedy(),
        seed: 0,
        id: 0,
        max_new_tokens: NEW,
        k,
        stop_tokens: &[],
    };
    decoder.generate(&request, &mut |_| ControlFlow::Continue(())).unwrap()
}
