//! Reading safetensors: one file, mapped into memory.

use super::stored::{Element, Stored};
use crate::error::{Error, Result};
use memmap2::Mmap;
use safetensors::{
    SafeTensors,
    tensor::{Metadata, TensorInfo},
};
use std::{
    borrow::Cow,
    fs::File,
    path::{Path, PathBuf},
};

/// One `.safetensors` file. Its header has been checked: each tensor lies inside the file, and together
/// they cover it without holes.
pub(super) struct SafetensorsFile {
    path: PathBuf,
    map: Mmap,
    start: usize,
    header: Metadata,
}

impl SafetensorsFile {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let map = map(path)?;
        let (length, header) = SafeTensors::read_metadata(&map).map_err(|e| {
            Error::invalid(
                path,
                "header",
                e.to_string(),
                format!("a whole safetensors file of {} bytes", map.len()),
            )
        })?;
        Ok(Self { path: path.to_owned(), start: size_of::<u64>() + length, map, header })
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    pub(super) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.header.info(name)
    }

    /// A tensor's bytes, unless there is none of this name.
    pub(super) fn stored(&self, name: &str) -> Result<Option<Stored<'_>>> {
        let Some(info) = self.info(name) else { return Ok(None) };
        let (from, to) = info.data_offsets;
        let bytes = self.map.get(self.start + from..self.start + to).ok_or_else(|| {
            Error::invalid(&self.path, name, format!("bytes {from}..{to}"), "a range inside the file")
        })?;
        let element = Element::of(info.dtype).ok_or_else(|| {
            let expected = "F32, F64, F16, BF16, I64, I32, U8 or BOOL";
            Error::invalid(&self.path, name, format!("type {}", info.dtype), expected)
        })?;
        Ok(Some(Stored { element, shape: info.shape.clone(), bytes: Cow::Borrowed(bytes) }))
    }

    /// Size of the file.
    pub(super) fn len(&self) -> usize {
        self.map.len()
    }
}

/// Maps a file into memory, for reading only.
pub(super) fn map(path: &Path) -> Result<Mmap> {
    let file = File::open(path).map_err(Error::io(path))?;
    // SAFETY: sound as long as nobody shortens or rewrites the file meanwhile, as with every reader of
    // mapped checkpoints. This crate's own writers replace a file by renaming and never touch its bytes.
    unsafe { Mmap::map(&file) }.map_err(Error::io(path))
}
