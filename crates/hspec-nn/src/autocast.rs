//! The type in which layers that learn compute their products: mixed precision.

use burn::tensor::{FloatDType, Tensor, backend::Backend};
use std::cell::Cell;

/// A type of numbers to compute in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compute {
    /// 32 bits.
    #[default]
    F32,
    /// 16 bits, eight of them of precision, for the factors of products.
    Bf16,
}

thread_local! {
    static COMPUTE: Cell<Compute> = const { Cell::new(Compute::F32) };
}

/// Runs `work`, in which this thread's [`Linear`](crate::Linear) layers on backends with gradients, and what asks
/// [`compute`], compute their products in this type, forwards and backwards. Tensors stay f32. On flex only factors are
/// rounded; elsewhere a product's result is a bf16 number too.
///
/// # Panics
/// In a layer, where the backend does not know the type (`B::supports_dtype`).
pub fn autocast<R>(compute: Compute, work: impl FnOnce() -> R) -> R {
    struct Back(Compute);
    impl Drop for Back {
        fn drop(&mut self) {
            COMPUTE.set(self.0);
        }
    }
    let _back = Back(COMPUTE.replace(compute));
    work()
}

/// The type in which products are to be computed here.
pub fn compute() -> Compute {
    COMPUTE.get()
}

/// `x wᵀ`, `[m, in]` by `[out, in]` to `[m, out]`, in plain tensor operations: of rounded factors where products are
/// to be computed in bf16 and the backend has gradients.
pub fn product<B: Backend>(x: Tensor<B, 2>, w: Tensor<B, 2>) -> Tensor<B, 2> {
    if compute() == Compute::F32 || !B::ad_enabled(&w.device()) {
        return x.matmul(w.transpose());
    }
    let [x, w] = [x, w].map(|factor| factor.cast(FloatDType::BF16));
    x.matmul(w.transpose()).cast(FloatDType::F32)
}
