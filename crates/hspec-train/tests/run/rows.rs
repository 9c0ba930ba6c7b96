//! Rows of a step: what is packed, accumulated or shared out weighs what it would alone.

use super::{B, TokenId, kinds, recipe, responses, target};
use burn::{
    backend::Autodiff,
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{Distribution, Tensor, TensorData, backend::Backend},
};
use hspec_core::{
    drafter::{DraftVocab, HSpec, Term, dspark::DSpark, eagle3::Eagle3, peagle::PEagle, pruned_head},
    target::Target,
};
use hspec_nn::{Compute, autocast, params};
use hspec_train::{
    features::FeatureStore,
    kinds::{Learner, Start},
    logits::Logits,
    loss::{LossConfig, Slots, Weighting},
    objective::{objective, plain},
    pack::{Base, Draw, Forward, Judge},
    recipe::{Loop, Recipe},
    responses::Response,
    step::{self, Row, Sum},
};
use std::{collections::BTreeMap, path::Path};

type A = Autodiff<B>;

/// A drafter with gradients and rows for it.
struct Scene<'a, L> {
    learner: L,
    judge: Judge<B>,
    store: FeatureStore<'a, B>,
    config: LossConfig,
}

impl<'a, L: Learner<A>> Scene<'a, L> {
    fn new(target: &'a Target<B>, recipe: &Recipe) -> Self {
        let file = Path::new("recipe.toml");
        let all = target.config().vocab_size;
        let vocab = match recipe.drafter.draft_vocab() {
            Some(kept) => {
                DraftVocab::new((0..kept as u32).map(|i| TokenId(3 * i)).collect(), all, file).unwrap()
            }
            None => DraftVocab::full(all),
        };
        B::seed(target.device(), 7);
        let drafter = L::fresh(Start { recipe, file, target, name: "tiny", vocab }).unwrap();
        let head = pruned_head(target, L::vocab(&drafter));
        Self {
            learner: L::learner(&drafter, target.device(), file).unwrap(),
            judge: Judge { norm: target.norm().clone(), head },
            store: FeatureStore::new(target, L::reads(&drafter), 1 << 24),
            config: recipe.train.objective(0.0),
        }
    }

    /// Documents as a row of which every supervised token is drafted from.
    fn row(&mut self, documents: &[(usize, &Response)]) -> Row<B> {
        let draw = Draw { seed: 1, row: 0, anchors: usize::MAX, progress: 0.25 };
        Row { packed: self.store.pack(documents).unwrap(), draw }
    }

    fn sum(&self, rows: Vec<Row<B>>) -> Sum {
        step::sum::<A, L>(&self.learner, rows, &self.judge, &self.config).unwrap().unwrap()
    }
}

/// Gradients by name.
fn gradients<M: Module<A>>(module: &M, grads: &GradientsParams) -> BTreeMap<String, Vec<f32>> {
    struct Values<'a>(&'a GradientsParams, Vec<Option<Vec<f32>>>);
    impl ModuleVisitor<A> for Values<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
            let grad = self.0.get::<B, D>(param.id);
            self.1.push(grad.map(|g| g.into_data().iter::<f32>().collect()));
        }
    }
    let mut values = Values(grads, Vec::new());
    module.visit(&mut values);
    let names = params::list(module).into_iter().map(|p| p.name);
    names.zip(values.1).filter_map(|(name, grad)| Some((name, grad?))).collect()
}

fn assert_same(what: &str, found: &BTreeMap<String, Vec<f32>>, expected: &BTreeMap<String, Vec<f32>>) {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
    assert!(!expected.is_empty(), "{what}");
    for (name, expected) in expected {
        let largest = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
        for (a, b) in found[name].iter().zip(expected) {
            assert!((a - b).abs() <= 2e-5 * largest + 1e-9, "{what}: {name}: {a} and {b}");
        }
    }
}

/// Values that rounded factors give are near those of f32, and others.
fn assert_rounded(what: &str, narrow: &[f32], wide: &[f32]) {
    let squares = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    let off = squares(&mut narrow.iter().zip(wide).map(|(a, b)| a - b)) / squares(&mut wide.iter().copied());
    assert!((1e-5..0.05).contains(&off), "{what}: off by {off}");
}

/// Two documents with one behind them that has nothing to learn from, so that neither's end is the row's.
struct Documents([Response; 3]);

impl Documents {
    fn new(target: &Target<B>) -> Self {
        let mut found = responses(target, &recipe(|r| r)).into_iter().filter(|r| r.response_ids.len() > 12);
        let mut next = || found.next().unwrap();
        let (one, two) = (next(), next());
        let tail = Response { response_ids: Vec::new(), prompt_ids: vec![TokenId(7); 12], ..next() };
        Self([one, two, tail])
    }

    fn of(&self, numbers: &[usize]) -> Vec<(usize, &Response)> {
        numbers.iter().map(|&n| (n, &self.0[n])).collect()
    }
}

/// The loss and gradients of a packed row are the weighted sums of its documents' alone; so are those of a step
/// that is accumulated over rows.
fn packing<L: Learner<A>>(target: &Target<B>, what: &str, recipe: &Recipe) {
    let documents = Documents::new(target);
    let mut scene = Scene::<L>::new(target, recipe);
    let (alone, together) = ([[0, 2], [1, 2]], [0, 1, 2]);
    let rows: Vec<Row<B>> = alone.iter().map(|one| scene.row(&documents.of(one))).collect();
    let packed = scene.row(&documents.of(&together));
    let losses: Vec<Sum> = alone
        .iter()
        .map(|one| {
            let row = scene.row(&documents.of(one));
            scene.sum(vec![row])
        })
        .collect();
    let weighted: f64 = losses.iter().map(|sum| sum.tally.total).sum();
    let count: f64 = losses.iter().map(|sum| sum.tally.count).sum();
    let (packed, accumulated) = (scene.sum(vec![packed]), scene.sum(rows));
    for (how, sum) in [("packed", &packed), ("accumulated", &accumulated)] {
        assert!((sum.tally.count - count).abs() < 1e-3, "{what}, {how}: {} of {count}", sum.tally.count);
        let found = sum.tally.total;
        assert!((found - weighted).abs() < 1e-5 * weighted.abs(), "{what}, {how}: {found}, {weighted}");
    }
    assert_eq!(packed.tally.agreement, accumulated.tally.agreement, "{what}");
    assert_eq!(packed.tally.judged, accumulated.tally.judged, "{what}");
    let module = scene.learner.module();
    let mean = |sum: Sum| gradients(module, &sum.mean(&scene.learner).0);
    assert_same(what, &mean(accumulated), &mean(packed));
    #[cfg(feature = "collective")]
    devices(&mut scene, what, &documents);
}

/// Two devices give the gradients of one with the double batch.
#[cfg(feature = "collective")]
fn devices<L: Learner<A>>(scene: &mut Scene<'_, L>, what: &str, documents: &Documents) {
    let rows = vec![scene.row(&documents.of(&[0, 2])), scene.row(&documents.of(&[1, 2]))];
    let double = vec![scene.row(&documents.of(&[0, 1, 2]))];
    let device = scene.judge.norm.weight.device();
    let devices = [device.clone(), device];
    let shared = |rows: Vec<Row<B>>| {
        let sum =
            hspec_train::devices::sum::<A, L>(&scene.learner, rows, &scene.judge, &scene.config, &devices);
        sum.unwrap().unwrap()
    };
    let (wide, one) = (shared(rows.clone()), scene.sum(double));
    assert_eq!(wide.tally.agreement, one.tally.agreement, "{what}");
    let mean = |sum: Sum| gradients(scene.learner.module(), &sum.mean(&scene.learner).0);
    let wide = mean(wide);
    assert_same(&format!("{what} on two devices"), &wide, &mean(one));
    // Their threads compute in the type that this one asks for.
    let narrow = mean(autocast(Compute::Bf16, || shared(rows)));
    let values = |grads: &BTreeMap<String, Vec<f32>>| grads.values().flatten().copied().collect::<Vec<_>>();
    assert_rounded(what, &values(&narrow), &values(&wide));
}

#[test]
fn a_packed_batch_weighs_what_its_documents_do_alone() {
    let _alone = crate::alone();
    let target = target();
    for (name, drafter, train) in kinds::KINDS {
        // One depth alone, since P-EAGLE draws deeper ones at random.
        let drafter = if name == "peagle" {
            drafter.replace("draft_tokens = 4", "draft_tokens = 1")
        } else {
            drafter.into()
        };
        let recipe = kinds::recipe_of(&drafter, train, 1);
        match name {
            "dspark" | "dflash" | "dflash2" | "domino" => packing::<DSpark<A>>(&target, name, &recipe),
            "eagle3" => packing::<Eagle3<A>>(&target, name, &recipe),
            "peagle" => packing::<PEagle<A>>(&target, name, &recipe),
            _ => packing::<HSpec<A>>(&target, name, &recipe),
        }
    }
}

/// Burn 0.21 drops parts of a graph that one thread builds when another ends a backward pass
/// (tracel-ai/burn#5573). Without the lock, five runs of six of this test failed; with a fifth of the steps, two of
/// seven.
#[test]
fn threads_that_train_at_once_lose_no_gradients() {
    let _alone = crate::alone();
    let target = target();
    let documents = Documents::new(&target);
    let (_, drafter, train) = kinds::KINDS.into_iter().find(|(name, ..)| *name == "dspark").unwrap();
    let mut scene = Scene::<DSpark<A>>::new(&target, &kinds::recipe_of(drafter, train, 1));
    let shares: [Vec<Row<B>>; 8] =
        std::array::from_fn(|_| (0..400).map(|_| scene.row(&documents.of(&[0]))).collect());
    let Scene { learner, judge, config, .. } = &scene;
    let all: Vec<_> = std::thread::scope(|scope| {
        let workers = shares.map(|rows| {
            let (mut learner, judge) = (learner.clone(), judge.clone());
            scope.spawn(move || {
                let fork = learner.module().clone().fork(&judge.norm.weight.device());
                learner.replace(fork);
                let one =
                    |row| step::sum::<A, DSpark<A>>(&learner, vec![row], &judge, config).unwrap().unwrap();
                rows.into_iter().map(|row| gradients(learner.module(), &one(row).grads)).collect::<Vec<_>>()
            })
        });
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    all.iter().for_each(|found| assert_same("at once", found, &all[0]));
}

/// Gradients in closed form are those of autodiff, whatever slots count and whatever is minimised.
#[test]
fn the_closed_form_is_the_plain_one() {
    let _alone = crate::alone();
    let device = Default::default();
    let (n, k, v) = (6, 4, 37);
    B::seed(&device, 3);
    let random = || Tensor::<B, 3>::random([n, k, v], Distribution::Normal(0.0, 2.0), &device);
    let (logits, base, targets) = (random(), random(), random());
    let z = Tensor::<B, 2>::random([n, k], Distribution::Normal(0.0, 1.0), &device);
    let mask: Vec<f32> = (0..n * k).map(|i| f32::from(u8::from(i % 5 != 2))).collect();
    let mask = Tensor::<B, 2>::from_data(TensorData::new(mask, [n, k]), &device);
    let depths = Slots { number: (0..n * k).map(|i| i % 3).collect(), first: 0, means: 1 };
    let steps = Slots { means: k, ..Slots::blocks(n, k, 0) };
    let weightings = [
        Weighting::Decay { gamma: 4.0 },
        Weighting::Decay { gamma: f64::INFINITY },
        Weighting::Dpace { alpha: 0.5 },
    ];
    for (slots, weighting) in [&depths, &steps].into_iter().flat_map(|s| weightings.map(|w| (s, w))) {
        for (ce, tv, kl) in [(0.1, 0.9, 0.0), (0.0, 0.0, 1.0), (0.3, 0.2, 0.5)] {
            let config = LossConfig { ce, tv, kl, confidence: 0.7, weighting };
            let (x, z) = (
                Tensor::<A, 3>::from_inner(logits.clone()).require_grad(),
                Tensor::<A, 2>::from_inner(z.clone()).require_grad(),
            );
            let forward = || Forward {
                logits: x.clone().into(),
                confidence: Some(z.clone()),
                base: None,
                table: targets.clone().reshape([n * k, v]),
                anchors: vec![0; n],
                rows: (0..n * k).collect(),
                slots: slots.clone(),
                mask: Tensor::from_inner(mask.clone()),
            };
            let what = format!("{config:?}");
            let (fast, slow) = (objective(forward(), &config), plain(forward(), &config));
            for (a, b) in [(fast.total, slow.total), (fast.kl * kl, slow.kl * kl), (fast.count, slow.count)] {
                assert!((a - b).abs() < 1e-5 * b.abs().max(1.0), "{what}: {a}, {b}");
            }
            assert_eq!(fast.agreement, slow.agreement);
            let values = |t: Option<Tensor<B, 3>>| t.unwrap().into_data().iter::<f32>().collect::<Vec<_>>();
            let (fast, slow) = (fast.differentiable.backward(), slow.differentiable.backward());
            let pairs = values(x.grad(&fast)).into_iter().zip(values(x.grad(&slow)));
            for (a, b) in pairs {
                assert!((a - b).abs() < 1e-6, "{what}: {a}, {b}");
            }
            let values = |t: Option<Tensor<B, 2>>| t.unwrap().into_data().iter::<f32>().collect::<Vec<_>>();
            for (a, b) in values(z.grad(&fast)).into_iter().zip(values(z.grad(&slow))) {
                assert!((a - b).abs() < 1e-6, "{what}: confidence {a}, {b}");
            }

            // Logits before a correction add their share.
            let y = Tensor::<A, 3>::from_inner(base.clone()).require_grad();
            let both =
                Forward { base: Some(Base { logits: y.clone(), share: 0.25, corrected: 0.75 }), ..forward() };
            let other = Forward { logits: y.clone().into(), confidence: None, ..forward() };
            let (both, one, other) =
                (objective(both, &config), plain(forward(), &config), plain(other, &config));
            let expected = 0.75 * one.total + 0.25 * other.total;
            assert!((both.total - expected).abs() < 1e-4, "{what}: {}, {expected}", both.total);
            let (both, other) = (both.differentiable.backward(), other.differentiable.backward());
            let values = |t: Option<Tensor<B, 3>>| t.unwrap().into_data().iter::<f32>().collect::<Vec<_>>();
            for (a, b) in values(y.grad(&both)).into_iter().zip(values(y.grad(&other))) {
                assert!((a - 0.25 * b).abs() < 1e-6, "{what}: base {a}, {b}");
            }
        }
    }
}

/// Logits that are never all in memory give the values and the gradients that they give as a whole.
#[test]
fn a_sum_of_products_is_judged_as_the_logits_it_is() {
    let _alone = crate::alone();
    let device = Default::default();
    let (n, k, v, widths) = (37, 4, 70, [5, 3]);
    B::seed(&device, 5);
    let random = |shape: [usize; 2]| Tensor::<B, 2>::random(shape, Distribution::Normal(0.0, 1.0), &device);
    let table = random([n * k, v]);
    // Blocks that are computed together, and none of whose slots counts.
    let counts = |i: usize| i % 5 != 2 && !(3..6).contains(&(i / k));
    let mask: Vec<f32> = (0..n * k).map(|i| f32::from(u8::from(counts(i)))).collect();
    let mask = Tensor::<B, 2>::from_data(TensorData::new(mask, [n, k]), &device);
    // The last weight is the target's and does not learn.
    let (rows, weights) = (widths.map(|w| random([n * k, w])), widths.map(|w| random([v, w])));
    for weighting in [Weighting::Decay { gamma: 4.0 }, Weighting::Dpace { alpha: 0.5 }] {
        let config = LossConfig { ce: 0.3, tv: 0.6, kl: 0.2, confidence: 0.0, weighting };
        let run = |whole: bool| {
            let leaf = |t: &Tensor<B, 2>| Tensor::<A, 2>::from_inner(t.clone()).require_grad();
            let rows = [leaf(&rows[0]), leaf(&rows[1])];
            let weights = [leaf(&weights[0]), Tensor::<A, 2>::from_inner(weights[1].clone())];
            let terms = rows.iter().zip(&weights);
            let terms = terms.map(|(r, w)| Term { rows: r.clone(), weight: w.clone() }).collect();
            let logits = Logits::Sum { terms, shape: [n, k, v] };
            let forward = Forward {
                logits: if whole { logits.whole().into() } else { logits },
                confidence: None,
                base: None,
                table: table.clone(),
                anchors: vec![0; n],
                rows: (0..n * k).collect(),
                slots: Slots::blocks(n, k, 1),
                mask: Tensor::from_inner(mask.clone()),
            };
            let found = objective(forward, &config);
            let grads = found.differentiable.backward();
            let leaves = [&rows[0], &rows[1], &weights[0]];
            let of = |t: &Tensor<A, 2>| t.grad(&grads).unwrap().into_data().iter::<f32>().collect::<Vec<_>>();
            (found.total, found.agreement, leaves.map(of))
        };
        let (whole, parts) = (run(true), run(false));
        assert!((whole.0 - parts.0).abs() < 1e-5, "{} {}", whole.0, parts.0);
        assert_eq!(whole.1, parts.1);
        for (whole, parts) in whole.2.iter().zip(&parts.2) {
            assert_eq!(whole.len(), parts.len());
            let pairs = whole.iter().zip(parts);
            pairs.for_each(|(a, b)| assert!((a - b).abs() < 1e-6, "{weighting:?}: {a} {b}"));
        }
        assert_eq!(run(false).2, parts.2, "whatever the order in which threads finish");
        let narrow = autocast(Compute::Bf16, || run(false));
        assert!((whole.0 - narrow.0).abs() < 1e-2, "{} {}", whole.0, narrow.0);
        whole.2.iter().zip(&narrow.2).for_each(|(whole, narrow)| assert_rounded("the sum", narrow, whole));
    }
}

/// What the loop minimises for EAGLE-3 is the published loss.
#[test]
fn the_objective_of_unrolled_steps_is_the_published_one() {
    let _alone = crate::alone();
    use hspec_core::drafter::eagle3::{Context, Pairs};
    use hspec_train::loss_eagle::{Aligned, ttt_divergence};
    let target = target();
    let (_, drafter, train) = kinds::KINDS[4];
    let recipe = kinds::recipe_of(drafter, train, 1);
    let decay = 0.8f64;
    let recipe = Recipe { train: Loop { gamma: -1.0 / decay.ln(), ..recipe.train }, ..recipe };
    let documents = Documents::new(&target);
    let mut scene = Scene::<Eagle3<A>>::new(&target, &recipe);
    let row = scene.row(&documents.of(&[0]));
    let packed = row.packed.clone().constant::<A>();
    let aligned = Aligned::new(&packed.ids, packed.fused, packed.last, &packed.loss_mask);
    let n = aligned.next.len();
    let features = aligned.features.unsqueeze::<3>();
    let context = vec![0; n];
    let pairs = Pairs {
        features,
        next: &aligned.next,
        positions: &aligned.positions,
        context: Context::Packed(&context),
    };
    let steps = scene.learner.ttt(&pairs, 4);
    let judged = scene.judge.head.forward(scene.judge.norm.forward(aligned.last.inner()));
    let published = ttt_divergence(&steps, Tensor::from_inner(judged).unsqueeze(), &aligned.mask, decay);
    let published = f64::from(published.total.into_scalar());
    let found = scene.sum(vec![row]);
    let found = found.tally.total / found.tally.count;
    assert!((found - published).abs() < 1e-4 * published, "{found}, {published}");
}
