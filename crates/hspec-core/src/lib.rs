//! Targets, drafters, checkpoints, lossless verification and decoding.
//!
//! 1. [`target::Target`] is the model whose text counts: it fills a key-value cache, returns logits, and
//!    lends both its cache and the hidden states entering chosen layers.
//! 2. A [`drafter::Drafter`] proposes k tokens from what the target has computed; [`drafter::HSpec`] keeps
//!    nothing per token of its own (H-Spec, arXiv 2609.24197, section 3), the baselines in the folders beside
//!    it do ([`drafter::dspark`]). [`drafter::load`] reads any of them.
//! 3. [`decode::Decoder`] lets the target check the proposals in one pass and keeps the prefix of them that
//!    leaves the output distributed as the target's own:
//!
//! ```text
//! keep x iff u q(x) < p(x);  else sample (p - q)+ / sum (p - q)+   (H-Spec section 2)
//! ```
//!
//! [`checkpoint`] reads and writes the files, [`config`] checks what they state, [`text`] turns text into
//! tokens and back, [`prompts`] reads prompt files, [`provenance`] tells where something was made.
//!
//! ```no_run
//! use hspec_core::{
//!     decode::{Decoder, Request, SamplingParams}, drafter::{Drafter, HSpec}, target::Target, text::Tokenizer,
//! };
//! use std::{ops::ControlFlow, path::Path};
//! type B = burn_flex::Flex;
//!
//! # fn main() -> hspec_core::Result<()> {
//! let (model, device) = (Path::new("models/smollm2-135m-instruct"), Default::default());
//! let target = Target::<B>::load(model, &device)?;
//! let drafter = HSpec::load(Path::new("assets/drafters/smollm2-135m-hspec"), Some(&target), &device)?;
//! let tokenizer = Tokenizer::open(model)?;
//! let request = Request {
//!     prompt: &tokenizer.encode("Once upon a time")?, sampling: SamplingParams::greedy(), seed: 0, id: 0,
//!     max_new_tokens: 64, k: drafter.max_draft(), stop_tokens: &tokenizer.eos_ids(),
//! };
//! let decoder = Decoder::new(&target, Some(&drafter as &dyn Drafter<B>));
//! let generation = decoder.generate(&request, &mut |_| ControlFlow::Continue(()))?;
//! println!("{}", tokenizer.decode(&generation.tokens, true)?);
//! # Ok(())
//! # }
//! ```
//!
//! Features: `flex` uses the flex backend's in-place bodies; any backend runs the plain ones. `parquet` reads
//! prompts from Parquet files.

pub mod checkpoint;
pub mod config;
pub mod decode;
pub mod drafter;
mod error;
mod ids;
pub mod prompts;
pub mod provenance;
pub mod target;
pub mod text;

pub use error::{Error, Result};
pub use ids::TokenId;
