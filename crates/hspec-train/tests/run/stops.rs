//! Runs that stop early or start from something.

use super::{B, TokenId, identity, loss, recipe, responses, target, train, weights};
use burn::{backend::Autodiff, tensor::TensorData};
use hspec_core::{
    Result,
    checkpoint::{StoreAs, Weights, write_safetensors},
    target::Target,
};
use hspec_train::{Trainer, recipe::Recipe, responses::Response, run_dir::RunDir, trainer::Finish};
use std::{collections::BTreeMap, path::Path, time::Duration};

fn run(
    target: &Target<B>,
    recipe: &Recipe,
    responses: &[Response],
    dir: &Path,
    init: Option<&Path>,
    limit: Option<Duration>,
) -> (Result<Finish>, Vec<f64>) {
    let dir = RunDir::open(dir, recipe, &identity(target), true).unwrap();
    let trainer = Trainer::<Autodiff<B>> {
        recipe,
        recipe_file: Path::new("recipe.toml"),
        target,
        target_name: "llama31-tiny",
        commit: "abc1234",
        stop_tokens: &[TokenId(2)],
        init,
        devices: &[],
        limit,
    };
    let mut losses = Vec::new();
    let finish = trainer.run(responses, &dir, &mut |event| losses.extend(loss(&event)));
    (finish, losses)
}

/// A run out of time stops behind a whole step, with a checkpoint from which it ends where an unbroken one does.
#[test]
fn a_run_out_of_time_goes_on_later() {
    let _alone = crate::alone();
    let target = target();
    let recipe = recipe(|r| r.replace("checkpoint_every = 4", "checkpoint_every = 8\nkeep = 1"));
    let responses = responses(&target, &recipe);
    let (whole, broken) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let losses = train(&target, &recipe, &responses, whole.path(), false);
    let mut found = Vec::new();
    for step in 1..=2 {
        let (finish, part) =
            run(&target, &recipe, &responses, broken.path(), None, Some(Duration::from_nanos(1)));
        assert_eq!(finish.unwrap(), Finish { step, steps: 8 });
        found.extend(part);
        assert!(broken.path().join(format!("step-{step:06}")).exists());
    }
    // One is kept.
    assert!(!broken.path().join("step-000001").exists());
    let (finish, part) = run(&target, &recipe, &responses, broken.path(), None, None);
    assert_eq!(finish.unwrap(), Finish { step: 8, steps: 8 });
    found.extend(part);
    assert_eq!(found, losses);
    let last = "step-000008";
    assert_eq!(weights(&broken.path().join(last)), weights(&whole.path().join(last)));
}

/// `init` takes weights and vocabulary of a drafter of the same shape, and names what differs.
#[test]
fn a_run_starts_from_another_drafter() {
    let _alone = crate::alone();
    let target = target();
    let recipe = recipe(|r| r.replace("steps = 8", "steps = 4"));
    let responses = responses(&target, &recipe);
    let first = tempfile::tempdir().unwrap();
    train(&target, &recipe, &responses, first.path(), false);
    let from = first.path().join("step-000004");
    // A rate of zero shows what it started from.
    let still = Recipe {
        train: hspec_train::recipe::Loop { lr: 0.0, muon_lr: 0.0, steps: Some(2), ..recipe.train.clone() },
        ..recipe.clone()
    };
    let dir = tempfile::tempdir().unwrap();
    let soon = Some(Duration::from_nanos(1));
    run(&target, &still, &responses, dir.path(), Some(&from), soon).0.unwrap();
    let (found, expected) = (weights(&dir.path().join("step-000001")), weights(&from));
    assert_eq!(found, expected);
    // A run that goes on later has not forgotten what it began with.
    run(&target, &still, &responses, dir.path(), None, None).0.unwrap();
    let init = |step: &Path| {
        let text = std::fs::read_to_string(step.join("provenance.json")).unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["init"].clone()
    };
    let named = init(&dir.path().join("step-000002"));
    assert_eq!(named, init(&dir.path().join("step-000001")));
    assert_eq!(named["drafter"], from.to_str().unwrap());
    assert!(init(&from).is_null());
    // From other weights, those of `best` being rounded, another hash.
    let (rounded, other) = (first.path().join("best"), tempfile::tempdir().unwrap());
    run(&target, &still, &responses, other.path(), Some(&rounded), soon).0.unwrap();
    assert_ne!(init(&other.path().join("step-000001"))["weights"], named["weights"]);

    for (from_text, to, part) in [
        ("kv_layers = [3]", "kv_layers = [2]", "config.json: kv_layers: found [3], expected [2]"),
        ("mamba_heads = 2", "mamba_heads = 3", "seed_projs.0.weight: found [64,64], expected [96,64]"),
        ("markov_rank = 16", "markov_rank = 8", "config.json: heads"),
        ("draft_vocab = 160", "draft_vocab = 128", "draft_vocabulary: found 160, expected 128"),
    ] {
        let other = super::recipe(|r| r.replace(from_text, to));
        let dir = tempfile::tempdir().unwrap();
        let error =
            run(&target, &other, &responses, dir.path(), Some(&from), None).0.unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("as the recipe has it"), "{to}: {error}");
    }
}

/// The first value that is not finite ends a run, with its name, the step, and what can be gone back to.
#[test]
fn a_value_that_is_not_finite_is_named() {
    let _alone = crate::alone();
    let target = target();
    let recipe = recipe(|r| r);
    let responses = responses(&target, &recipe);
    let dir = tempfile::tempdir().unwrap();
    train(&target, &recipe, &responses, dir.path(), false);
    std::fs::remove_dir_all(dir.path().join("step-000008")).unwrap();
    let last = dir.path().join("step-000004");
    let name = "layers.1.mlp.up_proj.weight";
    {
        let weights = Weights::open(&last).unwrap();
        let tensor = |name: String| (name.clone(), weights.tensor(&name).unwrap().unwrap());
        let mut tensors: BTreeMap<String, TensorData> = weights.names().into_iter().map(tensor).collect();
        let data = &tensors[name];
        let mut values: Vec<f32> = data.iter::<f32>().collect();
        // Large, and finite: the step makes the first value that is not.
        values.fill(3e38);
        tensors.insert(name.into(), TensorData::new(values, data.shape.to_vec()));
        write_safetensors(&last.join("model.safetensors"), &tensors, StoreAs::F32).unwrap();
    }
    let error = run(&target, &recipe, &responses, dir.path(), None, None).0.unwrap_err().to_string();
    assert!(error.contains("step 5: ") && error.contains("not finite"), "{error}");
    assert!(error.contains(&last.display().to_string()), "{error}");

    // A gradient that overflows is named by its parameter.
    let steep = Recipe { train: hspec_train::recipe::Loop { ce: 1e300, ..recipe.train.clone() }, ..recipe };
    let fresh = tempfile::tempdir().unwrap();
    let error = run(&target, &steep, &responses, fresh.path(), None, None).0.unwrap_err().to_string();
    // The closed form weighs terms in f64; without it, the loss overflows before its gradient.
    let what = if cfg!(feature = "flex") { "the gradient of " } else { "the loss is not finite" };
    assert!(
        error.contains(&format!("step 1: {what}")) && error.contains("there is no checkpoint before"),
        "{error}"
    );
}
