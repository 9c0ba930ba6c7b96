//! The draft steps of H-Spec and DSpark at growing context and concurrency: where a drafter without a cache of
//! its own wins (H-Spec, Figure 8).
//!
//! A step is what a round asks of a drafter for all requests at once: H-Spec fuses one position per request and
//! reads the target's cache; DSpark first projects the tokens that were accepted into its own cache, and then
//! reads that. Both run their block and draw seven tokens per request, greedily.

use super::{
    scene::{Scene, Step, vocab},
    shape,
    stats::Spread,
};
use crate::progress::Progress;
use anyhow::Context;
use burn::tensor::{Distribution, Int, Tensor, TensorData, backend::Backend};
use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use hspec_attn::{Anchor, Position, Prefix};
use hspec_core::{
    TokenId,
    config::TargetConfig,
    drafter::{
        Blocks, HSpec,
        dspark::{DSpark, DSparkConfig, DSparkModel},
    },
};
use hspec_heads::{CausalCorrection, MarkovHead};
use serde::Serialize;
use std::{
    path::Path,
    time::{Duration, Instant},
};

const PREFIXES: [usize; 4] = [512, 2048, 8192, 32_768];
const CONCURRENCY: [usize; 4] = [1, 8, 32, 128];
/// Tokens that a round accepts of each request: about what the paper's drafters reach.
const ACCEPTED: usize = 4;
const WARM_UP: usize = 2;
const REPEATS: usize = 5;
/// Most of the free memory that a cell may ask for.
const SHARE: f64 = 0.7;

/// A drafter at one context and concurrency.
#[derive(Debug, Serialize)]
pub(crate) struct Cell {
    pub(crate) drafter: &'static str,
    /// Tokens of context of each request.
    pub(crate) prefix: usize,
    pub(crate) concurrency: usize,
    /// Of one step for all requests.
    pub(crate) ms: Option<Spread>,
    /// Bytes of cache that the drafter keeps beside the target's, as measured here (f32).
    pub(crate) own_cache_bytes: u64,
    /// Why there is no time.
    pub(crate) skipped: Option<String>,
}

/// How much may be used.
pub(crate) struct Limits {
    /// When to stop.
    pub(crate) until: Instant,
    /// Bytes that are free, where that is known.
    pub(crate) memory: Option<u64>,
}

/// Measures one cell after the other, smallest first, as far as time and memory allow.
pub(crate) fn run<B: Backend>(scene: Scene<B>, limits: &Limits) -> anyhow::Result<Vec<Cell>> {
    let device = scene.target.device().clone();
    let target = scene.target.config().clone();
    let (hspec, recipe) = (scene.drafter, scene.recipe);
    // Gives the memory back.
    drop((scene.target, scene.rounded));
    B::memory_cleanup(&device);
    let file = Path::new("config.json");
    let config = DSparkConfig::from_value(&shape::dspark(&target, &recipe), file)?;
    let model = DSparkModel::init(&config.shape(file)?, &device).prepack();
    let dspark = DSpark::<B>::new(config, model, vocab(&target, &recipe)?, file)?;

    let mut cells: Vec<(usize, usize)> =
        CONCURRENCY.iter().flat_map(|&c| PREFIXES.map(|prefix| (prefix, c))).collect();
    cells.sort_by_key(|&(prefix, concurrency)| (prefix * concurrency, concurrency));
    let progress = Progress::count("sweep", 2 * cells.len() as u64);
    let mut found = Vec::new();
    // Per drafter, seconds and size of the last cell.
    let mut last: [Option<(f64, usize)>; 2] = [None; 2];
    for (prefix, concurrency) in cells {
        for (which, drafter) in ["hspec", "dspark"].into_iter().enumerate() {
            let at = Place { prefix, concurrency };
            let own = which == 1;
            let layers = if own { dspark.shape().rules.len() } else { hspec.config.attention_layers() };
            let cache = at.cache_bytes(layers, &target);
            let left = limits.until.saturating_duration_since(Instant::now());
            let skipped = too_much(cache, limits.memory).or_else(|| too_long(last[which], at.tokens(), left));
            let ms = if skipped.is_none() {
                let start = Instant::now();
                let step = if own {
                    dspark_step(&dspark, at, &device)
                } else {
                    hspec_step(&hspec, at, &target, &device)
                };
                let ms = time(step?)?;
                B::memory_cleanup(&device);
                last[which] = Some((start.elapsed().as_secs_f64(), at.tokens()));
                Some(ms)
            } else {
                None
            };
            if let Some(reason) = &skipped {
                progress.note(&format!(
                    "{drafter}, prefix {prefix}, concurrency {concurrency}: skipped, {reason}"
                ));
            }
            let own_cache_bytes = if own { cache } else { 0 };
            found.push(Cell { drafter, prefix, concurrency, ms, own_cache_bytes, skipped });
            progress.set(found.len() as u64);
        }
    }
    Ok(found)
}

fn too_much(bytes: u64, free: Option<u64>) -> Option<String> {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let free = free.filter(|&free| bytes as f64 > SHARE * free as f64)?;
    Some(format!("its keys and values take {:.1} GiB and {:.1} GiB are free", gib(bytes), gib(free)))
}

/// A cell takes at most in proportion longer than the last one of its drafter.
fn too_long(last: Option<(f64, usize)>, tokens: usize, left: Duration) -> Option<String> {
    let (seconds, before) = last?;
    let expected = seconds * (tokens as f64 / before as f64).max(1.0);
    (expected > left.as_secs_f64())
        .then(|| format!("it may take {expected:.0} s and {} s are left", left.as_secs()))
}

fn time(mut step: Step<'_>) -> anyhow::Result<Spread> {
    for _ in 0..WARM_UP {
        step()?;
    }
    let mut found = Vec::new();
    for _ in 0..REPEATS {
        let start = Instant::now();
        step()?;
        found.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(Spread::of(found))
}

/// Requests side by side.
#[derive(Clone, Copy)]
struct Place {
    prefix: usize,
    concurrency: usize,
}

impl Place {
    fn tokens(self) -> usize {
        self.prefix * self.concurrency
    }

    fn cache_bytes(self, layers: usize, target: &TargetConfig) -> u64 {
        (2 * layers * target.num_key_value_heads * target.head_dim * size_of::<f32>() * self.tokens()) as u64
    }

    /// Each request is a document of its own.
    fn anchors(self) -> Vec<Anchor> {
        let anchor = |i: usize| Anchor {
            index: (i + 1) * self.prefix,
            document: i * self.prefix,
            position: Position(self.prefix),
        };
        (0..self.concurrency).map(anchor).collect()
    }

    /// Keys and values of all requests; not zeros, which a system need not store.
    fn prefixes<B: Backend>(
        self,
        layers: usize,
        heads: usize,
        head_dim: usize,
        device: &B::Device,
    ) -> Vec<Prefix<B>> {
        let full = || Tensor::full([heads, self.tokens(), head_dim], 0.01, device);
        (0..layers).map(|_| Prefix { keys: full(), values: full() }).collect()
    }
}

fn noise<B: Backend>(rows: usize, width: usize, device: &B::Device) -> Tensor<B, 2> {
    Tensor::random([rows, width], Distribution::Normal(0.0, 1.0), device)
}

fn hspec_step<'a, B: Backend>(
    drafter: &'a HSpec<B>,
    at: Place,
    target: &TargetConfig,
    device: &'a B::Device,
) -> anyhow::Result<Step<'a>> {
    let markov = drafter.model.markov_head.as_ref().context("the drafter has a Markov head")?;
    let slots = drafter.config.block_size;
    let layers = drafter.config.attention_layers();
    let prefixes = at.prefixes(layers, target.num_key_value_heads, target.head_dim, device);
    let (anchors, tokens) = (at.anchors(), vec![TokenId(1); at.concurrency]);
    let width = drafter.config.fusion_layers().len() * target.hidden_size;
    let seeds = noise(at.concurrency, width, device);
    Ok(Box::new(move || {
        let blocks =
            Blocks { anchors: &anchors, tokens: &tokens, seeds: seeds.clone(), prefixes: &prefixes, slots };
        // Slot 0 is the anchor itself.
        let hidden = drafter.forward(&blocks).narrow(1, 1, slots - 1);
        walk(markov, drafter.base_logits(hidden.clone()), hidden);
        Ok(())
    }))
}

fn dspark_step<'a, B: Backend>(
    drafter: &'a DSpark<B>,
    at: Place,
    device: &'a B::Device,
) -> anyhow::Result<Step<'a>> {
    let markov = drafter.model.markov_head.as_ref().context("the drafter has a Markov head")?;
    let s = drafter.shape();
    let prefixes = at.prefixes(s.rules.len(), s.num_key_value_heads, s.head_dim, device);
    let (anchors, tokens) = (at.anchors(), vec![TokenId(1); at.concurrency]);
    let features = noise(at.concurrency * ACCEPTED, s.feature_layers.len() * s.hidden_size, device);
    let positions: Vec<usize> = (0..at.concurrency).flat_map(|_| at.prefix - ACCEPTED..at.prefix).collect();
    Ok(Box::new(move || {
        // Writing them into the cache is not counted: it is a copy of a few rows.
        let accepted = drafter.context(&drafter.fuse(features.clone()), &positions);
        let hidden = drafter.forward(&anchors, &tokens, &prefixes);
        walk(markov, drafter.base_logits(hidden.clone()), hidden);
        drop(accepted);
        Ok(())
    }))
}

/// Draws the best token of each slot, one after the other, for all requests at once.
fn walk<B: Backend>(head: &MarkovHead<B>, base: Tensor<B, 3>, hidden: Tensor<B, 3>) -> TensorData {
    let ([n, k, v], h, device) = (base.dims(), hidden.dims()[2], base.device());
    let mut state = head.start(n, &device);
    let mut token = Tensor::<B, 1, Int>::ones([n], &device);
    let mut path = Vec::with_capacity(k);
    for slot in 0..k {
        let hidden = hidden.clone().narrow(1, slot, 1).reshape([n, h]);
        let (bias, after) = head.step(state, token, hidden);
        state = after;
        let logits = base.clone().narrow(1, slot, 1).reshape([n, v]) + bias;
        // The draft vocabulary is the first ids of the target's.
        token = logits.argmax(1).reshape([n]);
        path.push(token.clone());
    }
    Tensor::cat(path, 0).into_data()
}

const HEADER: [&str; 6] =
    ["prefix", "concurrency", "hspec, ms", "dspark, ms", "dspark / hspec", "dspark's cache"];

/// One line per context and concurrency.
fn lines(cells: &[Cell]) -> impl Iterator<Item = [String; 6]> + '_ {
    cells.chunks_exact(2).map(|pair| {
        let ms = |cell: &Cell| match (&cell.ms, &cell.skipped) {
            (Some(ms), _) => format!("{:.1}", ms.median()),
            _ => "skipped".to_owned(),
        };
        let ratio = match (&pair[0].ms, &pair[1].ms) {
            (Some(hspec), Some(dspark)) => format!("{:.2}", dspark.median() / hspec.median()),
            _ => "-".into(),
        };
        let mib = pair[1].own_cache_bytes >> 20;
        let (prefix, concurrency) = (pair[0].prefix.to_string(), pair[0].concurrency.to_string());
        [prefix, concurrency, ms(&pair[0]), ms(&pair[1]), ratio, format!("{mib} MiB")]
    })
}

/// For a terminal; nothing without a sweep.
pub(crate) fn table(cells: &[Cell]) -> String {
    if cells.is_empty() {
        return String::new();
    }
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(HEADER);
    for line in lines(cells) {
        table.add_row(line);
    }
    format!("{table}\n")
}

/// For a page; nothing without a sweep.
pub(crate) fn markdown(cells: &[Cell]) -> String {
    if cells.is_empty() {
        return String::new();
    }
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = String::from("\nA draft step for all requests at once:\n\n");
    text += &line(&HEADER.map(str::to_owned));
    text += &line(&HEADER.map(|_| "---:".to_owned()));
    lines(cells).for_each(|cells| text += &line(&cells));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_that_does_not_fit_says_why() {
        assert_eq!(too_much(6 << 30, Some(10 << 30)), None);
        assert_eq!(too_much(u64::MAX, None), None);
        let reason = too_much(8 << 30, Some(10 << 30)).unwrap();
        assert_eq!(reason, "its keys and values take 8.0 GiB and 10.0 GiB are free");
        let left = Duration::from_secs(10);
        assert_eq!(too_long(None, 1 << 20, left), None);
        assert_eq!(too_long(Some((2.0, 100)), 400, left), None);
        assert_eq!(too_long(Some((2.0, 400)), 100, left), None);
        assert_eq!(too_long(Some((2.0, 100)), 1000, left).unwrap(), "it may take 20 s and 10 s are left");
    }

    #[test]
    fn requests_do_not_see_each_other() {
        let at = Place { prefix: 5, concurrency: 3 };
        let anchors = at.anchors();
        let rule =
            hspec_attn::BlockRule { window: None, rule: hspec_attn::WindowRule::Training, causal: false };
        let seen: Vec<_> = anchors.iter().map(|a| rule.prefix(a, 0)).collect();
        assert_eq!(seen, [0..5, 5..10, 10..15]);
        assert!(anchors.iter().all(|a| a.position == hspec_attn::Position(5)));
    }
}
