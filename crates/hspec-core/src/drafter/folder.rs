//! The folder that an export writes.

use super::{Inspection, inspect};
use crate::{
    Error, Result,
    checkpoint::{Stored, write_atomic, write_stored},
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    io::ErrorKind,
    path::{Path, PathBuf},
};

const TENSORS: &str = "model.safetensors";
const CONFIG: &str = "config.json";

/// The path of a folder to be written, without links.
///
/// # Errors
/// A folder with something in it, a file, a link to nothing, and a place inside a folder of `sources`.
pub(super) fn free(out: &Path, sources: [Option<&Path>; 2]) -> Result<PathBuf> {
    let refuse = |found: String, expected: &str| Err(Error::invalid(out, "folder", found, expected));
    const FREE: &str = "an empty folder, or none of this name";
    match std::fs::read_dir(out).map(|mut entries| entries.next().is_some()) {
        Ok(true) => return refuse("files in it".into(), FREE),
        Err(e) if e.kind() == ErrorKind::NotFound && out.is_symlink() => {
            return refuse("a link to nothing".into(), FREE);
        }
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(Error::io(out)(e)),
        Ok(false) | Err(_) => {}
    }
    let resolved = resolved(out)?;
    for source in sources.into_iter().flatten() {
        // What cannot be found is told when it is read.
        if source.canonicalize().is_ok_and(|source| resolved.starts_with(source)) {
            let found = format!("a place inside {}, which is read", source.display());
            return refuse(found, "a folder outside of it");
        }
    }
    Ok(resolved)
}

/// A path without links, of which the last parts may be absent.
fn resolved(path: &Path) -> Result<PathBuf> {
    let whole = std::path::absolute(path).map_err(Error::io(path))?;
    let there = |part: &Path| Some(part.canonicalize().ok()?.join(whole.strip_prefix(part).ok()?));
    Ok(whole.ancestors().find_map(there).unwrap_or_else(|| whole.clone()))
}

/// Writes a folder that is [`free`]: under a temporary name, which is read again and renamed. An empty folder
/// stays the one that it is, for it may be a mount or somebody's current folder, and gets the files, the
/// configuration last.
///
/// # Errors
/// When it cannot be written, or not be read again.
pub(super) fn write(
    out: &Path,
    config: &Value,
    tensors: &BTreeMap<String, Stored<'_>>,
) -> Result<Inspection> {
    let there = out.is_dir();
    let place = if there { out } else { out.parent().unwrap_or(out) };
    std::fs::create_dir_all(place).map_err(Error::io(place))?;
    let temporary =
        tempfile::Builder::new().prefix(".partial-").tempdir_in(place).map_err(Error::io(place))?;
    let dir = temporary.path().join("drafter");
    std::fs::create_dir(&dir).map_err(Error::io(&dir))?;
    write_stored(&dir.join(TENSORS), tensors)?;
    let text = format!("{config:#}\n");
    write_atomic(&dir.join(CONFIG), |file| file.write_all(text.as_bytes()))?;
    let inspection = inspect(&dir)?;
    let moved = |from: &Path, to: &Path| std::fs::rename(from, to).map_err(Error::io(to));
    if there {
        for name in [TENSORS, CONFIG] {
            moved(&dir.join(name), &out.join(name))?;
        }
    } else {
        moved(&dir, out)?;
    }
    Ok(inspection)
}
