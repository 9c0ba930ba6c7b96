//! Trains drafters on what their target says.
//!
//! 1. Conversations are drawn from prompt files ([`select`]) and the target answers them ([`responses`]); what
//!    it says is the only text a drafter learns.
//! 2. For a document the target runs once and leaves what the drafter reads: hidden states of the
//!    fusion layers and the keys and values of the layers it borrows ([`features`]), on disk if wanted
//!    ([`feature_cache`], [`caches`]).
//! 3. Documents are packed ([`pack`]), and all drafts of a row run at once through the code that also decodes;
//!    how, is a kind's own ([`kinds`]).
//! 4. The corrected logits are held against the target's own ([`loss`], [`objective`]), and AdamW or Muon
//!    moves the weights ([`optim`]).
//! 5. Every so often the drafter decodes held-out prompts; that tau, not a loss, picks the best
//!    ([`trainer`]). A killed run continues from its last checkpoint ([`run_dir`]), beside which lies what made
//!    it ([`record`]).
//!
//! ```
//! use burn::tensor::Tensor;
//! use hspec_train::loss::{LossConfig, Weighting, elements, loss};
//! type B = burn_ndarray::NdArray;
//!
//! // One block of an anchor and one slot, two draft tokens; the drafter agrees with the target.
//! let device = Default::default();
//! let logits = Tensor::<B, 3>::from_floats([[[0.0, 0.0], [0.0, 3.0]]], &device);
//! let mask = Tensor::from_floats([[0.0, 1.0]], &device);
//! let config = LossConfig { ce: 0.1, tv: 0.9, kl: 0.0, confidence: 1.0, weighting: Weighting::Decay { gamma: 4.0 } };
//! let l = loss(elements(logits.clone(), logits, None), mask, &config);
//! assert!(l.tv.into_scalar() < 1e-6);
//! ```

pub mod caches;
mod curves;
#[cfg(feature = "collective")]
pub mod devices;
pub mod doctor;
mod event_file;
mod events;
pub mod feature_cache;
pub mod features;
mod feed;
#[cfg(feature = "flex")]
mod flex;
mod journal;
pub mod kinds;
pub mod logits;
pub mod loss;
pub mod loss_deepspec;
pub mod loss_eagle;
mod muon;
pub mod objective;
pub mod optim;
pub mod pack;
pub mod recipe;
pub mod record;
pub mod responses;
pub mod run_dir;
pub mod schedule;
pub mod select;
pub mod step;
pub mod target_cache;
pub mod trainer;
pub mod vocab;
pub mod warm;

pub use trainer::Trainer;
