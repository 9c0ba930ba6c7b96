//! The header of a GGUF file (versions 2 and 3, little-endian): counts, metadata, tensor entries. Every
//! length, count, type and offset in it is checked against the file before it is believed.

use super::quant::ElementType;
use crate::error::{Error, Result};
use serde_json::Value;
use std::{collections::BTreeMap, path::Path};

pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, Value>,
    pub(super) tensors: Vec<Entry>,
}

/// A tensor as the file describes it.
pub(super) struct Entry {
    pub(super) name: String,
    /// Dimensions as stored: the fastest first.
    pub(super) dims: Vec<usize>,
    pub(super) kind: ElementType,
    /// Where its bytes lie in the file.
    pub(super) range: std::ops::Range<usize>,
}

/// Deeper nested arrays than this have no use and could exhaust the stack.
const MAX_DEPTH: u32 = 4;
/// GGML knows no tensors of more dimensions.
const MAX_DIMS: u32 = 4;

pub(super) fn parse(file: &Path, bytes: &[u8]) -> Result<Header> {
    let mut cursor = Cursor { file, bytes, at: 0 };
    if cursor.take("magic", 4)? != b"GGUF" {
        return Err(cursor.invalid("magic", format!("{:02x?}", &bytes[..4]), "\"GGUF\""));
    }
    let version = cursor.u32("version")?;
    if !(2..=3).contains(&version) {
        return Err(cursor.invalid("version", version.to_string(), "2 or 3, little-endian"));
    }
    // The shortest entry of each kind bounds how many the rest of the file can hold.
    let tensor_count = cursor.count("number of tensors", 8 + 4 + 4 + 8)?;
    let metadata_count = cursor.count("number of metadata entries", 8 + 4 + 1)?;

    let mut metadata = BTreeMap::new();
    for n in 0..metadata_count {
        let key = cursor.string(&format!("key {n} of the metadata"))?;
        let kind = cursor.u32(&key)?;
        let value = cursor.value(&key, kind, 0)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(cursor.invalid(&key, "twice in the metadata", "each key once"));
        }
    }

    let raw: Vec<_> = (0..tensor_count).map(|n| cursor.entry(n)).collect::<Result<_>>()?;
    let alignment = metadata.get("general.alignment").map_or(Some(32), Value::as_u64);
    let Some(alignment) = alignment.filter(|a| a.is_power_of_two() && (8..=1 << 16).contains(a)) else {
        let found = metadata["general.alignment"].to_string();
        return Err(cursor.invalid("general.alignment", found, "a power of two from 8 to 65536"));
    };
    let data = cursor.at.next_multiple_of(alignment as usize);
    let mut tensors = raw
        .into_iter()
        .map(|(name, dims, kind, offset)| {
            let range = cursor.range(&name, &dims, kind, offset, alignment, data)?;
            Ok(Entry { name, dims, kind, range })
        })
        .collect::<Result<Vec<_>>>()?;

    tensors.sort_by_key(|t| (t.range.start, t.range.end));
    for pair in tensors.windows(2) {
        if pair[1].range.start < pair[0].range.end {
            let found = format!("bytes shared with {}", pair[0].name);
            return Err(cursor.invalid(&pair[1].name, found, "a place of its own"));
        }
    }
    Ok(Header { metadata, tensors })
}

struct Cursor<'a> {
    file: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn invalid(&self, field: &str, found: impl Into<String>, expected: impl Into<String>) -> Error {
        Error::invalid(self.file, field, found, expected)
    }

    fn take(&mut self, field: &str, length: u64) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        match usize::try_from(length).ok().and_then(|length| rest.get(..length)) {
            Some(taken) => {
                self.at += taken.len();
                Ok(taken)
            }
            None => {
                let expected = format!("no more than the {} bytes left in the file", rest.len());
                Err(self.invalid(field, format!("{length} bytes"), expected))
            }
        }
    }

    fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N]> {
        let bytes = self.take(field, N as u64)?;
        Ok(bytes.try_into().expect("take returned N bytes"))
    }

    fn u32(&mut self, field: &str) -> Result<u32> {
        self.array(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: &str) -> Result<u64> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// A number of things that take at least `size` bytes each.
    fn count(&mut self, field: &str, size: usize) -> Result<usize> {
        let count = self.u64(field)?;
        let most = (self.bytes.len() - self.at) / size;
        match usize::try_from(count) {
            Ok(count) if count <= most => Ok(count),
            _ => Err(self.invalid(
                field,
                count.to_string(),
                format!("at most {most}, as the file holds no more"),
            )),
        }
    }

    fn string(&mut self, field: &str) -> Result<String> {
        let length = self.u64(field)?;
        let bytes = self.take(field, length)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(e) => Err(self.invalid(field, e.to_string(), "UTF-8")),
        }
    }

    /// A metadata value. Floats that no JSON number can be (NaN, infinities) become null.
    fn value(&mut self, key: &str, kind: u32, depth: u32) -> Result<Value> {
        Ok(match kind {
            0 => u8::from_le_bytes(self.array(key)?).into(),
            1 => i8::from_le_bytes(self.array(key)?).into(),
            2 => u16::from_le_bytes(self.array(key)?).into(),
            3 => i16::from_le_bytes(self.array(key)?).into(),
            4 => self.u32(key)?.into(),
            5 => i32::from_le_bytes(self.array(key)?).into(),
            // The decimal that was meant: 1e-5 stored as f32 is 1e-5 in JSON and not 9.999999747378752e-06.
            6 => f32::from_le_bytes(self.array(key)?).to_string().parse::<f64>().ok().into(),
            7 => match self.array(key)? {
                [0] => false.into(),
                [1] => true.into(),
                [other] => return Err(self.invalid(key, format!("truth value {other}"), "0 or 1")),
            },
            8 => self.string(key)?.into(),
            9 if depth < MAX_DEPTH => {
                let element = self.u32(key)?;
                let count = self.count(key, 1)?;
                let values = (0..count).map(|_| self.value(key, element, depth + 1));
                Value::Array(values.collect::<Result<_>>()?)
            }
            10 => self.u64(key)?.into(),
            11 => i64::from_le_bytes(self.array(key)?).into(),
            12 => f64::from_le_bytes(self.array(key)?).into(),
            9 => return Err(self.invalid(key, "arrays of arrays", format!("at most {MAX_DEPTH} levels"))),
            other => return Err(self.invalid(key, format!("value type {other}"), "0 to 12")),
        })
    }

    fn entry(&mut self, number: usize) -> Result<(String, Vec<usize>, ElementType, u64)> {
        let name = self.string(&format!("name of tensor {number}"))?;
        let rank = self.u32(&name)?;
        if rank > MAX_DIMS {
            return Err(self.invalid(&name, format!("{rank} dimensions"), format!("at most {MAX_DIMS}")));
        }
        let dims = (0..rank).map(|_| self.u64(&name)).collect::<Result<Vec<_>>>()?;
        let dims = dims
            .iter()
            .map(|&d| usize::try_from(d).map_err(|_| self.invalid(&name, format!("dimension {d}"), "a size")))
            .collect::<Result<_>>()?;
        let id = self.u32(&name)?;
        let Some(kind) = ElementType::from_id(id) else {
            return Err(self.invalid(&name, format!("type {id}"), ElementType::NAMES));
        };
        let offset = self.u64(&name)?;
        Ok((name, dims, kind, offset))
    }

    fn range(
        &self,
        name: &str,
        dims: &[usize],
        kind: ElementType,
        offset: u64,
        alignment: u64,
        data: usize,
    ) -> Result<std::ops::Range<usize>> {
        let (elements, size) = kind.block();
        let row = dims.first().copied().unwrap_or(1);
        if !row.is_multiple_of(elements) {
            let expected = format!("a multiple of {elements}, the block of {kind:?}");
            return Err(self.invalid(name, format!("rows of {row} elements"), expected));
        }
        if !offset.is_multiple_of(alignment) {
            return Err(self.invalid(name, format!("offset {offset}"), format!("a multiple of {alignment}")));
        }
        let end = dims
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d))
            .and_then(|n| (n / elements).checked_mul(size))
            .zip(usize::try_from(offset).ok().and_then(|o| o.checked_add(data)))
            .and_then(|(length, start)| Some(start..start.checked_add(length)?))
            .filter(|range| range.end <= self.bytes.len());
        end.ok_or_else(|| {
            let found = format!("shape {dims:?} of {kind:?} at offset {offset}");
            self.invalid(name, found, format!("a place inside the file of {} bytes", self.bytes.len()))
        })
    }
}
