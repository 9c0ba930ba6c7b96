//! The forward pass that trains against the one that decodes, on the same text.

use super::{
    Drafter,
    check::{Compared, Told, Verdict},
    layers,
    target::{Opened, floats},
};
use crate::{
    features::{FeatureStore, Reads},
    kinds::Learner,
    loss::elements,
    pack::{Draw, Forward, Judge, Packed, indices},
    responses::Response,
};
use burn::tensor::{Tensor, backend::AutodiffBackend};
use hspec_core::{
    Result, TokenId,
    drafter::{self, HSpec, dspark::DSpark, eagle3::Eagle3, peagle::PEagle, pruned_head},
    target::{Rows, Target, Want},
};
use std::collections::{BTreeMap, HashMap};

/// Anchors of a text in training.
const ANCHORS: usize = 24;
/// Anchors of a text at which it is decoded, too.
const DECODED: usize = 3;
/// The two passes multiply in other orders.
const TOLERANCE: f64 = 1e-3;

/// Runs the checks with the drafter's kind.
pub(super) fn check<A: AutodiffBackend>(
    drafter: &Drafter<'_>,
    opened: &Opened<A::InnerBackend>,
    documents: &[Response],
    told: &mut Told<'_>,
) {
    match drafter.outline.description.kind {
        "hspec" => check_kind::<A, HSpec<A>>(drafter, opened, documents, told),
        "dspark" | "dflash" | "dflash2" | "domino" => {
            check_kind::<A, DSpark<A>>(drafter, opened, documents, told)
        }
        "eagle3" => check_kind::<A, Eagle3<A>>(drafter, opened, documents, told),
        "peagle" => check_kind::<A, PEagle<A>>(drafter, opened, documents, told),
        _ => told.skip("training forward", "this kind cannot be trained here"),
    }
}

/// A drafter that learns, and what it is judged by.
pub(super) struct Learning<'a, A: AutodiffBackend, L> {
    pub target: &'a Target<A::InnerBackend>,
    pub learner: L,
    pub reads: Reads,
    judge: Judge<A::InnerBackend>,
}

impl<A: AutodiffBackend, L: Learner<A>> Learning<'_, A, L> {
    /// The forward pass over text `number`; nothing where it has nothing to draft.
    pub(super) fn forward(&self, packed: &Packed<A::InnerBackend>, number: usize) -> Option<Forward<A>> {
        let draw = Draw { seed: 0, row: number as u64, anchors: ANCHORS, progress: 0.0 };
        let mut forward = self.learner.forward(&packed.clone().constant::<A>(), &draw, &self.judge)?;
        // They are looked at several times, and each time would multiply again.
        forward.logits = forward.logits.whole().into();
        Some(forward)
    }
}

fn check_kind<A: AutodiffBackend, L: Learner<A>>(
    drafter: &Drafter<'_>,
    opened: &Opened<A::InnerBackend>,
    documents: &[Response],
    told: &mut Told<'_>,
) {
    let (target, dir) = (&opened.target, drafter.dir);
    let loaded = told.attempt("drafter with its target", "one made for the other", || {
        let decoding = drafter::load(dir, target, target.device())?;
        let kept = L::load(dir, target)?;
        let learning = Learning {
            target,
            learner: L::learner(&kept, target.device(), &dir.join("config.json"))?,
            reads: L::reads(&kept),
            judge: Judge { norm: target.norm().clone(), head: pruned_head(target, L::vocab(&kept)) },
        };
        Ok((format!("{} trained parameters", decoding.footprint().params_trainable), (decoding, learning)))
    });
    let Some((decoding, learning)) = loaded else { return };
    let mut seen = Seen::default();
    if let Err(error) = seen.texts(&learning, &*decoding, documents) {
        told.holds("training forward", false, error.to_string(), "a pass over the text");
        return;
    }
    if seen.anchors == 0 {
        told.skip("training forward against decoding", "no text is long enough to draft in");
        return;
    }
    told.close("training forward against decoding", seen.compared, "the logits of both", TOLERANCE);
    told.equal("numbers that are not finite", seen.not_finite, 0);
    let (share, chance) = (seen.first.share(), seen.first.chance());
    told.add(
        "first draft token",
        if share > chance { Verdict::Ok } else { Verdict::Warning },
        format!("the target's best in {:.0} % of {} places", 100.0 * share, seen.first.places),
        format!("more than {:.0} %, the share of the most frequent token", 100.0 * chance),
    );
    match &drafter.record {
        Ok(Some(_)) => told.skip("layers that suit it", "training wrote down which it reads"),
        Ok(None) | Err(_) => layers::check(&learning, documents, told),
    }
}

/// What was seen in the texts.
#[derive(Default)]
struct Seen {
    /// Logits in training and in decoding.
    compared: Compared,
    /// Anchors at which both were computed.
    anchors: usize,
    not_finite: usize,
    first: FirstSlots,
}

impl Seen {
    fn texts<A: AutodiffBackend, L: Learner<A>>(
        &mut self,
        learning: &Learning<'_, A, L>,
        decoding: &dyn drafter::Drafter<A::InnerBackend>,
        documents: &[Response],
    ) -> Result<()> {
        let mut store = FeatureStore::new(learning.target, learning.reads.clone(), 0);
        for (number, document) in documents.iter().enumerate() {
            let packed = store.pack(&[(number, document)])?;
            let Some(forward) = learning.forward(&packed, number) else { continue };
            let first = learning.learner.first_slot();
            self.decode(&forward, first, &packed, learning.target, decoding)?;
            self.count(&forward);
            self.first.add(&forward, first);
        }
        Ok(())
    }

    /// Compares a few anchors' logits with those of a session that is shown the same text.
    fn decode<A: AutodiffBackend>(
        &mut self,
        forward: &Forward<A>,
        first: usize,
        packed: &Packed<A::InnerBackend>,
        target: &Target<A::InnerBackend>,
        decoding: &dyn drafter::Drafter<A::InnerBackend>,
    ) -> Result<()> {
        let [n, slots, width] = forward.logits.dims();
        let logits = forward.logits.whole().inner().reshape([n * slots, width]);
        let counted = floats(forward.mask.clone().inner());
        // By anchor: rows of logits, and which token of a draft each is for.
        let mut anchors: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
        for (row, (&slot, counted)) in forward.slots.number.iter().zip(counted).enumerate() {
            if counted > 0.0 && slot >= first {
                anchors.entry(forward.anchors[row / slots]).or_default().push((row, slot - first + 1));
            }
        }
        let ids = &packed.ids;
        let mut cache = target.cache(1, ids.len());
        target.forward(ids, &mut cache, &Want { logits: Rows::None, hidden: &[] })?;
        let step = anchors.len().div_ceil(DECODED).max(1);
        // From the last to the first: the cache is cut back to each.
        let chosen: Vec<_> = anchors.into_iter().rev().step_by(step).collect();
        for (anchor, wanted) in chosen {
            cache.truncate(anchor);
            let mut session = decoding.session(ids.len() + decoding.max_draft() + 1);
            // As a prompt and what was accepted behind it.
            for part in [0..anchor / 2, anchor / 2..anchor].into_iter().filter(|part| !part.is_empty()) {
                let features = packed.fused.clone().narrow(0, part.start, part.len());
                session.observe(&ids[part], features);
            }
            let mut drafted: Vec<Vec<f32>> = Vec::new();
            session.draft(ids[anchor], &cache, decoding.max_draft(), &mut |slot, logits| {
                drafted.push(logits.to_vec());
                Ok(ids.get(anchor + slot).copied().unwrap_or(TokenId(0)))
            })?;
            self.anchors += 1;
            for (row, place) in wanted {
                let Some(decoded) = drafted.get(place - 1) else { continue };
                let trained = floats(logits.clone().select(0, indices(&[row], &logits.device())));
                self.not_finite += decoded.iter().filter(|x| x.is_nan() || **x == f32::INFINITY).count();
                // A selector leaves out all but its candidates, which only decoding does.
                let both = trained.iter().zip(decoded).filter(|(_, d)| **d != f32::NEG_INFINITY);
                let (trained, decoded): (Vec<f32>, Vec<f32>) = both.unzip();
                self.compared.add(&trained, &decoded);
            }
        }
        Ok(())
    }

    /// Counts what is not finite.
    fn count<A: AutodiffBackend>(&mut self, forward: &Forward<A>) {
        let not_finite = |numbers: &[f32]| numbers.iter().filter(|x| !x.is_finite()).count();
        let confidence = forward.confidence.clone().map(|c| floats(c.inner())).unwrap_or_default();
        self.not_finite += not_finite(&floats(forward.logits.whole().inner()));
        self.not_finite += not_finite(&floats(forward.table.clone())) + not_finite(&confidence);
    }
}

/// First slots of drafts, and how often the drafter's best token is the target's there.
#[derive(Default, Clone)]
pub(super) struct FirstSlots {
    places: usize,
    right: usize,
    /// How often a draft id is the target's best.
    best: HashMap<i64, usize>,
}

impl FirstSlots {
    /// Takes in a pass; `first` is the number of the first slot that predicts.
    pub(super) fn add<A: AutodiffBackend>(&mut self, forward: &Forward<A>, first: usize) {
        let [n, slots, width] = forward.logits.dims();
        let counted = floats(forward.mask.clone().inner());
        let best = |x: Tensor<A::InnerBackend, 3>| -> Vec<i64> {
            x.reshape([n * slots, width]).argmax(1).into_data().iter::<i64>().collect()
        };
        let (ours, theirs) = (best(forward.logits.whole().inner()), best(forward.targets()));
        for row in (0..n * slots).filter(|&row| counted[row] > 0.0 && forward.slots.number[row] == first) {
            self.places += 1;
            self.right += usize::from(ours[row] == theirs[row]);
            *self.best.entry(theirs[row]).or_default() += 1;
        }
    }

    /// Share of the places where the drafter is right.
    pub(super) fn share(&self) -> f64 {
        self.right as f64 / self.places.max(1) as f64
    }

    /// The share of one who always says the token that is right most often.
    pub(super) fn chance(&self) -> f64 {
        self.best.values().copied().max().unwrap_or(0) as f64 / self.places.max(1) as f64
    }
}

/// The mean probability of acceptance of each block of which something counts.
pub(super) fn acceptance<A: AutodiffBackend>(forward: Forward<A>) -> Vec<f64> {
    let slots = forward.logits.dims()[1];
    let accepted = floats(elements(forward.logits.whole().inner(), forward.targets(), None).acceptance);
    let counted = floats(forward.mask.inner());
    let blocks = accepted.chunks_exact(slots).zip(counted.chunks_exact(slots));
    let mean = |(accepted, counted): (&[f32], &[f32])| {
        let count = f64::from(counted.iter().sum::<f32>());
        let sum: f32 = accepted.iter().zip(counted).map(|(a, c)| a * c).sum();
        (count > 0.0).then(|| f64::from(sum) / count)
    };
    blocks.filter_map(mean).collect()
}
