//! Evaluations of drafters whose acceptance is known, on a tiny real target.

#![allow(clippy::unwrap_used)] // a test: a panic is how it fails

mod lossless;
mod support;

use burn::tensor::Tensor;
use hspec_core::{
    Result, TokenId,
    checkpoint::{Weights, read_json},
    config::TargetConfig,
    decode::{Decoder, Generation, Request, SamplingParams},
    drafter::{Drafter, Footprint, Proposal, Session},
    target::{KvCache, Target},
};
use hspec_eval::{DrafterFacts, Evaluation, PromptRun, Task, TaskPrompt};
use std::{cell::RefCell, ops::ControlFlow, path::Path, rc::Rc};

type B = burn_flex::Flex;

const NEW: usize = 17;

fn target(context: Option<usize>) -> Target<B> {
    let folder = hspec_goldens::root().join("targets/llama31-tiny");
    let file = folder.join("config.json");
    let mut config: serde_json::Value = read_json(&file).unwrap();
    if let Some(context) = context {
        config["max_position_embeddings"] = context.into();
    }
    let config = TargetConfig::from_value(&config, &file).unwrap();
    Target::from_weights(config, &Weights::open(&folder).unwrap(), &Default::default()).unwrap()
}

fn prompt(numbers: impl IntoIterator<Item = u32>) -> Vec<TokenId> {
    numbers.into_iter().map(TokenId).collect()
}

fn task(name: &str, prompts: &[Vec<TokenId>]) -> Task {
    let prompt =
        |(i, tokens): (usize, &Vec<TokenId>)| TaskPrompt { id: format!("{i}"), tokens: tokens.clone() };
    Task { name: name.into(), prompts: prompts.iter().enumerate().map(prompt).collect() }
}

fn plain(target: &Target<B>, prompt: &[TokenId]) -> Generation {
    let request = Request {
        prompt,
        sampling: SamplingParams::greedy(),
        seed: 0,
        id: 0,
        max_new_tokens: NEW,
        k: 7,
        stop_tokens: &[],
    };
    Decoder::new(target, None).generate(&request, &mut |_| ControlFlow::Continue(())).unwrap()
}

fn evaluation<'a>(target: &'a Target<B>, drafters: &'a [Box<dyn Drafter<B>>]) -> Evaluation<'a, B> {
    Evaluation {
        target,
        drafters,
        k: 7,
        schedule: None,
        max_new_tokens: NEW,
        sampling: SamplingParams::greedy(),
        seed: 0,
        stop_tokens: &[],
    }
}

/// Drafts what it has been told, the first `right` tokens of a block rightly.
struct Oracle {
    text: Vec<TokenId>,
    right: usize,
    log: Rc<RefCell<Vec<&'static str>>>,
}

fn oracle(prompt: &[TokenId], answer: &[TokenId], right: usize) -> Box<dyn Drafter<B>> {
    Box::new(Oracle { text: [prompt, answer].concat(), right, log: Rc::default() })
}

impl Drafter<B> for Oracle {
    fn kind(&self) -> &'static str {
        "oracle"
    }

    fn max_draft(&self) -> usize {
        7
    }

    fn feature_layers(&self) -> &[usize] {
        &[1]
    }

    fn vocabulary(&self) -> Option<&[TokenId]> {
        None
    }

    fn footprint(&self) -> Footprint {
        Footprint { params_trainable: 1, params_frozen: 2, kv_bytes_per_token: 3, state_bytes: 4 }
    }

    fn session(&self, _capacity: usize) -> Box<dyn Session<B> + '_> {
        Box::new(OracleSession(self))
    }
}

struct OracleSession<'a>(&'a Oracle);

impl Session<B> for OracleSession<'_> {
    fn observe(&mut self, _tokens: &[TokenId], _features: Tensor<B, 2>) {}

    fn draft(
        &mut self,
        _anchor: TokenId,
        cache: &KvCache<B>,
        k: usize,
        pick: &mut dyn FnMut(usize, &[f32]) -> Result<TokenId>,
    ) -> Result<Proposal> {
        let Oracle { text, right, log } = self.0;
        log.borrow_mut().push("draft");
        let token = |slot: usize| {
            let known = text.get(cache.len() + slot).map_or(0, |t| t.index());
            if slot <= *right { known } else { (known + 1) % 512 }
        };
        let tokens = (1..=k)
            .map(|slot| pick(slot, &(0..512).map(|t| f32::from(t == token(slot))).collect::<Vec<_>>()))
            .collect::<Result<_>>()?;
        Ok(Proposal { tokens, confidence: Vec::new() })
    }
}

#[test]
fn rounds_of_drafters_that_know_all_or_two_or_no_tokens() {
    let target = target(None);
    let prompt = prompt([3, 14, 15, 92, 65]);
    let answer = plain(&target, &prompt).tokens;
    let drafters = [7, 2, 0].map(|right| oracle(&prompt, &answer, right));
    let tasks = [task("t", std::slice::from_ref(&prompt))];
    let runs = evaluation(&target, &drafters).run(&tasks, &mut |_, _| {}).unwrap();
    let runs: Vec<&PromptRun> = runs.iter().map(|tasks| &tasks[0].1[0]).collect();
    for run in &runs {
        assert!(run.same_text);
        assert_eq!((run.acceptance.tokens(), run.plain_tokens), (16, 16));
        assert!(run.draft_seconds > 0.0 && run.verify_seconds > 0.0 && run.plain_seconds > 0.0);
        assert!(run.draft_seconds + run.verify_seconds <= run.seconds, "{run:?}");
    }
    // 16 = 2 rounds of 8 tokens = 5 rounds of 3 and a step that has no room for a draft.
    assert_eq!(runs.iter().map(|r| r.acceptance.rounds()).collect::<Vec<_>>(), [2, 6, 16]);
    assert_eq!(runs[0].acceptance.accepted(), [2; 7]);
    assert_eq!(runs[1].acceptance.accepted(), [5, 5, 0, 0, 0, 0, 0]);
    assert_eq!(runs[1].acceptance.reached(), [5, 5, 5, 0, 0, 0, 0]);
    assert_eq!(runs[1].acceptance.proposed(), [5, 5, 5, 4, 4, 4, 3]);
    // The last token again is a step without a draft.
    assert_eq!(runs[2].acceptance.reached(), [15, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn who_begins_changes_from_prompt_to_prompt() {
    let target = target(None);
    let log: Rc<RefCell<Vec<_>>> = Rc::default();
    let drafters: [Box<dyn Drafter<B>>; 1] =
        [Box::new(Oracle { text: Vec::new(), right: 0, log: log.clone() })];
    let tasks = [task("a", &[prompt([1])]), task("b", &[prompt([2, 3]), prompt([4])])];
    let mut told = Vec::new();
    let runs = evaluation(&target, &drafters).run(&tasks, &mut |done, total| {
        log.borrow_mut().push("done");
        told.push((done, total));
    });
    let names: Vec<_> = runs.unwrap()[0].iter().map(|(name, runs)| (name.clone(), runs.len())).collect();
    assert_eq!(names, [("a".to_owned(), 1), ("b".to_owned(), 2)]);
    assert_eq!(told, (1..=6).map(|done| (done, 6)).collect::<Vec<_>>());
    let mut log = log.take();
    log.dedup_by(|a, b| *a == "draft" && *b == "draft");
    // The warm-up; then plain and drafter, drafter and plain, plain and drafter.
    assert_eq!(log, ["draft", "done", "draft", "done", "draft", "done", "done", "done", "draft", "done"]);
}

#[test]
fn a_random_drafter_leaves_the_text_and_a_stop_token_ends_it() {
    let target = target(None);
    let prompts = [prompt([7]), prompt(20..40), prompt([500, 1, 500])];
    let answer = plain(&target, &prompts[1]).tokens;
    let known = oracle(&prompts[1], &answer, 7);
    let drafters = [Box::new(support::random_drafter(&target)), known];
    let tasks = [task("t", &prompts)];
    let whole = evaluation(&target, &drafters);
    for run in whole.run(&tasks, &mut |_, _| {}).unwrap().iter().flat_map(|tasks| &tasks[0].1) {
        assert!(run.same_text);
        assert_eq!((run.acceptance.tokens(), run.plain_tokens), (16, 16));
    }
    // An answer that ends with its fifth token, unless this one occurs before.
    let stop = [answer[4]];
    let expected = answer.iter().position(|t| *t == stop[0]).unwrap() as u64;
    let stopped = Evaluation { stop_tokens: &stop, ..whole };
    for runs in stopped.run(&tasks, &mut |_, _| {}).unwrap() {
        let run = &runs[0].1[1];
        assert!(run.same_text);
        assert_eq!((run.acceptance.tokens(), run.plain_tokens), (expected, expected));
    }
}

#[test]
fn sampling_repeats_with_its_seed_and_differs_between_prompts() {
    let target = target(None);
    let drafters: [Box<dyn Drafter<B>>; 1] = [Box::new(support::random_drafter(&target))];
    let tasks = [task("t", &[prompt([7, 8]), prompt([7, 8])])];
    let sampling = SamplingParams::new(1.0, None, None).unwrap();
    let evaluation = Evaluation { sampling, ..evaluation(&target, &drafters) };
    let counts = || {
        let runs = evaluation.run(&tasks, &mut |_, _| {}).unwrap().remove(0).remove(0).1;
        runs.into_iter().map(|run| run.acceptance).collect::<Vec<_>>()
    };
    let first = counts();
    assert_eq!(counts(), first);
    assert!(first[0].rounds() > 0);
    // Same prompt, another number: other random choices.
    assert_ne!(first[0], first[1]);
}

#[test]
fn a_prompt_that_is_too_long_is_named_before_anything_is_decoded() {
    let target = target(Some(8));
    let drafters: [Box<dyn Drafter<B>>; 0] = [];
    let tasks = [task("short", &[prompt([1])]), task("long", &[prompt([1]), prompt(0..8)])];
    let mut told = false;
    let error = evaluation(&target, &drafters).run(&tasks, &mut |_, _| told = true).unwrap_err();
    assert!(!told);
    let message = error.to_string();
    let expected = "task long, prompt 1: prompt length in tokens: found 8, expected 1 to 7";
    assert!(message.starts_with(expected), "{message}");
}

#[test]
fn facts_are_the_drafter_s() {
    let drafter = oracle(&[], &[], 0);
    let facts = DrafterFacts::new(Path::new("some/where"), &*drafter);
    let expected = DrafterFacts {
        path: "some/where".into(),
        kind: "oracle".into(),
        params_trainable: 1,
        params_frozen: 2,
        kv_bytes_per_token: 3,
        state_bytes: 4,
    };
    assert_eq!(facts, expected);
}
