//! `cargo xtask bench`: how long the pieces of work take, and a peer beside us.

mod peer;
mod report;
mod scene;
mod shape;
mod stats;
mod sweep;
mod work;

use crate::{
    backend::{Common, Name, keep_freed_memory, threads, with_backend},
    model::default_target,
    output::probe,
    progress::Progress,
};
use anyhow::Context;
use burn::tensor::{DType, backend::Backend};
use hspec_core::{
    checkpoint::write_atomic,
    target::{Target, WeightStorage},
};
use hspec_eval::{Machine, commit, utc_date};
use hspec_nn::Compute;
use peer::{Dtype, Peer};
use report::{Document, Row, cost_ratios};
use scene::{Scene, Step};
pub(crate) use shape::Shape;
use stats::{Spread, ratios};
use std::{
    io::Write,
    path::PathBuf,
    time::{Duration, Instant, SystemTime},
};
use work::Work;

/// Repetitions that do not count.
const WARM_UP: usize = 2;
/// Fewest repetitions that count, however short the time.
const LEAST: usize = 3;
/// Between repetitions, so that a peer's threads are asleep when ours work, and ours when its do.
const PAUSE: Duration = Duration::from_millis(20);
/// A training step of rounded factors.
const IN_BF16: Work = Work::TrainStep(Compute::Bf16);
/// Time of a sweep unless told otherwise, on the CPU and on a GPU.
const SWEEP_MINUTES: [f64; 2] = [1.0, 3.0];

/// Measure how long decoding, verifying, drafting and training take.
///
/// Weights are a target's or random ones of a published shape; the drafter is random, of the shape that goes with
/// the target. With --peer torch, our step and the same step in PyTorch run alternately, and ratios are taken pair
/// by pair: above 1 we are faster.
#[derive(clap::Args)]
#[command(after_help = "\
Work: decode@256 decode@1024 verify8@256 verify8@1024 prefill512 draft_step train_step ssd_scan, and the
first five with weights rounded to bf16: decode@256:bf16 ... (without --work, beside a peer only); train_step:bf16
multiplies rounded factors

Examples:
  cargo xtask bench
  cargo xtask bench --work decode@256 verify8@256 --repeats 30
  cargo xtask bench --peer torch --out docs/results    # how to install it: benches/peers/README.md
  cargo xtask bench --shape qwen3-8b --backend cuda --sweep --minutes 6 --json")]
pub(crate) struct Args {
    /// The model: a Hugging Face folder or a GGUF file [default: models/smollm2-135m-instruct].
    #[arg(long, value_name = "DIR", conflicts_with = "shape")]
    target: Option<PathBuf>,
    /// Random weights of a published model's shape in place of a model.
    #[arg(long, value_enum)]
    shape: Option<Shape>,
    /// What to measure [default: everything].
    #[arg(long, value_name = "NAME", num_args = 1..)]
    work: Vec<Work>,
    /// Repetitions that count, of each piece of work.
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u16).range(1..))]
    repeats: u16,
    /// Measure a peer beside us.
    #[arg(long, value_enum)]
    peer: Option<PeerName>,
    /// Also measure draft steps of H-Spec and DSpark at contexts of 512 to 32,768 tokens and 1 to 128 requests, as
    /// far as time and memory allow.
    #[arg(long)]
    sweep: bool,
    /// Stop after about so many minutes, with fewer repetitions and a shorter sweep [default: none, and for
    /// a sweep 1, on a GPU 3].
    #[arg(long, value_name = "M", value_parser = minutes)]
    minutes: Option<f64>,
    /// Write one JSON document instead of a table.
    #[arg(long)]
    json: bool,
    /// Folder for speed.json and speed.md; in a speed.md that is there, only the measured part is replaced.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    backend: Common,
}

/// Who else does the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum PeerName {
    /// PyTorch on the CPU, in f32 and bf16.
    Torch,
}

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(m) if (0.0..1e6).contains(&m) => Ok(m),
        _ => Err("expected a number of minutes".into()),
    }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    // As training does.
    keep_freed_memory();
    if args.peer.is_some() && args.backend.backend == Name::Cuda {
        anyhow::bail!("--peer torch measures PyTorch on the CPU; it says nothing beside --backend cuda");
    }
    if let Some(out) = &args.out {
        probe(out)?;
    }
    let document = with_backend!(args.backend, |B, device| measure::<B>(args, &device))?;
    if let Some(out) = &args.out {
        let json = serde_json::to_string_pretty(&document)?;
        write_atomic(&out.join("speed.json"), |file| writeln!(file, "{json}"))?;
        let path = out.join("speed.md");
        let page = report::page(&document, &command(), std::fs::read_to_string(&path).ok().as_deref());
        write_atomic(&path, |file| file.write_all(page.as_bytes()))?;
    }
    let mut stdout = std::io::stdout().lock();
    if args.json {
        writeln!(stdout, "{}", serde_json::to_string_pretty(&document)?)?;
    } else {
        write!(stdout, "{}", report::table(&document))?;
    }
    Ok(())
}

/// What was typed.
fn command() -> String {
    ["cargo", "xtask"]
        .map(str::to_owned)
        .into_iter()
        .chain(std::env::args().skip(1))
        .collect::<Vec<_>>()
        .join(" ")
}

/// The target and its name, from files or at random.
fn target<B: Backend>(
    args: &Args,
    storage: WeightStorage,
    free: Option<u64>,
    device: &B::Device,
) -> anyhow::Result<(Target<B>, String)> {
    if let Some(shape) = args.shape {
        // Not random from run to run.
        B::seed(device, 0);
        let name = clap::ValueEnum::to_possible_value(&shape).context("every shape has a name")?;
        let config = shape.config()?;
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        let needed = shape::bytes(&config);
        if let Some(free) = free.filter(|&free| needed > free) {
            let (needed, free) = (gib(needed), gib(free));
            anyhow::bail!(
                "--shape {}: takes {needed:.0} GiB in f32, {free:.0} GiB are free",
                name.get_name()
            );
        }
        return Ok((Target::random(config, None, device)?, format!("random weights of {}", name.get_name())));
    }
    let path = args.target.clone().unwrap_or_else(default_target);
    let hint =
        || format!("{}: fetch it with `cargo xtask fetch smollm2-135m`, or give --shape", path.display());
    std::fs::metadata(&path).with_context(hint)?;
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    Ok((Target::load_as(&path, storage, device)?, name))
}

fn measure<B: Backend>(args: &Args, device: &B::Device) -> anyhow::Result<Document> {
    let start = Instant::now();
    let cuda = args.backend.backend == Name::Cuda;
    let works = works(args, B::supports_dtype(device, DType::BF16))?;
    let (target, name) = self::target::<B>(args, args.backend.weights, free_memory(cuda), device)?;
    let rounded = match works.iter().any(Work::is_rounded) {
        true => Some(self::target::<B>(args, WeightStorage::Bf16, None, device)?.0),
        false => None,
    };
    let scene = Scene::new(target, rounded)?;
    let mut peers = peers(args, &scene)?;
    let until = args.minutes.map(|m| start + Duration::from_secs_f64(60.0 * m));
    let repeats = usize::from(args.repeats);
    let progress = Progress::count("bench", (works.len() * repeats) as u64);
    let mut rows = Vec::new();
    for (i, &work) in works.iter().enumerate() {
        // What is left is shared out evenly; a sweep gets as much as all works together.
        let shares = (works.len() - i + if args.sweep { works.len() } else { 0 }) as u32;
        let until = until.map(|end| Instant::now() + end.saturating_duration_since(Instant::now()) / shares);
        let done = |r: usize| progress.set((i * repeats + r) as u64);
        let times = alternate(work, scene.step(work)?, &mut peers, Limits { repeats, until }, &done)?;
        rows.extend(times.rows(work, &peers));
        B::memory_cleanup(device);
    }
    drop((peers, progress));
    let sweep = if args.sweep {
        let minutes = SWEEP_MINUTES[usize::from(cuda)];
        let until = until.unwrap_or_else(|| Instant::now() + Duration::from_secs_f64(60.0 * minutes));
        sweep::run(scene, &sweep::Limits { until, memory: free_memory(cuda) })?
    } else {
        Vec::new()
    };
    Ok(Document {
        schema: 1,
        commit: commit(&crate::workspace()),
        date: utc_date(SystemTime::now()),
        machine: Machine::this(threads()),
        backend: args.backend.backend.to_string(),
        weights: crate::backend::storage_word(args.backend.weights),
        target: name,
        repeats,
        cost_ratios: cost_ratios(&rows),
        rows,
        sweep,
    })
}

/// What is to be measured. Rounded weights are another target in memory, so that they are measured where they are
/// asked for or a peer's bf16 stands beside them. `bf16`: whether the backend has such products.
fn works(args: &Args, bf16: bool) -> anyhow::Result<Vec<Work>> {
    let rounded = args.backend.backend == Name::Flex && args.shape.is_none();
    if args.shape.is_some() && args.backend.weights != WeightStorage::Lossless {
        anyhow::bail!("--weights: says how a model's weights are stored; those of --shape are random");
    }
    match args.work.iter().find(|work| work.is_rounded()) {
        Some(work) if !rounded => anyhow::bail!(
            "--work {work}: weights are rounded where a model is loaded on the backend flex; found --backend {}{}",
            args.backend.backend,
            if args.shape.is_some() { " with --shape" } else { "" }
        ),
        _ if !bf16 && args.work.contains(&IN_BF16) => {
            anyhow::bail!("--work {IN_BF16}: the backend {} has no bf16 products", args.backend.backend)
        }
        _ if !args.work.is_empty() => Ok(args.work.clone()),
        _ => {
            let rounded = rounded && args.peer.is_some();
            let fits = |work: &Work| (rounded || !work.is_rounded()) && (bf16 || *work != IN_BF16);
            Ok(Work::ALL.into_iter().filter(fits).collect())
        }
    }
}

/// The peers that were asked for and are there.
fn peers<B: Backend>(args: &Args, scene: &Scene<B>) -> anyhow::Result<Vec<Peer>> {
    let mut peers = Vec::new();
    if args.peer.is_some() {
        // Threads that wait for each other by spinning, as PyTorch's do, suffer most where cores are short.
        if let Some(load) = load().filter(|&load| load > 1.0) {
            eprintln!(
                "the machine is busy (load average {load}): a peer's times and the ratios will mislead"
            );
        }
        let facts = shape::facts(scene.target.config(), &scene.recipe);
        for dtype in [Dtype::F32, Dtype::Bf16] {
            match Peer::start(dtype, threads(), &facts)? {
                Ok(peer) => peers.push(peer),
                Err(reason) => {
                    eprintln!("--peer torch skipped: {reason}");
                    break;
                }
            }
        }
    }
    Ok(peers)
}

struct Limits {
    repeats: usize,
    until: Option<Instant>,
}

/// Milliseconds of each repetition.
struct Times {
    ours: Vec<f64>,
    peers: Vec<Vec<f64>>,
}

impl Times {
    fn rows(self, work: Work, peers: &[Peer]) -> Vec<Row> {
        let ours_ms = Spread::of(self.ours.clone());
        let alone = Row { work: work.to_string(), ours_ms, peer: None, peer_ms: None, ratio: None };
        if peers.is_empty() {
            return vec![alone];
        }
        let beside = |(peer, times): (&Peer, Vec<f64>)| Row {
            work: work.to_string(),
            ours_ms,
            peer: Some(peer.name),
            ratio: Some(ratios(&self.ours, &times)),
            peer_ms: Some(Spread::of(times)),
        };
        peers.iter().zip(self.peers).map(beside).collect()
    }
}

/// Our step and the peers', turn by turn.
fn alternate(
    work: Work,
    mut step: Step<'_>,
    peers: &mut [Peer],
    limits: Limits,
    done: &dyn Fn(usize),
) -> anyhow::Result<Times> {
    let mut ours = || -> anyhow::Result<f64> {
        let start = Instant::now();
        step().with_context(|| work.to_string())?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        std::thread::sleep(PAUSE);
        Ok(ms)
    };
    let theirs = |peers: &mut [Peer]| -> anyhow::Result<Vec<f64>> {
        let once = |peer: &mut Peer| {
            let ms = peer.run(work);
            std::thread::sleep(PAUSE);
            ms
        };
        peers.iter_mut().map(once).collect()
    };
    for _ in 0..WARM_UP {
        ours()?;
        theirs(peers)?;
    }
    let mut times = Times { ours: Vec::new(), peers: vec![Vec::new(); peers.len()] };
    for r in 0..limits.repeats {
        if r >= LEAST && limits.until.is_some_and(|end| Instant::now() >= end) {
            break;
        }
        // Who goes first changes, so that a machine that gets slower or faster favours nobody.
        let (own, other) = if r % 2 == 0 {
            let own = ours()?;
            (own, theirs(peers)?)
        } else {
            let other = theirs(peers)?;
            (ours()?, other)
        };
        times.ours.push(own);
        times.peers.iter_mut().zip(other).for_each(|(times, ms)| times.push(ms));
        done(r + 1);
    }
    Ok(times)
}

/// Programs that wanted to compute during the last minute, where the system tells.
fn load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

/// Bytes that are free on the device that computes, where the system tells.
fn free_memory(cuda: bool) -> Option<u64> {
    if cuda {
        let query = ["--query-gpu=memory.free", "--format=csv,noheader,nounits"];
        let output = std::process::Command::new("nvidia-smi").args(query).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        return Some(text.lines().next()?.trim().parse::<u64>().ok()? << 20);
    }
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}
