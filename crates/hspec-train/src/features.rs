//! What the target computes for a document: computed when it is needed or read from a cache, and kept in memory
//! between epochs.

use crate::{pack::Packed, responses::Response};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use hspec_attn::Prefix;
use hspec_core::{
    Result, TokenId,
    target::{Rows, Target, Want},
};
use std::{collections::HashMap, sync::Arc};

/// What a drafter reads of its target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reads {
    /// Hidden ids, ascending.
    pub hidden: Vec<usize>,
    /// Layers whose keys and values are read, one for each of the drafter's attention sub-layers; none where it
    /// keeps a cache of its own.
    pub kv: Vec<usize>,
}

impl Reads {
    /// The distinct layers of `kv`, ascending.
    pub fn layers(&self) -> Vec<usize> {
        let mut layers = self.kv.clone();
        layers.sort_unstable();
        layers.dedup();
        layers
    }
}

/// Everything a drafter reads of one document of S tokens, and what it is judged by.
#[derive(Debug)]
pub struct Features<B: Backend> {
    /// `[S, F * H]`.
    fused: Tensor<B, 2>,
    /// Output of the last layer before the final norm, `[S, H]`.
    last: Tensor<B, 2>,
    /// By position in the ascending list of distinct layers.
    layers: Vec<Prefix<B>>,
}

/// The same as they lie in a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// `[S, F * H]`.
    pub fused: TensorData,
    /// `[S, H]`.
    pub last: TensorData,
    /// Keys and values, each `[kv_heads, S, head_dim]`.
    pub layers: Vec<(TensorData, TensorData)>,
}

/// Features that were computed before.
pub trait Cached<B: Backend>: Send {
    /// Refuses what is not in it, or is another target's.
    ///
    /// # Errors
    /// Names the file and what is missing.
    fn check(&self, reads: &Reads, target: &Target<B>) -> Result<()>;

    /// Refuses a document that is not in it.
    ///
    /// # Errors
    /// Names the file and the document.
    fn holds(&self, document: &Response) -> Result<()>;

    /// The features of a document.
    ///
    /// # Errors
    /// Those of [`holds`](Self::holds), and a file that cannot be read.
    fn read(&mut self, document: &Response, reads: &Reads, target: &Target<B>) -> Result<Stored>;
}

/// Computes or reads features and remembers them as long as they fit.
pub struct FeatureStore<'a, B: Backend> {
    target: &'a Target<B>,
    cached: Option<Box<dyn Cached<B>>>,
    reads: Reads,
    /// For each attention sub-layer, its layer's place among the distinct ones.
    places: Vec<usize>,
    known: HashMap<usize, Arc<Features<B>>>,
    bytes_left: usize,
}

impl<'a, B: Backend> FeatureStore<'a, B> {
    /// A store that remembers at most `bytes`.
    pub fn new(target: &'a Target<B>, reads: Reads, bytes: usize) -> Self {
        let layers = reads.layers();
        let place = |id: &usize| layers.binary_search(id).expect("taken from the same list");
        let places = reads.kv.iter().map(place).collect();
        Self { target, cached: None, reads, places, known: HashMap::new(), bytes_left: bytes }
    }

    /// Reads features from a cache in the place of computing them.
    ///
    /// # Errors
    /// A cache that lacks something.
    pub fn cached(mut self, cache: Box<dyn Cached<B>>) -> Result<Self> {
        cache.check(&self.reads, self.target)?;
        self.cached = Some(cache);
        Ok(self)
    }

    /// The features of document `number`.
    ///
    /// # Errors
    /// Those of [`Target::forward`] or [`Cached::read`].
    pub fn get(&mut self, number: usize, document: &Response) -> Result<Arc<Features<B>>> {
        if let Some(known) = self.known.get(&number) {
            return Ok(known.clone());
        }
        let features = Arc::new(match &mut self.cached {
            Some(cache) => {
                Features::load(cache.read(document, &self.reads, self.target)?, self.target.device())
            }
            None => Features::compute(document, &self.reads, self.target)?,
        });
        let width = features.fused.dims()[1]
            + features.last.dims()[1]
            + features.layers.iter().map(|p| 2 * p.keys.dims()[0] * p.keys.dims()[2]).sum::<usize>();
        let bytes = document.tokens() * width * size_of::<f32>();
        if bytes <= self.bytes_left {
            self.bytes_left -= bytes;
            self.known.insert(number, features.clone());
        }
        Ok(features)
    }

    /// Packs documents side by side.
    ///
    /// # Errors
    /// Those of [`FeatureStore::get`].
    pub fn pack(&mut self, documents: &[(usize, &Response)]) -> Result<Packed<B>> {
        let features: Vec<Arc<Features<B>>> =
            documents.iter().map(|&(number, document)| self.get(number, document)).collect::<Result<_>>()?;
        let (mut ids, mut loss_mask, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        for (_, document) in documents {
            ids.extend(document.ids());
            loss_mask.extend(document.loss_mask());
            positions.extend(0..document.tokens());
        }
        let joined = |part: &dyn Fn(&Features<B>) -> Tensor<B, 2>| {
            Tensor::cat(features.iter().map(|f| part(f)).collect(), 0)
        };
        let side_by_side = |part: &dyn Fn(&Features<B>) -> Tensor<B, 3>| {
            Tensor::cat(features.iter().map(|f| part(f)).collect(), 1)
        };
        let layers: Vec<Prefix<B>> = (0..self.reads.layers().len())
            .map(|l| Prefix {
                keys: side_by_side(&|f| f.layers[l].keys.clone()),
                values: side_by_side(&|f| f.layers[l].values.clone()),
            })
            .collect();
        Ok(Packed {
            ids,
            loss_mask,
            positions,
            fused: joined(&|f| f.fused.clone()),
            last: joined(&|f| f.last.clone()),
            prefixes: self.places.iter().map(|&l| layers[l].clone()).collect(),
        })
    }
}

impl<B: Backend> Features<B> {
    /// One pass of the target over the document.
    ///
    /// # Errors
    /// Those of [`Target::forward`].
    pub fn compute(document: &Response, reads: &Reads, target: &Target<B>) -> Result<Self> {
        let ids: Vec<TokenId> = document.ids().collect();
        let mut cache = target.cache(1, ids.len());
        let mut wanted = reads.hidden.clone();
        wanted.push(target.config().num_hidden_layers);
        let pass = target.forward(&ids, &mut cache, &Want { logits: Rows::None, hidden: &wanted })?;
        let mut hidden: Vec<Tensor<B, 2>> = pass.hidden.into_iter().map(|h| h.squeeze_dim(0)).collect();
        let last = hidden.pop().expect("the last layer's output was asked for");
        let layers = reads.layers().into_iter().map(|layer| cache.lend(layer)).collect();
        Ok(Self { fused: Tensor::cat(hidden, 1), last, layers })
    }

    fn load(stored: Stored, device: &B::Device) -> Self {
        let prefix = |(keys, values)| Prefix {
            keys: Tensor::from_data(keys, device),
            values: Tensor::from_data(values, device),
        };
        Self {
            fused: Tensor::from_data(stored.fused, device),
            last: Tensor::from_data(stored.last, device),
            layers: stored.layers.into_iter().map(prefix).collect(),
        }
    }

    /// As they go into a file.
    pub fn store(self) -> Stored {
        let data = |prefix: Prefix<B>| (prefix.keys.into_data(), prefix.values.into_data());
        Stored {
            fused: self.fused.into_data(),
            last: self.last.into_data(),
            layers: self.layers.into_iter().map(data).collect(),
        }
    }
}

impl<B: Backend> Packed<B> {
    /// The same values as constants of an autodiff backend.
    pub fn constant<A: burn::tensor::backend::AutodiffBackend<InnerBackend = B>>(self) -> Packed<A> {
        let prefix =
            |p: Prefix<B>| Prefix { keys: Tensor::from_inner(p.keys), values: Tensor::from_inner(p.values) };
        Packed {
            ids: self.ids,
            loss_mask: self.loss_mask,
            positions: self.positions,
            fused: Tensor::from_inner(self.fused),
            last: Tensor::from_inner(self.last),
            prefixes: self.prefixes.into_iter().map(prefix).collect(),
        }
    }
}
