//! What can be wrong with a number.

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A number outside its range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[error("{what}: found {found}, expected {expected}")]
pub struct Error {
    /// The argument.
    pub what: &'static str,
    /// Its value.
    pub found: f64,
    /// What is allowed.
    pub expected: &'static str,
}
