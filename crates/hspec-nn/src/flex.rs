//! Between tensors of the flex backend and slices, for the fast bodies of this crate and others.

mod gradient;
pub(crate) mod layers;

pub use gradient::{Gradient, Tracked, is_tracked, node, pull, tracked};

use burn::tensor::{Bytes, DType, Shape, Tensor, TensorPrimitive, backend::Backend};
use burn_flex::{FlexTensor, Layout};
use std::any::{Any, TypeId};

/// Whether a backend's tensors are flex's own, not those of autodiff or of another backend.
pub fn is_flex<B: Backend>() -> bool {
    TypeId::of::<B::FloatTensorPrimitive>() == TypeId::of::<FlexTensor>()
}

/// The flex tensor inside, sharing its storage; none unless it is one, of type f32.
pub fn inner<B: Backend, const D: usize>(x: &Tensor<B, D>) -> Option<FlexTensor> {
    if !is_flex::<B>() {
        return None;
    }
    let mut primitive = Some(x.clone().into_primitive().tensor());
    let found = (&mut primitive as &mut dyn Any).downcast_mut::<Option<FlexTensor>>()?.take()?;
    (found.dtype() == DType::F32).then_some(found)
}

/// [`inner`] in row-major order, so that `as_slice` has the values.
pub fn contiguous<B: Backend, const D: usize>(x: &Tensor<B, D>) -> Option<FlexTensor> {
    let x = inner(x)?;
    Some(if x.is_contiguous() { x } else { x.to_contiguous() })
}

/// The values of a tensor that [`contiguous`] returned.
pub fn values(x: &FlexTensor) -> &[f32] {
    x.as_slice::<f32>().expect("contiguous, and of type f32")
}

/// A tensor of row-major values.
///
/// # Panics
/// Unless [`is_flex`], or if the number of values is not the shape's.
pub fn tensor<B: Backend, const D: usize>(values: Vec<f32>, shape: [usize; D]) -> Tensor<B, D> {
    let mut made = Some(primitive(values, shape));
    let primitive = (&mut made as &mut dyn Any).downcast_mut::<Option<B::FloatTensorPrimitive>>();
    let primitive = primitive.and_then(Option::take).expect("callers have asked whether this is flex");
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// [`tensor`], as flex has it inside.
pub fn primitive<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> FlexTensor {
    assert_eq!(values.len(), shape.iter().product::<usize>());
    let layout = Layout::contiguous(Shape::new(shape));
    FlexTensor::new(Bytes::from_elems(values), layout, DType::F32)
}
