//! Operations with a gradient of their own, for autodiff over flex: what would be a dozen nodes of its graph,
//! each a pass over memory on one thread, becomes one.

use burn::{
    backend::{
        Autodiff,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::NoCheckpointing},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
    },
    tensor::{
        DType, Tensor, TensorPrimitive,
        backend::{Backend, BackendTypes},
    },
};
use burn_flex::{Flex, FlexTensor};
use std::{
    any::{Any, TypeId},
    fmt::Debug,
    marker::PhantomData,
};

/// A tensor of autodiff over flex.
pub type Tracked = <Autodiff<Flex> as BackendTypes>::FloatTensorPrimitive;

/// What an operation of `N` inputs does backwards; holds what it needs of the way forward.
pub trait Gradient<const N: usize>: Clone + Debug + Send + 'static {
    /// The gradients of the inputs, at least of those `wanted`, for that of the output (row-major).
    fn backward(self, output: &FlexTensor, wanted: [bool; N]) -> [Option<FlexTensor>; N];
}

/// Whether a backend is autodiff over flex.
pub fn is_tracked<B: Backend>() -> bool {
    TypeId::of::<B::FloatTensorPrimitive>() == TypeId::of::<Tracked>()
}

/// The tensor inside, row-major; none unless it is one of autodiff over flex, of type f32.
pub fn tracked<B: Backend, const D: usize>(x: &Tensor<B, D>) -> Option<Tracked> {
    if !is_tracked::<B>() {
        return None;
    }
    let mut primitive = Some(x.clone().into_primitive().tensor());
    let mut found = (&mut primitive as &mut dyn Any).downcast_mut::<Option<Tracked>>()?.take()?;
    if found.primitive.dtype() != DType::F32 {
        return None;
    }
    if !found.primitive.is_contiguous() {
        found.primitive = found.primitive.to_contiguous();
    }
    Some(found)
}

/// The output of an operation, which autodiff will ask for its gradients.
///
/// # Panics
/// Unless the backend is autodiff over flex, as it is where [`tracked`] gave the inputs.
pub fn node<B: Backend, const N: usize, const D: usize>(
    inputs: [Tracked; N],
    output: FlexTensor,
    gradient: impl Gradient<N>,
) -> Tensor<B, D> {
    let prepared = Node(PhantomData).prepare::<NoCheckpointing>(inputs.map(|input| input.node));
    let made = match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(gradient, output),
        OpsKind::UnTracked(prepared) => prepared.finish(output),
    };
    let mut made = Some(made);
    let primitive = (&mut made as &mut dyn Any).downcast_mut::<Option<B::FloatTensorPrimitive>>();
    let primitive = primitive.and_then(Option::take).expect("the inputs are of this backend");
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// A scalar, zero, whose gradient by `x` is given, as row-major values; none unless autodiff over flex computes.
pub fn pull<B: Backend, const D: usize>(x: &Tensor<B, D>, gradient: Vec<f32>) -> Option<Tensor<B, 1>> {
    let gradient = Pull(super::primitive(gradient, x.dims()));
    Some(node([tracked(x)?], super::primitive(vec![0.0], [1]), gradient))
}

#[derive(Clone, Debug)]
struct Pull(FlexTensor);

impl Gradient<1> for Pull {
    fn backward(mut self, output: &FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let factor = super::values(output)[0];
        if factor != 1.0 {
            self.0.storage_mut::<f32>().iter_mut().for_each(|x| *x *= factor);
        }
        [Some(self.0)]
    }
}

/// Any operation with a [`Gradient`].
#[derive(Debug)]
struct Node<G>(PhantomData<G>);

impl<G: Gradient<N>, const N: usize> Backward<Flex, N> for Node<G> {
    type State = G;

    fn backward(self, ops: Ops<G, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let Ops { parents, node, state } = ops;
        let output = grads.consume::<Flex>(&node);
        let output = if output.is_contiguous() { output } else { output.to_contiguous() };
        let wanted = std::array::from_fn(|i| parents[i].is_some());
        for (parent, gradient) in parents.into_iter().zip(state.backward(&output, wanted)) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<Flex>(parent.id, gradient);
            }
        }
    }
}
