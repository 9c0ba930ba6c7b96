//! Commands as a user meets them, on a tiny target whose tokens are words.

#![cfg(feature = "flex")]
#![allow(clippy::unwrap_used)] // a test: a panic is how it fails

mod answers;
mod bad_input;
mod checkpoints;
mod comparing;
mod data;
mod doctor;
mod killed;
#[cfg(unix)]
mod measure;
mod scene;
mod schedules;
#[path = "../../../crates/hspec-eval/tests/runner/support.rs"]
mod support;
