//! Products of a few rows on the flex backend.
//!
//! Decoding multiplies one row and verification eight by every weight of a model, so both are bound by
//! reading the weights once. flex's own product packs an operand for every call, and with one row it uses
//! one thread. Here each weight row is read once, from where it lies, and dotted with all rows of `x`;
//! weight rows are shared out among threads.

use crate::dot::Kernel;
use burn::tensor::{Shape, Tensor, TensorPrimitive, backend::Backend};
use burn_flex::{FlexTensor, Layout};
use rayon::prelude::*;
use std::any::Any;

/// Most rows of `x`: beyond, packing pays.
pub(crate) const MAX_ROWS: usize = 16;
/// Weights below which threads cost more than they bring.
const PARALLEL: usize = 200_000;
/// Weight rows that one task takes at least.
const TASK_ROWS: usize = 32;

/// `x [m, in] · w [out, in]ᵀ -> [m, out]`, or both unchanged unless they are contiguous f32 tensors of
/// flex with few rows.
pub(crate) fn product<B: Backend>(
    x: Tensor<B, 2>,
    w: Tensor<B, 2>,
) -> Result<Tensor<B, 2>, (Tensor<B, 2>, Tensor<B, 2>)> {
    let ([m, input], [output, _]) = (x.dims(), w.dims());
    if m > MAX_ROWS {
        return Err((x, w));
    }
    let (x, w) = (x.into_primitive().tensor(), w.into_primitive().tensor());
    let wrap = |p| Tensor::from_primitive(TensorPrimitive::Float(p));
    let y = match (rows(&x), rows(&w)) {
        (Some(x), Some(w)) => multiply(x, w, m, input, output),
        _ => return Err((wrap(x), wrap(w))),
    };
    let y = FlexTensor::new(
        burn::tensor::Bytes::from_elems(y),
        Layout::contiguous(Shape::new([m, output])),
        burn::tensor::DType::F32,
    );
    // The operands were flex's, so this primitive is too.
    let y: Box<dyn Any> = Box::new(y);
    match y.downcast::<B::FloatTensorPrimitive>() {
        Ok(y) => Ok(wrap(*y)),
        Err(_) => Err((wrap(x), wrap(w))),
    }
}

fn rows<P: 'static>(primitive: &P) -> Option<&[f32]> {
    let tensor = (primitive as &dyn Any).downcast_ref::<FlexTensor>()?;
    tensor.as_slice::<f32>()
}

fn multiply(x: &[f32], w: &[f32], m: usize, input: usize, output: usize) -> Vec<f32> {
    let kernel = Kernel::widest();
    // [out, m]: a task's results lie side by side.
    let mut y = vec![0f32; output * m];
    let task = |(y, w): (&mut [f32], &[f32])| kernel.run(y, w, x, m, input);
    if output * input < PARALLEL {
        task((&mut y, w));
    } else {
        let per_task = output.div_ceil(4 * rayon::current_num_threads()).max(TASK_ROWS);
        y.par_chunks_mut(per_task * m).zip(w.par_chunks(per_task * input)).for_each(task);
    }
    if m == 1 {
        return y;
    }
    let mut turned = Vec::with_capacity(output * m);
    for r in 0..m {
        turned.extend((0..output).map(|o| y[o * m + r]));
    }
    turned
}
