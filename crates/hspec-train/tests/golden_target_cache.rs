//! DeepSpec's cache of target features.

#![allow(clippy::unwrap_used)] // a test may panic

use hspec_goldens::{Golden, Tolerance, assert_close};
use hspec_train::target_cache::TargetCache;
use std::path::Path;

#[test]
fn golden_target_cache() {
    let expected = Golden::open("dspark/target_cache_expected");
    let cache = TargetCache::open(&hspec_goldens::root().join("dspark/target_cache")).unwrap();
    let samples = expected.names().filter(|name| name.ends_with("/input_ids")).count();
    assert_eq!(cache.len(), samples);
    assert!(!cache.is_empty());
    for i in 0..samples {
        let sample = cache.sample(i).unwrap();
        let ids: Vec<i64> = sample.ids.iter().map(|t| i64::from(t.0)).collect();
        assert_eq!(ids, expected.ints(&format!("{i}/input_ids")));
        let mask: Vec<i64> = sample.loss_mask.iter().map(|&m| i64::from(m)).collect();
        assert_eq!(mask, expected.ints(&format!("{i}/loss_mask")));
        assert_eq!(sample.attention_mask.len(), ids.len());
        for (name, found) in
            [("target_hidden_states", sample.features), ("target_last_hidden_states", sample.last)]
        {
            let key = format!("{i}/{name}");
            assert_close(&key, &found, &expected.f32s(&key), Tolerance::Absolute(0.0));
        }
    }
}

/// The fixture's folder with one file changed.
fn changed(file: &str, edit: impl Fn(Vec<u8>) -> Vec<u8>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(hspec_goldens::root().join("dspark/target_cache")).unwrap() {
        let entry = entry.unwrap();
        let bytes = std::fs::read(entry.path()).unwrap();
        let bytes = if entry.file_name() == file { edit(bytes) } else { bytes };
        std::fs::write(dir.path().join(entry.file_name()), bytes).unwrap();
    }
    dir
}

fn replaced(from: &'static str, to: &'static str) -> impl Fn(Vec<u8>) -> Vec<u8> {
    move |bytes| {
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.contains(from));
        text.replace(from, to).into_bytes()
    }
}

#[test]
fn damaged_caches_are_refused() {
    let open = |dir: &Path| match TargetCache::open(dir) {
        Ok(cache) => cache.sample(0).map(|_| ()).unwrap_err().to_string(),
        Err(error) => error.to_string(),
    };
    type Edit = Box<dyn Fn(Vec<u8>) -> Vec<u8>>;
    let put = |at: usize, bytes: &'static [u8]| -> Edit {
        Box::new(move |mut all| {
            all[at..at + bytes.len()].copy_from_slice(bytes);
            all
        })
    };
    let cases: Vec<(&str, Edit, &str)> = vec![
        (
            "manifest.json",
            Box::new(replaced("\"version\": 2", "\"version\": 1")),
            "version: found 1, expected 2",
        ),
        ("manifest.json", Box::new(replaced("bfloat16", "float16")), "hidden_dtype: found float16"),
        (
            "manifest.json",
            Box::new(replaced("shard-00001.bin", "../shard")),
            "shards[1]: found 1 in \"../shard\"",
        ),
        ("samples.idx", Box::new(|b| b[..b.len() - 1].to_vec()), "expected 3 records of 56 bytes"),
        ("samples.idx", put(0, &[9]), "record 0: found sample 9, expected sample 0"),
        ("samples.idx", put(8, &[7]), "record 0: found shard 7, expected one of 3"),
        ("samples.idx", put(12, &[255; 4]), "expected arrays within 350 bytes"),
        ("samples.idx", put(16, &[255; 8]), "expected arrays within 350 bytes"),
        ("shard-00000.bin", Box::new(|b| b[..b.len() - 1].to_vec()), "expected arrays within 349 bytes"),
        ("shard-00000.bin", put(0, &[255; 4]), "sample 0: found token -1, expected token ids from 0"),
        ("shard-00000.bin", put(40, &[0xc0, 0x7f]), "sample 0: found NaN, expected finite hidden states"),
    ];
    for (file, edit, part) in cases {
        let error = open(changed(file, edit).path());
        assert!(error.contains(part), "{error}");
    }
}
