//! Convolution, scan and gate of a few blocks in one pass each over plain memory, for the flex backend: a
//! drafter's block is small, and some eighty tensor operations would cost more than their arithmetic.

use crate::MambaConfig;
use burn::tensor::{Tensor, backend::Backend};
use hspec_nn::{flex, simd::exp};

/// What lies between the projections of a mixer.
pub(crate) struct Parameters<'a, B: Backend> {
    /// `[conv_dim, 1, conv_kernel]` and `[conv_dim]`.
    pub conv: (&'a Tensor<B, 3>, &'a Tensor<B, 1>),
    /// `[num_heads]` each.
    pub a_log: &'a Tensor<B, 1>,
    pub d: &'a Tensor<B, 1>,
    pub dt_bias: &'a Tensor<B, 1>,
}

/// From the projected input `[b * l, gate | xBC | Δ]` and the state before the first step to
/// `y silu(gate): [b * l, d_inner]` and the state after the last; none unless the tensors are flex's.
pub(crate) fn mix<B: Backend>(
    projected: &Tensor<B, 2>,
    parameters: &Parameters<'_, B>,
    initial: Option<&Tensor<B, 4>>,
    config: &MambaConfig,
    b: usize,
) -> Option<(Tensor<B, 2>, Tensor<B, 4>)> {
    let MambaConfig { d_state: n, num_heads: h, head_dim: p, .. } = *config;
    let u = flex::contiguous(projected)?;
    let (weight, bias) = (flex::contiguous(parameters.conv.0)?, flex::contiguous(parameters.conv.1)?);
    let (a_log, d) = (flex::contiguous(parameters.a_log)?, flex::contiguous(parameters.d)?);
    let dt_bias = flex::contiguous(parameters.dt_bias)?;
    let initial = match initial {
        Some(state) => Some(flex::contiguous(state)?),
        None => None,
    };
    let mixer = Mixer {
        config,
        weight: flex::values(&weight),
        bias: flex::values(&bias),
        rates: flex::values(&a_log).iter().map(|a| -a.exp()).collect(),
        direct: flex::values(&d),
        dt_bias: flex::values(&dt_bias),
    };
    let u = flex::values(&u);
    let (rows, width) = (projected.dims()[0], projected.dims()[1]);
    let l = rows / b;
    let size = h * p * n;
    let mut states = match &initial {
        Some(state) => flex::values(state).to_vec(),
        None => vec![0.0; b * size],
    };
    let mut out = Vec::with_capacity(rows * h * p);
    for (u, state) in u.chunks_exact(l * width).zip(states.chunks_exact_mut(size)) {
        out.extend(mixer.block(u, state, width));
    }
    Some((flex::tensor(out, [rows, h * p]), flex::tensor(states, [b, h, p, n])))
}

struct Mixer<'a> {
    config: &'a MambaConfig,
    weight: &'a [f32],
    bias: &'a [f32],
    /// `-exp(A_log)`.
    rates: Vec<f32>,
    direct: &'a [f32],
    dt_bias: &'a [f32],
}

impl Mixer<'_> {
    /// One sequence: `u: [l, width]`, `state: [h, p, n]` before it and then after it.
    fn block(&self, u: &[f32], state: &mut [f32], width: usize) -> Vec<f32> {
        let MambaConfig { d_state: n, num_heads: h, head_dim: p, n_groups, .. } = *self.config;
        let (inner, groups) = (h * p, n_groups * n);
        let per_group = h / n_groups;
        // The state as [h, n, p]: steps run along the channels.
        let mut turned = vec![0f32; state.len()];
        swap(&mut turned, state, p, n);
        let mut out = vec![0f32; u.len() / width * inner];
        for (t, (y, row)) in out.chunks_exact_mut(inner).zip(u.chunks_exact(width)).enumerate() {
            let xbc = self.convolved(u, t, width);
            let (x, rest) = xbc.split_at(inner);
            let (keys, queries) = rest.split_at(groups);
            for head in 0..h {
                let dt = softplus(row[width - h + head] + self.dt_bias[head]);
                let decay = (dt * self.rates[head]).exp();
                let x = &x[head * p..(head + 1) * p];
                let y = &mut y[head * p..(head + 1) * p];
                for (y, x) in y.iter_mut().zip(x) {
                    *y = x * self.direct[head];
                }
                let group = head / per_group * n;
                for (i, state) in turned[head * n * p..(head + 1) * n * p].chunks_exact_mut(p).enumerate() {
                    let (key, query) = (dt * keys[group + i], queries[group + i]);
                    for ((s, x), y) in state.iter_mut().zip(x).zip(y.iter_mut()) {
                        *s = *s * decay + x * key;
                        *y += *s * query;
                    }
                }
            }
            for (y, gate) in y.iter_mut().zip(&row[..inner]) {
                *y *= gate / (1.0 + exp(-gate));
            }
        }
        swap(state, &turned, n, p);
        out
    }

    /// `silu(conv(xBC))` of step `t`.
    fn convolved(&self, u: &[f32], t: usize, width: usize) -> Vec<f32> {
        let MambaConfig { conv_kernel: taps, .. } = *self.config;
        let (inner, channels) = (self.config.d_inner(), self.config.conv_dim());
        let mut sum = self.bias.to_vec();
        for j in (taps - 1).saturating_sub(t)..taps {
            let step = t + j + 1 - taps;
            let x = &u[step * width + inner..][..channels];
            for ((sum, x), w) in sum.iter_mut().zip(x).zip(self.weight[j..].iter().step_by(taps)) {
                *sum += w * x;
            }
        }
        for x in &mut sum {
            *x /= 1.0 + exp(-*x);
        }
        sum
    }
}

/// `[.., rows, columns]` as `[.., columns, rows]`.
fn swap(to: &mut [f32], from: &[f32], rows: usize, columns: usize) {
    for (to, from) in to.chunks_exact_mut(rows * columns).zip(from.chunks_exact(rows * columns)) {
        for (i, row) in from.chunks_exact(columns).enumerate() {
            for (to, x) in to[i..].iter_mut().step_by(rows).zip(row) {
                *to = *x;
            }
        }
    }
}

/// As [`crate::softplus`].
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
