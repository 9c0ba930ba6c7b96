//! What can be wrong with a number or a file of numbers.

use std::path::PathBuf;

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number outside its range.
    #[error("{what}: found {found}, expected {expected}")]
    Value {
        /// The argument, with its row where it has several.
        what: String,
        /// Its value.
        found: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// Reading or writing failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file's content cannot be right.
    #[error("{}: {source}", file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// The field, what stands there and what was expected.
        source: serde_json::Error,
    },
}

impl Error {
    pub(crate) fn value(what: impl Into<String>, found: impl ToString, expected: &'static str) -> Self {
        Self::Value { what: what.into(), found: found.to_string(), expected }
    }
}
