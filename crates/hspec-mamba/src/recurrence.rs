//! The recurrence, one step after the other: the reference for the scan.

use burn::tensor::{DType, Tensor, backend::Backend};

/// What a state space layer reads. Head `q` uses group `q / (h / g)`.
#[derive(Debug, Clone)]
pub struct SsdInputs<B: Backend> {
    /// `[b, l, h, p]`: the input of each head.
    pub x: Tensor<B, 4>,
    /// `[b, l, h]`: positive step sizes, that is after the bias and [`softplus`].
    pub dt: Tensor<B, 3>,
    /// `[h]`: negative decay rates.
    pub a: Tensor<B, 1>,
    /// `[b, l, g, n]`: keys, what the state is written with.
    pub b: Tensor<B, 4>,
    /// `[b, l, g, n]`: queries, what the state is read with.
    pub c: Tensor<B, 4>,
    /// `[h]`: weight of the direct path from x to y.
    pub d: Tensor<B, 1>,
}

impl<B: Backend> SsdInputs<B> {
    /// The same inputs in f32: states and decays are always computed in f32.
    pub(crate) fn in_f32(self) -> Self {
        Self {
            x: self.x.cast(DType::F32),
            dt: self.dt.cast(DType::F32),
            a: self.a.cast(DType::F32),
            b: self.b.cast(DType::F32),
            c: self.c.cast(DType::F32),
            d: self.d.cast(DType::F32),
        }
    }

    /// Steps `start..start + length`.
    pub(crate) fn steps(&self, start: usize, length: usize) -> Self {
        if length == self.dt.dims()[1] {
            return self.clone();
        }
        Self {
            x: self.x.clone().narrow(1, start, length),
            dt: self.dt.clone().narrow(1, start, length),
            a: self.a.clone(),
            b: self.b.clone().narrow(1, start, length),
            c: self.c.clone().narrow(1, start, length),
            d: self.d.clone(),
        }
    }

    /// `initial` in f32, or zeros: `[b, h, p, n]`.
    pub(crate) fn state(&self, initial: Option<Tensor<B, 4>>) -> Tensor<B, 4> {
        let [b, _, h, p] = self.x.dims();
        let n = self.b.dims()[3];
        match initial {
            Some(state) => state.cast(DType::F32),
            None => Tensor::zeros([b, h, p, n], (&self.x.device(), DType::F32)),
        }
    }
}

/// `[b, l, g, n] -> [b, h, l, n]`, contiguous: every head gets a copy of its group's rows.
pub(crate) fn to_heads<B: Backend>(grouped: Tensor<B, 4>, h: usize) -> Tensor<B, 4> {
    let [b, l, g, n] = grouped.dims();
    grouped.swap_dims(1, 2).reshape([b, g, 1, l * n]).repeat_dim(2, h / g).reshape([b, h, l, n])
}

/// The recurrence of the crate's introduction, literally.
///
/// Takes at least one step and, optionally, the state `[b, h, p, n]` before the first (default
/// zeros); returns `y: [b, l, h, p]` in the type of `x` and the state after the last step in f32.
pub fn ssd_recurrent<B: Backend>(
    inputs: SsdInputs<B>,
    initial: Option<Tensor<B, 4>>,
) -> (Tensor<B, 4>, Tensor<B, 4>) {
    let dtype = inputs.x.dtype();
    let inputs = inputs.in_f32();
    let [b, l, h, p] = inputs.x.dims();
    let n = inputs.b.dims()[3];
    let mut state = inputs.state(initial);
    let keys = to_heads(inputs.b, h);
    let queries = to_heads(inputs.c, h);
    let rate = inputs.a.reshape([1, h, 1, 1]);
    let direct = inputs.d.reshape([1, h, 1]);

    let mut outputs = Vec::with_capacity(l);
    for t in 0..l {
        let x = inputs.x.clone().narrow(1, t, 1).reshape([b, h, p]);
        let dt = inputs.dt.clone().narrow(1, t, 1).reshape([b, h, 1, 1]);
        let key = keys.clone().narrow(2, t, 1).reshape([b, h, 1, n]);
        let query = queries.clone().narrow(2, t, 1).reshape([b, h, 1, n]);
        let written = x.clone().unsqueeze_dim::<4>(3) * dt.clone() * key;
        state = state * (dt * rate.clone()).exp() + written;
        let read = (state.clone() * query).sum_dim(3).reshape([b, h, p]);
        outputs.push((read + x * direct.clone()).unsqueeze_dim::<4>(1));
    }
    (Tensor::cat(outputs, 1).cast(dtype), state)
}

/// `ln(1 + exp(x))`, and `x` itself above 20, where the two agree to the last bit of f32.
pub fn softplus<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let linear = x.clone().greater_elem(20.0);
    // Clamped, so that the branch not taken neither overflows nor has a NaN for a gradient.
    x.clone().clamp_max(20.0).exp().log1p().mask_where(linear, x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use burn::backend::Autodiff;

    #[test]
    fn softplus_and_its_gradient_are_right_from_end_to_end() {
        type B = Autodiff<burn_flex::Flex>;
        let values = [-80.0f32, -5.0, 0.0, 1.0, 19.5, 20.0, 20.5, 1e30];
        let x = Tensor::<B, 1>::from_floats(values, &Default::default()).require_grad();
        let y = softplus(x.clone());
        let gradients = y.clone().sum().backward();
        let gradient = x.grad(&gradients).expect("x is tracked").into_data().to_vec::<f32>().unwrap();
        let y = y.into_data().to_vec::<f32>().unwrap();
        for ((x, y), g) in values.iter().zip(y).zip(gradient) {
            let x64 = f64::from(*x);
            let expected = if x64 > 20.0 { x64 } else { x64.exp().ln_1p() };
            assert_relative_eq!(f64::from(y), expected, max_relative = 1e-6);
            assert_relative_eq!(f64::from(g), 1.0 / (1.0 + (-x64).exp()), max_relative = 1e-6);
        }
    }
}
