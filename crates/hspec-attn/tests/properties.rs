//! Prefix attention equals attention over a naive concatenation, and what a mask hides has no
//! influence whatever it holds.

#![allow(clippy::unwrap_used)] // a test may panic

use burn::{
    backend::Autodiff,
    tensor::{
        Distribution, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use hspec_attn::{
    Anchor, BlockRope, BlockRule, Position, Prefix, PrefixAttention, Rope, RopeScaling, WindowRule,
};
use hspec_goldens::{Tolerance, assert_close, assert_tensor};
use hspec_nn::{Linear, params};
use proptest::prelude::*;

type B = burn_ndarray::NdArray;
const HEADS: usize = 4;
const KV: usize = 2;
const D: usize = 4;
const HIDDEN: usize = 6;

/// What has gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Learns {
    Nothing,
    /// The weights and the block's input.
    Block,
    /// The prefix as well.
    All,
}

struct Setup {
    module: PrefixAttention<B>,
    x: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    total: usize,
    anchors: Vec<Anchor>,
    k: usize,
    rule: BlockRule,
}

fn random(n: usize) -> Vec<f32> {
    let device = Default::default();
    Tensor::<B, 1>::random([n], Distribution::Normal(0.0, 1.0), &device).into_data().to_vec().unwrap()
}

impl Setup {
    fn new(documents: &[usize], anchors: &[(usize, usize)], k: usize, rule: BlockRule) -> Self {
        let device = Default::default();
        let linear = |i, o| Linear::random(i, o, false, 0.7, &device);
        let module = PrefixAttention {
            q_proj: linear(HIDDEN, HEADS * D),
            k_proj: linear(HIDDEN, KV * D),
            v_proj: linear(HIDDEN, KV * D),
            o_proj: linear(HEADS * D, HIDDEN),
            q_norm: None,
            k_norm: None,
            head_dim: D,
        };
        let starts: Vec<usize> =
            documents.iter().scan(0, |at, len| Some(std::mem::replace(at, *at + len))).collect();
        let total = documents.iter().sum();
        let mut anchors: Vec<Anchor> = anchors
            .iter()
            .map(|&(doc, position)| {
                let doc = doc % documents.len();
                let position = position % documents[doc];
                Anchor { index: starts[doc] + position, document: starts[doc], position: Position(position) }
            })
            .collect();
        anchors.sort_by_key(|a| a.index);
        Self {
            module,
            x: random(anchors.len() * k * HIDDEN),
            keys: random(KV * total * D),
            values: random(KV * total * D),
            total,
            anchors,
            k,
            rule,
        }
    }

    fn rope(&self) -> Rope {
        Rope::new(100.0, D, RopeScaling::None)
    }

    /// On ndarray, by the plain body, and close to what the body for flex says.
    fn run(&self) -> Vec<f32> {
        let (plain, fast) = (self.run_on::<B>(), self.run_on::<burn_flex::Flex>());
        assert_close("flex", &fast, &plain, Tolerance::Scaled(1e-5));
        // A target's prefix does not learn, one of the drafter's own does; the rest learns the same.
        for learns in [Learns::Block, Learns::All] {
            let (plain_slopes, fast_slopes) =
                (self.slopes::<Autodiff<B>>(learns), self.slopes::<Autodiff<burn_flex::Flex>>(learns));
            let count = if learns == Learns::All { 7 } else { 5 };
            assert_eq!((plain_slopes.len(), fast_slopes.len()), (count, count));
            for ((name, plain), (_, fast)) in plain_slopes.iter().zip(&fast_slopes) {
                assert_close(name, fast, plain, Tolerance::Scaled(1e-5));
            }
        }
        plain
    }

    fn run_on<B: Backend>(&self) -> Vec<f32> {
        self.on::<B>(Learns::Nothing).2.into_data().to_vec().unwrap()
    }

    /// Gradients of a weighted sum of outputs: by the input and by each weight, and by the prefix where it learns.
    fn slopes<A: AutodiffBackend>(&self, learns: Learns) -> Vec<(String, Vec<f32>)> {
        let (module, [x, keys, values], out) = self.on::<A>(learns);
        let weights: Vec<f32> = (0..out.shape().num_elements()).map(|i| (i as f32 * 0.7).sin()).collect();
        let weights = Tensor::<A, 3>::from_data(TensorData::new(weights, out.dims()), &out.device());
        let grads = (out * weights).sum().backward();
        let inputs = [("x", &x), ("prefix keys", &keys), ("prefix values", &values)];
        let of_inputs = inputs.into_iter().filter(|(_, x)| x.is_require_grad()).map(|(name, x)| {
            // What no slot sees is no part of the graph, or one of slope zero.
            let slope = x.grad(&grads).unwrap_or_else(|| x.zeros_like().inner());
            (name.to_owned(), slope.into_data().to_vec().unwrap())
        });
        let slopes = params::gradients(&module, &grads);
        let slopes = slopes.into_iter().map(|(name, slope)| (name, slope.to_vec().unwrap()));
        of_inputs.chain(slopes).collect()
    }

    /// Module, input with the prefix's keys and values, and output on a backend.
    fn on<B: Backend>(&self, learns: Learns) -> (PrefixAttention<B>, [Tensor<B, 3>; 3], Tensor<B, 3>) {
        let device = Default::default();
        let linear = |i, o| Linear::<B>::random(i, o, false, 0.7, &device);
        let module = PrefixAttention {
            q_proj: linear(HIDDEN, HEADS * D),
            k_proj: linear(HIDDEN, KV * D),
            v_proj: linear(HIDDEN, KV * D),
            o_proj: linear(HEADS * D, HIDDEN),
            q_norm: None,
            k_norm: None,
            head_dim: D,
        };
        let weights = params::collect(&self.module);
        let trained = learns != Learns::Nothing;
        let module = params::fill(module, &device, |name| weights.get(name).cloned(), |_| trained).unwrap();
        let positions: Vec<Position> =
            self.anchors.iter().flat_map(|a| (0..self.k).map(|t| a.position + t)).collect();
        let rope = BlockRope {
            q: self.rope().tables(&positions, HEADS, &device),
            k: self.rope().tables(&positions, KV, &device),
        };
        let tensor = |v: &[f32]| {
            let data = TensorData::new(v.to_vec(), [KV, self.total, D]);
            Tensor::<B, 3>::from_data(data, &device).set_require_grad(learns == Learns::All)
        };
        let (keys, values) = (tensor(&self.keys), tensor(&self.values));
        let prefix = Prefix { keys: keys.clone(), values: values.clone() };
        let x = TensorData::new(self.x.clone(), [self.anchors.len(), self.k, HIDDEN]);
        let x = Tensor::from_data(x, &device).set_require_grad(trained);
        let out = module.forward(x.clone(), &self.anchors, &rope, Some(&prefix), &self.rule);
        (module, [x, keys, values], out)
    }

    /// One block, one head and one slot at a time over the concatenated keys it may see.
    fn naive(&self) -> Vec<f32> {
        let device = Default::default();
        let project = |l: &Linear<B>, rows: usize, width: usize| -> Vec<f32> {
            let x = Tensor::<B, 2>::from_data(TensorData::new(self.x.clone(), [rows, HIDDEN]), &device);
            l.forward(x).reshape([rows * width]).into_data().to_vec().unwrap()
        };
        let rows = self.anchors.len() * self.k;
        let q = project(&self.module.q_proj, rows, HEADS * D);
        let keys = project(&self.module.k_proj, rows, KV * D);
        let values = project(&self.module.v_proj, rows, KV * D);
        let turn = |x: &[f32], position: Position| -> Vec<f32> {
            let row = Tensor::<B, 2>::from_data(TensorData::new(x.to_vec(), [1, D]), &device);
            self.rope().tables(&[position], 1, &device).apply(row).into_data().to_vec().unwrap()
        };
        let mut out = Vec::new();
        for (i, anchor) in self.anchors.iter().enumerate() {
            for t in 0..self.k {
                for h in 0..HEADS {
                    let g = h / (HEADS / KV);
                    let query = &q[((i * self.k + t) * HEADS + h) * D..][..D];
                    let query = turn(query, anchor.position + t);
                    let mut seen: Vec<(Vec<f32>, Vec<f32>)> = Vec::new();
                    for j in self.rule.prefix(anchor, t) {
                        let at = (g * self.total + j) * D;
                        seen.push((self.keys[at..at + D].to_vec(), self.values[at..at + D].to_vec()));
                    }
                    for s in (0..self.k).filter(|&s| self.rule.block(s, t)) {
                        let at = ((i * self.k + s) * KV + g) * D;
                        seen.push((
                            turn(&keys[at..at + D], anchor.position + s),
                            values[at..at + D].to_vec(),
                        ));
                    }
                    let weight = |k: &[f32]| {
                        (k.iter().zip(&query).map(|(a, b)| a * b).sum::<f32>() / (D as f32).sqrt()).exp()
                    };
                    let total: f32 = seen.iter().map(|(k, _)| weight(k)).sum();
                    out.extend(
                        (0..D).map(|c| seen.iter().map(|(k, v)| weight(k) * v[c]).sum::<f32>() / total),
                    );
                }
            }
        }
        let heads = Tensor::<B, 2>::from_data(TensorData::new(out, [rows, HEADS * D]), &device);
        self.module.o_proj.forward(heads).into_data().to_vec().unwrap()
    }
}

fn rules() -> impl Strategy<Value = BlockRule> {
    let rule = prop_oneof![Just(WindowRule::Training), Just(WindowRule::Serving)];
    (proptest::option::of(1usize..12), rule, any::<bool>()).prop_map(|(window, rule, causal)| BlockRule {
        window,
        rule,
        causal,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn equals_attention_over_a_naive_concatenation(
        documents in proptest::collection::vec(1usize..9, 1..4),
        anchors in proptest::collection::vec((0usize..4, 0usize..9), 1..5),
        k in 1usize..6,
        rule in rules(),
    ) {
        let setup = Setup::new(&documents, &anchors, k, rule);
        assert_close("output", &setup.run(), &setup.naive(), Tolerance::Scaled(1e-5));
    }

    /// Keys outside the window, of other documents, or at and after the anchor change nothing.
    #[test]
    fn hidden_keys_have_no_influence(
        documents in proptest::collection::vec(1usize..9, 1..4),
        anchor in (0usize..4, 0usize..9),
        k in 1usize..6,
        rule in rules(),
    ) {
        let mut setup = Setup::new(&documents, &[anchor], k, rule);
        let before = setup.run();
        let seen: Vec<usize> = (0..k).flat_map(|t| rule.prefix(&setup.anchors[0], t)).collect();
        for j in (0..setup.total).filter(|j| !seen.contains(j)) {
            for g in 0..KV {
                let at = (g * setup.total + j) * D;
                setup.keys[at..at + D].fill(1e6);
                setup.values[at..at + D].fill(-1e6);
            }
        }
        prop_assert_eq!(before, setup.run());
    }

    /// A cache cut to its window once went with positions that started anew (buun-llama-cpp#32): the window
    /// hides keys, and the block's queries continue the positions that the others were written at.
    #[test]
    fn a_cache_cut_to_its_window_keeps_absolute_positions(
        before in 6usize..20, window in 1usize..5, k in 1usize..4,
    ) {
        let rule = BlockRule { window: Some(window), rule: WindowRule::Training, causal: true };
        let whole = Setup::new(&[before + 1], &[(0, before)], k, rule);
        let cut = |position| {
            let last = |x: &[f32]| -> Vec<f32> {
                x.chunks(whole.total * D).flat_map(|x| x[(before - window) * D..before * D].to_vec()).collect()
            };
            let anchors = vec![Anchor { index: window, document: 0, position: Position(position) }];
            let (keys, values) = (last(&whole.keys), last(&whole.values));
            let (module, x) = (whole.module.clone(), whole.x.clone());
            Setup { module, x, keys, values, total: window, anchors, ..whole }.run()
        };
        assert_close("cut", &cut(before), &whole.run(), Tolerance::Scaled(1e-5));
        let largest = |x: Vec<f32>| x.iter().zip(whole.run()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        prop_assert!(largest(cut(window)) > 1e-6, "positions had no influence");
    }

    /// Blocks do not see each other: a block alone gives what it gives in company.
    #[test]
    fn blocks_are_independent(
        documents in proptest::collection::vec(1usize..9, 1..4),
        anchors in proptest::collection::vec((0usize..4, 0usize..9), 2..5),
        k in 1usize..6,
        rule in rules(),
    ) {
        let all = Setup::new(&documents, &anchors, k, rule);
        let out = all.run();
        let width = k * HIDDEN;
        for i in 0..all.anchors.len() {
            let alone = Setup {
                module: all.module.clone(),
                x: all.x[i * width..(i + 1) * width].to_vec(),
                keys: all.keys.clone(),
                values: all.values.clone(),
                anchors: vec![all.anchors[i]],
                ..all
            };
            assert_close("block", &alone.run(), &out[i * width..(i + 1) * width], Tolerance::Scaled(1e-5));
        }
    }
}

/// So many blocks that each part of the sums over a prefix holds several, of one document or of two.
#[test]
fn many_blocks_of_several_documents_teach_their_prefixes() {
    let places: Vec<(usize, usize)> = (0..50).map(|i| (i % 3, 5 * i)).collect();
    for causal in [false, true] {
        let rule = BlockRule { window: Some(6), rule: WindowRule::Serving, causal };
        let setup = Setup::new(&[9, 30, 11], &places, 3, rule);
        assert_close("output", &setup.run(), &setup.naive(), Tolerance::Scaled(1e-5));
    }
}

/// Chunked prefill through a cache gives the attention of the whole sequence, padding or not.
#[test]
fn causal_attention_does_not_depend_on_chunks_or_padding() {
    let device = Default::default();
    for (t, d, pad) in [(7, 4, 3), (70, 64, 3), (71, 40, 33)] {
        let random = |heads| {
            let x = Tensor::<B, 4>::random([1, t, heads, d], Distribution::Normal(0.0, 1.0), &device);
            x.into_data()
        };
        let (q, k, v) = (random(HEADS), random(KV), random(KV));
        let plain = chunked::<B>([&q, &k, &v], pad, false);
        let fast = chunked::<burn_flex::Flex>([&q, &k, &v], pad, cfg!(feature = "flex"));
        assert_close("flex", &fast, &plain, Tolerance::Scaled(1e-5));
    }
}

/// The attention of the whole sequence, compared with that of its chunks; where `exact` bit by bit, as
/// verifying a block must say what decoding its tokens one by one would.
fn chunked<B: Backend>(inputs: [&TensorData; 3], pad: usize, exact: bool) -> Vec<f32> {
    use hspec_attn::{CausalMask, KvCache, causal_attention};
    let device = Default::default();
    let [q, k, v] = inputs.map(|x| Tensor::<B, 4>::from_data(x.clone(), &device));
    let [_, t, _, d] = q.dims();
    let run = |pad: usize, chunks: &[usize]| {
        let padded = |x: &Tensor<B, 4>, heads| {
            Tensor::cat(vec![Tensor::full([1, pad, heads, d], 9.0, &device), x.clone()], 1)
        };
        let (q, k, v) = if pad > 0 {
            (padded(&q, HEADS), padded(&k, KV), padded(&v, KV))
        } else {
            (q.clone(), k.clone(), v.clone())
        };
        let mut cache = KvCache::<B>::new(1, 1, KV, t + pad, d, &device);
        cache.set_starts(vec![pad]);
        let mut out = Vec::new();
        let mut at = 0;
        for &n in chunks {
            let mask = CausalMask::new(&cache, n, &device);
            cache.write(0, k.clone().narrow(1, at, n), v.clone().narrow(1, at, n));
            out.push(causal_attention(q.clone().narrow(1, at, n), &cache, 0, at + n, mask.as_ref()));
            cache.advance(n);
            at += n;
        }
        Tensor::cat(out, 1).narrow(1, pad, t)
    };
    let whole: Vec<f32> = run(0, &[t]).into_data().to_vec().unwrap();
    let rest = t - 4;
    for (pad, chunks) in
        [(0, vec![1; t]), (0, vec![3, 1, rest]), (0, vec![rest, 4]), (pad, vec![pad + 1, t - 1])]
    {
        let found: Vec<f32> = run(pad, &chunks).into_data().to_vec().unwrap();
        if exact && pad == 0 {
            assert_eq!(found, whole, "{chunks:?}");
        }
        assert_close("chunks", &found, &whole, Tolerance::Scaled(1e-5));
    }
    whole
}

/// A drafter with a cache of its own projects its context once: as if the context were slots of the block.
#[test]
fn context_keys_are_those_of_slots_before_the_block() {
    let device = Default::default();
    let rule = BlockRule { window: None, rule: WindowRule::Training, causal: false };
    let (t, k) = (5, 3);
    let setup = Setup::new(&[1], &[(0, 0)], k, rule);
    let module = PrefixAttention {
        k_norm: Some(hspec_nn::RmsNorm::new(Tensor::from_floats([0.5, 2.0, 1.0, 3.0], &device), 1e-6)),
        ..setup.module
    };
    let x = Tensor::<B, 3>::random([1, t + k, HIDDEN], Distribution::Normal(0.0, 1.0), &device);
    let rope = Rope::new(100.0, D, RopeScaling::None);
    let positions: Vec<Position> = (0..t + k).map(Position).collect();
    let tables = |from: usize| BlockRope {
        q: rope.tables(&positions[from..], HEADS, &device),
        k: rope.tables(&positions[from..], KV, &device),
    };
    let one_block = module.forward(x.clone(), &[Anchor::at(0)], &tables(0), None, &rule).narrow(1, t, k);

    let context = x.clone().narrow(1, 0, t).reshape([t, HIDDEN]);
    let (keys, values) = module.context(context, &rope.tables(&positions[..t], KV, &device));
    let prefix = Prefix { keys: keys.swap_dims(0, 1), values: values.swap_dims(0, 1) };
    let block = x.narrow(1, t, k);
    let found = module.forward(block, &[Anchor::at(t)], &tables(t), Some(&prefix), &rule);
    let expected: Vec<f32> = one_block.into_data().to_vec().unwrap();
    assert_tensor("context", found, &expected, Tolerance::Scaled(1e-5));
}
