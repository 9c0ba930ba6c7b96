//! Reading safetensors: one file, mapped into memory and converted tensor by tensor.

use crate::error::{Error, Result};
use burn::tensor::TensorData;
use bytemuck::{AnyBitPattern, pod_collect_to_vec};
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::{
    Dtype, SafeTensors,
    tensor::{Metadata, TensorInfo},
};
use std::{
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

    pub(super) fn tensor(&self, name: &str) -> Result<Option<TensorData>> {
        let Some(info) = self.info(name) else { return Ok(None) };
        let (from, to) = info.data_offsets;
        let bytes = self.map.get(self.start + from..self.start + to).ok_or_else(|| {
            Error::invalid(&self.path, name, format!("bytes {from}..{to}"), "a range inside the file")
        })?;
        let shape = info.shape.clone();
        Ok(Some(match info.dtype {
            Dtype::F32 => TensorData::new(collect::<f32>(bytes), shape),
            Dtype::F64 => TensorData::new(convert(bytes, |x: f64| x as f32), shape),
            Dtype::F16 => TensorData::new(convert(bytes, f16::to_f32), shape),
            Dtype::BF16 => TensorData::new(convert(bytes, bf16::to_f32), shape),
            Dtype::I64 => TensorData::new(collect::<i64>(bytes), shape),
            Dtype::I32 => TensorData::new(convert(bytes, |x: i32| i64::from(x)), shape),
            Dtype::U8 => TensorData::new(convert(bytes, |x: u8| i64::from(x)), shape),
            Dtype::BOOL => TensorData::new(convert(bytes, |x: u8| i64::from(x != 0)), shape),
            other => {
                let expected = "F32, F64, F16, BF16, I64, I32, U8 or BOOL";
                return Err(Error::invalid(&self.path, name, format!("type {other}"), expected));
            }
        }))
    }
}

/// Elements of a byte range of any alignment. The format is little-endian, and so is every machine that
/// Burn's backends run on.
fn collect<T: AnyBitPattern + bytemuck::NoUninit>(bytes: &[u8]) -> Vec<T> {
    pod_collect_to_vec(bytes)
}

fn convert<T: AnyBitPattern, U>(bytes: &[u8], to: impl Fn(T) -> U) -> Vec<U> {
    bytes.chunks_exact(size_of::<T>()).map(|b| to(bytemuck::pod_read_unaligned(b))).collect()
}

/// Maps a file into memory, for reading only.
pub(super) fn map(path: &Path) -> Result<Mmap> {
    let file = File::open(path).map_err(Error::io(path))?;
    // SAFETY: sound as long as nobody shortens or rewrites the file meanwhile, as with every reader of
    // mapped checkpoints. This crate's own writers replace a file by renaming and never touch its bytes.
    unsafe { Mmap::map(&file) }.map_err(Error::io(path))
}
