//! Whole runs on a tiny real target: learning, resuming, damaged checkpoints, responses.

#![allow(clippy::unwrap_used)] // a test may panic

mod doctor;
mod kinds;
mod recipes;
mod rows;
mod stops;

use burn::backend::Autodiff;
use hspec_core::{
    TokenId,
    checkpoint::Weights,
    decode::{Decoder, Request, SamplingParams},
    target::Target,
};
use hspec_train::{
    Trainer,
    recipe::Recipe,
    responses::{PromptTokens, Response, Sampling, answer},
    run_dir::{Identity, RunDir},
    trainer::Event,
};
use std::{collections::BTreeMap, ops::ControlFlow, path::Path};

type B = burn_flex::Flex;

const RECIPE: &str = r#"
    [data]
    max_new_tokens = 24
    batch = 5
    validation = 2
    [drafter]
    block_pattern = "mamba mlp mamba attention mlp"
    fusion_layers = [1, 2, 3]
    kv_layers = [3]
    intermediate_size = 32
    mamba_heads = 2
    mamba_head_dim = 8
    mamba_groups = 1
    draft_vocab = 160
    markov_rank = 16
    mask_token = 500
    [train]
    steps = 8
    tokens_per_step = 100
    anchors_per_step = 24
    warm_start = "attention"
    optimizer = "muon"
    lr = 5e-3
    muon_lr = 2e-2
    ce = 0.5
    tv = 0.5
    checkpoint_every = 4
    evaluate_every = 8
    evaluate_tokens = 16
"#;

fn recipe(edit: impl FnOnce(String) -> String) -> Recipe {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("recipe.toml");
    std::fs::write(&path, edit(RECIPE.to_owned())).unwrap();
    Recipe::read(&path).unwrap()
}

fn target() -> Target<B> {
    let dir = hspec_goldens::root().join("targets/llama31-tiny");
    Target::load(&dir, &Default::default()).unwrap()
}

fn prompts() -> Vec<PromptTokens> {
    let ids = |n: u32| (0..5 + n % 7).map(|i| TokenId((n * 37 + i * 11) % 480 + 3)).collect();
    (0..14).map(|n| PromptTokens { id: format!("p{n}"), ids: ids(n) }).collect()
}

fn sampling(recipe: &Recipe, params: SamplingParams) -> Sampling<'static> {
    Sampling {
        params,
        seed: 1,
        max_new_tokens: recipe.data.max_new_tokens,
        stop_tokens: &[TokenId(2)],
        batch: recipe.data.batch,
    }
}

fn responses(target: &Target<B>, recipe: &Recipe) -> Vec<Response> {
    let dir = tempfile::tempdir().unwrap();
    let sampling = sampling(recipe, SamplingParams::greedy());
    answer(target, &prompts(), &sampling, &dir.path().join("r.jsonl"), &mut |_, _| {}).unwrap()
}

fn train(target: &Target<B>, recipe: &Recipe, responses: &[Response], dir: &Path, resume: bool) -> Vec<f64> {
    let dir = RunDir::open(dir, recipe, &identity(target), resume).unwrap();
    let trainer = Trainer::<Autodiff<B>> {
        recipe,
        recipe_file: Path::new("recipe.toml"),
        target,
        target_name: "llama31-tiny",
        commit: "abc1234",
        stop_tokens: &[TokenId(2)],
        init: None,
        devices: &[],
        limit: None,
    };
    let mut losses = Vec::new();
    trainer.run(responses, &dir, &mut |event| losses.extend(loss(&event))).unwrap();
    losses
}

fn loss(event: &Event<'_>) -> Option<f64> {
    match event {
        Event::Step(metrics) => Some(metrics.loss),
        _ => None,
    }
}

fn identity(target: &Target<B>) -> Identity {
    Identity::new(target, &prompts())
}

fn weights(dir: &Path) -> BTreeMap<String, Vec<f32>> {
    let weights = Weights::open(dir).unwrap();
    weights
        .names()
        .into_iter()
        .map(|n| (n.clone(), weights.tensor(&n).unwrap().unwrap().iter::<f32>().collect()))
        .collect()
}

/// One test at a time: random weights come from a generator that the whole process shares on flex, and another
/// test's draws once changed a run's first weights.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A run killed after its fourth step and continued ends bit for bit where an unbroken one does.
#[test]
fn a_resumed_run_equals_an_unbroken_one() {
    let _alone = alone();
    let (target, recipe) = (target(), recipe(|r| r));
    let responses = responses(&target, &recipe);
    let dir = tempfile::tempdir().unwrap();
    let losses = train(&target, &recipe, &responses, dir.path(), false);
    assert_eq!(losses.len(), 8);
    let metrics = std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
    let last = dir.path().join("step-000008");
    let unbroken = weights(&last);
    std::fs::remove_dir_all(&last).unwrap();
    std::fs::create_dir(dir.path().join("checkpoint.part")).unwrap();
    let again = train(&target, &recipe, &responses, dir.path(), true);
    assert_eq!(losses[4..], again);
    assert_eq!(unbroken, weights(&last));
    let record = hspec_train::record::Record::read(&last).unwrap().unwrap();
    assert_eq!((record.commit.as_str(), record.step, record.backend.as_str()), ("abc1234", 8, "flex"));
    assert_eq!((record.feature_layers, record.kv_layers), (vec![1, 2, 3], vec![3]));
    assert!(record.simulated_tau.is_some_and(|tau| tau >= 1.0));
    assert!(dir.path().join("curves.svg").exists());
    // The metrics of the steps that were done twice are there once.
    let steps = |text: &str| text.lines().filter(|l| l.contains("\"loss\"")).count();
    let resumed = std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
    assert_eq!(steps(&metrics), steps(&resumed));
}

#[test]
fn a_damaged_newest_checkpoint_falls_back_to_the_one_before() {
    let _alone = alone();
    let (target, recipe) = (target(), recipe(|r| r));
    let responses = responses(&target, &recipe);
    let dir = tempfile::tempdir().unwrap();
    train(&target, &recipe, &responses, dir.path(), false);
    let unbroken = weights(&dir.path().join("step-000008"));
    for name in ["model.safetensors", "muon.mpk", "progress.json"] {
        let file = dir.path().join("step-000008").join(name);
        let whole = std::fs::read(&file).unwrap();
        std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
        let losses = train(&target, &recipe, &responses, dir.path(), true);
        assert_eq!(losses.len(), 4, "{name}");
        assert_eq!(unbroken, weights(&dir.path().join("step-000008")), "{name}");
    }
}

#[test]
fn another_recipe_or_a_used_folder_is_refused() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(|r| r);
    let identity = identity(&target());
    RunDir::open(dir.path(), &recipe, &identity, false).unwrap();
    let error = RunDir::open(dir.path(), &recipe, &identity, false).unwrap_err().to_string();
    assert!(error.contains("another run"), "{error}");
    let other = self::recipe(|r| r.replace("steps = 8", "steps = 9"));
    let error = RunDir::open(dir.path(), &other, &identity, true).unwrap_err().to_string();
    assert!(error.contains("train.steps: found 9, expected 8, with which the run began"), "{error}");
    for (from, to, part) in [
        ("tokens_per_step = 100", "tokens_per_step = 120", "train.tokens_per_step: found 120, expected 100"),
        ("anchors_per_step = 24", "anchors_per_step = 12", "train.anchors_per_step: found 12, expected 24"),
        ("steps = 8", "steps = 8\naccumulate = 2", "train.accumulate: found 2, expected 1"),
    ] {
        let other = self::recipe(|r| r.replace(from, to));
        let error = RunDir::open(dir.path(), &other, &identity, true).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("count steps of that size"), "{error}");
    }
    let other = Identity { prompts: "0".into(), ..identity.clone() };
    let error = RunDir::open(dir.path(), &recipe, &other, true).unwrap_err().to_string();
    assert!(error.contains("with which the run began"), "{error}");
    RunDir::open(dir.path(), &recipe, &identity, true).unwrap();
}

/// The loss falls and the drafter, decoding, is accepted more often than when it started. A random target
/// says nothing that generalises, so it decodes prompts that it also learned from.
#[test]
fn a_run_learns() {
    let _alone = alone();
    let target = target();
    let recipe = recipe(|r| {
        r.replace("steps = 8", "steps = 200").replace("evaluate_every = 8", "evaluate_every = 100")
    });
    let mut responses = responses(&target, &recipe);
    let learned = responses[5..5 + recipe.data.validation].to_vec();
    responses.splice(0..0, learned);
    let dir = tempfile::tempdir().unwrap();
    let losses = train(&target, &recipe, &responses, dir.path(), false);
    let mean = |l: &[f64]| l.iter().sum::<f64>() / l.len() as f64;
    let (first, last) = (mean(&losses[..10]), mean(&losses[190..]));
    assert!(last < 0.8 * first, "loss went from {first} to {last}");
    let metrics = std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
    let taus: Vec<f64> = metrics
        .lines()
        .filter_map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()["tau"].as_f64())
        .collect();
    assert!(taus.len() == 3 && taus[2] > taus[0], "simulated tau: {taus:?}");
}

/// Products of bf16 change what a run learns by their rounding, and neither more nor not at all.
#[test]
fn a_run_in_bf16_learns_nearly_the_same() {
    let _alone = alone();
    let target = target();
    let losses = |compute: &str| {
        let recipe = recipe(|r| r.replace("steps = 8", &format!("steps = 8\n    compute = \"{compute}\"")));
        let dir = tempfile::tempdir().unwrap();
        train(&target, &recipe, &responses(&target, &recipe), dir.path(), false)
    };
    for (wide, narrow) in losses("f32").into_iter().zip(losses("bf16")) {
        assert!((wide - narrow).abs() < 0.02 * wide && wide != narrow, "{wide} {narrow}");
    }
}

/// Found before any work is done.
#[test]
fn a_backend_without_bf16_products_refuses_them() {
    let _alone = alone();
    let recipe = recipe(|r| r.replace("steps = 8", "steps = 8\n    compute = \"bf16\""));
    let folder = hspec_goldens::root().join("targets/llama31-tiny");
    let target = Target::<burn_ndarray::NdArray>::load(&folder, &Default::default()).unwrap();
    let error =
        hspec_train::warm::check(&recipe, &target, 14, Path::new("recipe.toml")).unwrap_err().to_string();
    assert!(error.contains("recipe.toml: train.compute: found \"bf16\""), "{error}");
    assert!(error.contains("no bf16 products"), "{error}");
}

/// Batches, padding and the order of prompts change no answer, greedy or sampled.
#[test]
fn batched_answers_equal_single_requests() {
    let _alone = alone();
    let (target, recipe) = (target(), recipe(|r| r));
    for params in [SamplingParams::greedy(), SamplingParams::new(0.8, Some(40), None).unwrap()] {
        let sampling = sampling(&recipe, params);
        let dir = tempfile::tempdir().unwrap();
        let all =
            answer(&target, &prompts(), &sampling, &dir.path().join("r.jsonl"), &mut |_, _| {}).unwrap();
        for (number, response) in all.iter().enumerate() {
            let request = Request {
                prompt: &response.prompt_ids,
                sampling: params,
                seed: 1,
                id: number as u64,
                max_new_tokens: sampling.max_new_tokens,
                k: 0,
                stop_tokens: sampling.stop_tokens,
            };
            let alone =
                Decoder::new(&target, None).generate(&request, &mut |_| ControlFlow::Continue(())).unwrap();
            assert_eq!(alone.tokens, response.response_ids, "{}", response.id);
        }
    }
}

/// A file cut in the middle of a line is continued: whole answers are kept, the rest is written again.
#[test]
fn interrupted_answers_are_continued() {
    let _alone = alone();
    let (target, recipe) = (target(), recipe(|r| r));
    let sampling = sampling(&recipe, SamplingParams::greedy());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.jsonl");
    let all = answer(&target, &prompts(), &sampling, &path, &mut |_, _| {}).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, &text[..text.len() * 2 / 3]).unwrap();
    let mut first = None;
    let again = answer(&target, &prompts(), &sampling, &path, &mut |done, _| {
        first.get_or_insert(done);
    })
    .unwrap();
    assert_eq!(all, again);
    assert!(first.unwrap() > 0, "whole answers were kept");
    assert_eq!(hspec_train::responses::read(&path).unwrap().1.len(), all.len());
    let mut other = prompts();
    other[0].ids.push(TokenId(9));
    let error = answer(&target, &other, &sampling, &path, &mut |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("another prompt"), "{error}");
}

/// What does not fit is found before the target answers anything.
#[test]
fn recipes_that_do_not_fit_the_target_are_refused_by_field() {
    let _alone = alone();
    let target = target();
    for (from, to, part) in [
        ("kv_layers = [3]", "kv_layers = [2, 3]", "drafter.kv_layers: found [2, 3]"),
        (
            "kv_layers = [3]",
            "kv_layers = [4]",
            "drafter.kv_layers: found 4, expected at most 3: the target has 4 layers",
        ),
        ("mamba_groups = 1", "mamba_groups = 0", "drafter.mamba"),
        ("draft_vocab = 160", "draft_vocab = 600", "drafter.draft_vocab: found 600"),
        ("mask_token = 500", "mask_token = 512", "drafter.mask_token: found 512"),
        ("markov_rank = 16", "markov_rank = 1000000000000", "drafter.markov_rank"),
        ("validation = 2", "validation = 14", "data.validation: found 14"),
        ("max_new_tokens = 24", "max_new_tokens = 200000", "data.max_new_tokens: found 200000"),
        ("tokens_per_step = 100", "tokens_per_step = 8", "train.tokens_per_step: found 8"),
        ("\"attention\"", "\"layers\"", "train.mlp_layers: found []"),
        ("\"attention\"", "\"layers\"\nmlp_layers = [1, 3]", "drafter.intermediate_size: found 32"),
        ("\"attention\"", "\"attention\"\nmlp_layers = [1]", "train.mlp_layers: found [1]"),
        ("mamba mlp mamba", "mamba mlp conv", "drafter.block_pattern"),
        (
            "fusion_layers = [1, 2, 3]",
            "fusion_layers = [5]",
            "drafter.fusion_layers: found 5, expected at most 4",
        ),
        ("mamba_heads = 2", "mamba_heads = 100000000", "drafter.mamba_heads"),
    ] {
        let recipe = recipe(|r| r.replace(from, to));
        let error = hspec_train::warm::check(&recipe, &target, 14, Path::new("recipe.toml")).unwrap_err();
        assert!(error.to_string().contains(part), "{to}: {error}");
    }
    hspec_train::warm::check(&recipe(|r| r), &target, 14, Path::new("recipe.toml")).unwrap();
}

/// Readers of the layout expect the stamp, which a fresh drafter lacked.
#[test]
fn a_fresh_configuration_says_which_layout_it_has() {
    let _alone = alone();
    let (recipe, target) = (recipe(|r| r), target());
    let config = hspec_train::kinds::config(&recipe, target.config(), "t", Path::new("recipe.toml")).unwrap();
    assert_eq!(config["speculators_version"], hspec_core::config::SPECULATORS_VERSION);
}
