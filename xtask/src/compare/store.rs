//! The folder of a comparison: its plan, and a journal that grows by a line per answer and survives being
//! cut off.

use anyhow::{Context, bail};
use hspec_core::checkpoint::{read_json, refuse_foreign, write_atomic};
use hspec_eval::comparison::{Manifest, Record};
use std::{
    collections::HashSet,
    fs::File,
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

const MANIFEST: &str = "manifest.json";
const JOURNAL: &str = "records.jsonl";

/// A comparison that is being measured.
pub(crate) struct Store {
    path: PathBuf,
    journal: File,
    known: HashSet<String>,
}

impl Store {
    /// Opens the folder for this plan, or goes on with what lies there.
    ///
    /// # Errors
    /// A folder of something else; a plan that contradicts that of the folder; another run at work in it; a journal that is damaged
    /// before its last line.
    pub(crate) fn open(dir: &Path, manifest: &mut Manifest) -> anyhow::Result<Self> {
        if !dir.join(MANIFEST).exists() {
            // Pages and results must not lie among the files of something else.
            refuse_foreign(dir, &[JOURNAL], "an empty folder, or that of a comparison")?;
        }
        let path = dir.join(JOURNAL);
        let named = || path.display().to_string();
        let mut options = File::options();
        let mut journal =
            options.create(true).truncate(false).read(true).write(true).open(&path).with_context(named)?;
        if journal.try_lock().is_err() {
            bail!("{}: another run is writing into it", path.display());
        }
        let file = dir.join(MANIFEST);
        if file.exists() {
            let earlier: Manifest = read_json(&file)?;
            if let Some(conflict) = manifest.conflict(&earlier) {
                bail!(
                    "{}: what was measured there cannot be continued: {conflict}; take another --out",
                    dir.display()
                );
            }
            if earlier.machine != manifest.machine {
                bail!("{}: was measured on another machine ({})", dir.display(), earlier.machine.cpu);
            }
            manifest.date = earlier.date;
            if !earlier.commit.split(", ").any(|commit| commit == manifest.commit) {
                manifest.commit = format!("{}, {}", earlier.commit, manifest.commit);
            } else {
                manifest.commit = earlier.commit;
            }
        }
        let json = serde_json::to_string_pretty(manifest)? + "\n";
        write_atomic(&file, |out| out.write_all(json.as_bytes()))?;
        let mut text = Vec::new();
        journal.read_to_end(&mut text).with_context(named)?;
        // Whatever stands behind the last line's end was being written when the run was cut off.
        let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        journal.set_len(whole as u64).with_context(named)?;
        journal.seek(SeekFrom::End(0)).with_context(named)?;
        let known = parse(&text[..whole], &path)?.iter().map(Record::key).collect();
        Ok(Self { path, journal, known })
    }

    /// Whether this has been measured.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.known.contains(key)
    }

    /// Adds records; when this returns they are on the disk.
    pub(crate) fn append(&mut self, records: &[Record]) -> anyhow::Result<()> {
        let mut lines = String::new();
        for record in records {
            lines += &serde_json::to_string(record)?;
            lines.push('\n');
        }
        let mut write = || {
            self.journal.write_all(lines.as_bytes())?;
            self.journal.sync_data()
        };
        write().with_context(|| self.path.display().to_string())?;
        self.known.extend(records.iter().map(Record::key));
        Ok(())
    }
}

/// What a folder holds: its plan and its records; none where it is no folder of a comparison.
pub(crate) fn read(dir: &Path) -> anyhow::Result<Option<(Manifest, Vec<Record>)>> {
    let file = dir.join(MANIFEST);
    if !file.exists() {
        return Ok(None);
    }
    let manifest = read_json(&file)?;
    let path = dir.join(JOURNAL);
    let text = std::fs::read(&path).with_context(|| path.display().to_string())?;
    let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    Ok(Some((manifest, parse(&text[..whole], &path)?)))
}

fn parse(text: &[u8], path: &Path) -> anyhow::Result<Vec<Record>> {
    let lines = text.split(|&byte| byte == b'\n').enumerate().filter(|(_, line)| !line.is_empty());
    lines
        .map(|(i, line)| {
            serde_json::from_slice(line).with_context(|| format!("{}: line {}", path.display(), i + 1))
        })
        .collect()
}
