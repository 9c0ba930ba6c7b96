//! A folder with a target, a drafter and prompts, to be spoilt by tests.

use crate::support::random_drafter;
use burn::tensor::TensorData;
use hspec_core::{
    checkpoint::{StoreAs, Weights, write_safetensors},
    target::Target,
};
use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, path::PathBuf, process::Command};

pub struct Scene {
    dir: tempfile::TempDir,
}

/// How a command ended.
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Scene {
    /// `target`, a `drafter` for it, another target `other`, and `prompts.jsonl` with two prompts.
    pub fn new() -> Self {
        let scene = Self { dir: tempfile::tempdir().unwrap() };
        for (folder, model) in [("target", "llama31-tiny"), ("other", "qwen3-tiny-untied")] {
            let from = hspec_goldens::root().join("targets").join(model);
            std::fs::create_dir(scene.path(folder)).unwrap();
            for file in ["config.json", "model.safetensors"] {
                std::fs::copy(from.join(file), scene.path(folder).join(file)).unwrap();
            }
            scene.edit(&format!("{folder}/config.json"), |config| {
                let words = config["vocab_size"].as_u64().unwrap();
                let tokenizer = scene.path(folder).join("tokenizer.json");
                std::fs::write(tokenizer, word_tokenizer(words).to_string()).unwrap();
            });
        }
        let target = Target::<burn_flex::Flex>::load(&scene.path("target"), &Default::default()).unwrap();
        random_drafter(&target).save(&scene.path("drafter"), StoreAs::F32, false).unwrap();
        scene.write("prompts.jsonl", "{\"prompt\":\"w3 w14 w15\"}\n{\"id\":\"b\",\"prompt\":\"w92 w65\"}\n");
        scene
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    pub fn remove(&self, name: &str) {
        std::fs::remove_file(self.path(name)).unwrap();
    }

    /// Changes a JSON file.
    pub fn edit(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut value = serde_json::from_slice(&std::fs::read(self.path(name)).unwrap()).unwrap();
        change(&mut value);
        self.write(name, &value.to_string());
    }

    /// Cuts a file to half its length.
    pub fn cut(&self, name: &str) {
        let bytes = std::fs::read(self.path(name)).unwrap();
        std::fs::write(self.path(name), &bytes[..bytes.len() / 2]).unwrap();
    }

    /// Changes the tensors of a checkpoint.
    pub fn tensors(&self, folder: &str, change: impl FnOnce(&mut BTreeMap<String, TensorData>)) {
        let weights = Weights::open(&self.path(folder)).unwrap();
        let tensor = |name: String| (name.clone(), weights.tensor(&name).unwrap().unwrap());
        let mut tensors = weights.names().into_iter().map(tensor).collect();
        change(&mut tensors);
        let file = self.path(folder).join("model.safetensors");
        write_safetensors(&file, &tensors, StoreAs::F32).unwrap();
    }

    /// A command in the folder.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command.args(args).current_dir(self.dir.path()).env_remove("RUST_LOG").env_remove("HSPEC_MODELS");
        // Without cargo's variable the folder itself counts as the workspace.
        command.env_remove("CARGO_MANIFEST_DIR");
        // Nothing is fetched: the hub's tools look into their cache only.
        command.env_remove("HF_HUB_CACHE").env("HF_HOME", self.path("hf")).env("HF_HUB_OFFLINE", "1");
        command
    }

    /// Runs a command in the folder.
    pub fn run(&self, args: &[&str]) -> Ended {
        self.run_with(args, &[])
    }

    /// Runs a command in the folder with some variables set.
    pub fn run_with(&self, args: &[&str], variables: &[(&str, &str)]) -> Ended {
        let output = self.command(args).envs(variables.iter().copied()).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Names of what lies in a folder; none where there is no folder.
    pub fn list(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(folder)).into_iter().flatten();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Ended {
    /// The document on standard output, which must be nothing else.
    pub fn json(&self) -> Value {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        serde_json::from_str(&self.stdout).unwrap()
    }
}

/// Token `i` is the word `w{i}`.
fn word_tokenizer(words: u64) -> Value {
    let vocabulary: Map<String, Value> = (0..words).map(|i| (format!("w{i}"), i.into())).collect();
    json!({
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": { "type": "WhitespaceSplit" },
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "w0" },
    })
}
