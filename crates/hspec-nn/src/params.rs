//! Reading and writing the parameters of a module by name.
//!
//! A parameter's name is the path of its fields joined by dots (`layers.0.mlp.up_proj.weight`);
//! variants of an enum add nothing to the path. Names double as parameter ids, so that the state of
//! an optimiser finds its parameter again after a restart.

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    tensor::{
        DType, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use std::collections::BTreeMap;

/// Why a module could not be filled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadError {
    /// The source has no tensor of this name.
    Missing {
        /// Name of the parameter.
        name: String,
        /// Its shape.
        expected: Vec<usize>,
    },
    /// The source's tensor has another shape.
    Shape {
        /// Name of the parameter.
        name: String,
        /// Shape in the source.
        found: Vec<usize>,
        /// Shape of the parameter.
        expected: Vec<usize>,
    },
}

impl std::fmt::Display for LoadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing { name, expected } => {
                write!(f, "tensor {name} is missing (expected shape {expected:?})")
            }
            Self::Shape { name, found, expected } => {
                write!(f, "tensor {name} has shape {found:?}, expected {expected:?}")
            }
        }
    }
}

impl std::error::Error for LoadError {}

/// A stable id for the parameter called `name`.
pub fn stable_id(name: &str) -> ParamId {
    ParamId::from(fingerprint(name.bytes()))
}

/// 64-bit FNV-1a: the same on every machine and in every version.
pub fn fingerprint(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Name, id, shape and gradient flag of every parameter, in field order.
pub fn list<B: Backend, M: Module<B>>(module: &M) -> Vec<ParamInfo> {
    let mut visitor = Lister { path: Path::default(), found: Vec::new() };
    module.visit(&mut visitor);
    visitor.found
}

/// One parameter as [`list`] reports it.
#[derive(Debug, Clone)]
pub struct ParamInfo {
    /// Dotted field path.
    pub name: String,
    /// Id under which optimisers know it.
    pub id: ParamId,
    /// Shape.
    pub shape: Vec<usize>,
    /// Whether gradients are collected for it.
    pub trained: bool,
}

/// The values of every parameter, by name.
pub fn collect<B: Backend, M: Module<B>>(module: &M) -> BTreeMap<String, TensorData> {
    let mut visitor = Collector { path: Path::default(), found: BTreeMap::new() };
    module.visit(&mut visitor);
    visitor.found
}

/// The gradient of every parameter that has one, by name.
pub fn gradients<B: AutodiffBackend, M: Module<B>>(
    module: &M,
    of: &B::Gradients,
) -> BTreeMap<String, TensorData> {
    let mut visitor = Slopes::<B> { path: Path::default(), of, found: BTreeMap::new() };
    module.visit(&mut visitor);
    visitor.found
}

/// Replaces every parameter by what `source` returns for its name (converted to f32), gives each
/// its [`stable_id`], and asks for gradients where `trained(name)` holds.
///
/// # Errors
/// The first parameter that `source` lacks or has in another shape.
pub fn fill<B: Backend, M: Module<B>>(
    module: M,
    device: &B::Device,
    source: impl FnMut(&str) -> Option<TensorData>,
    trained: impl Fn(&str) -> bool,
) -> Result<M, LoadError> {
    let mut filler = Filler { path: Path::default(), device: device.clone(), source, trained, error: None };
    let module = module.map(&mut filler);
    filler.error.map_or(Ok(module), Err)
}

#[derive(Default)]
struct Path(Vec<String>);

impl Path {
    fn enter(&mut self, name: &str, container: &str) {
        if !container.starts_with("Enum") {
            self.0.push(name.to_owned());
        }
    }

    fn exit(&mut self, container: &str) {
        if !container.starts_with("Enum") {
            self.0.pop();
        }
    }

    fn name(&self) -> String {
        self.0.join(".")
    }
}

struct Lister {
    path: Path,
    found: Vec<ParamInfo>,
}

impl<B: Backend> ModuleVisitor<B> for Lister {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }
    fn exit_module(&mut self, _: &str, container: &str) {
        self.path.exit(container);
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.found.push(ParamInfo {
            name: self.path.name(),
            id: param.id,
            // Without making the tensor of a packed layer.
            shape: param.lazy_shape().to_vec(),
            trained: param.is_initialized() && param.is_require_grad(),
        });
    }
}

struct Collector {
    path: Path,
    found: BTreeMap<String, TensorData>,
}

impl<B: Backend> ModuleVisitor<B> for Collector {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }
    fn exit_module(&mut self, _: &str, container: &str) {
        self.path.exit(container);
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.found.insert(self.path.name(), param.val().into_data());
    }
}

struct Slopes<'a, B: AutodiffBackend> {
    path: Path,
    of: &'a B::Gradients,
    found: BTreeMap<String, TensorData>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Slopes<'_, B> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }
    fn exit_module(&mut self, _: &str, container: &str) {
        self.path.exit(container);
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(grad) = param.val().grad(self.of) {
            self.found.insert(self.path.name(), grad.into_data());
        }
    }
}

struct Filler<B: Backend, S, T> {
    path: Path,
    device: B::Device,
    source: S,
    trained: T,
    error: Option<LoadError>,
}

impl<B: Backend, S, T> ModuleMapper<B> for Filler<B, S, T>
where
    S: FnMut(&str) -> Option<TensorData>,
    T: Fn(&str) -> bool,
{
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }
    fn exit_module(&mut self, _: &str, container: &str) {
        self.path.exit(container);
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let name = self.path.name();
        let expected = param.lazy_shape().to_vec();
        let tensor = match (self.source)(&name) {
            None => {
                self.error.get_or_insert(LoadError::Missing { name, expected });
                return param;
            }
            Some(data) if data.shape.to_vec() != expected => {
                let found = data.shape.to_vec();
                self.error.get_or_insert(LoadError::Shape { name, found, expected });
                return param;
            }
            Some(data) => Tensor::from_data(data.convert_dtype(DType::F32), &self.device),
        };
        let tensor = tensor.set_require_grad((self.trained)(&name));
        Param::initialized(stable_id(&name), tensor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SwiGlu;
    type B = burn_ndarray::NdArray;

    #[test]
    fn names_are_field_paths_and_a_round_trip_keeps_values() {
        let device = Default::default();
        let from = SwiGlu::<B>::random(2, 3, 1.0, &device);
        let values = collect(&from);
        let names: Vec<_> = values.keys().cloned().collect();
        assert_eq!(names, ["down_proj.weight", "gate_proj.weight", "up_proj.weight"]);
        let to = SwiGlu::<B>::random(2, 3, 1.0, &device);
        let to = fill(to, &device, |n| values.get(n).cloned(), |_| true).unwrap();
        assert_eq!(collect(&to), values);
        assert_eq!(list(&to)[0].id, stable_id("gate_proj.weight"));
    }

    #[test]
    fn a_missing_tensor_and_a_wrong_shape_are_named() {
        let device = Default::default();
        let make = || SwiGlu::<B>::random(2, 3, 1.0, &device);
        let error = fill(make(), &device, |_| None, |_| false).unwrap_err();
        assert_eq!(error.to_string(), "tensor gate_proj.weight is missing (expected shape [3, 2])");
        let wrong = |_: &str| Some(TensorData::new(vec![0f32; 4], [4]));
        let error = fill(make(), &device, wrong, |_| false).unwrap_err();
        assert!(error.to_string().contains("has shape [4], expected [3, 2]"), "{error}");
    }
}
