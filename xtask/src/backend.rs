//! Which Burn backend computes, and on how many threads.
//!
//! Everything else is generic over the backend; only [`with_backend`] turns a name into a type.

use anyhow::Context;
use hspec_core::target::WeightStorage;
use std::str::FromStr;

#[cfg(not(any(feature = "flex", feature = "ndarray", feature = "cuda")))]
compile_error!("xtask needs a backend: build with one of the features flex (default), ndarray and cuda");

const DEFAULT: &str = if cfg!(feature = "flex") {
    "flex"
} else if cfg!(feature = "ndarray") {
    "ndarray"
} else {
    "cuda"
};

/// Where to compute.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Common {
    /// What computes: flex and ndarray on the CPU, cuda on an NVIDIA GPU, each if built in.
    #[arg(long, value_name = "flex|ndarray|cuda", default_value = DEFAULT)]
    pub(crate) backend: Name,
    /// Threads of the CPU that compute [default: all].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// How flex stores the target's matrices: f32, bf16 (rounded: half the bytes to read), or bf16 where that
    /// changes no value.
    #[arg(long, value_name = "auto|f32|bf16", default_value = "auto", value_parser = storage)]
    pub(crate) weights: WeightStorage,
}

fn storage(text: &str) -> Result<WeightStorage, String> {
    match text {
        "auto" => Ok(WeightStorage::Lossless),
        "f32" => Ok(WeightStorage::F32),
        "bf16" => Ok(WeightStorage::Bf16),
        _ => Err("known are auto, f32, bf16".to_owned()),
    }
}

/// What [`storage`] parses.
pub(crate) fn storage_word(storage: WeightStorage) -> &'static str {
    match storage {
        WeightStorage::Lossless => "auto",
        WeightStorage::F32 => "f32",
        WeightStorage::Bf16 => "bf16",
    }
}

/// A backend, whether or not it is built in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Name {
    Flex,
    Ndarray,
    Cuda,
}

impl Name {
    const ALL: [Self; 3] = [Self::Flex, Self::Ndarray, Self::Cuda];

    fn word(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Ndarray => "ndarray",
            Self::Cuda => "cuda",
        }
    }

    fn built_in(self) -> bool {
        match self {
            Self::Flex => cfg!(feature = "flex"),
            Self::Ndarray => cfg!(feature = "ndarray"),
            Self::Cuda => cfg!(feature = "cuda"),
        }
    }

    /// The error of a backend that is not built in.
    pub(crate) fn absent<T>(self) -> anyhow::Result<T> {
        anyhow::bail!(
            "--backend {self}: not built in; run `cargo run --release -p xtask --features {self} -- COMMAND ...`"
        )
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.word())
    }
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.map(Self::word).join(", ");
        Self::ALL.into_iter().find(|name| name.word() == text).ok_or_else(|| format!("known are {known}"))
    }
}

impl Common {
    /// Sets the number of threads and makes sure that there is a device. To be called once, before
    /// anything computes.
    pub(crate) fn prepare(&self) -> anyhow::Result<()> {
        if !self.backend.built_in() {
            return self.backend.absent();
        }
        if self.weights == WeightStorage::Bf16 && self.backend != Name::Flex {
            anyhow::bail!("--weights bf16: only the backend flex stores weights in a form of its own");
        }
        if let Some(threads) = self.threads {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.into());
            pool.build_global().context("--threads")?;
        }
        #[cfg(feature = "cuda")]
        if self.backend == Name::Cuda {
            // Without this, the driver's absence is a panic in a thread of Burn's.
            probe_cuda(std::path::Path::new("/dev"), &library_folders())?;
        }
        Ok(())
    }
}

/// Asks the C library to keep memory that is freed. A training step frees and asks for gigabytes in pieces of
/// megabytes, which otherwise go back to the system each time and come again page by page, zeroed.
pub(crate) fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: both only set numbers of the allocator, before other threads run.
    unsafe {
        // Older versions take 32 MiB at most, and either option alone would make things worse.
        if [1 << 30, 32 << 20].into_iter().any(|bytes| libc::mallopt(libc::M_MMAP_THRESHOLD, bytes) == 1) {
            libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
        }
    }
}

/// Threads of the CPU that compute.
pub(crate) fn threads() -> usize {
    rayon::current_num_threads()
}

/// Threads that may work on different things: a GPU's work queues up behind one.
pub(crate) fn workers<B: burn::tensor::backend::Backend>(device: &B::Device) -> usize {
    if B::name(device).contains("cuda") { 1 } else { threads() }
}

/// Runs an expression with a backend's type and its default device:
/// `with_backend!(&args.backend, |B, device| command::<B>(args, &device))`.
macro_rules! with_backend {
    ($args:expr, |$backend:ident, $device:ident| $body:expr) => {{
        $args.prepare()?;
        match $args.backend {
            #[cfg(feature = "flex")]
            $crate::backend::Name::Flex => {
                type $backend = burn_flex::Flex;
                let $device = Default::default();
                $body
            }
            #[cfg(feature = "ndarray")]
            $crate::backend::Name::Ndarray => {
                type $backend = burn_ndarray::NdArray;
                let $device = Default::default();
                $body
            }
            #[cfg(feature = "cuda")]
            $crate::backend::Name::Cuda => {
                type $backend = burn_cuda::Cuda;
                let $device = Default::default();
                $body
            }
            // Refused above; here for builds that lack one.
            #[allow(unreachable_patterns)]
            name => name.absent::<std::convert::Infallible>().map(|never| match never {})?,
        }
    }};
}
pub(crate) use with_backend;

/// Refuses a machine without an NVIDIA device or its driver's library.
#[cfg(any(feature = "cuda", test))]
fn probe_cuda(devices: &std::path::Path, libraries: &[std::path::PathBuf]) -> anyhow::Result<()> {
    let is_gpu = |name: &str| name.strip_prefix("nvidia").is_some_and(|n| n.parse::<u32>().is_ok());
    let entries = std::fs::read_dir(devices).into_iter().flatten().flatten();
    if !entries.into_iter().any(|entry| entry.file_name().to_str().is_some_and(is_gpu)) {
        anyhow::bail!("--backend cuda: {} has no nvidia0: no NVIDIA GPU is visible here", devices.display());
    }
    if !libraries.iter().any(|folder| folder.join("libcuda.so.1").exists()) {
        anyhow::bail!(
            "--backend cuda: there is a GPU, but libcuda.so.1 (part of NVIDIA's driver) is in no folder of \
             libraries; where it lies elsewhere, name that folder in LD_LIBRARY_PATH"
        );
    }
    Ok(())
}

/// Where the loader looks for libraries: `LD_LIBRARY_PATH`, its cache, and the usual folders.
#[cfg(feature = "cuda")]
fn library_folders() -> Vec<std::path::PathBuf> {
    use std::path::{Path, PathBuf};
    let named = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&named).collect();
    if let Ok(cache) = std::process::Command::new("ldconfig").arg("-p").output() {
        let cache = String::from_utf8_lossy(&cache.stdout).into_owned();
        let files =
            cache.lines().filter_map(|line| line.split_once("=> ")).map(|(_, file)| Path::new(file.trim()));
        folders.extend(files.filter_map(Path::parent).map(Path::to_owned));
    }
    folders.extend(
        ["/usr/lib64", "/usr/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"]
            .map(PathBuf::from),
    );
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_that_is_not_built_in_is_refused_with_its_feature() {
        for name in Name::ALL {
            assert_eq!(name.word().parse(), Ok(name));
            let common = Common { backend: name, threads: None, weights: WeightStorage::Lossless };
            if !name.built_in() {
                let message = common.prepare().unwrap_err().to_string();
                assert!(message.contains(&format!("--features {name}")), "{message}");
            }
        }
        assert_eq!("tpu".parse::<Name>().unwrap_err(), "known are flex, ndarray, cuda");
        assert!(DEFAULT.parse::<Name>().is_ok_and(Name::built_in));
    }

    #[test]
    fn storages_that_are_not_known_are_refused() {
        for word in ["auto", "f32", "bf16"] {
            assert_eq!(storage(word).map(storage_word), Ok(word));
        }
        assert_eq!(storage("q8").unwrap_err(), "known are auto, f32, bf16");
    }

    #[test]
    fn a_gpu_needs_a_device_and_a_driver() {
        let dir = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir(&path).unwrap();
            path
        };
        let (devices, libraries) = (folder("dev"), folder("lib"));
        let probe = || probe_cuda(&devices, std::slice::from_ref(&libraries)).map_err(|e| e.to_string());
        std::fs::write(devices.join("nvidiactl"), "").unwrap();
        assert!(probe().unwrap_err().contains("no NVIDIA GPU is visible"));
        std::fs::write(devices.join("nvidia3"), "").unwrap();
        assert!(probe().unwrap_err().contains("libcuda.so.1"));
        std::fs::write(libraries.join("libcuda.so.1"), "").unwrap();
        assert_eq!(probe(), Ok(()));
    }
}
