//! The recipes that come with the program.

use hspec_core::{config::TargetConfig, drafter::outline};
use hspec_nn::Compute;
use hspec_train::{
    kinds,
    recipe::{Recipe, Shape, SlotWeights},
};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn recipes() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes")
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let mut files: Vec<PathBuf> = entries.filter(|p| p.extension().is_some_and(|e| e == "toml")).collect();
    files.sort();
    files
}

/// The model that a recipe's name begins with.
fn target(file: &Path) -> TargetConfig {
    let name = file.file_stem().unwrap().to_str().unwrap();
    let qwen = |hidden: usize, inner: usize| {
        json!({
            "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": hidden, "intermediate_size": inner,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 40_960, "rope_theta": 1e6,
        })
    };
    let config: Value = match name {
        _ if name.starts_with("qwen3-4b") => qwen(2560, 9728),
        _ if name.starts_with("qwen3-8b") => qwen(4096, 12_288),
        _ if name.starts_with("llama31-8b") => json!({
            "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "rope_theta": 5e5,
        }),
        _ => json!({
            "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
            "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 1e5,
        }),
    };
    TargetConfig::from_value(&config, Path::new("config.json")).unwrap()
}

fn trainable(file: &Path) -> (Recipe, usize) {
    let recipe = Recipe::read(file).unwrap();
    let target = target(file);
    kinds::check_warm_start(&recipe, &target, file).unwrap();
    let config = kinds::config(&recipe, &target, "target", file).unwrap();
    let outline = outline(&config, file, Some(target.num_hidden_layers)).unwrap();
    (recipe, outline.trainable())
}

#[test]
fn every_recipe_makes_a_drafter_for_its_target() {
    let files = files(&recipes());
    for model in ["qwen3-4b", "qwen3-8b", "llama31-8b"] {
        for kind in ["hspec", "dspark", "dflash", "peagle", "eagle3"] {
            let file = recipes().join(format!("{model}-{kind}.toml"));
            assert!(files.contains(&file), "{}", file.display());
        }
    }
    for file in files {
        let (recipe, size) = trainable(&file);
        let name = file.file_name().unwrap().to_str().unwrap();
        assert!(size > 1_000_000, "{name}: {size}");
        if name.starts_with("smollm2") {
            continue;
        }
        // The settings that the comparison of H-Spec has for all.
        let train = &recipe.train;
        assert_eq!((train.epochs, train.lr, train.anchors_per_step), (Some(5), 6e-4, 3072), "{name}");
        assert_eq!(recipe.drafter.draft_vocab(), Some(32_000), "{name}");
        if !matches!(recipe.drafter, Shape::Eagle3(_) | Shape::PEagle(_)) {
            assert_eq!((train.ce, train.tv, train.gamma), (0.1, 0.9, 4.0), "{name}");
        }
    }
}

/// What is compared at equal time differs from what it is compared with by what its name says, and by its steps.
#[test]
fn the_small_budget_is_spent_on_one_drafter() {
    let folder = recipes().join("budget");
    assert_eq!(files(&folder).len(), 10);
    let read = |name: &str| trainable(&folder.join(format!("{name}.toml"))).0;
    let differ = |name: &str, from: &str, change: &dyn Fn(&mut Recipe, &Recipe)| {
        let (recipe, mut expected) = (read(name), read(from));
        expected.train.steps = recipe.train.steps;
        change(&mut expected, &recipe);
        assert_eq!(recipe, expected, "{name} is {from} but for what its name says");
    };
    let start = |to: &mut Recipe, from: &Recipe| {
        assert_ne!(to.train.warm_start, from.train.warm_start);
        to.train.warm_start = from.train.warm_start;
        to.train.mlp_layers.clone_from(&from.train.mlp_layers);
    };
    let phase = |to: &mut Recipe, from: &Recipe| {
        assert!(to.train.first_phase.is_none() && from.train.first_phase.is_some());
        to.train.first_phase = from.train.first_phase;
    };
    let muon = |to: &mut Recipe, from: &Recipe| {
        assert_ne!(to.train.optimizer, from.train.optimizer);
        (to.train.optimizer, to.train.lr) = (from.train.optimizer, from.train.lr);
    };
    let vocab = |to: &mut Recipe, from: &Recipe| {
        assert_ne!(to.drafter, from.drafter);
        to.drafter = from.drafter.clone();
        assert_eq!(from.drafter.draft_vocab(), Some(12_288));
    };
    differ("warm-start", "published", &start);
    differ("ce-first", "published", &phase);
    differ("muon", "published", &muon);
    differ("small-vocab", "published", &vocab);
    differ("all", "published", &|to, from| {
        start(to, from);
        phase(to, from);
        muon(to, from);
        vocab(to, from);
    });
    differ("even", "all", &|to, _| {
        (to.train.ce, to.train.tv, to.train.first_phase) = (0.5, 0.5, None);
    });
    differ("even-near", "even", &|to, _| to.train.gamma = 1.5);
    differ("even-dpace", "even", &|to, _| to.train.weighting = SlotWeights::Dpace);
    differ("even-f32", "even", &|to, _| to.train.compute = Compute::F32);
}

/// The rows of a comparison differ in what they are, and in nothing else.
#[test]
fn comparisons_are_of_drafters_of_one_size() {
    let study = files(&recipes().join("study"));
    assert_eq!(study.len(), 6);
    let rivals = ["dspark", "dflash"].map(|kind| recipes().join(format!("smollm2-135m-{kind}.toml")));
    for (hspec, others) in [("study/hspec.toml", study), ("smollm2-135m.toml", rivals.to_vec())] {
        let (hspec, _) = trainable(&recipes().join(hspec));
        for file in others {
            let (recipe, size) = trainable(&file);
            let off = size as f64 / 12.1e6 - 1.0;
            assert!(off.abs() < 0.03, "{}: {size} parameters", file.display());
            assert_eq!(recipe.data, hspec.data);
            let mut train = recipe.train;
            train.mlp_layers.clone_from(&hspec.train.mlp_layers);
            train.start_layers.clear();
            assert_eq!(train, hspec.train, "{}", file.display());
        }
    }
}

/// The documentation says so, and the second begins with the weights of the first.
#[test]
fn the_shipped_drafters_two_trainings_differ_in_length_and_rates_only() {
    let [first, second] =
        ["", "-second"].map(|name| trainable(&recipes().join(format!("smollm2-135m{name}.toml"))).0);
    let mut expected = first.clone();
    let (from, to) = (&second.train, &mut expected.train);
    (to.steps, to.lr, to.evaluate_every) = (from.steps, from.lr, from.evaluate_every);
    to.muon_lr = from.muon_lr;
    assert_eq!(second, expected);
    assert!(from.lr < first.train.lr && from.muon_lr < first.train.muon_lr);
}
