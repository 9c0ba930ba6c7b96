//! The heads against outputs and gradients of reference implementations.

mod dflash2;
mod domino;
mod markov;

use burn::{
    backend::Autodiff,
    tensor::{Tensor, backend::AutodiffBackend},
};
use hspec_goldens::{Golden, Tolerance, assert_close};

const FORWARD: Tolerance = Tolerance::Absolute(2e-5);
const GRADIENT: f32 = 1e-4;

fn values<B: AutodiffBackend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// Gradients are compared relative to the largest one of their tensor.
fn assert_gradient<B: AutodiffBackend, const D: usize>(
    golden: &Golden,
    field: &str,
    tensor: &Tensor<B, D>,
    gradients: &B::Gradients,
) {
    let found = values::<Autodiff<B::InnerBackend>, D>(Tensor::from_inner(
        tensor.grad(gradients).unwrap_or_else(|| panic!("{field} got no gradient")),
    ));
    let reference = golden.f32s(field);
    let largest = reference.iter().fold(0f32, |m, r| m.max(r.abs()));
    assert_close(field, &found, &reference, Tolerance::Absolute(GRADIENT * largest));
}

/// What follows `prefix` in the names of the folder's fixtures. Only a folder named from outside may hold
/// none.
fn fixtures(prefix: &str) -> Vec<String> {
    let folder = hspec_goldens::root().join("dspark");
    let foreign = std::env::var_os("HSPEC_GOLDENS").is_some();
    if foreign && !folder.exists() {
        return Vec::new();
    }
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut found = Vec::new();
    for entry in entries {
        let name = entry.expect("a readable folder").file_name().into_string().expect("a UTF-8 name");
        if let Some(rest) = name.strip_prefix(prefix).and_then(|n| n.strip_suffix(".safetensors")) {
            found.push(rest.to_owned());
        }
    }
    assert!(foreign || !found.is_empty(), "{} holds no {prefix}*", folder.display());
    found
}
