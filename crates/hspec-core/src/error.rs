//! What can go wrong with files, configurations and requests.

use std::path::{Path, PathBuf};

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of this crate. Each names the file or argument, what was found and what was expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Reading or writing failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file's content cannot be right.
    #[error("{}: {field}: found {found}, expected {expected}", file.display())]
    Invalid {
        /// The file.
        file: PathBuf,
        /// The field, tensor or line in it.
        field: String,
        /// What stands there.
        found: String,
        /// What should.
        expected: String,
    },
    /// Two things that are each right do not belong together.
    #[error("{0}")]
    Mismatch(String),
    /// A request that cannot be served.
    #[error("{what}: found {found}, expected {expected}")]
    Request {
        /// The argument.
        what: &'static str,
        /// Its value.
        found: String,
        /// What is allowed.
        expected: String,
    },
}

impl Error {
    /// An I/O error at `path`, for `map_err`.
    pub fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.as_ref().to_owned();
        move |source| Self::Io { path, source }
    }

    /// A drafter's session that is asked to draft before it has seen a token.
    pub(crate) fn nothing_observed() -> Self {
        Self::Request { what: "observed tokens", found: "0".into(), expected: "at least 1".into() }
    }

    /// Shorthand for [`Error::Invalid`].
    pub fn invalid(
        file: impl AsRef<Path>,
        field: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self::Invalid {
            file: file.as_ref().to_owned(),
            field: field.into(),
            found: found.into(),
            expected: expected.into(),
        }
    }
}
