//! Scalars in TensorBoard's files.
//!
//! A file is a sequence of TFRecords, each holding an `Event` in the encoding of protocol buffers
//! (tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto):
//!
//! ```text
//! record  = length: u64, masked(crc(length)): u32, data, masked(crc(data)): u32       little endian
//! masked(c) = rotate_right(c, 15) + 0xa282ead8            crc = CRC-32C
//! Event   = 1: wall_time double, 2: step int64, 3: file_version | 5: Summary | 7: SessionLog
//! Summary = 1: { 1: tag, 2: simple_value float } ..       SessionLog = 1: status, 1 is START
//! ```
//!
//! A run that goes on begins another file, whose first event says from which step on earlier files are void.

use hspec_core::{Error, Result};
use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

/// TensorBoard takes any file for its own that has this in its name, and reads those of a folder by name.
const PREFIX: &str = "events.out.tfevents.";

/// A file that is written to.
#[derive(Debug)]
pub(crate) struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Begins the next file of a run's folder. What earlier ones have of the steps from `first` on is void.
    ///
    /// # Errors
    /// When the folder cannot be read or written.
    pub(crate) fn begin(dir: &Path, first: usize) -> Result<Self> {
        let path = dir.join(format!("{PREFIX}{:06}", numbers(dir)?.last().map_or(1, |last| last + 1)));
        let file = OpenOptions::new().create_new(true).append(true).open(&path).map_err(Error::io(&path))?;
        let mut events = Self { path, file };
        events.write(0, &field(3, b"brain.Event:2"))?;
        events.write(first, &field(7, &integer(1, 1)))?;
        Ok(events)
    }

    /// Appends the values of a step.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn scalars(&mut self, step: usize, values: &[(String, f64)]) -> Result<()> {
        let value = |(tag, value): &(String, f64)| {
            // 2 in the low bits' place of a field of four bytes: 2 << 3 | 5.
            let number = [&[0x15][..], &(*value as f32).to_le_bytes()].concat();
            field(1, &[field(1, tag.as_bytes()), number].concat())
        };
        let summary: Vec<u8> = values.iter().flat_map(value).collect();
        self.write(step, &field(5, &summary))
    }

    fn write(&mut self, step: usize, what: &[u8]) -> Result<()> {
        // A clock before 1970 tells nothing.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        // 1 << 3 | 1: a field of eight bytes.
        let event = [&[0x09][..], &now.to_le_bytes(), &integer(2, step as u64), what].concat();
        self.file.write_all(&record(&event)).map_err(Error::io(&self.path))
    }
}

/// Numbers of the files in a folder, ascending.
fn numbers(dir: &Path) -> Result<Vec<u64>> {
    let mut numbers = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io(dir))? {
        let name = entry.map_err(Error::io(dir))?.file_name();
        numbers.extend(name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse::<u64>().ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let sum = |bytes: &[u8]| masked(bytes).to_le_bytes();
    [&length[..], &sum(&length), data, &sum(data)].concat()
}

fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C, bit by bit: a step writes a few hundred bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc: u32, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg()))
    })
}

/// A field of bytes.
fn field(number: u64, bytes: &[u8]) -> Vec<u8> {
    [varint(number << 3 | 2), varint(bytes.len() as u64), bytes.to_vec()].concat()
}

fn integer(number: u64, value: u64) -> Vec<u8> {
    [varint(number << 3), varint(value)].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// Reads such files back, for tests.
#[cfg(test)]
pub(crate) mod testing {
    use super::{PREFIX, masked, numbers};
    use std::{collections::BTreeMap, path::Path};

    /// An event: its step and the fields behind it.
    pub(crate) struct Read {
        pub step: usize,
        pub version: Option<String>,
        pub starts: bool,
        pub scalars: Vec<(String, f32)>,
    }

    fn take_varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let (byte, rest) = bytes.split_first().unwrap();
            *bytes = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if *byte < 0x80 {
                break;
            }
        }
        value
    }

    /// Number and content of each field; of numbers, their little-endian bytes.
    fn fields(mut bytes: &[u8]) -> Vec<(u64, Vec<u8>)> {
        let mut all = Vec::new();
        while !bytes.is_empty() {
            let key = take_varint(&mut bytes);
            let length = match key & 7 {
                0 => {
                    all.push((key >> 3, take_varint(&mut bytes).to_le_bytes().to_vec()));
                    continue;
                }
                1 => 8,
                5 => 4,
                2 => take_varint(&mut bytes) as usize,
                other => panic!("wire type {other}"),
            };
            let (content, rest) = bytes.split_at(length);
            bytes = rest;
            all.push((key >> 3, content.to_vec()));
        }
        all
    }

    /// The events of a file, every checksum of which must be right.
    pub(crate) fn read(path: &Path) -> Vec<Read> {
        let bytes = std::fs::read(path).unwrap();
        let mut rest = &bytes[..];
        let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
        let mut events = Vec::new();
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(word(&rest[8..12]), masked(&rest[..8]));
            let data = &rest[12..12 + length];
            assert_eq!(word(&rest[12 + length..16 + length]), masked(data));
            rest = &rest[16 + length..];
            let mut event = Read { step: 0, version: None, starts: false, scalars: Vec::new() };
            for (number, content) in fields(data) {
                match number {
                    1 => assert!(f64::from_le_bytes(content.try_into().unwrap()) > 1.7e9),
                    2 => event.step = u64::from_le_bytes(content.try_into().unwrap()) as usize,
                    3 => event.version = Some(String::from_utf8(content).unwrap()),
                    7 => event.starts = fields(&content) == [(1, 1u64.to_le_bytes().to_vec())],
                    5 => event.scalars.extend(fields(&content).into_iter().map(|(_, value)| {
                        let parts = fields(&value);
                        let tag = String::from_utf8(parts[0].1.clone()).unwrap();
                        (tag, f32::from_le_bytes(parts[1].1.clone().try_into().unwrap()))
                    })),
                    other => panic!("field {other}"),
                }
            }
            events.push(event);
        }
        events
    }

    /// What a reader of all files of a folder ends up with: by tag, values in the order of their steps.
    pub(crate) fn run(dir: &Path) -> BTreeMap<String, Vec<(usize, f32)>> {
        let mut run: BTreeMap<String, Vec<(usize, f32)>> = BTreeMap::new();
        for number in numbers(dir).unwrap() {
            for event in read(&dir.join(format!("{PREFIX}{number:06}"))) {
                if event.starts {
                    run.values_mut().for_each(|values| values.retain(|(step, _)| *step < event.step));
                }
                for (tag, value) in event.scalars {
                    run.entry(tag).or_default().push((event.step, value));
                }
            }
        }
        run
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of RFC 3720, B.4, and the mask applied to it by hand.
    #[test]
    fn checksums_are_the_published_ones() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(masked(b"123456789"), 0xe306_9283u32.rotate_right(15).wrapping_add(0xa282_ead8));
        assert_eq!(varint(300), [0xac, 2]);
    }

    #[test]
    fn a_file_is_read_back_and_a_second_one_voids_the_end_of_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let tag = |tag: &str, value: f64| (tag.to_owned(), value);
        let mut first = EventFile::begin(dir.path(), 0).unwrap();
        for step in [0, 1, 2, 300] {
            first.scalars(step, &[tag("loss/total", 2.5), tag("tau", step as f64)]).unwrap();
        }
        let events = testing::read(&first.path);
        assert_eq!(events[0].version.as_deref(), Some("brain.Event:2"));
        assert!(events[1].starts && events[1].step == 0);
        assert_eq!(events[5].step, 300);
        assert_eq!(events[5].scalars, [("loss/total".to_owned(), 2.5), ("tau".to_owned(), 300.0)]);
        let mut second = EventFile::begin(dir.path(), 2).unwrap();
        assert_ne!(first.path, second.path);
        second.scalars(2, &[tag("tau", 7.0)]).unwrap();
        let run = testing::run(dir.path());
        assert_eq!(run["tau"], [(0, 0.0), (1, 1.0), (2, 7.0)]);
        assert_eq!(run["loss/total"], [(0, 2.5), (1, 2.5)]);
    }
}
