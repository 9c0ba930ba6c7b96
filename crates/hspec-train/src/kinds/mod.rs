//! What the loop needs of a kind of drafter. A kind is a file of this folder; the loop knows none of them.

mod dspark;
mod eagle3;
mod hspec;
mod layers;
mod peagle;

use crate::{
    features::Reads,
    pack::{Draw, Forward, Judge, Packed},
    recipe::{Recipe, Shape},
};
use burn::{
    module::AutodiffModule,
    tensor::backend::{AutodiffBackend, Backend},
};
use hspec_core::{
    Error, Result,
    checkpoint::StoreAs,
    config::TargetConfig,
    drafter::{DraftVocab, Drafter, outline},
    target::Target,
};
use hspec_nn::params;
use serde_json::Value;
use std::path::Path;

/// What a fresh drafter starts from.
pub struct Start<'a, B: Backend> {
    /// What to do.
    pub recipe: &'a Recipe,
    /// Names the recipe in errors.
    pub file: &'a Path,
    /// The target.
    pub target: &'a Target<B>,
    /// Its name, for the checkpoint.
    pub name: &'a str,
    /// What can be drafted.
    pub vocab: DraftVocab,
}

/// A drafter that learns. The one that decodes, [`Learner::Drafter`], is the same on the backend without
/// gradients.
pub trait Learner<B: AutodiffBackend>: Clone + Send + Sized {
    /// Its parameters.
    type Module: AutodiffModule<B>;
    /// Decodes, and lies in checkpoints.
    type Drafter: Drafter<B::InnerBackend>;

    /// A fresh drafter whose copies and warm start come from the target.
    ///
    /// # Errors
    /// A recipe that does not fit the target.
    fn fresh(start: Start<'_, B::InnerBackend>) -> Result<Self::Drafter>;

    /// Reads a drafter from a folder.
    ///
    /// # Errors
    /// Files that are missing, damaged, of another kind, or made for another target.
    fn load(dir: &Path, target: &Target<B::InnerBackend>) -> Result<Self::Drafter>;

    /// Writes a drafter into a folder, without the target's tensors.
    ///
    /// # Errors
    /// When the folder cannot be written.
    fn save(drafter: &Self::Drafter, dir: &Path, store: StoreAs) -> Result<()>;

    /// Its vocabulary.
    fn vocab(drafter: &Self::Drafter) -> &DraftVocab;

    /// What it reads of the target.
    fn reads(drafter: &Self::Drafter) -> Reads;

    /// The same drafter with gradients for what training changes; `file` names its configuration in errors.
    ///
    /// # Errors
    /// None for a drafter that was loaded or made.
    fn learner(drafter: &Self::Drafter, device: &B::Device, file: &Path) -> Result<Self>;

    /// Gives a drafter the weights learned so far.
    fn teach(&self, drafter: &mut Self::Drafter);

    /// Its parameters.
    fn module(&self) -> &Self::Module;

    /// Puts other parameters in their place.
    fn replace(&mut self, module: Self::Module);

    /// The first slot that predicts.
    fn first_slot(&self) -> usize;

    /// Runs it over a row; nothing where the row has no token to learn from.
    fn forward(&self, row: &Packed<B>, draw: &Draw, judge: &Judge<B::InnerBackend>) -> Option<Forward<B>>;
}

/// A module's values with gradients for the parameters of some names.
///
/// # Errors
/// None for a module of the same configuration.
fn with_gradients<B: AutodiffBackend, M: AutodiffModule<B>>(
    fresh: M,
    from: &impl burn::module::Module<B::InnerBackend>,
    device: &B::Device,
    trained: impl Fn(&str) -> bool,
) -> Result<M> {
    let values = params::collect(from);
    params::fill(fresh, device, |n| values.get(n).cloned(), trained)
        .map_err(|e| Error::Mismatch(e.to_string()))
}

/// A module's parameters under the ids that optimisers know, without gradients.
///
/// # Errors
/// None: names and shapes are the module's own.
fn named<B: Backend, M: burn::module::Module<B>>(module: M, device: &B::Device) -> Result<M> {
    let values = params::collect(&module);
    params::fill(module, device, |n| values.get(n).cloned(), |_| false)
        .map_err(|e| Error::Mismatch(format!("warm start: {e}")))
}

/// The `config.json` of the drafter that a recipe asks for; `name` is the target's, `file` names the recipe in
/// errors.
///
/// # Errors
/// A shape that cannot be right or does not fit the target.
pub fn config(recipe: &Recipe, target: &TargetConfig, name: &str, file: &Path) -> Result<Value> {
    match &recipe.drafter {
        Shape::HSpec(shape) => {
            let config = hspec::config(shape, recipe.train.anchors_per_step, target, name, file)?;
            serde_json::to_value(config)
                .map_err(|e| Error::invalid(file, "drafter", e.to_string(), "what JSON can say"))
        }
        Shape::DSpark(_) | Shape::DFlash(_) | Shape::DFlash2(_) | Shape::Domino(_) => {
            dspark::config(&recipe.drafter, target, name, file)
        }
        Shape::Eagle3(_) | Shape::PEagle(_) => eagle3::config(&recipe.drafter, target, name, file),
    }
}

/// What the drafter that a recipe asks for reads of its target; `file` names the recipe in errors.
///
/// # Errors
/// A shape that cannot be right or does not fit the target.
pub fn reads(recipe: &Recipe, target: &TargetConfig, file: &Path) -> Result<Reads> {
    let config = config(recipe, target, "", file)?;
    let description = outline(&config, file, Some(target.num_hidden_layers))?.description;
    let hidden = description.feature_layers.unwrap_or_default();
    Ok(Reads { hidden, kv: description.kv_layers })
}

/// Refuses a warm start that the kind or the target cannot give; `file` names the recipe in errors.
///
/// # Errors
/// [`Error::Invalid`] naming the field.
pub fn check_warm_start(recipe: &Recipe, target: &TargetConfig, file: &Path) -> Result<()> {
    let train = &recipe.train;
    let refuse =
        |field: &str, found: String, expected: String| Err(Error::invalid(file, field, found, expected));
    let (mlp, start) = (&train.mlp_layers, &train.start_layers);
    let elsewhere = match &recipe.drafter {
        Shape::HSpec(_) => {
            ("train.start_layers", start, "hspec, whose attention starts from drafter.kv_layers")
        }
        _ => ("train.mlp_layers", mlp, "this kind: its layers start from train.start_layers"),
    };
    if let (field, ids @ [_, ..], kind) = (elsewhere.0, elsewhere.1.as_slice(), elsewhere.2) {
        return refuse(field, format!("{ids:?}"), format!("none for {kind}"));
    }
    match &recipe.drafter {
        Shape::HSpec(shape) => hspec::check_warm_start(shape, train, file),
        Shape::DSpark(s) => layers::check_warm_start(s.layers, train, file),
        Shape::DFlash(s) => layers::check_warm_start(s.layers, train, file),
        Shape::DFlash2(s) => layers::check_warm_start(s.layers, train, file),
        Shape::Domino(s) => layers::check_warm_start(s.layers, train, file),
        Shape::Eagle3(_) | Shape::PEagle(_) => eagle3::check_warm_start(train, file),
    }?;
    if train.warm_start == crate::recipe::WarmStart::Layers {
        let theirs = target.intermediate_size;
        let ours = recipe.drafter.intermediate_size();
        if ours != theirs {
            let expected = format!("{theirs}, the target's, with warm_start = \"layers\"");
            return refuse("drafter.intermediate_size", ours.to_string(), expected);
        }
    }
    let layers = target.num_hidden_layers;
    for (field, ids) in [("train.mlp_layers", mlp), ("train.start_layers", start)] {
        if let Some(id) = ids.iter().find(|&&id| id >= layers) {
            return refuse(field, id.to_string(), format!("layers below {layers}"));
        }
    }
    Ok(())
}
