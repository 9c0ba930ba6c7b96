//! From prompts to features on a tiny real target: batches, turns, interruptions, caches.

#![allow(clippy::unwrap_used)] // a test may panic

use burn::tensor::{TensorData, backend::Backend};
use half::bf16;
use hspec_core::{Error, TokenId, checkpoint::StoreAs, decode::SamplingParams, target::Target};
use hspec_train::{
    caches::{Caches, read_documents},
    feature_cache::{FeatureCache, Manifest},
    features::{Cached, FeatureStore, Features, Reads},
    pack::Packed,
    responses::{Answering, FORMAT, Finish, Origin, PromptTokens, Response, Sampling, documents, read},
};
use std::{cell::Cell, path::Path};

type B = burn_flex::Flex;

fn target() -> Target<B> {
    let dir = hspec_goldens::root().join("targets/llama31-tiny");
    Target::load(&dir, &Default::default()).unwrap()
}

fn prompts(n: u32) -> Vec<PromptTokens> {
    let ids = |n: u32| (0..3 + n * n % 13).map(|i| TokenId((n * 37 + i * 11) % 480 + 3)).collect();
    (0..n).map(|n| PromptTokens { id: format!("p{n}"), ids: ids(n) }).collect()
}

fn sampling(batch: usize) -> Sampling<'static> {
    Sampling {
        params: SamplingParams::new(1.0, Some(50), None).unwrap(),
        seed: 4,
        max_new_tokens: 20,
        // Often, so that rows come and go.
        stop_tokens: &STOPS,
        batch,
    }
}

const STOPS: [TokenId; 40] = {
    let mut stops = [TokenId(0); 40];
    let mut i = 0;
    while i < stops.len() {
        stops[i] = TokenId(i as u32 * 12);
        i += 1;
    }
    stops
};

/// Two more turns of every third conversation, unless an answer was cut.
fn follow(number: usize, answers: &[Vec<TokenId>]) -> hspec_core::Result<Option<Vec<TokenId>>> {
    let more = number.is_multiple_of(3) && answers.len() < 3;
    let mut prompt = prompts(number as u32 + 1).pop().unwrap().ids;
    for answer in answers {
        prompt.extend(answer);
        prompt.extend([TokenId(7), TokenId(8)]);
    }
    Ok(more.then_some(prompt))
}

fn origin() -> Origin {
    Origin {
        format: FORMAT.into(),
        target: "tiny".into(),
        template: "none".into(),
        temperature: 1.0,
        top_k: Some(50),
        top_p: None,
        seed: 4,
        max_new_tokens: 20,
    }
}

fn run(target: &Target<B>, path: &Path, batch: usize, threads: usize) -> Result<Vec<Response>, Error> {
    let (sampling, origin) = (sampling(batch), origin());
    let given = [Response::new("given", vec![TokenId(1)], vec![TokenId(2)])];
    let answering = Answering {
        target,
        sampling: &sampling,
        origin: Some(&origin),
        follow: &follow,
        given: &given,
        threads,
    };
    let last = Cell::new(None);
    let all = answering.run(&prompts(40), path, &mut |told| last.set(Some(told)))?;
    let told = last.get().unwrap();
    assert_eq!((told.done, told.total), (40, 40));
    Ok(all)
}

/// Rows that come and go, workers side by side, and a kill in the middle change no token.
#[test]
fn answers_depend_on_neither_batch_nor_threads_nor_kills() {
    let target = target();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.jsonl");
    let alone = run(&target, &dir.path().join("alone.jsonl"), 1, 1).unwrap();
    let all = run(&target, &path, 32, 2).unwrap();
    assert_eq!(alone, all);
    assert_eq!(all.len(), 40 + 2 * 14 + 1);
    assert_eq!(all.last().unwrap().id, "given");
    let ends = |finish| all.iter().filter(|r| r.finish == Some(finish)).count();
    assert!(ends(Finish::Stop) > 10 && ends(Finish::Length) > 10, "both ends occur");
    for response in &all[..68] {
        let stopped = response.response_ids.last().is_some_and(|t| STOPS.contains(t));
        assert_eq!(response.finish, Some(if stopped { Finish::Stop } else { Finish::Length }));
    }
    let documents = documents(all.clone());
    assert_eq!(documents.len(), 41);
    assert_eq!((documents[3].turn, documents[3].given.len()), (1, 2));

    let text = std::fs::read_to_string(&path).unwrap();
    for part in [0, 30, 400, text.len() / 2, text.len() - 3] {
        std::fs::write(&path, &text[..part]).unwrap();
        assert_eq!(run(&target, &path, 7, 1).unwrap(), all, "{part} of {}", text.len());
        assert_eq!(read(&path).unwrap().1.len(), all.len());
    }
    std::fs::write(&path, text.replace("\"temperature\":1.0", "\"temperature\":0.5")).unwrap();
    let error = run(&target, &path, 7, 1).unwrap_err().to_string();
    assert!(error.contains("line 1, temperature: found 0.5, expected 1.0"), "{error}");
}

fn equal<T: Backend>(a: &Packed<T>, b: &Packed<T>) {
    assert_eq!((&a.ids, &a.loss_mask, &a.positions), (&b.ids, &b.loss_mask, &b.positions));
    let same = |a: TensorData, b: TensorData| assert_eq!(a, b);
    same(a.fused.to_data(), b.fused.to_data());
    same(a.last.to_data(), b.last.to_data());
    assert_eq!(a.prefixes.len(), b.prefixes.len());
    for (a, b) in a.prefixes.iter().zip(&b.prefixes) {
        same(a.keys.to_data(), b.keys.to_data());
        same(a.values.to_data(), b.values.to_data());
    }
}

fn some_documents() -> Vec<Response> {
    let ids = |from: u32, n: u32| (from..from + n).map(|i| TokenId(i * 31 % 500)).collect();
    (0..7).map(|i| Response::new(format!("d{i}"), ids(i, 4 + i), ids(100 + i, 9 - i))).collect()
}

fn open(dir: &Path) -> Box<dyn Cached<B>> {
    Box::new(Caches::open(&[dir.to_owned()]).unwrap())
}

fn error<T>(result: Result<T, Error>) -> String {
    result.err().unwrap().to_string()
}

/// Answers that came later are cached by themselves.
#[test]
fn several_caches_hold_the_documents_between_them() {
    let (target, documents) = (target(), some_documents());
    let folder = tempfile::tempdir().unwrap();
    let reads = Reads { hidden: vec![1, 2], kv: vec![3] };
    let write = |name: &str, documents: &[Response]| {
        let dir = folder.path().join(name);
        let plan = Manifest::plan(documents, &reads, &target, StoreAs::F32, 30_000).unwrap();
        plan.resume(&dir).unwrap().fill(&dir, documents, &target, &mut |_| {}).unwrap();
        dir
    };
    let dirs = [write("old", &documents[..4]), write("new", &documents[4..6])];
    let row = [(1, &documents[1]), (5, &documents[5]), (3, &documents[3])];
    let store = || FeatureStore::new(&target, reads.clone(), 0);
    let mut cached = store().cached(Box::new(Caches::open(&dirs).unwrap())).unwrap();
    equal(&store().pack(&row).unwrap(), &cached.pack(&row).unwrap());

    let missing = error(cached.pack(&[(6, &documents[6])]));
    assert!(missing.contains("document \"d6\": found in none of the caches"), "{missing}");
    let other = Reads { hidden: vec![3], kv: vec![] };
    let mut caches = Caches::<B>::open(&dirs).unwrap();
    assert!(error(Cached::<B>::check(&caches, &other, &target)).contains("old/manifest.json: hidden_layers"));
    assert!(Cached::<B>::read(&mut caches, &documents[4], &reads, &target).is_ok());
}

#[test]
fn features_from_a_cache_are_those_that_the_target_computes() {
    let (target, documents) = (target(), some_documents());
    let dir = tempfile::tempdir().unwrap();
    let reads = Reads { hidden: vec![1, 2, 3], kv: vec![3, 1, 3] };
    let plan = |reads: &Reads| Manifest::plan(&documents, reads, &target, StoreAs::F32, 30_000).unwrap();
    let mut manifest = plan(&reads).resume(dir.path()).unwrap();
    assert_eq!((manifest.documents, manifest.tokens), (7, 7 * 13));
    assert_eq!(manifest.bytes_left(), 7 * 13 * manifest.bytes_per_token());
    let unfinished = error(FeatureCache::open(dir.path()));
    assert!(unfinished.contains("unfinished, expected all finished"), "{unfinished}");
    manifest.fill(dir.path(), &documents, &target, &mut |_| {}).unwrap();
    let file = |n: usize| dir.path().join(format!("shard-{n:05}.safetensors"));
    assert!(file(1).exists() && manifest.bytes_left() == 0);
    let on_disk: u64 =
        std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
    assert!(on_disk >= manifest.bytes() && on_disk < manifest.bytes() * 6 / 5, "{on_disk}");

    // Of the cached layers another drafter may read fewer.
    let pack = |reads: &Reads, cached: bool| {
        let mut store = FeatureStore::new(&target, reads.clone(), 0);
        if cached {
            store = store.cached(open(dir.path())).unwrap();
        }
        store.pack(&[(2, &documents[2]), (0, &documents[0]), (6, &documents[6])]).unwrap()
    };
    for reads in
        [reads.clone(), Reads { hidden: vec![1, 3], kv: vec![1] }, Reads { hidden: vec![2], kv: vec![] }]
    {
        equal(&pack(&reads, false), &pack(&reads, true));
    }

    // A killed run continues with the shard that is missing.
    let whole = std::fs::read(file(1)).unwrap();
    std::fs::remove_file(file(1)).unwrap();
    std::fs::write(dir.path().join(".partial-x"), "half").unwrap();
    let mut again = plan(&reads).resume(dir.path()).unwrap();
    assert!(again.bytes_left() > 0 && again.bytes_left() < again.bytes());
    let mut told = Vec::new();
    again.fill(dir.path(), &documents, &target, &mut |done| told.push(done)).unwrap();
    assert!(told[0] > 0 && *told.last().unwrap() == 7, "{told:?}");
    assert_eq!(std::fs::read(file(1)).unwrap(), whole);
    equal(&pack(&reads, false), &pack(&reads, true));

    // What cannot be right is refused.
    let other = Reads { hidden: vec![1, 2], kv: vec![3] };
    assert!(error(plan(&other).resume(dir.path())).contains("another cache"));
    let cached = |reads: Reads| FeatureStore::new(&target, reads, 0).cached(open(dir.path())).map(|_| ());
    let message = error(cached(Reads { hidden: vec![0, 1], kv: vec![] }));
    assert!(message.contains("hidden_layers: found [1, 2, 3], expected at least [0, 1]"), "{message}");
    assert!(error(cached(Reads { hidden: vec![1], kv: vec![0] })).contains("kv_layers: found [1, 3]"));
    let stranger = Response::new("stranger", vec![TokenId(1)], vec![TokenId(2)]);
    let mut cache = FeatureCache::open(dir.path()).unwrap();
    let message = error(Cached::<B>::read(&mut cache, &stranger, &reads, &target));
    assert!(message.contains("document \"stranger\": found none, expected one of the 7"), "{message}");
    let mut bytes = whole;
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(file(1), bytes).unwrap();
    let mut cache = FeatureCache::open(dir.path()).unwrap();
    let read =
        documents.iter().map(|d| Cached::<B>::read(&mut cache, d, &reads, &target)).find(Result::is_err);
    assert!(error(read.unwrap()).contains("00001.safetensors: checksum: found"));
    let text = std::fs::read_to_string(dir.path().join("manifest.json")).unwrap();
    std::fs::write(dir.path().join("manifest.json"), text.replace("shard-00001", "../shard-00001")).unwrap();
    assert!(error(FeatureCache::open(dir.path())).contains("names of files beside the manifest"));
}

/// DeepSpec stores the last state behind the final norm; from it the same logits follow.
#[test]
fn a_cache_of_deepspecs_is_a_source_of_features() {
    let (target, documents) = (target(), some_documents());
    let dir = tempfile::tempdir().unwrap();
    let reads = Reads { hidden: vec![1, 3], kv: vec![] };
    let all = Reads { hidden: vec![1, 2, 3], kv: vec![] };
    let (mut shard, mut index) = (Vec::new(), Vec::new());
    let floats = |x: &TensorData| -> Vec<u8> {
        x.iter::<f32>().flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect()
    };
    for (i, document) in documents.iter().enumerate() {
        let stored = Features::compute(document, &all, &target).unwrap().store();
        let last = burn::tensor::Tensor::<B, 2>::from_data(stored.last, &Default::default());
        let last = target.norm().forward(last).into_data();
        // Padding at the left, and behind the last supervised token one that is not.
        let (pad, s) = (2, document.tokens() + 3);
        let among = |width: usize, values: Vec<u8>| [vec![0; pad * width], values, vec![0; width]].concat();
        let ids: Vec<u8> = document.ids().flat_map(|id| (id.0 as i32).to_le_bytes()).collect();
        let mask = document.loss_mask().iter().map(|m| u8::from(*m)).collect();
        let row = |x: &TensorData| 2 * x.shape[1];
        index.extend((i as u64).to_le_bytes());
        index.extend(0u32.to_le_bytes());
        index.extend((s as u32).to_le_bytes());
        for array in [
            among(4, ids),
            [vec![0; pad], vec![1; s - pad]].concat(),
            among(1, mask),
            among(row(&stored.fused), floats(&stored.fused)),
            among(row(&last), floats(&last)),
        ] {
            index.extend((shard.len() as u64).to_le_bytes());
            shard.extend(array);
        }
    }
    let manifest = serde_json::json!({
        "version": 2, "num_samples": 7, "hidden_size": target.config().hidden_size, "target_layer_ids": [0, 1, 2],
        "hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": 56,
        "shards": [{ "shard_id": 0, "file_name": "shard-00000.bin" }],
    });
    std::fs::write(dir.path().join("manifest.json"), manifest.to_string()).unwrap();
    std::fs::write(dir.path().join("samples.idx"), index).unwrap();
    std::fs::write(dir.path().join("shard-00000.bin"), shard).unwrap();

    let cache = hspec_train::target_cache::TargetCache::open(dir.path()).unwrap();
    let found = cache.documents().unwrap();
    assert_eq!(found.len(), 7);
    assert_eq!(found[3].1.ids().collect::<Vec<_>>(), documents[3].ids().collect::<Vec<_>>());
    assert_eq!(found[3].1.loss_mask(), documents[3].loss_mask());
    // All that a run needs: drawn by the seed as the documents of a file of responses are.
    let drawn = read_documents(&[dir.path().to_owned()], 3, 5).unwrap();
    let order = hspec_train::pack::shuffled(7, 3, u64::MAX);
    let tokens = |d: &Response| d.ids().collect::<Vec<_>>();
    assert_eq!(
        drawn.iter().map(tokens).collect::<Vec<_>>(),
        order[..5].iter().map(|&i| tokens(&documents[i])).collect::<Vec<_>>()
    );
    let mut stores = [true, false].map(|cached| {
        let store = FeatureStore::new(&target, reads.clone(), 0);
        if cached { store.cached(open(dir.path())).unwrap() } else { store }
    });
    let [theirs, ours] =
        stores.each_mut().map(|store| store.pack(&[(1, &documents[1]), (5, &documents[5])]).unwrap());
    let close = |a: TensorData, b: TensorData| {
        assert_eq!(a.shape, b.shape);
        for (a, b) in a.iter::<f32>().zip(b.iter::<f32>()) {
            assert!((a - b).abs() <= 0.01 * b.abs().max(0.1), "{a} {b}");
        }
    };
    close(theirs.fused.to_data(), ours.fused.to_data());
    let normed = |packed: &Packed<B>| target.norm().forward(packed.last.clone()).into_data();
    close(normed(&theirs), normed(&ours));
    assert!(theirs.prefixes.is_empty());

    let refused =
        |reads: Reads| error(FeatureStore::new(&target, reads, 0).cached(open(dir.path())).map(|_| ()));
    let message = refused(Reads { hidden: vec![1], kv: vec![3] });
    assert!(message.contains("keys and values: found none, expected those of layers [3]"), "{message}");
    let message = refused(Reads { hidden: vec![0], kv: vec![] });
    assert!(message.contains("target_layer_ids: found [0, 1, 2], expected at least [-1]"), "{message}");
}
