//! Target features in files: written once, read by every run that trains on the same documents.
//!
//! A folder holds `manifest.json` and shards in the safetensors format. The manifest is written before the first
//! shard and says which documents go where and how large each shard will be; a shard's checksum is entered when
//! the shard is whole, so that a killed run continues with the first one that has none. A document's tensors bear
//! its [`key`], a hash of its tokens:
//!
//! ```text
//! KEY.hidden [S, F * H] | KEY.last [S, H] | KEY.keys.L, KEY.values.L [kv_heads, S, head_dim]
//! ```

use crate::{
    features::{Cached, Features, Reads, Stored},
    responses::Response,
    run_dir::target_hash,
};
use burn::tensor::{TensorData, backend::Backend};
use hspec_core::{
    Error, Result,
    checkpoint::{StoreAs, Weights, read_json, write_atomic, write_safetensors},
    target::Target,
};
use hspec_nn::params::fingerprint;
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
};

/// Names the format and its version.
const FORMAT: &str = "hspec-features-1";
/// Bytes after which a shard is full, unless told otherwise: what is computed between two safe points.
pub const SHARD_BYTES: u64 = 256 << 20;
pub(crate) const MANIFEST: &str = "manifest.json";

/// What a cache holds, and how far it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    format: String,
    /// Hash of the target.
    target: String,
    /// Hidden ids, ascending: id L is the residual stream entering layer L.
    hidden_layers: Vec<usize>,
    /// Layers whose keys and values are there, ascending.
    kv_layers: Vec<usize>,
    hidden_size: usize,
    kv_heads: usize,
    head_dim: usize,
    /// `f32` or `bf16`.
    dtype: Dtype,
    /// Documents in all.
    pub documents: usize,
    /// Their tokens.
    pub tokens: usize,
    /// Shards in order.
    shards: Vec<Shard>,
}

/// How floats are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Dtype {
    F32,
    Bf16,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shard {
    file: String,
    /// Keys of its documents and their tokens.
    documents: Vec<(String, usize)>,
    /// Bytes of its tensors.
    bytes: u64,
    /// Hash of the file; none until it is whole.
    checksum: Option<String>,
}

/// A document's name in a cache: a hash of its tokens.
pub fn key(document: &Response) -> String {
    format!("{:016x}", fingerprint(document.ids().flat_map(|id| id.0.to_le_bytes())))
}

impl Manifest {
    /// Plans a cache with shards of at most `shard` bytes, or one document each. Documents of the same tokens are
    /// stored once.
    ///
    /// # Errors
    /// A layer that the target lacks, or no document.
    pub fn plan<B: Backend>(
        documents: &[Response],
        reads: &Reads,
        target: &Target<B>,
        store: StoreAs,
        shard: u64,
    ) -> Result<Self> {
        let config = target.config();
        let refuse = |what, found: String, expected: String| Err(Error::Request { what, found, expected });
        if let Some(id) = reads.hidden.iter().find(|&&id| id > config.num_hidden_layers) {
            return refuse("hidden layer", id.to_string(), format!("at most {}", config.num_hidden_layers));
        }
        if let Some(id) = reads.kv.iter().find(|&&id| id >= config.num_hidden_layers) {
            return refuse("key-value layer", id.to_string(), format!("below {}", config.num_hidden_layers));
        }
        if documents.is_empty() {
            return refuse("documents", "0".into(), "at least 1".into());
        }
        let mut manifest = Self {
            format: FORMAT.into(),
            target: target_hash(target),
            hidden_layers: reads.hidden.clone(),
            kv_layers: reads.layers(),
            hidden_size: config.hidden_size,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            dtype: if store == StoreAs::F32 { Dtype::F32 } else { Dtype::Bf16 },
            documents: 0,
            tokens: 0,
            shards: Vec::new(),
        };
        let mut seen = std::collections::HashSet::new();
        for document in documents {
            let (key, tokens) = (key(document), document.tokens());
            if !seen.insert(key.clone()) {
                continue;
            }
            manifest.documents += 1;
            manifest.tokens += tokens;
            let bytes = tokens as u64 * manifest.bytes_per_token();
            match manifest.shards.last_mut() {
                Some(last) if last.bytes + bytes <= shard => {
                    last.bytes += bytes;
                    last.documents.push((key, tokens));
                }
                _ => {
                    let file = format!("shard-{:05}.safetensors", manifest.shards.len());
                    let documents = vec![(key, tokens)];
                    manifest.shards.push(Shard { file, documents, bytes, checksum: None });
                }
            }
        }
        Ok(manifest)
    }

    /// Bytes that a token takes.
    pub fn bytes_per_token(&self) -> u64 {
        let hidden = (self.hidden_layers.len() + 1) * self.hidden_size;
        let kv = 2 * self.kv_layers.len() * self.kv_heads * self.head_dim;
        let size = if self.dtype == Dtype::F32 { 4 } else { 2 };
        (hidden + kv) as u64 * size
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes).sum()
    }

    /// Bytes that are still to be written.
    pub fn bytes_left(&self) -> u64 {
        self.shards.iter().filter(|shard| shard.checksum.is_none()).map(|shard| shard.bytes).sum()
    }

    /// Documents whose shards are whole.
    pub fn documents_done(&self) -> usize {
        self.shards.iter().filter(|shard| shard.checksum.is_some()).map(|shard| shard.documents.len()).sum()
    }

    /// Opens the cache that this plan makes in a folder: the plan itself, or as far as an earlier run came.
    ///
    /// # Errors
    /// A folder that cannot be written or that holds another cache.
    pub fn resume(mut self, dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
        let file = dir.join(MANIFEST);
        if !file.exists() {
            self.write(dir)?;
            return Ok(self);
        }
        let found = Self::read(&file)?;
        let mut bare = found.clone();
        bare.shards.iter_mut().for_each(|shard| shard.checksum = None);
        if bare != self {
            let found = "another cache: of other documents, layers, types or another target";
            return Err(Error::invalid(dir, "folder", found, "an empty folder, or the cache to continue"));
        }
        self = found;
        for shard in &mut self.shards {
            // What was written after a crash of the machine may be missing though its checksum is there.
            let whole = std::fs::metadata(dir.join(&shard.file)).is_ok_and(|m| m.len() > shard.bytes);
            if !whole {
                shard.checksum = None;
            }
        }
        Ok(self)
    }

    fn read(file: &Path) -> Result<Self> {
        let manifest: Self = read_json(file)?;
        if manifest.format != FORMAT {
            return Err(Error::invalid(file, "format", manifest.format, FORMAT));
        }
        for shard in &manifest.shards {
            // A name with a path in it would read files that are none of this folder's.
            if Path::new(&shard.file).file_name().is_none_or(|name| name != shard.file.as_str()) {
                return Err(Error::invalid(
                    file,
                    "shards",
                    &shard.file,
                    "names of files beside the manifest",
                ));
            }
        }
        Ok(manifest)
    }

    fn write(&self, dir: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).expect("plain fields always serialise");
        write_atomic(&dir.join(MANIFEST), |out| out.write_all(text.as_bytes()))
    }

    /// Computes and writes what is missing; `progress` is told how many documents are done.
    ///
    /// # Errors
    /// When the folder cannot be written, or a document cannot be computed.
    pub fn fill<B: Backend>(
        &mut self,
        dir: &Path,
        documents: &[Response],
        target: &Target<B>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<()> {
        let by_key: HashMap<String, &Response> = documents.iter().map(|d| (key(d), d)).collect();
        let reads = Reads { hidden: self.hidden_layers.clone(), kv: self.kv_layers.clone() };
        let store = if self.dtype == Dtype::F32 { StoreAs::F32 } else { StoreAs::Bf16 };
        progress(self.documents_done());
        for number in 0..self.shards.len() {
            let Shard { file, documents, checksum, .. } = self.shards[number].clone();
            if checksum.is_some() {
                continue;
            }
            let done = self.documents_done();
            let mut tensors = BTreeMap::new();
            for (i, (key, _)) in documents.iter().enumerate() {
                let document = by_key.get(key).expect("the plan was made from these documents");
                let Stored { fused, last, layers } = Features::compute(document, &reads, target)?.store();
                tensors.insert(format!("{key}.hidden"), fused);
                tensors.insert(format!("{key}.last"), last);
                for (layer, (keys, values)) in reads.kv.iter().zip(layers) {
                    tensors.insert(format!("{key}.keys.{layer}"), keys);
                    tensors.insert(format!("{key}.values.{layer}"), values);
                }
                progress(done + i + 1);
            }
            let path = dir.join(file);
            write_safetensors(&path, &tensors, store)?;
            self.shards[number].checksum = Some(checksum_of(&path)?);
            self.write(dir)?;
        }
        Ok(())
    }
}

fn checksum_of(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(Error::io(path))?;
    Ok(format!("{:016x}", fingerprint(bytes.into_iter())))
}

/// A whole cache.
pub struct FeatureCache {
    dir: PathBuf,
    manifest: Manifest,
    /// The shard of each document, and its tokens.
    places: HashMap<String, (usize, usize)>,
    /// Shards that were opened, after their checksum had been found right.
    open: Vec<Option<Weights>>,
}

impl FeatureCache {
    /// Opens one.
    ///
    /// # Errors
    /// A manifest that cannot be right, or a cache that is not finished.
    pub fn open(dir: &Path) -> Result<Self> {
        let file = dir.join(MANIFEST);
        let manifest = Manifest::read(&file)?;
        let missing = manifest.shards.iter().filter(|shard| shard.checksum.is_none()).count();
        if missing > 0 {
            let found = format!("{missing} of {} unfinished", manifest.shards.len());
            let expected = "all finished; the command that writes the cache continues it";
            return Err(Error::invalid(file, "shards", found, expected));
        }
        let place = |(number, shard): (usize, &Shard)| {
            let place = move |(key, tokens): (String, usize)| (key, (number, tokens));
            shard.documents.clone().into_iter().map(place).collect::<Vec<_>>()
        };
        let places = manifest.shards.iter().enumerate().flat_map(place).collect();
        let open = manifest.shards.iter().map(|_| None).collect();
        Ok(Self { dir: dir.to_owned(), manifest, places, open })
    }

    /// The shard of a document, and its tokens.
    fn place(&self, document: &Response) -> Result<(usize, usize)> {
        self.places.get(&key(document)).copied().ok_or_else(|| {
            let expected = format!("one of the {} that were cached", self.manifest.documents);
            let file = self.dir.join(MANIFEST);
            Error::invalid(file, format!("document {:?}", document.id), "none", expected)
        })
    }

    fn shard(&mut self, number: usize) -> Result<&Weights> {
        let Shard { file, checksum, .. } = &self.manifest.shards[number];
        let path = self.dir.join(file);
        let slot = &mut self.open[number];
        if slot.is_none() {
            let found = checksum_of(&path)?;
            if Some(&found) != checksum.as_ref() {
                let expected = format!("{}, as the manifest says", checksum.clone().unwrap_or_default());
                return Err(Error::invalid(path, "checksum", found, expected));
            }
            *slot = Some(Weights::open_file(&path)?);
        }
        Ok(slot.as_ref().expect("opened just before"))
    }
}

impl<B: Backend> Cached<B> for FeatureCache {
    fn check(&self, reads: &Reads, target: &Target<B>) -> Result<()> {
        let (m, file) = (&self.manifest, self.dir.join(MANIFEST));
        let hash = target_hash(target);
        if m.target != hash {
            return Err(Error::invalid(file, "target", &m.target, format!("{hash}, the target's hash")));
        }
        for (field, found, wanted) in
            [("hidden_layers", &m.hidden_layers, &reads.hidden), ("kv_layers", &m.kv_layers, &reads.layers())]
        {
            if wanted.iter().any(|layer| !found.contains(layer)) {
                let expected = format!("at least {wanted:?}, which the drafter reads");
                return Err(Error::invalid(file, field, format!("{found:?}"), expected));
            }
        }
        Ok(())
    }

    fn holds(&self, document: &Response) -> Result<()> {
        self.place(document).map(|_| ())
    }

    fn read(&mut self, document: &Response, reads: &Reads, _: &Target<B>) -> Result<Stored> {
        let (key, (shard, tokens)) = (key(document), self.place(document)?);
        let Manifest { hidden_size, kv_heads, head_dim, .. } = self.manifest;
        let hidden_layers = self.manifest.hidden_layers.clone();
        let weights = self.shard(shard)?;
        let tensor = |name: String, shape: Vec<usize>| {
            let data = weights.tensor(&name)?.filter(|data| data.shape.to_vec() == shape);
            data.ok_or_else(|| {
                Error::invalid(weights.path(), &name, "none of this shape", format!("a tensor {shape:?}"))
            })
        };
        let hidden = tensor(format!("{key}.hidden"), vec![tokens, hidden_layers.len() * hidden_size])?;
        let kv = vec![kv_heads, tokens, head_dim];
        let pair = |layer: usize| {
            let part = |part: &str| tensor(format!("{key}.{part}.{layer}"), kv.clone());
            Ok((part("keys")?, part("values")?))
        };
        Ok(Stored {
            fused: columns(hidden, &hidden_layers, &reads.hidden, hidden_size),
            last: tensor(format!("{key}.last"), vec![tokens, hidden_size])?,
            layers: reads.layers().into_iter().map(pair).collect::<Result<_>>()?,
        })
    }
}

/// Of `[S, F * H]` for the layers `from`, the columns of the layers `to`, which are among them.
pub(crate) fn columns(data: TensorData, from: &[usize], to: &[usize], width: usize) -> TensorData {
    if from == to {
        return data;
    }
    let places: Vec<usize> = to.iter().filter_map(|id| from.iter().position(|f| f == id)).collect();
    let all: Vec<f32> = data.iter::<f32>().collect();
    let rows: Vec<f32> = (all.chunks_exact(from.len() * width))
        .flat_map(|row| places.iter().flat_map(|&p| &row[p * width..(p + 1) * width]))
        .copied()
        .collect();
    let tokens = rows.len() / (places.len() * width).max(1);
    TensorData::new(rows, [tokens, places.len() * width])
}
