//! Mamba-2: the state space recurrence, its parallel scan, and the mixer around it.
//!
//! A head keeps a state `S: [p, n]`. At step `t` it forgets a little and writes the outer product of
//! its input and a key; a query reads the result (Mamba-2, arXiv 2405.21060; H-Spec, arXiv
//! 2609.24197, starts `S₀` from one projected hidden state of the target instead of zeros):
//!
//! ```text
//! S_t = exp(Δ_t A) S_{t-1} + Δ_t x_t B_tᵀ        A < 0, Δ_t > 0, one of each per head
//! y_t = S_t C_t + D x_t
//! ```
//!
//! [`ssd_recurrent`] computes this literally, one step after the other: it is the reference.
//! [`ssd_scan`] computes the same by the dual form (state space duality): within a chunk `y = M x`
//! with `M_ij = exp(Σ_{j<k≤i} Δ_k A) (C_i · B_j) Δ_j` for `j ≤ i`, so a block of eight slots is one
//! small matrix product, and longer sequences hand the state from chunk to chunk. [`Mamba2Mixer`]
//! adds the projections, the short causal convolution and the gated norm.
//!
//! ```
//! use burn::tensor::{Distribution, Tensor};
//! use hspec_mamba::{SsdInputs, ssd_recurrent, ssd_scan};
//! type B = burn_ndarray::NdArray;
//!
//! let device = Default::default();
//! let normal = Distribution::Normal(0.0, 1.0);
//! let inputs = SsdInputs::<B> {
//!     x: Tensor::random([1, 8, 4, 16], normal, &device), // one block of 8 slots, 4 heads of 16
//!     dt: Tensor::random([1, 8, 4], Distribution::Uniform(0.1, 1.0), &device),
//!     a: Tensor::from_floats([-1.0, -2.0, -3.0, -4.0], &device),
//!     b: Tensor::random([1, 8, 2, 4], normal, &device), // 2 groups share B and C, state size 4
//!     c: Tensor::random([1, 8, 2, 4], normal, &device),
//!     d: Tensor::ones([4], &device),
//! };
//! let seed = Tensor::random([1, 4, 16, 4], normal, &device);
//! let (y, state) = ssd_scan(inputs.clone(), Some(seed.clone()));
//! let (expected, _) = ssd_recurrent(inputs, Some(seed));
//! assert_eq!(state.dims(), [1, 4, 16, 4]);
//! assert!((y - expected).abs().max().into_scalar() < 1e-4);
//! ```
//!
//! Features: `flex` computes what lies between a mixer's projections in one pass on the flex backend.

mod config;
mod conv;
#[cfg(feature = "flex")]
mod flex;
mod mixer;
mod recurrence;
mod scan;

pub use config::{ConfigError, MambaConfig};
pub use conv::CausalConv1d;
pub use mixer::Mamba2Mixer;
pub use recurrence::{SsdInputs, softplus, ssd_recurrent};
pub use scan::ssd_scan;
