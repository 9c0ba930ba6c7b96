//! The few layers that targets and drafters share, in the layout that checkpoints use.
//!
//! Burn's own layers name and transpose their weights differently from the Hugging Face files
//! (`gamma` for a norm's `weight`, `[in, out]` for a linear's `[out, in]`). These keep the file's
//! names and shapes, so that a struct's field path *is* the tensor's name and [`params`] can read
//! and write a whole module without a table of renames.
//!
//! | layer | equation |
//! |---|---|
//! | [`Linear`] | `y = x Wᵀ + b`, `W: [out, in]` |
//! | [`RmsNorm`] | `y = x / sqrt(mean(x²) + eps) · w` |
//! | [`SwiGlu`] | `y = W_down (silu(W_gate x) · W_up x)` |
//!
//! ```
//! use burn::tensor::Tensor;
//! use hspec_nn::Linear;
//! type B = burn_ndarray::NdArray;
//!
//! let device = Default::default();
//! let w = Tensor::<B, 2>::from_floats([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], &device);
//! let y = Linear::new(w, None).forward(Tensor::<B, 2>::from_floats([[2.0, 3.0]], &device));
//! assert_eq!(y.to_data().to_vec::<f32>().unwrap(), [2.0, 3.0, 5.0]);
//! ```
//!
//! Features: `flex` gives layers that no longer learn ([`Linear::prepack`]) weights packed in the order in
//! which products read them, and fused bodies on the flex backend, under autodiff too.

pub mod autocast;
#[cfg(feature = "flex")]
pub mod flex;
#[cfg(feature = "flex")]
pub mod gemm;
mod linear;
#[cfg(feature = "flex")]
mod memory;
mod mlp;
#[cfg(feature = "flex")]
pub mod multiply;
mod norm;
#[cfg(feature = "flex")]
pub mod panels;
pub mod params;
mod pool;
#[cfg(feature = "flex")]
mod prepack;
#[cfg(feature = "flex")]
pub mod simd;

pub use autocast::{Compute, autocast};
pub use linear::{Linear, WeightStorage, contiguous};
pub use mlp::{SwiGlu, gated, silu};
pub use norm::RmsNorm;
pub use pool::pass;
