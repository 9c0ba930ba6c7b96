//! Attention for targets and for drafters that borrow a target's cache.
//!
//! An H-Spec drafter keeps no keys of its own. Slot `t` of the block at anchor `a` attends to the
//! target's cached keys and values of positions before `a`, exactly as the target wrote them (after
//! its key norm and RoPE), followed by the keys of the block's own slots (H-Spec section 3.2):
//!
//! ```text
//! out_t = softmax( q_t [K_target[visible(a, t)] ; K_block[s <= t]]ᵀ / sqrt(d) ) [V_target ; V_block]
//! ```
//!
//! Its queries continue the target's rotary positions `a, a+1, ..`. [`PrefixAttention`] computes
//! this for any number of blocks at once, [`BlockRule`] says who sees whom, [`KvCache`] is what is
//! lent, and [`causal_attention`] is the plain attention by which the target fills it. A drafter with a
//! cache of its own (DSpark, DFlash) makes its keys and values with [`PrefixAttention::context`].
//!
//! ```
//! use burn::tensor::Tensor;
//! use hspec_attn::{KvCache, Position, Rope, RopeScaling};
//! type B = burn_ndarray::NdArray;
//!
//! let device = Default::default();
//! let mut cache = KvCache::<B>::new(1, 1, 1, 8, 2, &device);
//! let rope = Rope::new(10_000.0, 2, RopeScaling::None);
//! let key = rope.tables(&[Position(0)], 1, &device).apply(Tensor::from_floats([[1.0, 2.0]], &device));
//! cache.write(0, key.clone().reshape([1, 1, 1, 2]), key.reshape([1, 1, 1, 2]));
//! cache.advance(1);
//! assert_eq!(cache.keys(0, 0, 1).into_data().to_vec::<f32>().unwrap(), [1.0, 2.0]);
//! ```
//!
//! Features: `flex` writes the cache in place on the flex backend, and rotates and attends in one pass.

#[cfg(feature = "flex")]
mod attend;
mod cache;
mod causal;
#[cfg(feature = "flex")]
mod flex;
mod mask;
mod position;
mod prefix;
mod rope;

pub use cache::KvCache;
pub use causal::{CausalMask, causal_attention};
pub use mask::{Anchor, BlockRule, WindowRule};
pub use position::Position;
pub use prefix::{BlockRope, Prefix, PrefixAttention};
pub use rope::{Rope, RopeScaling, RopeTables};
