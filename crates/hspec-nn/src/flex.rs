//! Products of a few rows on the flex backend.
//!
//! Decoding multiplies one row and verification eight by every weight of a model, so both are bound by
//! reading the weights once. flex's own product packs an operand for every call, and with one row it uses
//! one thread. Here each weight row is read once, from where it lies, and dotted with all rows of `x`;
//! weight rows are shared out among threads.

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
const LANES: usize = 16;

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
    let kernel = Kernel::detect();
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

/// The widest instructions that this machine has.
#[derive(Clone, Copy)]
enum Kernel {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Kernel {
    fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self::Avx2;
            }
        }
        Self::Portable
    }

    /// `y [rows, m] = w [rows, in] · x [m, in]ᵀ`.
    fn run(self, y: &mut [f32], w: &[f32], x: &[f32], m: usize, input: usize) {
        match self {
            // SAFETY: the features were found on this machine.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512(y, w, x, m, input) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2(y, w, x, m, input) },
            Self::Portable => all_rows(y, w, x, m, input, |a, b, c| a * b + c),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn avx512(y: &mut [f32], w: &[f32], x: &[f32], m: usize, input: usize) {
    all_rows(y, w, x, m, input, f32::mul_add);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2(y: &mut [f32], w: &[f32], x: &[f32], m: usize, input: usize) {
    all_rows(y, w, x, m, input, f32::mul_add);
}

/// Rows of `x` in groups whose sums fit the registers.
#[inline(always)]
fn all_rows(
    y: &mut [f32],
    w: &[f32],
    x: &[f32],
    m: usize,
    input: usize,
    fma: impl Fn(f32, f32, f32) -> f32 + Copy,
) {
    for (y, w) in y.chunks_exact_mut(m).zip(w.chunks_exact(input)) {
        let mut r = 0;
        while r < m {
            let rest = &x[r * input..];
            r += match m - r {
                8.. => dot::<8>(&mut y[r..], w, rest, fma),
                4.. => dot::<4>(&mut y[r..], w, rest, fma),
                2.. => dot::<2>(&mut y[r..], w, rest, fma),
                _ => dot::<1>(&mut y[r..], w, rest, fma),
            };
        }
    }
}

/// `y[r] = w · x[r]` for the first `R` rows of `x`; returns `R`.
#[inline(always)]
fn dot<const R: usize>(
    y: &mut [f32],
    w: &[f32],
    x: &[f32],
    fma: impl Fn(f32, f32, f32) -> f32 + Copy,
) -> usize {
    let n = w.len();
    let rows: [&[f32]; R] = std::array::from_fn(|r| &x[r * n..(r + 1) * n]);
    let mut sums = [[0f32; LANES]; R];
    let whole = n / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        let w: &[f32; LANES] = w[at..at + LANES].try_into().expect("the slice has that length");
        for (sum, row) in sums.iter_mut().zip(&rows) {
            let x: &[f32; LANES] = row[at..at + LANES].try_into().expect("the slice has that length");
            for l in 0..LANES {
                sum[l] = fma(w[l], x[l], sum[l]);
            }
        }
    }
    for ((y, sum), row) in y.iter_mut().zip(&sums).zip(&rows) {
        let tail: f32 = w[whole..].iter().zip(&row[whole..]).map(|(a, b)| a * b).sum();
        *y = sum.iter().sum::<f32>() + tail;
    }
    R
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every kernel of this machine against a plain sum in f64.
        #[test]
        fn every_kernel_equals_the_plain_sum(
            m in 1usize..=MAX_ROWS, input in 1usize..70, output in 1usize..40, seed in 0u32..1000,
        ) {
            let value = |i: usize| ((i as u32 * 2_654_435_761 + seed) >> 16) as f32 / 65536.0 - 0.5;
            let x: Vec<f32> = (0..m * input).map(value).collect();
            let w: Vec<f32> = (0..output * input).map(|i| value(i + 7919)).collect();
            let mut kernels = vec![Kernel::Portable, Kernel::detect()];
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                kernels.push(Kernel::Avx2);
            }
            for kernel in kernels {
                let mut y = vec![0f32; output * m];
                kernel.run(&mut y, &w, &x, m, input);
                for (i, found) in y.iter().enumerate() {
                    let (o, r) = (i / m, i % m);
                    let plain: f64 = (0..input)
                        .map(|k| f64::from(w[o * input + k]) * f64::from(x[r * input + k]))
                        .sum();
                    prop_assert!((f64::from(*found) - plain).abs() < 1e-5 * (1.0 + input as f64));
                }
            }
        }
    }
}
