//! Writing whole files or nothing.

use super::Stored;
use crate::error::{Error, Result};
use burn::tensor::{DType, TensorData};
use half::bf16;
use safetensors::{Dtype, tensor::TensorInfo};
use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
};

/// Writes a file through a temporary name in the same folder: flushed to the disk, then renamed. Whoever
/// looks at `path` sees the old file or the whole new one.
///
/// # Errors
/// [`Error::Io`]; the temporary file is then removed and `path` is as before.
pub fn write_atomic(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    write_inner(path, write).map_err(Error::io(path))
}

fn write_inner(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    // "model.bin" has the parent "", which means the current folder.
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    builder.prefix(".partial-");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // What a newly created file has; the umask takes its part off. The crate's default is 0600.
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let mut temporary = builder.tempfile_in(folder)?;
    let mut buffer = BufWriter::with_capacity(1 << 20, temporary.as_file_mut());
    write(&mut buffer)?;
    buffer.flush()?;
    drop(buffer);
    temporary.as_file().sync_all()?;
    temporary.persist(path).map_err(|e| e.error)?;
    // The rename itself is only safe on the disk once the folder is.
    #[cfg(unix)]
    File::open(folder)?.sync_all()?;
    Ok(())
}

/// Refuses a folder that holds files of something else: all but `own`, and hidden ones as files being written are.
///
/// # Errors
/// A folder that cannot be read; [`Error::Invalid`] with `expected` that names the first such file.
pub fn refuse_foreign(dir: &Path, own: &[&str], expected: &str) -> Result<()> {
    for entry in std::fs::read_dir(dir).map_err(Error::io(dir))? {
        let name = entry.map_err(Error::io(dir))?.file_name();
        let name = name.to_string_lossy();
        if !own.contains(&&*name) && !name.starts_with('.') {
            return Err(Error::invalid(dir, "folder", name, expected));
        }
    }
    Ok(())
}

/// How floats are stored in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreAs {
    /// 4 bytes, exact.
    F32,
    /// 2 bytes, rounded to nearest even.
    Bf16,
}

/// Writes tensors as one safetensors file, atomically and without a second copy of the whole in memory:
/// floats as asked, integers as I64, truth values as BOOL, and the metadata `format: pt` that PyTorch
/// tools look for.
///
/// # Errors
/// [`Error::Io`] where the file cannot be written.
pub fn write_safetensors(path: &Path, tensors: &BTreeMap<String, TensorData>, store: StoreAs) -> Result<()> {
    let entries = tensors.iter().map(|(name, data)| Entry { name, dtype: stored_type(data, store), data });
    write_entries(path, entries.collect(), |data| data.shape.to_vec(), write_elements)
}

/// [`write_safetensors`] of tensors as they are stored elsewhere.
///
/// # Errors
/// [`Error::Io`] where the file cannot be written.
pub(crate) fn write_stored(path: &Path, tensors: &BTreeMap<String, Stored<'_>>) -> Result<()> {
    let entries = tensors.iter().map(|(name, data)| Entry { name, dtype: data.element.dtype(), data });
    write_entries(
        path,
        entries.collect(),
        |data| data.shape.clone(),
        |out, _, data| out.write_all(&data.bytes),
    )
}

/// A tensor to be written.
struct Entry<'a, T> {
    name: &'a String,
    dtype: Dtype,
    data: &'a T,
}

fn write_entries<T>(
    path: &Path,
    mut entries: Vec<Entry<'_, T>>,
    shape: impl Fn(&T) -> Vec<usize>,
    write: impl Fn(&mut dyn Write, Dtype, &T) -> io::Result<()>,
) -> Result<()> {
    // Wide types first, so that each tensor lies on a multiple of its element size.
    entries.sort_by_key(|entry| (std::cmp::Reverse(entry.dtype.bitsize()), entry.name));

    let mut offset = 0;
    let mut header = BTreeMap::new();
    for Entry { name, dtype, data } in &entries {
        let shape = shape(data);
        let end = offset + shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let info = TensorInfo { dtype: *dtype, shape, data_offsets: (offset, end) };
        header.insert(name.as_str(), info);
        offset = end;
    }

    #[derive(serde::Serialize)]
    struct Header<'a> {
        __metadata__: HashMap<&'a str, &'a str>,
        #[serde(flatten)]
        tensors: BTreeMap<&'a str, TensorInfo>,
    }
    write_atomic(path, |out| {
        let header = Header { __metadata__: HashMap::from([("format", "pt")]), tensors: header };
        let mut header = serde_json::to_vec(&header)?;
        header.resize(header.len().next_multiple_of(8), b' ');
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        entries.iter().try_for_each(|entry| write(out, entry.dtype, entry.data))
    })
}

fn stored_type(data: &TensorData, store: StoreAs) -> Dtype {
    match data.dtype {
        DType::Bool(_) => Dtype::BOOL,
        dtype if !dtype.is_float() => Dtype::I64,
        _ => match store {
            StoreAs::F32 => Dtype::F32,
            StoreAs::Bf16 => Dtype::BF16,
        },
    }
}

fn write_elements(out: &mut dyn Write, dtype: Dtype, data: &TensorData) -> io::Result<()> {
    match (dtype, data.dtype) {
        // The usual case without a call per element.
        (Dtype::F32, DType::F32) if cfg!(target_endian = "little") => out.write_all(data.as_bytes()),
        (Dtype::F32, _) => data.iter::<f32>().try_for_each(|x| out.write_all(&x.to_le_bytes())),
        (Dtype::BF16, _) => {
            data.iter::<f32>().try_for_each(|x| out.write_all(&bf16::from_f32(x).to_le_bytes()))
        }
        (Dtype::BOOL, _) => data.iter::<bool>().try_for_each(|x| out.write_all(&[u8::from(x)])),
        _ => data.iter::<i64>().try_for_each(|x| out.write_all(&x.to_le_bytes())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Weights;
    use proptest::prelude::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("results.json");
        write_atomic(&path, |out| out.write_all(b"old")).unwrap();
        let failed = write_atomic(&path, |out| {
            out.write_all(b"half")?;
            Err(io::Error::other("disk full"))
        });
        assert!(failed.unwrap_err().to_string().contains("disk full"));
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        write_atomic(&path, |out| out.write_all(b"new")).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn an_absent_folder_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("absent/results.json");
        let message = write_atomic(&path, |_| Ok(())).unwrap_err().to_string();
        assert!(message.contains("results.json"), "{message}");
    }

    #[cfg(unix)]
    #[test]
    fn a_written_file_has_the_permissions_of_a_created_one() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let (created, written) = (dir.path().join("created"), dir.path().join("written"));
        File::create(&created).unwrap();
        write_atomic(&written, |_| Ok(())).unwrap();
        let mode = |p: &Path| std::fs::metadata(p).unwrap().permissions().mode();
        assert_eq!(mode(&created), mode(&written));
    }

    #[test]
    fn types_and_values_survive() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        let tensors = BTreeMap::from([
            ("a.flags".to_owned(), TensorData::new(vec![true, false, true], [3])),
            ("b.ids".to_owned(), TensorData::new(vec![-5i64, 1 << 40], [2])),
            ("c.weight".to_owned(), TensorData::new(vec![1.0f32, 1.003_906_3, -3.1], [1, 3])),
            ("d.ids".to_owned(), TensorData::new(vec![7i32], [1])),
            ("e.empty".to_owned(), TensorData::new(Vec::<f32>::new(), [0, 4])),
        ]);
        for (store, expected) in
            [(StoreAs::F32, vec![1.0f32, 1.003_906_3, -3.1]), (StoreAs::Bf16, vec![1.0, 1.0, -3.09375])]
        {
            write_safetensors(&path, &tensors, store).unwrap();
            let weights = Weights::open(dir.path()).unwrap();
            assert_eq!(weights.names(), tensors.keys().cloned().collect::<Vec<_>>());
            let get = |name| weights.tensor(name).unwrap().unwrap();
            assert_eq!(get("c.weight").to_vec::<f32>().unwrap(), expected);
            assert_eq!(weights.shape("c.weight"), Some(vec![1, 3]));
            assert_eq!(get("a.flags").to_vec::<i64>().unwrap(), [1, 0, 1]);
            assert_eq!(get("b.ids").to_vec::<i64>().unwrap(), [-5, 1 << 40]);
            assert_eq!(get("d.ids").to_vec::<i64>().unwrap(), [7]);
            assert_eq!(weights.shape("e.empty"), Some(vec![0, 4]));

            let bytes = std::fs::read(&path).unwrap();
            let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
            assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
            let stored = |name| header.info(name).unwrap().dtype;
            let float = if store == StoreAs::F32 { Dtype::F32 } else { Dtype::BF16 };
            assert_eq!(
                [stored("a.flags"), stored("b.ids"), stored("c.weight")],
                [Dtype::BOOL, Dtype::I64, float]
            );
        }
    }

    proptest! {
        // Few, as each waits for the disk.
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn every_float_survives_f32_storage(values in proptest::collection::vec(any::<u32>(), 0..40)) {
            let dir = tempfile::tempdir().unwrap();
            let floats: Vec<f32> = values.iter().map(|&b| f32::from_bits(b)).collect();
            let tensors = BTreeMap::from([("x".to_owned(), TensorData::new(floats.clone(), [floats.len()]))]);
            write_safetensors(&dir.path().join("model.safetensors"), &tensors, StoreAs::F32).unwrap();
            let back = Weights::open(dir.path()).unwrap().tensor("x").unwrap().unwrap();
            let bits: Vec<u32> = back.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect();
            prop_assert_eq!(bits, values);
        }
    }
}
