//! Muon (Jordan 2024): momentum, made orthogonal by five Newton-Schulz iterations, as Burn has it. Here its products
//! run on the threads and registers of the fast bodies, where symmetric ones need half the work.

use burn::{
    module::AutodiffModule,
    optim::{LearningRate, SimpleOptimizer, adaptor::OptimizerAdaptor},
    record::Record,
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
};

/// Share of the momentum that is kept.
pub(crate) const MOMENTUM: f64 = 0.95;
/// Coefficients of the quintic iteration.
pub(crate) const QUINTIC: [f32; 3] = [3.4445, -4.775, 2.0315];
/// Iterations.
pub(crate) const ITERATIONS: usize = 5;
/// Least norm to divide by.
pub(crate) const LEAST_NORM: f32 = 1e-7;

/// Muon with Nesterov momentum and decoupled decay of weights.
#[derive(Clone)]
pub(crate) struct Muon {
    decay: f64,
}

/// What is kept of a matrix from step to step, named as in Burn's record.
#[derive(Record, Clone)]
pub(crate) struct MuonState<B: Backend, const D: usize> {
    momentum: MomentumState<B, D>,
}

/// See [`MuonState`].
#[derive(Record, Clone)]
pub(crate) struct MomentumState<B: Backend, const D: usize> {
    velocity: Tensor<B, D>,
}

impl Muon {
    /// Of modules on `B`; `decay` times the learning rate is the share that weights lose per step.
    pub(crate) fn init<B: AutodiffBackend, M: AutodiffModule<B>>(decay: f64) -> OptimizerAdaptor<Self, M, B> {
        OptimizerAdaptor::from(Self { decay })
    }
}

impl<B: Backend> SimpleOptimizer<B> for Muon {
    type State<const D: usize> = MuonState<B, D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<B, D>,
        grad: Tensor<B, D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<B, D>, Option<Self::State<D>>) {
        let shape = tensor.dims();
        assert_eq!(shape.len(), 2, "Muon is for matrices");
        let adjusted = lr * (shape[0] as f64 / shape[1] as f64).max(1.0).sqrt();
        let kept = 1.0 - lr * self.decay;
        let velocity = state.map(|s| s.momentum.velocity);
        let step = |(tensor, velocity)| (tensor, Some(MuonState { momentum: MomentumState { velocity } }));
        #[cfg(feature = "flex")]
        if let Some(done) = crate::flex::muon(&tensor, &grad, velocity.as_ref(), kept, adjusted) {
            return step(done);
        }
        let velocity = match velocity {
            Some(velocity) => grad.clone() + velocity.mul_scalar(MOMENTUM),
            None => grad.clone(),
        };
        let update = orthogonal(velocity.clone().mul_scalar(MOMENTUM) + grad);
        step((tensor.mul_scalar(kept) - update.mul_scalar(adjusted), velocity))
    }

    fn to_device<const D: usize>(mut state: Self::State<D>, device: &B::Device) -> Self::State<D> {
        state.momentum.velocity = state.momentum.velocity.to_device(device);
        state
    }
}

fn orthogonal<B: Backend, const D: usize>(update: Tensor<B, D>) -> Tensor<B, D> {
    let tall = update.dims()[0] > update.dims()[1];
    let x = if tall { update.transpose() } else { update };
    let norm = (x.clone() * x.clone()).sum().sqrt().clamp_min(LEAST_NORM);
    let mut x = x / norm.unsqueeze();
    let [a, b, c] = QUINTIC;
    for _ in 0..ITERATIONS {
        let gram = x.clone().matmul(x.clone().transpose());
        let squared = gram.clone().matmul(gram.clone());
        x = x.clone().mul_scalar(a) + (gram.mul_scalar(b) + squared.mul_scalar(c)).matmul(x);
    }
    if tall { x.transpose() } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{
        backend::Autodiff,
        optim::{GradientsParams, MuonConfig, Optimizer, decay::WeightDecayConfig},
        tensor::Distribution,
    };
    use hspec_nn::Linear;

    /// Three steps of ours and of Burn's from the same weights and gradients.
    fn check<B: Backend>(rows: usize, columns: usize) {
        type A<B> = Autodiff<B>;
        let device = Default::default();
        let weight = Tensor::<A<B>, 2>::random([rows, columns], Distribution::Normal(0.0, 0.1), &device);
        let mut ours = Linear::new(weight.require_grad(), None);
        let mut theirs = ours.clone();
        let decay = Some(WeightDecayConfig { penalty: 0.1 });
        let mut muon = Muon::init::<A<B>, Linear<A<B>>>(f64::from(0.1f32));
        let mut reference = MuonConfig::new().with_weight_decay(decay).init::<A<B>, Linear<A<B>>>();
        for step in 0..3 {
            let slope = Tensor::<A<B>, 2>::random([rows, columns], Distribution::Normal(0.0, 1.0), &device);
            let grads = |l: &Linear<A<B>>| {
                let grads = (l.weight.val() * slope.clone()).sum().backward();
                GradientsParams::from_grads(grads, l)
            };
            let (of_ours, of_theirs) = (grads(&ours), grads(&theirs));
            ours = muon.step(0.05, ours, of_ours);
            theirs = reference.step(0.05, theirs, of_theirs);
            let values = |l: &Linear<A<B>>| l.weight.val().into_data().iter::<f32>().collect::<Vec<_>>();
            for (a, b) in values(&ours).into_iter().zip(values(&theirs)) {
                assert!((a - b).abs() < 2e-5, "[{rows}, {columns}], step {step}: {a}, {b}");
            }
        }
    }

    #[test]
    fn a_step_is_that_of_burn() {
        for [rows, columns] in [[5, 9], [9, 5], [40, 40], [3, 700]] {
            check::<burn_ndarray::NdArray>(rows, columns);
            check::<burn_flex::Flex>(rows, columns);
        }
    }
}
