//! Folders of features, this crate's or DeepSpec's (version 2), that hold a run's documents between them.

use crate::{
    feature_cache::{FeatureCache, MANIFEST},
    features::{Cached, Reads, Stored},
    responses::{Response, drawn, join},
    target_cache::TargetCache,
};
use burn::tensor::backend::Backend;
use hspec_core::{Error, Result, checkpoint::read_json, target::Target};
use std::path::{Path, PathBuf};

/// Several caches as one.
pub struct Caches<B: Backend> {
    caches: Vec<Box<dyn Cached<B>>>,
    dirs: Vec<PathBuf>,
}

impl<B: Backend> Caches<B> {
    /// Opens them.
    ///
    /// # Errors
    /// A manifest that cannot be right, or a cache that is not finished.
    pub fn open(dirs: &[PathBuf]) -> Result<Self> {
        let caches = dirs.iter().map(|dir| open(dir)).collect::<Result<_>>()?;
        Ok(Self { caches, dirs: dirs.to_vec() })
    }

    /// Which of them holds a document.
    fn place(&self, document: &Response) -> Result<usize> {
        if let Some(place) = self.caches.iter().position(|cache| cache.holds(document).is_ok()) {
            return Ok(place);
        }
        if let [only] = &self.caches[..] {
            only.holds(document)?;
        }
        let dirs: Vec<String> = self.dirs.iter().map(|dir| dir.display().to_string()).collect();
        let (id, dirs) = (&document.id, dirs.join(", "));
        Err(Error::Mismatch(format!("document {id:?}: found in none of the caches {dirs}, expected in one")))
    }
}

fn open<B: Backend>(dir: &Path) -> Result<Box<dyn Cached<B>>> {
    match format(dir)? {
        Some(_) => Ok(Box::new(FeatureCache::open(dir)?)),
        None => Ok(Box::new(TargetCache::open(dir)?.by_tokens()?)),
    }
}

/// What a manifest says of its format; DeepSpec's says nothing.
fn format(dir: &Path) -> Result<Option<serde_json::Value>> {
    let manifest: serde_json::Value = read_json(&dir.join(MANIFEST))?;
    Ok(manifest.get("format").cloned())
}

/// What folders of DeepSpec's say was learned, tokens and masks, in a random order that depends on the seed
/// alone; at most `max` documents, unless it is 0.
///
/// # Errors
/// A cache of this crate's, which holds no tokens, and those of [`TargetCache::documents`].
pub fn read_documents(dirs: &[PathBuf], seed: u64, max: usize) -> Result<Vec<Response>> {
    let mut documents = Vec::new();
    for dir in dirs {
        let file = dir.join(MANIFEST);
        if let Some(format) = format(dir)? {
            let expected =
                "a cache of DeepSpec's, which holds the tokens too: name the answers with --responses";
            return Err(Error::invalid(&file, "format", format.to_string(), expected));
        }
        let found = TargetCache::open(dir)?.documents()?;
        if found.is_empty() {
            return Err(Error::invalid(&file, "num_samples", "none to learn from", "at least one"));
        }
        join(&mut documents, found.into_iter().map(|(_, document)| document).collect(), dir);
    }
    Ok(drawn(documents, seed, max))
}

impl<B: Backend> Cached<B> for Caches<B> {
    fn check(&self, reads: &Reads, target: &Target<B>) -> Result<()> {
        self.caches.iter().try_for_each(|cache| cache.check(reads, target))
    }

    fn holds(&self, document: &Response) -> Result<()> {
        self.place(document).map(|_| ())
    }

    fn read(&mut self, document: &Response, reads: &Reads, target: &Target<B>) -> Result<Stored> {
        let place = self.place(document)?;
        self.caches[place].read(document, reads, target)
    }
}
