//! Targets, drafters, checkpoints, lossless verification and decoding.

pub mod checkpoint;
pub mod config;
pub mod decode;
pub mod drafter;
mod error;
mod ids;
pub mod prompts;
pub mod target;
pub mod text;

pub use error::{Error, Result};
pub use ids::TokenId;
