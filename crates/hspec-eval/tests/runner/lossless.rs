//! Greedy decoding of a real model: the same tokens with drafters as without.

use crate::{B, support::random_drafter};
use hspec_core::{
    TokenId,
    decode::{Decoder, Request, SamplingParams},
    drafter::{Drafter, HSpec},
    prompts::read_prompts,
    target::Target,
    text::{ChatTemplate, Tokenizer},
};
use std::{ops::ControlFlow, path::Path};

/// Tokens of an answer; an end of text does not end it.
const NEW: usize = 64;

#[test]
fn greedy_text_of_a_real_model_is_the_same_with_a_random_and_the_shipped_drafter() {
    let model = hspec_goldens::model("smollm2-135m-instruct");
    let device = Default::default();
    let target = Target::<B>::load(&model, &device).unwrap();
    let tokenizer = Tokenizer::open(&model).unwrap();
    let chat = ChatTemplate::open(&model).unwrap().unwrap();
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets");
    let prompts = read_prompts(&assets.join("prompts/demo.jsonl")).unwrap();
    assert_eq!(prompts.len(), 20);
    let shipped = HSpec::load(&assets.join("drafters/smollm2-135m-hspec"), Some(&target), &device).unwrap();
    let random = random_drafter(&target);
    // The random one is nearly always wrong: few drafts, that a token may cost little more than without.
    let drafters: [(&str, &dyn Drafter<B>, usize); 2] = [("random", &random, 2), ("shipped", &shipped, 7)];
    let mut rounds = [0; 2];
    for prompt in &prompts {
        let tokens = tokenizer.encode(&chat.render(&prompt.messages, true).unwrap()).unwrap();
        let decode = |drafter, k| {
            let request = Request {
                prompt: &tokens,
                sampling: SamplingParams::greedy(),
                seed: 0,
                id: 0,
                max_new_tokens: NEW,
                k,
                stop_tokens: &[],
            };
            Decoder::new(&target, drafter).generate(&request, &mut |_| ControlFlow::Continue(())).unwrap()
        };
        let plain: Vec<TokenId> = decode(None, 0).tokens;
        assert_eq!(plain.len(), NEW);
        for ((name, drafter, k), rounds) in drafters.iter().zip(&mut rounds) {
            let speculative = decode(Some(*drafter), *k);
            assert_eq!(speculative.tokens, plain, "{name} drafter, prompt {}", prompt.id);
            *rounds += speculative.target_passes;
        }
    }
    let tau = rounds.map(|rounds| (prompts.len() * (NEW - 1)) as f64 / rounds as f64);
    println!("tau: random {:.2} (k = 2), shipped {:.2} (k = 7)", tau[0], tau[1]);
    assert!(tau[1] > 1.5, "the shipped drafter is no use: tau {}", tau[1]);
}
