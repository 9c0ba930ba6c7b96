//! Linear layers over weights stored `[out, in]`.

use crate::autocast::{self, Compute, compute};
#[cfg(feature = "flex")]
use crate::{flex, multiply, panels::Panels, prepack::Prepacked, simd::Body};
use burn::{
    module::{Module, Param, ParamId},
    tensor::{Distribution, Int, Tensor, TensorData, backend::Backend},
};
#[cfg(feature = "flex")]
use std::sync::Arc;

/// Rows up to which `(W xᵀ)ᵀ` beats `x Wᵀ` on CPU: the small operand is the one that gets packed.
const FEW_ROWS: usize = 64;

/// How the packed weights of a layer that no longer learns are stored. Activations and sums are f32 in both
/// cases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WeightStorage {
    /// As bf16, half the bytes to read, where every weight of the matrix is a bf16 number; as f32 elsewhere.
    #[default]
    Lossless,
    /// As f32.
    F32,
    /// As bf16, each weight rounded to nearest.
    Bf16,
}

/// `y = x Wᵀ + b` with `W: [out, in]`, as Hugging Face files store it.
///
/// [`Linear::prepack`] exchanges the weight for a packed copy where the backend has a body for it.
#[derive(Module, Debug)]
pub struct Linear<B: Backend> {
    /// `[out, in]`; of a packed layer, made again when it is asked for.
    pub weight: Param<Tensor<B, 2>>,
    /// `[out]`.
    pub bias: Option<Param<Tensor<B, 1>>>,
    #[cfg(feature = "flex")]
    packed: Prepacked<B>,
}

impl<B: Backend> Linear<B> {
    /// Wraps a weight `[out, in]` and a bias `[out]`.
    pub fn new(weight: Tensor<B, 2>, bias: Option<Tensor<B, 1>>) -> Self {
        Self {
            weight: Param::initialized(ParamId::new(), weight),
            bias: bias.map(|b| Param::initialized(ParamId::new(), b)),
            #[cfg(feature = "flex")]
            packed: Prepacked::new(None),
        }
    }

    /// Weights from `N(0, std)`, bias (if any) zero.
    pub fn random(input: usize, output: usize, bias: bool, std: f64, device: &B::Device) -> Self {
        let weight = Tensor::random([output, input], Distribution::Normal(0.0, std), device);
        Self::new(weight, bias.then(|| Tensor::zeros([output], device)))
    }

    /// `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        let shape = self.weight.lazy_shape();
        [shape[0], shape[1]]
    }

    /// The same layer for inference: on flex its weight is packed in the order in which products read it,
    /// and the plain copy dropped. The weight must not be exchanged afterwards, save by a mapper.
    #[must_use]
    pub fn prepack(self, storage: WeightStorage) -> Self {
        #[cfg(feature = "flex")]
        if self.packed.panels.is_none()
            && let Some(weight) = flex::contiguous(&self.weight.val())
        {
            let [output, input] = self.shape();
            return Self {
                bias: self.bias.clone(),
                ..Self::from_panels(
                    Arc::new(Panels::pack(flex::values(&weight), output, input, storage)),
                    self.weight.id,
                    self.weight.lazy_device(),
                )
            };
        }
        let _ = storage;
        self
    }

    #[cfg(feature = "flex")]
    fn from_panels(panels: Arc<Panels>, id: ParamId, device: B::Device) -> Self {
        let [output, input] = panels.shape();
        let packed = Prepacked::new(Some(panels.clone()));
        let unpack = move |device: &B::Device, _| {
            Tensor::from_data(TensorData::new(panels.unpack(), [output, input]), device)
        };
        let shape = burn::tensor::Shape::new([output, input]);
        Self { weight: Param::uninitialized(id, unpack, device, false, shape), bias: None, packed }
    }

    /// Rows of the weight, `[ids, in]`.
    pub fn rows(&self, ids: &[usize]) -> Tensor<B, 2> {
        #[cfg(feature = "flex")]
        if let Some(panels) = &self.packed.panels {
            return flex::tensor(panels.rows(ids.iter().copied()), [ids.len(), panels.shape()[1]]);
        }
        let weight = self.weight.val();
        let ids: Vec<i64> = ids.iter().map(|&id| id as i64).collect();
        let ids = TensorData::new(ids.clone(), [ids.len()]);
        weight.clone().select(0, Tensor::<B, 1, Int>::from_data(ids, &weight.device()))
    }

    /// The weight; of a packed layer a copy that the layer does not keep.
    pub fn to_weight(&self) -> Tensor<B, 2> {
        #[cfg(feature = "flex")]
        if let Some(panels) = &self.packed.panels {
            return flex::tensor(panels.unpack(), panels.shape());
        }
        self.weight.val()
    }

    /// `[.., in] -> [.., out]`. Flattens to two dimensions first: the backward pass of a batched
    /// product would materialise one weight gradient per batch entry.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        let mut shape = x.dims();
        let [output, input] = self.shape();
        let rows = x.shape().num_elements() / input;
        let y = self.product(x.reshape([rows, input]));
        shape[D - 1] = output;
        self.biased(y).reshape(shape)
    }

    /// Several layers over the same rows: `[m, in] -> [m, out]` each.
    pub fn forward_all(layers: &[&Self], x: Tensor<B, 2>) -> Vec<Tensor<B, 2>> {
        #[cfg(feature = "flex")]
        if let Some(panels) = layers.iter().map(|l| l.packed.panels.as_deref()).collect::<Option<Vec<_>>>()
            && let Some(rows) = flex::contiguous(&x)
        {
            let m = x.dims()[0];
            let results = multiply::products(Body::widest(), flex::values(&rows), &panels);
            let tensors = results.into_iter().zip(layers);
            return tensors.map(|(y, l)| l.biased(flex::tensor(y, [m, l.shape()[0]]))).collect();
        }
        layers.iter().map(|l| l.forward(x.clone())).collect()
    }

    /// `silu(gate x) · up x`, `[m, in] -> [m, out]`, of packed layers without biases; `None` for others.
    #[cfg(feature = "flex")]
    pub(crate) fn gated(gate: &Self, up: &Self, x: &Tensor<B, 2>) -> Option<Tensor<B, 2>> {
        let (g, u) = (gate.packed.panels.as_deref()?, up.packed.panels.as_deref()?);
        if gate.bias.is_some() || up.bias.is_some() || g.storage() != u.storage() {
            return None;
        }
        let rows = flex::contiguous(x)?;
        let y = multiply::gated_product(Body::widest(), flex::values(&rows), g, u);
        Some(flex::tensor(y, [x.dims()[0], g.shape()[0]]))
    }

    fn biased(&self, y: Tensor<B, 2>) -> Tensor<B, 2> {
        match &self.bias {
            Some(bias) => y + bias.val().unsqueeze(),
            None => y,
        }
    }

    /// `x [m, in] -> [m, out]`, contiguous.
    fn product(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        #[cfg(feature = "flex")]
        if let Some(panels) = &self.packed.panels
            && let Some(rows) = flex::contiguous(&x)
        {
            let mut y = multiply::products(Body::widest(), flex::values(&rows), &[panels]);
            return flex::tensor(y.pop().expect("one matrix, one result"), [x.dims()[0], panels.shape()[0]]);
        }
        let w = self.weight.val();
        #[cfg(feature = "flex")]
        if let Some(y) = flex::layers::linear(&x, &w) {
            return y;
        }
        if compute() == Compute::Bf16 && B::ad_enabled(&w.device()) {
            return autocast::product(x, w);
        }
        if x.dims()[0] <= FEW_ROWS {
            contiguous(w.matmul(x.transpose()).transpose())
        } else {
            #[cfg(feature = "flex")]
            if let (Some(rows), Some(weight)) = (flex::contiguous(&x), flex::contiguous(&w)) {
                let shape = [x.dims()[0], w.dims()[0], w.dims()[1]];
                let y = flex::layers::times_turned(flex::values(&rows), flex::values(&weight), shape);
                return flex::tensor(y, [shape[0], shape[1]]);
            }
            x.matmul(w.transpose())
        }
    }
}

/// A copy of `x` in row-major order. Elementwise work on strided views is ten times slower on CPU
/// backends, so a view that feeds more than one such operation is materialised once.
pub fn contiguous<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let shape = x.dims();
    let n = x.shape().num_elements();
    x.reshape([n]).reshape(shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_abs_diff_eq;
    use proptest::prelude::*;

    fn naive(x: &[f32], w: &[f32], m: usize, i: usize, o: usize) -> Vec<f32> {
        let dot = |r: usize, c: usize| (0..i).map(|k| x[r * i + k] * w[c * i + k]).sum();
        (0..m * o).map(|n| dot(n / o, n % o)).collect()
    }

    fn check<B: Backend>(m: usize, i: usize, o: usize, x: &[f32], w: &[f32]) {
        let device = Default::default();
        let xt = Tensor::<B, 2>::from_data(TensorData::new(x.to_vec(), [m, i]), &device);
        let wt = Tensor::<B, 2>::from_data(TensorData::new(w.to_vec(), [o, i]), &device);
        let plain = Linear::new(wt, None);
        for linear in [plain.clone(), plain.prepack(WeightStorage::F32)] {
            let y = linear.forward(xt.clone()).into_data().to_vec::<f32>().unwrap();
            for (a, b) in y.iter().zip(naive(x, w, m, i, o)) {
                assert_abs_diff_eq!(*a, b, epsilon = 1e-4 * (1.0 + b.abs()));
            }
            assert_eq!(linear.shape(), [o, i]);
            assert_eq!(linear.rows(&[o - 1]).into_data().to_vec::<f32>().unwrap(), &w[(o - 1) * i..]);
            assert_eq!(linear.to_weight().into_data().to_vec::<f32>().unwrap(), w);
            assert_eq!(linear.weight.val().into_data().to_vec::<f32>().unwrap(), w);
        }
    }

    proptest! {
        #[test]
        fn every_row_count_equals_the_naive_product(
            m in 1usize..70, i in 1usize..9, o in 1usize..9,
            values in proptest::collection::vec(-2f32..2.0, 70 * 9 + 81),
        ) {
            let (x, w) = values.split_at(70 * 9);
            check::<burn_ndarray::NdArray>(m, i, o, &x[..m * i], &w[..o * i]);
            check::<burn_flex::Flex>(m, i, o, &x[..m * i], &w[..o * i]);
        }
    }

    /// A mapper that exchanged the weight of a packed layer would otherwise change nothing.
    #[test]
    fn a_mapped_layer_is_no_longer_packed() {
        type B = burn_flex::Flex;
        let device = Default::default();
        let linear = Linear::new(Tensor::<B, 2>::from_floats([[2.0, 3.0]], &device), None);
        let linear = linear.prepack(WeightStorage::F32);
        let data = TensorData::new(vec![5f32, 7.0], [1, 2]);
        let linear = crate::params::fill(linear, &device, |_| Some(data.clone()), |_| false).unwrap();
        let y = linear.forward(Tensor::<B, 2>::from_floats([[1.0, 1.0]], &device));
        assert_eq!(y.into_data().to_vec::<f32>().unwrap(), [12.0]);
    }

    #[test]
    fn several_layers_over_the_same_rows_equal_each_alone() {
        type B = burn_flex::Flex;
        let device = Default::default();
        let layers: Vec<_> = [(3, true), (40, false), (65, true)]
            .map(|(o, bias)| Linear::<B>::random(7, o, bias, 1.0, &device))
            .into();
        let x = Tensor::<B, 2>::random([5, 7], Distribution::Normal(0.0, 1.0), &device);
        for pack in [false, true] {
            let pack = |l: &Linear<B>| if pack { l.clone().prepack(WeightStorage::F32) } else { l.clone() };
            let layers: Vec<_> = layers.iter().map(pack).collect();
            let together = Linear::forward_all(&layers.iter().collect::<Vec<_>>(), x.clone());
            for (y, layer) in together.into_iter().zip(&layers) {
                assert_eq!(y.into_data(), layer.forward(x.clone()).into_data());
            }
        }
    }
}
