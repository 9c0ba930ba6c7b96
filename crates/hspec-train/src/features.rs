//! What the target computes for a document, kept in memory between epochs.

use crate::{pack::Packed, responses::Response};
use burn::tensor::{Tensor, backend::Backend};
use hspec_attn::Prefix;
use hspec_core::{
    Result, TokenId,
    target::{Rows, Target, Want},
};
use std::{collections::HashMap, sync::Arc};

/// What a drafter reads of its target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reads {
    /// Hidden ids whose states are fused, ascending.
    pub hidden: Vec<usize>,
    /// Layers whose cache is read, one per attention sub-layer.
    pub kv: Vec<usize>,
}

/// Everything a drafter reads of one document, and what it is judged by.
#[derive(Debug)]
pub struct Features<B: Backend> {
    fused: Tensor<B, 2>,
    last: Tensor<B, 2>,
    /// By position in the ascending list of distinct layers.
    layers: Vec<Prefix<B>>,
}

/// Computes features with a target and remembers them as long as they fit.
pub struct FeatureStore<'a, B: Backend> {
    target: &'a Target<B>,
    fusion: Vec<usize>,
    /// Distinct layers whose cache is read, ascending.
    kv: Vec<usize>,
    /// For each attention sub-layer, its layer's place in `kv`.
    reads: Vec<usize>,
    known: HashMap<usize, Arc<Features<B>>>,
    bytes_left: usize,
}

impl<'a, B: Backend> FeatureStore<'a, B> {
    /// A store that remembers at most `bytes`.
    pub fn new(target: &'a Target<B>, reads: &Reads, bytes: usize) -> Self {
        let mut kv = reads.kv.clone();
        kv.sort_unstable();
        kv.dedup();
        let place = |id: &usize| kv.binary_search(id).expect("taken from the same list");
        let (fusion, reads) = (reads.hidden.clone(), reads.kv.iter().map(place).collect());
        Self { target, fusion, kv, reads, known: HashMap::new(), bytes_left: bytes }
    }

    /// The features of document `number`.
    ///
    /// # Errors
    /// Those of [`Target::forward`].
    pub fn get(&mut self, number: usize, document: &Response) -> Result<Arc<Features<B>>> {
        if let Some(known) = self.known.get(&number) {
            return Ok(known.clone());
        }
        let features = Arc::new(self.compute(document)?);
        let tokens = document.prompt_ids.len() + document.response_ids.len();
        let width = features.fused.dims()[1]
            + features.last.dims()[1]
            + features.layers.iter().map(|p| 2 * p.keys.dims()[0] * p.keys.dims()[2]).sum::<usize>();
        let bytes = tokens * width * size_of::<f32>();
        if bytes <= self.bytes_left {
            self.bytes_left -= bytes;
            self.known.insert(number, features.clone());
        }
        Ok(features)
    }

    fn compute(&self, document: &Response) -> Result<Features<B>> {
        let ids: Vec<TokenId> = document.prompt_ids.iter().chain(&document.response_ids).copied().collect();
        let mut cache = self.target.cache(1, ids.len());
        let mut wanted = self.fusion.clone();
        wanted.push(self.target.config().num_hidden_layers);
        let pass = self.target.forward(&ids, &mut cache, &Want { logits: Rows::None, hidden: &wanted })?;
        let mut hidden: Vec<Tensor<B, 2>> = pass.hidden.into_iter().map(|h| h.squeeze_dim(0)).collect();
        let last = hidden.pop().expect("the last layer's output was asked for");
        let layers = self.kv.iter().map(|&layer| cache.lend(layer)).collect();
        Ok(Features { fused: Tensor::cat(hidden, 1), last, layers })
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
            let (prompt, response) = (&document.prompt_ids, &document.response_ids);
            ids.extend(prompt.iter().chain(response));
            loss_mask.extend((0..prompt.len() + response.len()).map(|i| i >= prompt.len()));
            positions.extend(0..prompt.len() + response.len());
        }
        let joined = |part: &dyn Fn(&Features<B>) -> Tensor<B, 2>| {
            Tensor::cat(features.iter().map(|f| part(f)).collect(), 0)
        };
        let side_by_side = |part: &dyn Fn(&Features<B>) -> Tensor<B, 3>| {
            Tensor::cat(features.iter().map(|f| part(f)).collect(), 1)
        };
        let layers: Vec<Prefix<B>> = (0..self.kv.len())
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
            prefixes: self.reads.iter().map(|&l| layers[l].clone()).collect(),
        })
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
