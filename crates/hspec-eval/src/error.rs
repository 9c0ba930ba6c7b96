//! What can go wrong with a measurement.

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No figure can be made of what was measured.
    #[error("{what}: {why}")]
    Undefined {
        /// The figure.
        what: String,
        /// What is missing.
        why: &'static str,
    },
    /// Numbers that no calibration fits.
    #[error(transparent)]
    Schedule(#[from] hspec_sched::Error),
    /// A prompt that cannot be decoded.
    #[error("task {task}, prompt {prompt}: {source}")]
    Prompt {
        /// The task.
        task: String,
        /// The prompt's name in it.
        prompt: String,
        /// What is wrong.
        source: Box<hspec_core::Error>,
    },
}
