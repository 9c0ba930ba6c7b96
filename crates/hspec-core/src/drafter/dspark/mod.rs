//! DFlash and DSpark drafters: blocks over a cache of their own.
//!
//! They project the target's hidden states of every position once, into one context vector that all layers
//! share, and keep each layer's keys and values of it (DSpark section 2; DFlash):
//!
//! ```text
//! C = norm(W_fc [hidden ids ..])        K_i = rope(norm(W_k,i C)),  V_i = W_v,i C      cached per token
//! h <- h + Attention_i(norm(h); K_i, V_i of positions before the anchor, and the block's own)
//! h <- h + SwiGLU_i(norm(h))            logits = W_head norm(h)
//! ```
//!
//! The cache follows acceptance by itself, as only final tokens are observed; a block's own keys and values
//! are gone after the pass. What differs between the kinds is around this: where a block's slots point
//! ([`Layout`]), which head restores the order inside a block (none, Markov, Domino's recurrence, DFlash-2's
//! selector), and DFlash-2's convolutions.
//!
//! Checkpoints come in three layouts, one file of this folder each. [`DSparkShape`] is what they have in
//! common, in this crate's terms; other conventions end there.

mod config;
mod convert;
mod deepspec;
mod forward;
mod io;
mod layout;
mod model;
mod packed;
mod session;
mod shape;
mod speculators;
mod stated;
mod zlab;

pub use config::DSparkConfig;
pub(super) use config::WORDS;
pub use deepspec::DeepSpecFile;
pub use forward::DSpark;
pub use layout::Layout;
pub use model::{BlockLayer, DSparkModel};
pub use packed::{BlockOutput, PackedRow};
pub use session::DSparkSession;
pub use shape::{ConvShape, DSparkShape, DominoShape, Kind, MarkovShape, SelectorShape};
pub use speculators::SpeculatorsFile;
pub(super) use stated::state;
pub use zlab::ZLabFile;
