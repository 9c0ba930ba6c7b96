//! Where results go.

use anyhow::Context;
use std::path::Path;

/// Makes the folder and a file in it, so that hours of work do not end at a disk that cannot be written.
pub(crate) fn probe(dir: &Path) -> anyhow::Result<()> {
    let unwritable = || format!("--out {} cannot be written", dir.display());
    std::fs::create_dir_all(dir).with_context(unwritable)?;
    tempfile::Builder::new().prefix(".probe-").tempfile_in(dir).with_context(unwritable)?;
    Ok(())
}

/// The same for a file that is written at the end; its folder is made.
pub(crate) fn probe_file(option: &str, file: &Path) -> anyhow::Result<()> {
    let unwritable = || format!("{option} {} cannot be written", file.display());
    anyhow::ensure!(!file.is_dir(), "{}: found a folder, expected a file", unwritable());
    let folder = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).with_context(unwritable)?;
    tempfile::Builder::new().prefix(".probe-").tempfile_in(folder).with_context(unwritable)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_below_a_file_is_found_out_at_once() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        let message = format!("{:#}", probe(&dir.path().join("file/out")).unwrap_err());
        assert!(message.contains("file/out cannot be written"), "{message}");
        let fresh = dir.path().join("a/b");
        probe(&fresh).unwrap();
        assert_eq!(std::fs::read_dir(&fresh).unwrap().count(), 0);
    }
}
