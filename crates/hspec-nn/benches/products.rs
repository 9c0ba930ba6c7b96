//! All linear layers of SmolLM2-135M, packed against the plain product of the backend.
#![allow(missing_docs)]

use burn::tensor::{Distribution, Tensor};
use burn_flex::Flex;
use criterion::{Criterion, criterion_group, criterion_main};
use hspec_nn::{Linear, SwiGlu, WeightStorage};
use std::hint::black_box;

const LAYERS: usize = 30;

struct Model {
    layers: Vec<([Linear<Flex>; 4], SwiGlu<Flex>)>,
    head: Linear<Flex>,
}

impl Model {
    fn new(storage: Option<WeightStorage>) -> Self {
        let device = Default::default();
        let pack = |l: Linear<Flex>| match storage {
            Some(storage) => l.prepack(storage),
            None => l,
        };
        let linear = |i, o| pack(Linear::random(i, o, false, 0.02, &device));
        let layer = |_| {
            let mlp = SwiGlu::random(576, 1536, 0.02, &device);
            let mlp = match storage {
                Some(storage) => mlp.prepack(storage),
                None => mlp,
            };
            ([linear(576, 576), linear(576, 192), linear(576, 192), linear(576, 576)], mlp)
        };
        Self { layers: (0..LAYERS).map(layer).collect(), head: linear(576, 49152) }
    }

    fn run(&self, x: &Tensor<Flex, 2>, head: usize) -> Tensor<Flex, 2> {
        for ([q, k, v, o], mlp) in &self.layers {
            black_box(Linear::forward_all(&[q, k, v], x.clone()));
            black_box(o.forward(x.clone()));
            black_box(mlp.forward(x.clone()));
        }
        self.head.forward(x.clone().narrow(0, 0, head))
    }
}

fn products(c: &mut Criterion) {
    let device = Default::default();
    let mut group = c.benchmark_group("linears of SmolLM2-135M");
    group.sample_size(15);
    for (name, storage) in
        [("f32", Some(WeightStorage::F32)), ("bf16", Some(WeightStorage::Bf16)), ("plain", None)]
    {
        let model = Model::new(storage);
        for (rows, head) in [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (256, 1)] {
            let x = Tensor::random([rows, 576], Distribution::Normal(0.0, 1.0), &device);
            group.bench_function(format!("{name}/{rows}"), |b| b.iter(|| black_box(model.run(&x, head))));
        }
    }
    group.finish();
}

criterion_group!(benches, products);
criterion_main!(benches);
