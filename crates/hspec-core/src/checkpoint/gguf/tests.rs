//! Whole GGUF files: what is read from right ones, and that wrong ones are refused by name.

use super::{Gguf, testing::Builder};
use crate::{
    checkpoint::{Weights, model_json},
    error::{Error, Result},
    text::{ChatTemplate, Message, Tokenizer},
};
use proptest::prelude::*;
use std::path::PathBuf;

fn written(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

fn open(file: &Builder) -> Result<Gguf> {
    let (_dir, path) = written(&file.bytes());
    Gguf::open(&path)
}

/// The error of a changed file, which must name the file.
fn refused(change: impl FnOnce(&mut Builder)) -> String {
    let mut file = Builder::llama();
    change(&mut file);
    let error = open(&file).err().expect("the file must be refused");
    assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
    assert!(error.to_string().contains("tiny.gguf"), "{error}");
    error.to_string()
}

fn f32s(file: &Gguf, name: &str) -> Vec<f32> {
    file.tensor(name).unwrap().to_vec().unwrap()
}

#[test]
fn names_shapes_and_values() {
    let (_dir, path) = written(&Builder::llama().bytes());
    let weights = Weights::open(&path).unwrap();
    let layer = |part: &str| format!("model.layers.0.{part}.weight");
    let mut expected: Vec<_> =
        ["mlp.up_proj", "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"]
            .iter()
            .map(|part| layer(part))
            .collect();
    expected.extend(["model.embed_tokens.weight".to_owned(), "model.norm.weight".to_owned()]);
    expected.sort();
    assert_eq!(weights.names(), expected);
    assert_eq!(weights.shape("model.embed_tokens.weight"), Some(vec![6, 32]));
    assert_eq!(weights.path(), path);
    assert!(!weights.contains("lm_head.weight"));
    assert!(weights.tensor("lm_head.weight").unwrap().is_none());
    let up: Vec<f32> = weights.tensor(&layer("mlp.up_proj")).unwrap().unwrap().to_vec().unwrap();
    assert_eq!(up, vec![half::f16::from_bits(0x1111).to_f32() * 17.0; 64]);
    let v: Vec<f32> = weights.tensor(&layer("self_attn.v_proj")).unwrap().unwrap().to_vec().unwrap();
    assert_eq!(v, (0..512).map(|i| i as f32).collect::<Vec<_>>());
}

/// llama.cpp's converter writes row (half j, pair i) of a head to row (i, j); the other way round, each
/// Hugging Face row must come back, in q with 2 heads and in k with 1.
#[test]
fn rows_of_q_and_k_come_back_in_order() {
    let mut file = Builder::llama();
    for (part, heads) in [("attn_q", 2), ("attn_k", 1)] {
        let mut stored = vec![0.0; heads * 16 * 32];
        for (head, half, pair) in
            (0..heads).flat_map(|h| (0..2).flat_map(move |j| (0..8).map(move |i| (h, j, i))))
        {
            let (from, to) = (head * 16 + half * 8 + pair, head * 16 + pair * 2 + half);
            for column in 0..32 {
                stored[to * 32 + column] = (from * 100 + column) as f32;
            }
        }
        file.floats(&format!("blk.0.{part}.weight"), &[32, heads as u64 * 16], stored.into_iter());
    }
    let llama = open(&file).unwrap();
    for (part, rows) in [("q_proj", 32), ("k_proj", 16)] {
        let expected: Vec<f32> = (0..rows).flat_map(|r| (0..32).map(move |c| (r * 100 + c) as f32)).collect();
        assert_eq!(f32s(&llama, &format!("model.layers.0.self_attn.{part}.weight")), expected);
    }
}

#[test]
fn a_qwen3_file_keeps_its_rows_and_has_norms_of_q_and_k() {
    let mut file = Builder::llama();
    for (key, ..) in &mut file.metadata {
        *key = String::from_utf8_lossy(key).replace("llama.", "qwen3.").into_bytes();
    }
    file.text("general.architecture", "qwen3");
    file.u32("qwen3.attention.key_length", 8);
    file.u32("qwen3.rope.dimension_count", 8);
    file.floats("blk.0.attn_q_norm.weight", &[8], (0..8).map(|i| i as f32));
    file.floats("output.weight", &[32, 6], (0..192).map(|i| i as f32));
    let qwen3 = open(&file).unwrap();
    let q = f32s(&qwen3, "model.layers.0.self_attn.q_proj.weight");
    assert_eq!(q, (0..1024).map(|i| i as f32).collect::<Vec<_>>());
    assert_eq!(f32s(&qwen3, "model.layers.0.self_attn.q_norm.weight").len(), 8);
    let config = qwen3.config().unwrap();
    assert_eq!(config["architectures"][0], "Qwen3ForCausalLM");
    assert_eq!(config["model_type"], "qwen3");
    assert_eq!(config["head_dim"], 8);
    assert_eq!(config["tie_word_embeddings"], false);
}

#[test]
fn settings_become_config_json() {
    let (_dir, path) = written(&Builder::llama().bytes());
    let config = model_json(&path, "config.json").unwrap().unwrap();
    for (key, expected) in [
        ("architectures", serde_json::json!(["LlamaForCausalLM"])),
        ("model_type", "llama".into()),
        ("bos_token_id", 0.into()),
        ("eos_token_id", 0.into()),
        ("head_dim", 16.into()),
        ("hidden_size", 32.into()),
        ("intermediate_size", 32.into()),
        ("max_position_embeddings", 64.into()),
        ("num_attention_heads", 2.into()),
        ("num_hidden_layers", 1.into()),
        ("num_key_value_heads", 1.into()),
        ("rms_norm_eps", 1e-5.into()),
        ("rope_scaling", serde_json::Value::Null),
        ("rope_theta", 1e5.into()),
        ("tie_word_embeddings", true.into()),
        ("torch_dtype", "float32".into()),
        ("vocab_size", 6.into()),
    ] {
        assert_eq!(config[key], expected, "{key}");
    }
    assert!(model_json(&path, "README.md").unwrap().is_none());
}

/// Divisors as llama.cpp's converter works them out for Llama 3's scaling.
fn llama3_divisors(factor: f32) -> Vec<f32> {
    (0..8)
        .map(|i| {
            let frequency = 1.0 / 500_000f64.powf(f64::from(i) / 8.0);
            let wavelength = 2.0 * std::f64::consts::PI / frequency;
            if wavelength < 8192.0 / 4.0 {
                1.0
            } else if wavelength > 8192.0 {
                factor
            } else {
                let smooth = (8192.0 / wavelength - 1.0) / 3.0;
                (1.0 / ((1.0 - smooth) / f64::from(factor) + smooth)) as f32
            }
        })
        .collect()
}

#[test]
fn divisors_of_the_frequencies_are_llama3_scaling_or_refused() {
    let with = |divisors: Vec<f32>| {
        let mut file = Builder::llama();
        file.f32("llama.rope.freq_base", 500_000.0);
        file.floats("rope_freqs.weight", &[divisors.len() as u64], divisors.into_iter());
        let file = open(&file).unwrap();
        assert!(!file.names().iter().any(|name| name.contains("rope")));
        file.config().map(|config| config["rope_scaling"].clone())
    };
    let scaling = with(llama3_divisors(32.0)).unwrap();
    assert_eq!(scaling["rope_type"], "llama3");
    assert_eq!(scaling["factor"], 32.0);
    assert_eq!(scaling["original_max_position_embeddings"], 8192);
    assert!(with(vec![1.0; 8]).unwrap().is_null());
    let mut other = llama3_divisors(8.0);
    other[4] *= 1.01;
    for wrong in [other, vec![8.0; 8], llama3_divisors(8.0)[..7].to_vec()] {
        assert!(with(wrong).unwrap_err().to_string().contains("rope_freqs.weight"));
    }
}

#[test]
fn the_tokenizer_and_the_chat_template_work() {
    let (_dir, path) = written(&Builder::llama().bytes());
    let tokenizer = Tokenizer::open(&path).unwrap();
    let ids = |text: &str| tokenizer.encode(text).unwrap().iter().map(|t| t.0).collect::<Vec<_>>();
    assert_eq!(ids("ab a11<|end|>"), [3, 4, 1, 5, 5, 0]);
    assert_eq!(tokenizer.decode(&tokenizer.encode("ab<|end|>").unwrap(), true).unwrap(), "ab");
    assert_eq!(tokenizer.eos_ids().iter().map(|t| t.0).collect::<Vec<_>>(), [0]);
    assert_eq!(tokenizer.vocab_size(), 6);
    let chat = ChatTemplate::open(&path).unwrap().unwrap();
    assert_eq!(chat.render(&[Message::user("ab")], true).unwrap(), "ab<|end|>");
}

#[test]
fn an_end_of_turn_token_stops_too() {
    let mut file = Builder::llama();
    file.u32("tokenizer.ggml.eot_token_id", 5);
    let (_dir, path) = written(&file.bytes());
    let eos = Tokenizer::open(&path).unwrap().eos_ids();
    assert_eq!(eos.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 5]);
}

#[test]
fn settings_and_tokenizers_that_are_not_supported_are_named() {
    for (change, name, part) in [
        (
            (|f| f.text("llama.rope.scaling.type", "yarn")) as fn(&mut Builder),
            "config.json",
            "rope.scaling.type",
        ),
        (|f| f.u32("llama.rope.dimension_count", 8), "config.json", "rope.dimension_count"),
        (|f| f.u32("llama.block_count", 0), "config.json", "block_count"),
        (|f| f.text("tokenizer.ggml.model", "llama"), "tokenizer.json", "tokenizer.ggml.model"),
        (|f| f.text("tokenizer.ggml.pre", "unheard-of"), "tokenizer.json", "unheard-of"),
        (|f| f.texts("tokenizer.ggml.merges", &["a c"]), "tokenizer.json", "a c"),
        (
            |f| f.texts("tokenizer.ggml.tokens", &["a", "b", "ab", "a", "Ġ", "1"]),
            "tokenizer.json",
            "each token once",
        ),
        (|f| f.texts("tokenizer.ggml.tokens", &["a", "b", "ab"]), "tokenizer.json", "token_type"),
        (|f| f.u32("tokenizer.ggml.eos_token_id", 6), "tokenizer_config.json", "eos_token_id"),
    ] {
        let mut file = Builder::llama();
        change(&mut file);
        let (_dir, path) = written(&file.bytes());
        let message = model_json(&path, name).unwrap_err().to_string();
        assert!(message.contains(part) && message.contains("tiny.gguf"), "{message}");
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let bytes = Builder::llama().bytes();
    let (_dir, path) = written(&bytes);
    assert!(Gguf::open(&path).is_ok());
    // Every byte of the header, and some of the data.
    for length in (0..bytes.len()).filter(|n| *n < 2500 || n % 97 == 0).chain([bytes.len() - 1]) {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let error =
            Gguf::open(&path).err().unwrap_or_else(|| panic!("accepted {length} of {} bytes", bytes.len()));
        assert!(matches!(error, Error::Invalid { .. }), "{length}: {error:?}");
    }
}

#[test]
fn attacks_on_the_header_are_refused_by_name() {
    for (change, part) in [
        ((|f| f.magic = *b"GGML") as fn(&mut Builder), "magic"),
        (|f| f.version = 1, "version"),
        (|f| f.version = 3u32.swap_bytes(), "version"),
        (|f| f.counts.0 = Some(u64::MAX), "number of tensors"),
        (|f| f.counts.1 = Some(1 << 40), "number of metadata entries"),
        (|f| f.metadata[0].0 = vec![0xff, 0xfe], "UTF-8"),
        (|f| f.metadata.push(f.metadata[0].clone()), "general.architecture"),
        (|f| f.raw("x.length", 8, &u64::MAX.to_le_bytes()), "x.length"),
        (|f| f.raw("x.list", 9, &[&4u32.to_le_bytes()[..], &(1u64 << 60).to_le_bytes()].concat()), "x.list"),
        (
            |f| f.raw("x.deep", 9, &[&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat().repeat(1000)),
            "x.deep",
        ),
        (|f| f.raw("x.kind", 13, &[0]), "x.kind"),
        (|f| f.raw("x.truth", 7, &[2]), "x.truth"),
        (|f| f.u32("general.alignment", 0), "general.alignment"),
        (|f| f.u32("general.alignment", 48), "general.alignment"),
        (|f| f.text("general.architecture", "gemma"), "gemma"),
        (|f| f.u32("llama.attention.head_count", 0), "head_count"),
        (|f| f.u32("llama.attention.head_count", 3), "blk.0.attn_q.weight"),
    ] {
        let message = refused(change);
        assert!(message.contains(part), "{part}: {message}");
    }
}

#[test]
fn attacks_on_tensors_are_refused_by_name() {
    for (change, part) in [
        ((|f| f.tensors[0].kind = 12) as fn(&mut Builder), "type 12"),
        (|f| f.tensors[0].kind = u32::MAX, "Q4_1 (3)"),
        (|f| f.tensors[0].offset = Some(1 << 20), "inside the file"),
        (|f| f.tensors[0].offset = Some(u64::MAX - 31), "inside the file"),
        (|f| f.tensors[0].offset = Some(8), "a multiple of 32"),
        (|f| f.tensors[1].offset = Some(0), "shared with"),
        (|f| f.tensors[0].dims = vec![32, 7000], "inside the file"),
        (|f| f.tensors[0].dims = vec![1 << 40, 1 << 40], "inside the file"),
        (|f| f.tensors[0].dims = vec![1; 5], "at most 4"),
        (|f| f.tensor("blk.0.ffn_up.weight", &[16, 4], 8, vec![0; 68]), "multiple of 32"),
        (|f| f.tensors[0].name = "blk.0.attn_q.bias".into(), "blk.0.attn_q.bias"),
        (|f| f.tensors[0].name = "output_norm.weight".into(), "twice"),
        (|f| f.tensor("blk.0.attn_q.weight", &[32], 0, vec![0; 128]), "blk.0.attn_q.weight"),
    ] {
        let message = refused(change);
        assert!(message.contains(part), "{part}: {message}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    /// Whatever bytes are changed: an error or a file all of which can be read, never a panic.
    #[test]
    fn changed_bytes_never_panic(changes in proptest::collection::vec((0usize..2400, any::<u8>()), 1..6)) {
        let mut bytes = Builder::llama().bytes();
        for (at, value) in changes {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        let (_dir, path) = written(&bytes);
        if let Ok(file) = Gguf::open(&path) {
            for name in file.names() {
                let elements: usize = file.shape(&name).unwrap().iter().product();
                prop_assert_eq!(file.tensor(&name).unwrap().num_elements(), elements);
            }
            for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
                let _ = file.json(name);
            }
        }
    }
}
