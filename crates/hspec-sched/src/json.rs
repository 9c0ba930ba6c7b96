//! One value per JSON file.

use crate::{Error, Result};
use serde::{Serialize, de::DeserializeOwned};
use std::{fs, io::Write, path::Path};

pub(crate) fn load<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = fs::read(path).map_err(|source| Error::Io { path: path.into(), source })?;
    serde_json::from_slice(&bytes).map_err(|source| Error::Json { file: path.into(), source })
}

/// Through a temporary name, so that whoever looks at `path` sees the old file or the whole new one.
pub(crate) fn save<T: Serialize>(value: &T, path: &Path) -> Result<()> {
    let text =
        serde_json::to_string_pretty(value).map_err(|source| Error::Json { file: path.into(), source })?;
    let write = || {
        // "profile.json" has the parent "", which means the current folder.
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut builder = tempfile::Builder::new();
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // What a newly created file has; the umask takes its part off. The crate's default is 0600.
            builder.permissions(fs::Permissions::from_mode(0o666));
        }
        let mut file = builder.tempfile_in(folder)?;
        writeln!(file, "{text}")?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|e| e.error)?;
        Ok(())
    };
    write().map_err(|source| Error::Io { path: path.into(), source })
}
