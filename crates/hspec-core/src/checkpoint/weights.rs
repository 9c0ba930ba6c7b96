//! A checkpoint's tensors, whatever files they lie in.

use super::{
    Gguf, is_gguf, read_json,
    safetensors::SafetensorsFile,
    stored::{Element, Stored},
};
use crate::error::{Error, Result};
use burn::tensor::TensorData;
use std::{
    borrow::Cow,
    collections::BTreeMap,
    path::{Component, Path, PathBuf},
};

/// A checkpoint's tensors behind one interface: a folder with `model.safetensors` or with
/// `model.safetensors.index.json` and its shards, or a GGUF file. Names are those of Hugging Face's
/// checkpoints in every case. Files are mapped: opening reads their headers only.
pub struct Weights {
    path: PathBuf,
    files: Files,
}

enum Files {
    Gguf(Gguf),
    /// Files, and which of them holds a tensor.
    Safetensors(Vec<SafetensorsFile>, BTreeMap<String, usize>),
}

impl Weights {
    /// Opens a folder or a GGUF file.
    ///
    /// # Errors
    /// [`Error::Io`] where a file is absent or unreadable; [`Error::Invalid`] where it cannot be right: cut
    /// short, a header that is none, tensors outside the file, a type nobody reads, a shard without a
    /// tensor that the index promises.
    pub fn open(path: &Path) -> Result<Self> {
        let files = if is_gguf(path) { Files::Gguf(Gguf::open(path)?) } else { Self::open_folder(path)? };
        Ok(Self { path: path.to_owned(), files })
    }

    /// Opens one safetensors file, whatever its name.
    ///
    /// # Errors
    /// As [`Weights::open`].
    pub fn open_file(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_owned(), files: Self::single(path)? })
    }

    fn single(path: &Path) -> Result<Files> {
        let file = SafetensorsFile::open(path)?;
        let holder = file.names().into_iter().map(|name| (name, 0)).collect();
        Ok(Files::Safetensors(vec![file], holder))
    }

    fn open_folder(folder: &Path) -> Result<Files> {
        std::fs::metadata(folder).map_err(Error::io(folder))?;
        let (single, index) = (folder.join("model.safetensors"), folder.join("model.safetensors.index.json"));
        if single.exists() {
            return Self::single(&single);
        }
        if !index.exists() {
            let expected = "model.safetensors or model.safetensors.index.json in it, or a .gguf file";
            return Err(Error::invalid(folder, "weights", "neither", expected));
        }
        Self::open_shards(folder, &index)
    }

    fn open_shards(folder: &Path, index: &Path) -> Result<Files> {
        #[derive(serde::Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let Index { weight_map } = read_json(index)?;
        let mut shards: BTreeMap<&str, usize> = BTreeMap::new();
        let mut files = Vec::new();
        let mut holder = BTreeMap::new();
        for (name, shard) in &weight_map {
            let number = match shards.get(shard.as_str()) {
                Some(&number) => number,
                None => {
                    // An index may name files beside it, not files elsewhere on the machine.
                    if !matches!(*Path::new(shard).components().collect::<Vec<_>>(), [Component::Normal(_)]) {
                        return Err(Error::invalid(
                            index,
                            name,
                            shard,
                            "the name of a file beside the index",
                        ));
                    }
                    files.push(SafetensorsFile::open(&folder.join(shard))?);
                    shards.insert(shard, files.len() - 1);
                    files.len() - 1
                }
            };
            if files[number].info(name).is_none() {
                return Err(Error::invalid(
                    folder.join(shard),
                    name,
                    "no such tensor",
                    "one, as the index says",
                ));
            }
            holder.insert(name.clone(), number);
        }
        Ok(Files::Safetensors(files, holder))
    }

    /// The folder or file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        match &self.files {
            Files::Gguf(file) => file.names(),
            Files::Safetensors(_, holder) => holder.keys().cloned().collect(),
        }
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.shape(name).is_some()
    }

    /// A tensor's shape, the slowest dimension first (a projection's is `[out, in]`).
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        match &self.files {
            Files::Gguf(file) => file.shape(name),
            Files::Safetensors(files, holder) => {
                holder.get(name).and_then(|&n| files[n].info(name)).map(|info| info.shape.clone())
            }
        }
    }

    /// A tensor's values, in row-major order: floats of every type (quantised ones too) as f32, integers
    /// as i64, truth values as i64 0 and 1. `None` where there is no such tensor.
    ///
    /// # Errors
    /// [`Error::Invalid`] where its type is none of those that are read.
    pub fn tensor(&self, name: &str) -> Result<Option<TensorData>> {
        match &self.files {
            Files::Gguf(file) => Ok(file.tensor(name)),
            Files::Safetensors(..) => Ok(self.stored(name)?.map(|stored| stored.decode())),
        }
    }

    /// A tensor's bytes as its file stores them; those of a GGUF file as F32.
    ///
    /// # Errors
    /// As [`Weights::tensor`].
    pub(crate) fn stored(&self, name: &str) -> Result<Option<Stored<'_>>> {
        match &self.files {
            Files::Gguf(file) => Ok(file.tensor(name).map(|data| Stored {
                element: Element::F32,
                shape: data.shape.to_vec(),
                bytes: Cow::Owned(data.as_bytes().to_vec()),
            })),
            Files::Safetensors(files, holder) => {
                holder.get(name).map_or(Ok(None), |&number| files[number].stored(name))
            }
        }
    }

    /// Whether a tensor's values are decoded from a quantised type, and so are not those that it had.
    pub(crate) fn quantised(&self, name: &str) -> bool {
        match &self.files {
            Files::Gguf(file) => file.quantised(name),
            Files::Safetensors(..) => false,
        }
    }

    /// The file format's name of a tensor's type, whether or not it can be read; none in a GGUF file.
    pub(crate) fn type_name(&self, name: &str) -> Option<String> {
        match &self.files {
            Files::Gguf(_) => None,
            Files::Safetensors(files, holder) => {
                Some(files[*holder.get(name)?].info(name)?.dtype.to_string())
            }
        }
    }

    /// Size of its files.
    pub(crate) fn file_bytes(&self) -> Result<u64> {
        match &self.files {
            Files::Gguf(file) => Ok(std::fs::metadata(file.path()).map_err(Error::io(file.path()))?.len()),
            Files::Safetensors(files, _) => Ok(files.iter().map(|file| file.len() as u64).sum()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A safetensors file from its header and data, with the length that the header has unless told.
    fn file(header: &[u8], length: Option<u64>, data: &[u8]) -> Vec<u8> {
        let length = length.unwrap_or(header.len() as u64);
        [&length.to_le_bytes()[..], header, data].concat()
    }

    fn folder(bytes: &[u8]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        dir
    }

    fn refused(bytes: &[u8]) -> String {
        let dir = folder(bytes);
        let error = Weights::open(dir.path()).err().expect("the file must be refused");
        assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
        assert!(error.to_string().contains("model.safetensors"), "{error}");
        error.to_string()
    }

    const TWO: &[u8] = br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
        "b":{"dtype":"BF16","shape":[2,1],"data_offsets":[4,8]}}"#;

    #[test]
    fn every_type_is_read() {
        let header = br#"{"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},
            "b":{"dtype":"I64","shape":[1],"data_offsets":[8,16]},
            "c":{"dtype":"F16","shape":[2],"data_offsets":[16,20]},
            "d":{"dtype":"BF16","shape":[1,2],"data_offsets":[20,24]},
            "e":{"dtype":"I32","shape":[1],"data_offsets":[24,28]},
            "f":{"dtype":"BOOL","shape":[2],"data_offsets":[28,30]},
            "g":{"dtype":"U8","shape":[1],"data_offsets":[30,31]},
            "h":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[31,32]}}"#;
        let mut data = (-2.5f64).to_le_bytes().to_vec();
        data.extend((-3i64).to_le_bytes());
        data.extend([0x00, 0x3e, 0x00, 0xb4, 0xc0, 0x3f, 0x49, 0xc0]); // 1.5, -0.25; 1.5, -3.140625
        data.extend((-7i32).to_le_bytes());
        data.extend([1, 0, 200, 0]);
        let dir = folder(&file(header, None, &data));
        let weights = Weights::open(dir.path()).unwrap();
        let tensor = |name| weights.tensor(name).unwrap().unwrap();
        let floats = |name| tensor(name).to_vec::<f32>().unwrap();
        let ints = |name| tensor(name).to_vec::<i64>().unwrap();
        assert_eq!(
            (floats("a"), floats("c"), floats("d")),
            (vec![-2.5], vec![1.5, -0.25], vec![1.5, -3.140625])
        );
        assert_eq!((ints("b"), ints("e"), ints("f"), ints("g")), (vec![-3], vec![-7], vec![1, 0], vec![200]));
        assert_eq!(weights.shape("d"), Some(vec![1, 2]));
        assert!(weights.tensor("absent").unwrap().is_none());
        let message = weights.tensor("h").unwrap_err().to_string();
        assert!(message.contains("F8_E4M3") && message.contains(": h:"), "{message}");
    }

    #[test]
    fn a_file_cut_anywhere_or_too_long_is_refused() {
        let bytes = file(TWO, None, &[0; 8]);
        assert!(Weights::open(folder(&bytes).path()).is_ok());
        for length in 0..bytes.len() {
            refused(&bytes[..length]);
        }
        refused(&[&bytes[..], &[0]].concat());
    }

    #[test]
    fn attacks_on_the_header_are_refused() {
        for (length, part) in
            [(u64::MAX, "too large"), (1 << 26, "header"), (TWO.len() as u64 + 100, "length")]
        {
            assert!(refused(&file(TWO, Some(length), &[0; 8])).contains(part), "{length}");
        }
        assert!(refused(&file(b"{\"a\xff\":1}", None, &[])).contains("UTF-8"));
        assert!(refused(&file(b"[1, 2]", None, &[])).contains("JSON"));
        let tensor = |dtype: &str, shape: &str, from: u64, to: u64| {
            let header =
                format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}}}"#);
            refused(&file(header.as_bytes(), None, &[0; 8]))
        };
        assert!(tensor("F32", "[1]", 4, 8).contains('w')); // a hole before it
        tensor("F32", "[1]", 0, 4); // bytes of nobody after it
        tensor("F32", "[1]", 8, 4);
        tensor("F32", "[4]", 0, 16); // past the end
        tensor("F32", "[3]", 0, 8); // too few bytes for the shape
        tensor("F64", "[2]", 0, 8); // and for the type
        tensor("F32", "[4611686018427387904, 4]", 0, 8);
        tensor("F32", "[-1]", 0, 8);
        assert!(tensor("Q7", "[8]", 0, 8).contains("Q7"));
    }

    fn sharded(index: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        let mut data = 1.5f32.to_le_bytes().to_vec();
        data.extend([0xc0, 0x3f, 0, 0]);
        std::fs::write(dir.path().join("one.safetensors"), file(TWO, None, &data)).unwrap();
        let other = br#"{"c":{"dtype":"I64","shape":[],"data_offsets":[0,8]}}"#;
        std::fs::write(dir.path().join("two.safetensors"), file(other, None, &9i64.to_le_bytes())).unwrap();
        dir
    }

    #[test]
    fn shards_are_one_checkpoint() {
        let dir = sharded(
            r#"{"metadata": {"total_size": 16},
                "weight_map": {"a": "one.safetensors", "c": "two.safetensors", "b": "one.safetensors"}}"#,
        );
        let weights = Weights::open(dir.path()).unwrap();
        assert_eq!(weights.names(), ["a", "b", "c"]);
        assert_eq!(weights.tensor("a").unwrap().unwrap().to_vec::<f32>().unwrap(), [1.5]);
        assert_eq!(weights.tensor("b").unwrap().unwrap().to_vec::<f32>().unwrap(), [1.5, 0.0]);
        assert_eq!(weights.tensor("c").unwrap().unwrap().to_vec::<i64>().unwrap(), [9]);
        assert_eq!(weights.shape("c"), Some(vec![]));
    }

    #[test]
    fn an_index_that_promises_too_much_is_refused() {
        for (index, part) in [
            (r#"{"weight_map": {"a": "three.safetensors"}}"#, "three.safetensors"),
            (r#"{"weight_map": {"d": "one.safetensors"}}"#, "one.safetensors: d"),
            (r#"{"weight_map": {"a": "../one.safetensors"}}"#, "beside the index"),
            (r#"{"weight_map": {"a": "/one.safetensors"}}"#, "beside the index"),
            (r#"{"weight_map": {"a": 1}}"#, "index.json"),
            (r#"{"weight_map": "#, "line 1"),
        ] {
            let dir = sharded(index);
            let message = Weights::open(dir.path()).err().expect("must be refused").to_string();
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn a_folder_without_weights_and_an_absent_one() {
        let dir = tempfile::tempdir().unwrap();
        let message = Weights::open(dir.path()).err().expect("must be refused").to_string();
        assert!(message.contains("model.safetensors.index.json"), "{message}");
        for name in ["absent", "absent.gguf"] {
            let error = Weights::open(&dir.path().join(name)).err().expect("must be refused");
            assert!(matches!(error, Error::Io { .. }) && error.to_string().contains(name), "{error}");
        }
    }
}
