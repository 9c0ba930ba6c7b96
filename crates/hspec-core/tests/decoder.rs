//! Decoding a request on a tiny real target: speculation changes no text, and every way to end ends right.

#![allow(clippy::unwrap_used)] // a test may panic

use burn::tensor::{Tensor, backend::Backend};
use hspec_attn::KvCache;
use hspec_core::{
    Result, TokenId,
    checkpoint::{Weights, read_json},
    config::{HSpecConfig, TargetConfig},
    decode::{Decoder, Finish, Generation, Request, SamplingParams},
    drafter::{DraftVocab, Drafter, Footprint, HSpec, HSpecModel, Proposal, Session},
    target::Target,
};
use std::{ops::ControlFlow, path::Path};

type B = burn_flex::Flex;

fn target(context: usize) -> Target<B> {
    let dir = hspec_goldens::root().join("targets/llama31-tiny");
    let file = dir.join("config.json");
    let mut config = TargetConfig::from_value(&read_json(&file).unwrap(), &file).unwrap();
    config.max_position_embeddings = context;
    Target::from_weights(config, &Weights::open(&dir).unwrap(), &Default::default()).unwrap()
}

/// A drafter with random weights for that target, whose vocabulary keeps every third id.
fn random_drafter() -> HSpec<B> {
    let config: HSpecConfig = serde_json::from_value(serde_json::json!({
        "speculators_model_type": "mamba_attn_hybrid",
        "draft_vocab_size": 171, "block_size": 8, "mask_token_id": 500,
        "aux_hidden_state_layer_ids": [2, 3], "latent_fusion_layer_ids": [1, 3], "attn_kv_layer_ids": [2, 3],
        "block_pattern": "mamba mlp mamba attention mlp mamba attention mlp", "use_qk_norm": false,
        "mamba_d_state": 4, "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_n_groups": 2,
        "mamba_seed_mode": "shared", "markov_rank": 8,
        "transformer_layer_config": {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5,
            "layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 16,
            "rope_theta": 500000.0,
        },
        "speculators_config": {
            "algorithm": "mamba_attn_hybrid", "default_proposal_method": "greedy", "proposal_methods": [],
            "verifier": { "name_or_path": null },
        },
    }))
    .unwrap();
    let file = Path::new("test");
    let kept = (0..171).map(|i| TokenId(3 * i)).collect();
    let model = HSpecModel::init(&config, &Default::default());
    HSpec::new(config, model, DraftVocab::new(kept, 512, file).unwrap(), file).unwrap()
}

/// Proposes what it was told the target will say.
struct Oracle {
    answer: Vec<TokenId>,
    /// What the target really says.
    truth: Vec<TokenId>,
    prompt: usize,
    /// Most tokens that it proposes, however many it is asked for.
    most: usize,
}

impl Oracle {
    fn new(answer: &[TokenId], prompt: usize) -> Self {
        Self { answer: answer.to_vec(), truth: answer.to_vec(), prompt, most: 7 }
    }
}

impl<B: Backend> Drafter<B> for Oracle {
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
        Footprint { params_trainable: 0, params_frozen: 0, kv_bytes_per_token: 0, state_bytes: 0 }
    }
    fn session(&self, capacity: usize) -> Box<dyn Session<B> + '_> {
        Box::new(OracleSession { oracle: self, capacity, seen: Vec::new() })
    }
}

/// Checks what the decoder shows it.
struct OracleSession<'a> {
    oracle: &'a Oracle,
    capacity: usize,
    seen: Vec<TokenId>,
}

impl<B: Backend> Session<B> for OracleSession<'_> {
    fn observe(&mut self, tokens: &[TokenId], features: Tensor<B, 2>) {
        assert_eq!(features.dims(), [tokens.len(), 64], "one layer's rows");
        self.seen.extend(tokens);
        assert!(self.seen.len() <= self.capacity);
    }
    fn draft(
        &mut self,
        anchor: TokenId,
        cache: &KvCache<B>,
        k: usize,
        pick: &mut dyn FnMut(usize, &[f32]) -> Result<TokenId>,
    ) -> Result<Proposal> {
        let Oracle { answer, truth, prompt, most } = self.oracle;
        assert_eq!(self.seen.len(), cache.len(), "all that is final and nothing else");
        let next = cache.len() + 1 - prompt;
        assert_eq!((&self.seen[*prompt..], anchor), (&truth[..next - 1], truth[next - 1]));
        let token = |slot: usize| {
            let token = answer.get(next + slot - 1).copied().unwrap_or(TokenId(0));
            let mut logits = vec![f32::NEG_INFINITY; 512];
            logits[token.index()] = 0.0;
            pick(slot, &logits)
        };
        let tokens = (1..=k.min(*most)).map(token).collect::<Result<_>>()?;
        Ok(Proposal { tokens, confidence: Vec::new() })
    }
}

struct Case<'a> {
    prompt: &'a [TokenId],
    max_new_tokens: usize,
    stop: &'a [TokenId],
    sampling: SamplingParams,
    k: usize,
}

impl Case<'_> {
    fn run(&self, target: &Target<B>, drafter: Option<&dyn Drafter<B>>) -> Generation {
        let request = Request {
            prompt: self.prompt,
            sampling: self.sampling,
            seed: 5,
            id: 0,
            max_new_tokens: self.max_new_tokens,
            k: self.k,
            stop_tokens: self.stop,
        };
        let mut emitted = Vec::new();
        let generation = Decoder::new(target, drafter)
            .generate(&request, &mut |tokens| {
                emitted.extend_from_slice(tokens);
                ControlFlow::Continue(())
            })
            .unwrap();
        assert_eq!(emitted, generation.tokens, "what was emitted is what was returned");
        generation
    }
}

fn ids(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().copied().map(TokenId).collect()
}

fn greedy<'a>(prompt: &'a [TokenId], max_new_tokens: usize, stop: &'a [TokenId]) -> Case<'a> {
    Case { prompt, max_new_tokens, stop, sampling: SamplingParams::greedy(), k: 7 }
}

#[test]
fn greedy_speculation_emits_what_plain_decoding_emits() {
    let (target, drafter) = (target(4096), random_drafter());
    for prompt in [ids(&[340, 131, 399]), ids(&[7]), ids(&[1; 40])] {
        for k in [1, 3, 7] {
            let case = Case { k, ..greedy(&prompt, 50, &[]) };
            let plain = case.run(&target, None);
            let speculative = case.run(&target, Some(&drafter));
            assert_eq!(plain.tokens, speculative.tokens, "k = {k}, prompt of {}", prompt.len());
            assert_eq!((plain.finish, plain.tokens.len()), (Finish::Length, 50));
            let oracle = Oracle::new(&plain.tokens, prompt.len());
            let perfect = case.run(&target, Some(&oracle));
            assert_eq!(plain.tokens, perfect.tokens);
            // 49 tokens after the prompt's own, k + 1 a round.
            assert_eq!(perfect.target_passes, 49usize.div_ceil(k + 1));
        }
    }
}

/// Blocks are filled with the mask token; output that is cut where that token stands would lose text.
#[test]
fn a_mask_token_in_the_text_is_a_token_like_any_other() {
    let (target, drafter) = (target(4096), random_drafter());
    let mask = TokenId(drafter.config.mask_token_id);
    let prompt = vec![mask; 6];
    let case = greedy(&prompt, 12, &[]);
    let plain = case.run(&target, None).tokens;
    assert_eq!(case.run(&target, Some(&drafter)).tokens, plain);
    // A drafter that proposes nothing but mask tokens.
    let masks = Oracle { answer: vec![mask; 64], ..Oracle::new(&plain, prompt.len()) };
    assert_eq!(case.run(&target, Some(&masks)).tokens, plain);
    assert_eq!(plain.len(), 12);
}

/// A drafter may propose fewer tokens than it is asked for, and none at all.
#[test]
fn short_proposals_are_short_rounds() {
    let target = target(4096);
    let prompt = ids(&[340, 131, 399]);
    let case = greedy(&prompt, 50, &[]);
    let whole = case.run(&target, None).tokens;
    for most in [0, 2] {
        let oracle = Oracle { most, ..Oracle::new(&whole, 3) };
        let generation = case.run(&target, Some(&oracle));
        assert_eq!(generation.tokens, whole);
        assert_eq!(generation.target_passes, 49usize.div_ceil(most + 1));
        assert!(generation.rounds.iter().all(|round| round.proposed <= most));
    }
}

#[test]
fn a_stop_token_inside_an_accepted_block_ends_the_answer_there() {
    let target = target(4096);
    let prompt = ids(&[340, 131, 399]);
    let whole = greedy(&prompt, 32, &[]).run(&target, None).tokens;
    // A token that first occurs in the middle of the oracle's first block.
    let at = (2..7).find(|&i| !whole[..i].contains(&whole[i])).unwrap();
    let stop = [whole[at]];
    let oracle = Oracle::new(&whole, prompt.len());
    let case = greedy(&prompt, 32, &stop);
    for generation in [case.run(&target, None), case.run(&target, Some(&oracle))] {
        assert_eq!(generation.finish, Finish::Stop);
        assert_eq!(generation.tokens, whole[..=at]);
    }
    let round = case.run(&target, Some(&oracle)).rounds[0];
    assert_eq!((round.proposed, round.accepted, round.stopped), (at, at, true));
}

/// A stop token that is drafted but rejected does not end the answer.
#[test]
fn a_rejected_stop_token_ends_nothing() {
    let target = target(4096);
    let prompt = ids(&[340, 131, 399]);
    let whole = greedy(&prompt, 16, &[]).run(&target, None).tokens;
    let stop = ids(&[511]);
    assert!(!whole.contains(&stop[0]));
    let mut wrong = whole.clone();
    wrong[3] = stop[0];
    let oracle = Oracle { answer: wrong, ..Oracle::new(&whole, prompt.len()) };
    let generation = greedy(&prompt, 16, &stop).run(&target, Some(&oracle));
    assert_eq!((generation.finish, generation.tokens), (Finish::Length, whole));
}

#[test]
fn at_the_end_of_the_context_drafts_shrink_and_then_stop() {
    for context in 4..24 {
        let target = target(context);
        let prompt = ids(&[340, 131, 399]);
        let case = greedy(&prompt, 100, &[]);
        let plain = case.run(&target, None);
        // The last token is sampled from the last position and not processed any more.
        assert_eq!(
            (plain.finish, plain.tokens.len()),
            (Finish::Context, context - 3 + 1),
            "context {context}"
        );
        let oracle = Oracle::new(&plain.tokens, 3);
        for drafter in [&oracle as &dyn Drafter<B>, &random_drafter()] {
            let speculative = case.run(&target, Some(drafter));
            assert_eq!((speculative.finish, speculative.tokens), (Finish::Context, plain.tokens.clone()));
        }
    }
}

#[test]
fn no_more_tokens_than_asked_for() {
    let (target, prompt) = (target(4096), ids(&[340, 131, 399]));
    let whole = greedy(&prompt, 20, &[]).run(&target, None).tokens;
    let oracle = Oracle::new(&whole, 3);
    for n in 0..12 {
        assert_eq!(greedy(&prompt, n, &[]).run(&target, Some(&oracle)).tokens, whole[..n]);
    }
}

#[test]
fn a_caller_may_stop_between_rounds() {
    let (target, prompt) = (target(4096), ids(&[340, 131, 399]));
    let case = greedy(&prompt, 20, &[]);
    let request = Request {
        prompt: case.prompt,
        sampling: case.sampling,
        seed: 0,
        id: 0,
        max_new_tokens: 20,
        k: 7,
        stop_tokens: &[],
    };
    let mut calls = 0;
    let generation = Decoder::new(&target, None)
        .generate(&request, &mut |_| {
            calls += 1;
            if calls == 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
    assert_eq!((generation.finish, generation.tokens.len()), (Finish::Cancelled, 5));
}

/// Sampling with a drafter depends on seed and request only.
#[test]
fn sampled_speculation_is_reproducible_and_seeds_differ() {
    let (target, drafter, prompt) = (target(4096), random_drafter(), ids(&[340, 131, 399]));
    let run = |seed, id| {
        let request = Request {
            prompt: &prompt,
            sampling: SamplingParams::new(1.0, None, Some(0.9)).unwrap(),
            seed,
            id,
            max_new_tokens: 24,
            k: 7,
            stop_tokens: &[],
        };
        let drafter: &dyn Drafter<B> = &drafter;
        Decoder::new(&target, Some(drafter))
            .generate(&request, &mut |_| ControlFlow::Continue(()))
            .unwrap()
            .tokens
    };
    assert_eq!(run(1, 0), run(1, 0));
    assert_ne!(run(1, 0), run(2, 0));
    assert_ne!(run(1, 0), run(1, 1));
}

#[test]
fn prompts_that_do_not_fit_are_refused() {
    let target = target(8);
    for prompt in [ids(&[]), ids(&[1; 8]), ids(&[1; 9])] {
        let request = Request {
            prompt: &prompt,
            sampling: SamplingParams::greedy(),
            seed: 0,
            id: 0,
            max_new_tokens: 4,
            k: 0,
            stop_tokens: &[],
        };
        let error = Decoder::<B>::new(&target, None).generate(&request, &mut |_| ControlFlow::Continue(()));
        let message = error.unwrap_err().to_string();
        let expected = format!("prompt length in tokens: found {}, expected 1 to 7", prompt.len());
        assert!(message.starts_with(&expected), "{message}");
    }
    let request = Request {
        prompt: &ids(&[512]),
        sampling: SamplingParams::greedy(),
        seed: 0,
        id: 0,
        max_new_tokens: 4,
        k: 0,
        stop_tokens: &[],
    };
    let error = Decoder::<B>::new(&target, None).generate(&request, &mut |_| ControlFlow::Continue(()));
    assert_eq!(error.unwrap_err().to_string(), "token id: found 512, expected below 512");
}
