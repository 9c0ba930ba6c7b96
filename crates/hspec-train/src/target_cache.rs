//! Reading target features that DeepSpec wrote (its cache, version 2).
//!
//! A folder holds `manifest.json`, `samples.idx` and shards. The index has a record per sample:
//!
//! ```text
//! u64 sample id | u32 shard | u32 tokens | u64 offsets in the shard of the five arrays
//! i32 ids [S] | u8 attention mask [S] | u8 loss mask [S] | bf16 features [S, m * H] | bf16 last state [S, H]
//! ```
//!
//! all little-endian. The last state stands *behind* the target's final norm, other than in this crate's
//! [`Packed`](crate::pack::Packed). Layer ids name outputs there and inputs here: one is added.
//!
//! As a source of features it serves drafters that read no keys and values, which it does not hold. Divided by
//! the norm's weight, the last state is one that the norm maps back to what is stored.

use crate::{
    feature_cache::{columns, key},
    features::{Cached, Reads, Stored},
    responses::Response,
};
use burn::tensor::{TensorData, backend::Backend};
use hspec_core::{Error, Result, TokenId, checkpoint::read_json, target::Target};
use serde::Deserialize;
use std::{
    collections::HashMap,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

const RECORD: usize = 56;

#[derive(Debug, Deserialize)]
struct Manifest {
    version: u32,
    num_samples: usize,
    hidden_size: usize,
    /// -1 is the embedding's output.
    target_layer_ids: Vec<i64>,
    hidden_dtype: String,
    token_dtype: String,
    mask_dtype: String,
    index_record_size: usize,
    shards: Vec<Shard>,
}

#[derive(Debug, Deserialize)]
struct Shard {
    shard_id: usize,
    file_name: String,
}

/// Where a sample lies.
#[derive(Debug, Clone, Copy)]
struct Record {
    shard: usize,
    tokens: usize,
    offsets: [u64; 5],
}

/// A folder of cached target features.
#[derive(Debug)]
pub struct TargetCache {
    /// Named in errors.
    manifest: PathBuf,
    shards: Vec<PathBuf>,
    records: Vec<Record>,
    layers: Vec<usize>,
    hidden_size: usize,
}

/// What the target computed for one sample of S tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct CachedSample {
    /// `[S]`.
    pub ids: Vec<TokenId>,
    /// Which tokens are no padding, `[S]`.
    pub attention_mask: Vec<bool>,
    /// Which tokens are supervised, `[S]`.
    pub loss_mask: Vec<bool>,
    /// Hidden states of the cached layers side by side, `[S, m * H]`.
    pub features: Vec<f32>,
    /// The last layer's output after the final norm, `[S, H]`.
    pub last: Vec<f32>,
}

impl TargetCache {
    /// Reads the manifest and the index and checks that every sample lies within its shard.
    ///
    /// # Errors
    /// A file that cannot be read, another version or type, a record that cannot be right.
    pub fn open(dir: &Path) -> Result<Self> {
        let file = dir.join("manifest.json");
        let manifest: Manifest = read_json(&file)?;
        for (field, found, expected) in [
            ("version", manifest.version.to_string(), "2"),
            ("index_record_size", manifest.index_record_size.to_string(), "56"),
            ("hidden_dtype", manifest.hidden_dtype.clone(), "bfloat16"),
            ("token_dtype", manifest.token_dtype.clone(), "int32"),
            ("mask_dtype", manifest.mask_dtype.clone(), "uint8"),
        ] {
            if found != expected {
                return Err(Error::invalid(&file, field, found, expected));
            }
        }
        let layer = |&id: &i64| {
            let layer = id.checked_add(1).and_then(|id| usize::try_from(id).ok());
            layer.ok_or_else(|| Error::invalid(&file, "target_layer_ids", id.to_string(), "ids from -1"))
        };
        let layers = manifest.target_layer_ids.iter().map(layer).collect::<Result<Vec<_>>>()?;
        let mut shards = Vec::new();
        for (i, shard) in manifest.shards.iter().enumerate() {
            // A name with a path in it would read files that are none of this folder's.
            let plain =
                Path::new(&shard.file_name).file_name().is_some_and(|n| n == shard.file_name.as_str());
            if shard.shard_id != i || !plain {
                let found = format!("{} in {:?}", shard.shard_id, shard.file_name);
                return Err(Error::invalid(
                    &file,
                    format!("shards[{i}]"),
                    found,
                    format!("id {i} and a file name"),
                ));
            }
            shards.push(dir.join(&shard.file_name));
        }
        let hidden_size = manifest.hidden_size;
        let mut cache = Self { manifest: file, shards, records: Vec::new(), layers, hidden_size };
        cache.read_index(&dir.join("samples.idx"), manifest.num_samples)?;
        Ok(cache)
    }

    fn read_index(&mut self, file: &Path, samples: usize) -> Result<()> {
        let bytes = std::fs::read(file).map_err(Error::io(file))?;
        if Some(bytes.len()) != samples.checked_mul(RECORD) {
            let expected = format!("{samples} records of {RECORD} bytes");
            return Err(Error::invalid(file, "file", format!("{} bytes", bytes.len()), expected));
        }
        let size = |path: &PathBuf| Ok(std::fs::metadata(path).map_err(Error::io(path))?.len());
        let sizes: Vec<u64> = self.shards.iter().map(size).collect::<Result<_>>()?;
        for (i, record) in bytes.chunks_exact(RECORD).enumerate() {
            let u64_at = |at: usize| u64::from_le_bytes(record[at..at + 8].try_into().expect("eight bytes"));
            let u32_at = |at: usize| u32::from_le_bytes(record[at..at + 4].try_into().expect("four bytes"));
            let at = format!("record {i}");
            if u64_at(0) != i as u64 {
                return Err(Error::invalid(file, at, format!("sample {}", u64_at(0)), format!("sample {i}")));
            }
            let (shard, tokens) = (u32_at(8) as usize, u32_at(12) as usize);
            let record = Record { shard, tokens, offsets: std::array::from_fn(|a| u64_at(16 + 8 * a)) };
            let Some(&size) = sizes.get(shard) else {
                return Err(Error::invalid(
                    file,
                    at,
                    format!("shard {shard}"),
                    format!("one of {}", sizes.len()),
                ));
            };
            for (offset, length) in record.offsets.iter().zip(self.lengths(tokens)) {
                if length.and_then(|length| offset.checked_add(length)).is_none_or(|end| end > size) {
                    let found = format!("{tokens} tokens at {offset}");
                    return Err(Error::invalid(file, at, found, format!("arrays within {size} bytes")));
                }
            }
            self.records.push(record);
        }
        Ok(())
    }

    /// Bytes of a sample's five arrays; none where they cannot be counted.
    fn lengths(&self, tokens: usize) -> [Option<u64>; 5] {
        let product = |factors: &[usize]| {
            factors.iter().try_fold(tokens as u64, |product, &f| product.checked_mul(f as u64))
        };
        let h = self.hidden_size;
        [product(&[4]), product(&[1]), product(&[1]), product(&[2, h, self.layers.len()]), product(&[2, h])]
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Cached layers as hidden ids: id L is the residual stream entering layer L.
    pub fn layers(&self) -> &[usize] {
        &self.layers
    }

    /// Reads sample `i < len()`.
    ///
    /// # Errors
    /// A shard that cannot be read, a negative id, a value that is not finite.
    ///
    /// # Panics
    /// If there is no sample `i`.
    pub fn sample(&self, i: usize) -> Result<CachedSample> {
        let mut file = self.shard(i)?;
        let Tokens { ids, attention_mask, loss_mask } = self.tokens(i, &mut file)?;
        let bf16 = |b: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
        let floats = |bytes: Vec<u8>| bytes.as_chunks::<2>().0.iter().map(bf16).collect::<Vec<_>>();
        let (features, last) = (floats(self.array(i, &mut file, 3)?), floats(self.array(i, &mut file, 4)?));
        if let Some(x) = features.iter().chain(&last).find(|x| !x.is_finite()) {
            return Err(self.invalid(i, x.to_string(), "finite hidden states"));
        }
        Ok(CachedSample { ids, attention_mask, loss_mask, features, last })
    }

    /// What stands before a sample's hidden states, which are nearly all of it and not read.
    fn tokens(&self, i: usize, file: &mut File) -> Result<Tokens> {
        let ids = self.array(i, file, 0)?;
        let ids: Vec<i32> = ids.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
        if let Some(id) = ids.iter().find(|id| **id < 0) {
            return Err(self.invalid(i, format!("token {id}"), "token ids from 0"));
        }
        let mask = |bytes: Vec<u8>| bytes.into_iter().map(|b| b != 0).collect();
        Ok(Tokens {
            ids: ids.into_iter().map(|id| TokenId(id as u32)).collect(),
            attention_mask: mask(self.array(i, file, 1)?),
            loss_mask: mask(self.array(i, file, 2)?),
        })
    }

    /// The file that a sample lies in.
    fn shard(&self, i: usize) -> Result<File> {
        let path = &self.shards[self.records[i].shard];
        File::open(path).map_err(Error::io(path))
    }

    /// One of a sample's five arrays.
    fn array(&self, i: usize, file: &mut File, which: usize) -> Result<Vec<u8>> {
        let record = self.records[i];
        let path = &self.shards[record.shard];
        let length = self.lengths(record.tokens)[which].expect("checked when the index was read");
        let mut bytes = vec![0; length as usize];
        file.seek(SeekFrom::Start(record.offsets[which])).map_err(Error::io(path))?;
        file.read_exact(&mut bytes).map_err(Error::io(path))?;
        Ok(bytes)
    }

    fn invalid(&self, i: usize, found: String, expected: &str) -> Error {
        Error::invalid(&self.shards[self.records[i].shard], format!("sample {i}"), found, expected)
    }

    /// Sample `i < len()` as a document without its padding, to train on; none if it has no supervised token or
    /// nothing else.
    ///
    /// # Errors
    /// A shard that cannot be read, a negative id.
    pub fn document(&self, i: usize) -> Result<Option<Response>> {
        let tokens = self.tokens(i, &mut self.shard(i)?)?;
        let places = || (0..tokens.ids.len()).filter(|&place| tokens.attention_mask[place]);
        let ids: Vec<TokenId> = places().map(|place| tokens.ids[place]).collect();
        let mask: Vec<bool> = places().map(|place| tokens.loss_mask[place]).collect();
        let document = Response::supervised_by(i.to_string(), &ids, &mask);
        Ok(document.check(Path::new("sample"), "").is_ok().then_some(document))
    }
}

/// The small part of a sample.
struct Tokens {
    ids: Vec<TokenId>,
    attention_mask: Vec<bool>,
    loss_mask: Vec<bool>,
}

/// A cache whose samples are found by their tokens.
pub struct ByTokens {
    cache: TargetCache,
    samples: HashMap<String, usize>,
}

impl ByTokens {
    /// The number of the sample that a document is.
    fn number(&self, document: &Response) -> Result<usize> {
        self.samples.get(&key(document)).copied().ok_or_else(|| {
            let found = format!("document {:?}", document.id);
            Error::invalid(&self.cache.manifest, found, "no such sample", "one with its tokens")
        })
    }
}

impl TargetCache {
    /// Finds samples by their tokens.
    ///
    /// # Errors
    /// Those of [`TargetCache::document`].
    pub fn by_tokens(self) -> Result<ByTokens> {
        let mut samples = HashMap::new();
        for (i, document) in self.documents()? {
            samples.insert(key(&document), i);
        }
        Ok(ByTokens { cache: self, samples })
    }

    /// The samples that can be learned from, with their numbers.
    ///
    /// # Errors
    /// Those of [`TargetCache::document`].
    pub fn documents(&self) -> Result<Vec<(usize, Response)>> {
        let mut documents = Vec::new();
        for i in 0..self.len() {
            documents.extend(self.document(i)?.map(|document| (i, document)));
        }
        Ok(documents)
    }
}

impl<B: Backend> Cached<B> for ByTokens {
    fn check(&self, reads: &Reads, target: &Target<B>) -> Result<()> {
        let cache = &self.cache;
        let refuse = |field, found: String, expected: String| {
            Err(Error::invalid(&cache.manifest, field, found, expected))
        };
        let size = target.config().hidden_size;
        if cache.hidden_size != size {
            return refuse("hidden_size", cache.hidden_size.to_string(), format!("{size}, the target's"));
        }
        if !reads.kv.is_empty() {
            let expected = format!("those of layers {:?}, which the drafter reads", reads.layers());
            return refuse("keys and values", "none".into(), expected);
        }
        if reads.hidden.iter().any(|layer| !cache.layers.contains(layer)) {
            let ids = |layers: &[usize]| layers.iter().map(|&l| l as i64 - 1).collect::<Vec<_>>();
            let expected = format!("at least {:?}, which the drafter reads", ids(&reads.hidden));
            return refuse("target_layer_ids", format!("{:?}", ids(&cache.layers)), expected);
        }
        Ok(())
    }

    fn holds(&self, document: &Response) -> Result<()> {
        self.number(document).map(|_| ())
    }

    fn read(&mut self, document: &Response, reads: &Reads, target: &Target<B>) -> Result<Stored> {
        let sample = self.cache.sample(self.number(document)?)?;
        let (h, layers) = (self.cache.hidden_size, self.cache.layers.len());
        let norm: Vec<f32> = target.norm().weight.val().into_data().iter::<f32>().collect();
        let real = |width: usize, values: &[f32]| -> Vec<f32> {
            let rows = values.chunks_exact(width).zip(&sample.attention_mask);
            // A document ends with its last supervised token; what came behind has no say in what was before.
            let rows = rows.filter(|(_, real)| **real).take(document.tokens());
            rows.flat_map(|(row, _)| row).copied().collect()
        };
        let mut last = real(h, &sample.last);
        for row in last.chunks_exact_mut(h) {
            // A weight of zero hides its column whatever stands there.
            row.iter_mut().zip(&norm).for_each(|(x, w)| *x = if *w == 0.0 { 0.0 } else { *x / w });
        }
        let tokens = document.tokens();
        let fused = TensorData::new(real(layers * h, &sample.features), [tokens, layers * h]);
        Ok(Stored {
            fused: columns(fused, &self.cache.layers, &reads.hidden, h),
            last: TensorData::new(last, [tokens, h]),
            layers: Vec::new(),
        })
    }
}
