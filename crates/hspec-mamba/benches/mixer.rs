//! A mixer over a drafter's block, at the sizes of the shipped drafter and of the paper's for Qwen3-8B: the body
//! for flex against plain tensor operations, which autodiff runs.
#![allow(missing_docs)]

use burn::{
    backend::Autodiff,
    tensor::{Distribution, Tensor, backend::Backend},
};
use burn_flex::Flex;
use criterion::{BenchmarkGroup, Criterion, criterion_group, criterion_main, measurement::WallTime};
use hspec_mamba::{Mamba2Mixer, MambaConfig};
use hspec_nn::WeightStorage;
use std::hint::black_box;

const SIZES: [(&str, MambaConfig); 2] = [
    (
        "SmolLM2-135M",
        MambaConfig { hidden: 576, d_state: 4, num_heads: 6, head_dim: 64, n_groups: 3, conv_kernel: 4 },
    ),
    (
        "Qwen3-8B",
        MambaConfig { hidden: 4096, d_state: 4, num_heads: 48, head_dim: 64, n_groups: 4, conv_kernel: 4 },
    ),
];

fn block<B: Backend>(group: &mut BenchmarkGroup<'_, WallTime>, name: &str) {
    let device = Default::default();
    for (size, config) in SIZES {
        let mixer = Mamba2Mixer::<B>::init(&config, &device).prepack(WeightStorage::F32);
        let x = Tensor::<B, 3>::random([1, 8, config.hidden], Distribution::Normal(0.0, 1.0), &device);
        group.bench_function(format!("{name}/{size}"), |b| {
            b.iter(|| black_box(mixer.forward(x.clone(), None)));
        });
    }
}

fn mixer(c: &mut Criterion) {
    let mut group = c.benchmark_group("mixer over 8 slots");
    block::<Flex>(&mut group, "flex");
    block::<Autodiff<Flex>>(&mut group, "plain");
    group.finish();
}

criterion_group!(benches, mixer);
criterion_main!(benches);
