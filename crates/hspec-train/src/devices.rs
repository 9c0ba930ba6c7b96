//! Rows of a step shared out among devices: each runs its rows on a copy of the drafter, and Burn's collective
//! adds the gradients up on the first. What a step learns from does not depend on how many devices there are.

use crate::{
    kinds::Learner,
    loss::LossConfig,
    pack::Judge,
    step::{self, Row, Sum},
};
use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{Tensor, TensorPrimitive, backend::AutodiffBackend},
};
use burn_collective::{
    CollectiveConfig, CollectiveError, PeerId, ReduceOperation, ReduceStrategy, finish_collective, reduce,
    register,
};
use hspec_core::{Error, Result};
use hspec_nn::autocast::{autocast, compute};
use std::sync::Mutex;

/// Burn keeps one group of peers per process.
static GROUP: Mutex<()> = Mutex::new(());

/// [`step::sum`] over several devices, row `i` on device `i mod n`; the gradients end up on the first.
///
/// # Errors
/// Those of [`step::sum`], the first of them; a reduction that Burn refuses.
pub fn sum<B: AutodiffBackend, L: Learner<B>>(
    learner: &L,
    rows: Vec<Row<B::InnerBackend>>,
    judge: &Judge<B::InnerBackend>,
    config: &LossConfig,
    devices: &[B::Device],
) -> Result<Option<Sum>> {
    let mut shares: Vec<Vec<Row<B::InnerBackend>>> = devices.iter().map(|_| Vec::new()).collect();
    for (i, row) in rows.into_iter().enumerate() {
        let device = i % devices.len();
        shares[device].push(row.on_device(&devices[device]));
    }
    let compute = compute();
    let peers: Vec<Peer<B, L>> = std::thread::scope(|scope| {
        let workers: Vec<_> = shares
            .into_iter()
            .zip(devices)
            .map(|(rows, device)| {
                let (mut learner, judge) = (learner.clone(), judge.clone().on_device(device));
                scope.spawn(move || {
                    learner.replace(learner.module().clone().fork(device));
                    let sum = autocast(compute, || step::sum(&learner, rows, &judge, config))?;
                    Ok(sum.map(|sum| Peer { learner, sum, device: device.clone() }))
                })
            })
            .collect();
        let done = workers.into_iter().map(|worker| worker.join().map_err(|_| panicked())?);
        done.collect::<Result<Vec<_>>>()
    })?
    .into_iter()
    .flatten()
    .collect();
    let sums = reduced(peers)?;
    let main = devices.first().ok_or_else(|| Error::Mismatch("there is no device".into()))?;
    Ok(sums.map(|mut sum| {
        sum.grads = sum.grads.to_device::<B, L::Module>(main, learner.module());
        sum
    }))
}

/// A device whose rows had something to learn from.
struct Peer<B: AutodiffBackend, L> {
    learner: L,
    sum: Sum,
    device: B::Device,
}

/// The sums of all peers, on the first one's device.
fn reduced<B: AutodiffBackend, L: Learner<B>>(peers: Vec<Peer<B, L>>) -> Result<Option<Sum>> {
    let n = peers.len();
    if n < 2 {
        return Ok(peers.into_iter().next().map(|peer| peer.sum));
    }
    if peers.iter().any(|peer| peer.sum.grads.len() != peers[0].sum.grads.len()) {
        return Err(Error::Mismatch("the devices have gradients of different parameters".into()));
    }
    let _alone = GROUP.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let sums: Vec<Sum> = std::thread::scope(|scope| {
        let workers: Vec<_> = peers
            .into_iter()
            .enumerate()
            .map(|(i, peer)| scope.spawn(move || peer.reduce(PeerId::from(i), n)))
            .collect();
        let done = workers.into_iter().map(|worker| worker.join().map_err(|_| panicked())?);
        done.collect::<Result<_>>()
    })?;
    let mut sums = sums.into_iter();
    let mut first = sums.next();
    if let Some(first) = &mut first {
        sums.for_each(|sum| first.tally.add(&sum.tally));
    }
    Ok(first)
}

impl<B: AutodiffBackend, L: Learner<B>> Peer<B, L> {
    /// Takes part in the reduction of every gradient; peer 0 gets the sums.
    fn reduce(mut self, id: PeerId, peers: usize) -> Result<Sum> {
        let failed = |e: CollectiveError| Error::Mismatch(format!("adding gradients up: {e:?}"));
        let config = CollectiveConfig::default()
            .with_num_devices(peers)
            .with_local_reduce_strategy(ReduceStrategy::Centralized);
        register::<B::InnerBackend>(id, self.device.clone(), config).map_err(failed)?;
        let mut visitor = Reduce { grads: &mut self.sum.grads, id, error: None };
        self.learner.module().visit(&mut visitor);
        let error = visitor.error;
        finish_collective::<B::InnerBackend>(id).map_err(failed)?;
        error.map_or(Ok(self.sum), |e| Err(failed(e)))
    }
}

struct Reduce<'a> {
    grads: &'a mut GradientsParams,
    id: PeerId,
    error: Option<CollectiveError>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Reduce<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) else { return };
        let grad = grad.into_primitive().tensor();
        match reduce::<B::InnerBackend>(self.id, grad, ReduceOperation::Sum, PeerId::from(0u32)) {
            Ok(Some(sum)) => {
                let sum = Tensor::from_primitive(TensorPrimitive::Float(sum));
                self.grads.register::<B::InnerBackend, D>(param.id, sum);
            }
            Ok(None) => {}
            Err(error) => self.error = Some(error),
        }
    }
}

fn panicked() -> Error {
    Error::Mismatch("the thread of a device panicked".into())
}
