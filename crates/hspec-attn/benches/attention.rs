//! Attention at the shape of SmolLM2-135M over its cache: the body for flex against plain tensor operations,
//! which autodiff runs.
#![allow(missing_docs)]

use burn::{
    backend::Autodiff,
    tensor::{Distribution, Tensor, backend::Backend},
};
use burn_flex::Flex;
use criterion::{BenchmarkGroup, Criterion, criterion_group, criterion_main, measurement::WallTime};
use hspec_attn::{CausalMask, KvCache, causal_attention};
use std::hint::black_box;

const HEADS: usize = 9;
const KV: usize = 3;
const D: usize = 64;

fn causal<B: Backend>(group: &mut BenchmarkGroup<'_, WallTime>, name: &str) {
    let device = Default::default();
    let random = |t, heads| Tensor::<B, 4>::random([1, t, heads, D], Distribution::Normal(0.0, 1.0), &device);
    for (before, t) in [(256, 1), (1024, 1), (256, 8), (1024, 8), (256, 256)] {
        let mut cache = KvCache::<B>::new(1, 1, KV, before + t, D, &device);
        cache.write(0, random(before + t, KV), random(before + t, KV));
        cache.advance(before);
        let mask = CausalMask::new(&cache, t, &device);
        let q = random(t, HEADS);
        group.bench_function(format!("{name}/{t} after {before}"), |b| {
            b.iter(|| black_box(causal_attention(q.clone(), &cache, 0, before + t, mask.as_ref())));
        });
    }
}

fn attention(c: &mut Criterion) {
    let mut group = c.benchmark_group("causal attention");
    causal::<Flex>(&mut group, "flex");
    causal::<Autodiff<Flex>>(&mut group, "plain");
    group.finish();
}

criterion_group!(benches, attention);
criterion_main!(benches);
