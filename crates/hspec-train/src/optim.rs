//! Optimisers by parameter group, and the global-norm clip.

use crate::{
    muon::Muon,
    recipe::{Loop, OptimizerKind},
};
use burn::{
    module::{AutodiffModule, Module, ModuleVisitor, Param, ParamId},
    optim::{AdamW, AdamWConfig, GradientsParams, Optimizer, adaptor::OptimizerAdaptor},
    record::{FullPrecisionSettings, NamedMpkBytesRecorder, Record, Recorder},
    tensor::{
        ElementConversion, Tensor,
        backend::{AutodiffBackend, Backend},
    },
};
use hspec_core::{Error, Result};
use hspec_nn::params;

type Adam<B, M> = OptimizerAdaptor<AdamW, M, B>;

/// Muon for matrices, AdamW with and without decay for the rest; tables of token vectors are no matrices.
pub struct Optimizers<B: AutodiffBackend, M: AutodiffModule<B>> {
    muon: OptimizerAdaptor<Muon, M, B>,
    decayed: Adam<B, M>,
    plain: Adam<B, M>,
    groups: Groups,
    lr: f64,
    muon_lr: f64,
    clip: f64,
}

struct Groups {
    muon: Vec<ParamId>,
    decayed: Vec<ParamId>,
    plain: Vec<ParamId>,
}

impl<B: AutodiffBackend, M: AutodiffModule<B>> Optimizers<B, M> {
    /// Groups the trained parameters of `module` by name and shape.
    pub fn new(module: &M, recipe: &Loop) -> Self {
        let mut groups = Groups { muon: Vec::new(), decayed: Vec::new(), plain: Vec::new() };
        for p in params::list(module).into_iter().filter(|p| p.trained) {
            let matrix = p.shape.len() == 2 && p.name.ends_with("weight");
            let by_muon = recipe.optimizer == OptimizerKind::Muon
                && !p.name.ends_with("markov_w1.weight")
                && p.name != "embed_tokens.weight"
                && !p.name.starts_with("confidence_head");
            match (matrix, by_muon) {
                (true, true) => groups.muon.push(p.id),
                (true, false) => groups.decayed.push(p.id),
                (false, _) => groups.plain.push(p.id),
            }
        }
        let adam = |decay: f64| AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(decay as f32);
        Self {
            muon: Muon::init(recipe.muon_weight_decay),
            decayed: adam(recipe.weight_decay).init(),
            plain: adam(0.0).init(),
            groups,
            lr: recipe.lr,
            muon_lr: recipe.muon_lr,
            clip: recipe.clip,
        }
    }

    /// One step at `scale` times the peak learning rates; returns the module and the gradient norm
    /// before clipping.
    ///
    /// # Errors
    /// [`Error::Mismatch`] naming the first parameter whose gradient is not finite; the module is lost.
    pub fn step(&mut self, scale: f64, module: M, mut all: GradientsParams) -> Result<(M, f64)> {
        let norm = clip(&module, &mut all, self.clip)?;
        let mut split = Split {
            all,
            from: &self.groups,
            muon: GradientsParams::new(),
            decayed: GradientsParams::new(),
            plain: GradientsParams::new(),
        };
        module.visit(&mut split);
        let Split { muon, decayed, plain, .. } = split;
        let module = self.muon.step(self.muon_lr * scale, module, muon);
        let module = self.decayed.step(self.lr * scale, module, decayed);
        Ok((self.plain.step(self.lr * scale, module, plain), norm))
    }

    /// The optimisers' state.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if it cannot be serialised.
    pub fn save(&self) -> Result<[Vec<u8>; 3]> {
        Ok([
            bytes::<B, _>(self.muon.to_record())?,
            bytes::<B, _>(self.decayed.to_record())?,
            bytes::<B, _>(self.plain.to_record())?,
        ])
    }

    /// Continues from a saved state.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the bytes are not such a state.
    pub fn load(mut self, [muon, decayed, plain]: [Vec<u8>; 3], device: &B::Device) -> Result<Self> {
        self.muon = self.muon.load_record(record::<B, _>(muon, device)?);
        self.decayed = self.decayed.load_record(record::<B, _>(decayed, device)?);
        self.plain = self.plain.load_record(record::<B, _>(plain, device)?);
        Ok(self)
    }
}

type Bytes = NamedMpkBytesRecorder<FullPrecisionSettings>;

fn bytes<B: AutodiffBackend, R: Record<B>>(record: R) -> Result<Vec<u8>> {
    Recorder::<B>::record(&Bytes::new(), record, ())
        .map_err(|e| Error::Mismatch(format!("optimiser state: {e}")))
}

fn record<B: AutodiffBackend, R: Record<B>>(bytes: Vec<u8>, device: &B::Device) -> Result<R> {
    Recorder::<B>::load(&Bytes::new(), bytes, device)
        .map_err(|e| Error::Mismatch(format!("optimiser state: {e}")))
}

/// Scales all gradients so that their joint norm is at most `limit`.
fn clip<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    grads: &mut GradientsParams,
    limit: f64,
) -> Result<f64> {
    let mut squares = Squares { grads, found: Vec::new() };
    module.visit(&mut squares);
    let found = squares.found;
    let total: f64 = found.iter().map(|(_, s)| s).sum();
    if !total.is_finite() {
        let bad = found.iter().find(|(_, s)| !s.is_finite()).map(|(id, _)| *id);
        let name =
            params::list(module).into_iter().find(|p| Some(p.id) == bad).map_or_else(String::new, |p| p.name);
        return Err(Error::Mismatch(format!("the gradient of {name} is not finite")));
    }
    let norm = total.sqrt();
    if norm > limit {
        scale(module, grads, limit / norm);
    }
    Ok(norm)
}

/// Multiplies all gradients by a factor.
pub(crate) fn scale<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    grads: &mut GradientsParams,
    factor: f64,
) {
    if factor != 1.0 {
        module.visit(&mut Scale { grads, factor });
    }
}

/// Adds gradients to others; `more` is empty after it.
pub(crate) fn add<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    grads: &mut GradientsParams,
    more: &mut GradientsParams,
) {
    module.visit(&mut Add { grads, more });
}

/// Refuses parameters that are not finite.
///
/// # Errors
/// [`Error::Mismatch`] naming the first of them.
pub fn check_finite<B: Backend, M: Module<B>>(module: &M) -> Result<()> {
    let mut sums = Sums(Vec::new());
    module.visit(&mut sums);
    match sums.0.iter().position(|sum| !sum.is_finite()) {
        Some(i) => {
            let name = params::list(module).into_iter().nth(i).map_or_else(String::new, |p| p.name);
            Err(Error::Mismatch(format!("parameter {name} is not finite")))
        }
        None => Ok(()),
    }
}

/// The sum of each parameter's magnitudes, in field order.
struct Sums(Vec<f32>);

impl<B: Backend> ModuleVisitor<B> for Sums {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.push(param.val().abs().sum().into_scalar().elem());
    }
}

struct Add<'a> {
    grads: &'a mut GradientsParams,
    more: &'a mut GradientsParams,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Add<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(more) = self.more.remove::<B::InnerBackend, D>(param.id) else { return };
        let sum = match self.grads.remove::<B::InnerBackend, D>(param.id) {
            Some(grad) => grad + more,
            None => more,
        };
        self.grads.register::<B::InnerBackend, D>(param.id, sum);
    }
}

struct Squares<'a> {
    grads: &'a GradientsParams,
    found: Vec<(ParamId, f64)>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(grad) = self.grads.get::<B::InnerBackend, D>(param.id) {
            self.found.push((param.id, squares(grad)));
        }
    }
}

/// The sum of a gradient's squares.
fn squares<B: Backend, const D: usize>(grad: Tensor<B, D>) -> f64 {
    #[cfg(feature = "flex")]
    if let Some(grad) = hspec_nn::flex::contiguous(&grad) {
        return crate::flex::squares(hspec_nn::flex::values(&grad));
    }
    let sum: f32 = (grad.clone() * grad).sum().into_scalar().elem();
    f64::from(sum)
}

struct Scale<'a> {
    grads: &'a mut GradientsParams,
    factor: f64,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) {
            self.grads.register::<B::InnerBackend, D>(param.id, grad.mul_scalar(self.factor));
        }
    }
}

struct Split<'a> {
    all: GradientsParams,
    from: &'a Groups,
    muon: GradientsParams,
    decayed: GradientsParams,
    plain: GradientsParams,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Split<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let id = param.id;
        let Some(grad) = self.all.remove::<B::InnerBackend, D>(id) else { return };
        let to = if self.from.muon.contains(&id) {
            &mut self.muon
        } else if self.from.decayed.contains(&id) {
            &mut self.decayed
        } else {
            &mut self.plain
        };
        to.register::<B::InnerBackend, D>(id, grad);
    }
}
