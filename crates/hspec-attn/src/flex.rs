//! In-place cache writes for the flex backend, whose `slice_assign` copies the whole tensor: a write
//! would cost as much as reading the cache once.

use burn::tensor::{Tensor, TensorPrimitive, backend::Backend};
use burn_flex::FlexTensor;
use std::any::Any;

/// `cache[row..row+b, :, at..at+t, :] = new` in place, or both tensors unchanged when they are not flex's.
pub(crate) fn write_at<B: Backend>(
    cache: Tensor<B, 4>,
    new: Tensor<B, 4>,
    row: usize,
    at: usize,
) -> Result<Tensor<B, 4>, (Tensor<B, 4>, Tensor<B, 4>)> {
    let ([_, kv, capacity, d], [b, t, _, _]) = (cache.dims(), new.dims());
    let mut cache = cache.into_primitive().tensor();
    let new = new.into_primitive().tensor();
    let wrap = |p| Tensor::from_primitive(TensorPrimitive::Float(p));
    let target = (&mut cache as &mut dyn Any).downcast_mut::<FlexTensor>();
    let source = (&new as &dyn Any).downcast_ref::<FlexTensor>();
    let (Some(target), Some(source)) = (target, source) else {
        return Err((wrap(cache), wrap(new)));
    };
    let source = source.to_contiguous();
    let offset = source.layout().start_offset();
    let from = &source.storage::<f32>()[offset..offset + b * t * kv * d];
    let to = target.storage_mut::<f32>();
    for (i, vector) in from.chunks_exact(d).enumerate() {
        let (r, slot, head) = (row + i / (t * kv), i / kv % t, i % kv);
        let start = ((r * kv + head) * capacity + at + slot) * d;
        to[start..start + d].copy_from_slice(vector);
    }
    Ok(wrap(cache))
}
