//! Convolution, scan and gate of blocks in one pass each over plain memory, for the flex backend: a drafter's
//! block is small, and some eighty tensor operations would cost more than their arithmetic.

mod back;

use crate::MambaConfig;
use burn::tensor::{Tensor, backend::Backend};
use burn_flex::FlexTensor;
use hspec_nn::{
    flex,
    simd::{Body, Op, Simd, Vector, exp},
};
use rayon::prelude::*;

/// Values below which threads cost more than they bring.
const PARALLEL: usize = 100_000;
/// Sequences of a task, and of a sum of gradients: so many whatever the number of threads, as the order decides
/// about the last bits.
const TOGETHER: usize = 8;

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
    let values = Values {
        config: *config,
        rows: projected.dims()[0] / b,
        projected: flex::contiguous(projected)?,
        weight: flex::contiguous(parameters.conv.0)?,
        bias: flex::contiguous(parameters.conv.1)?,
        a_log: flex::contiguous(parameters.a_log)?,
        d: flex::contiguous(parameters.d)?,
        dt_bias: flex::contiguous(parameters.dt_bias)?,
        initial: match initial {
            Some(state) => Some(flex::contiguous(state)?),
            None => None,
        },
    };
    let (out, states) = values.mix();
    Some((flex::tensor(out, [projected.dims()[0], h * p]), flex::tensor(states, [b, h, p, n])))
}

/// [`mix`] under autodiff, without the state after the last step.
pub(crate) fn output<B: Backend>(
    projected: &Tensor<B, 2>,
    parameters: &Parameters<'_, B>,
    initial: Option<&Tensor<B, 4>>,
    config: &MambaConfig,
    b: usize,
) -> Option<Tensor<B, 2>> {
    let rows = projected.dims()[0];
    let device = projected.device();
    // Zeros stand for no state: nobody asks for their gradient.
    let MambaConfig { d_state: n, num_heads: h, head_dim: p, .. } = *config;
    let initial = initial.cloned().unwrap_or_else(|| Tensor::zeros([b, h, p, n], &device));
    let inputs = [
        flex::tracked(projected)?,
        flex::tracked(parameters.conv.0)?,
        flex::tracked(parameters.conv.1)?,
        flex::tracked(parameters.a_log)?,
        flex::tracked(parameters.d)?,
        flex::tracked(parameters.dt_bias)?,
        flex::tracked(&initial)?,
    ];
    let [projected, weight, bias, a_log, d, dt_bias, initial] = inputs.clone().map(|input| input.primitive);
    let rows_each = rows / b;
    let values = Values {
        config: *config,
        rows: rows_each,
        projected,
        weight,
        bias,
        a_log,
        d,
        dt_bias,
        initial: Some(initial),
    };
    let out = flex::primitive(values.mix().0, [rows, h * p]);
    Some(flex::node(inputs, out, values))
}

/// Everything that goes into a mix, row-major.
#[derive(Debug, Clone)]
struct Values {
    config: MambaConfig,
    /// Steps of each sequence.
    rows: usize,
    projected: FlexTensor,
    weight: FlexTensor,
    bias: FlexTensor,
    a_log: FlexTensor,
    d: FlexTensor,
    dt_bias: FlexTensor,
    initial: Option<FlexTensor>,
}

impl Values {
    fn mixer(&self) -> Mixer<'_> {
        let (taps, channels) = (self.config.conv_kernel, self.config.conv_dim());
        let mut weight = vec![0f32; taps * channels];
        swap(&mut weight, flex::values(&self.weight), channels, taps);
        Mixer {
            config: self.config,
            weight,
            bias: flex::values(&self.bias),
            rates: flex::values(&self.a_log).iter().map(|a| -a.exp()).collect(),
            direct: flex::values(&self.d),
            dt_bias: flex::values(&self.dt_bias),
            width: self.config.in_proj_dim(),
        }
    }

    fn mix(&self) -> (Vec<f32>, Vec<f32>) {
        let MambaConfig { d_state: n, num_heads: h, head_dim: p, .. } = self.config;
        let (u, mixer, body) = (flex::values(&self.projected), self.mixer(), Body::widest());
        let (size, width) = (h * p * n, self.rows * mixer.width);
        let b = u.len() / width;
        let mut states = match &self.initial {
            Some(state) => flex::values(state).to_vec(),
            None => vec![0.0; b * size],
        };
        let mut out = vec![0f32; b * self.rows * h * p];
        let run = |((out, state), u): ((&mut [f32], &mut [f32]), &[f32])| {
            body.run(Forward { mixer: &mixer, u, state, out });
        };
        let each = self.rows * h * p;
        if u.len() < PARALLEL {
            out.chunks_mut(each).zip(states.chunks_mut(size)).zip(u.chunks(width)).for_each(run);
        } else {
            let parts = out.par_chunks_mut(each).zip(states.par_chunks_mut(size)).zip(u.par_chunks(width));
            parts.with_min_len(TOGETHER).for_each(run);
        }
        (out, states)
    }
}

struct Mixer<'a> {
    config: MambaConfig,
    /// `[conv_kernel, conv_dim]`.
    weight: Vec<f32>,
    bias: &'a [f32],
    /// `-exp(A_log)`.
    rates: Vec<f32>,
    direct: &'a [f32],
    dt_bias: &'a [f32],
    /// Of a row of the projected input.
    width: usize,
}

/// One sequence: `u: [l, width]`, `state: [h, p, n]` before it and then after it, `out: [l, d_inner]`.
struct Forward<'a> {
    mixer: &'a Mixer<'a>,
    u: &'a [f32],
    state: &'a mut [f32],
    out: &'a mut [f32],
}

impl Op for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, _: Simd<V>) {
        let Self { mixer, u, state, out } = self;
        let MambaConfig { d_state: n, num_heads: h, head_dim: p, .. } = mixer.config;
        let inner = h * p;
        // The state as [h, n, p]: steps run along the channels.
        let mut turned = vec![0f32; state.len()];
        swap(&mut turned, state, p, n);
        let mut xbc = vec![0f32; mixer.config.conv_dim()];
        for (t, (y, row)) in out.chunks_exact_mut(inner).zip(u.chunks_exact(mixer.width)).enumerate() {
            mixer.convolved(&mut xbc, u, t);
            for x in &mut xbc {
                *x /= 1.0 + exp(-*x);
            }
            for head in 0..h {
                let step = mixer.step(row, head);
                mixer.advance(head, step, &xbc, &mut turned, &mut y[head * p..(head + 1) * p]);
            }
            for (y, gate) in y.iter_mut().zip(&row[..inner]) {
                *y *= gate / (1.0 + exp(-gate));
            }
        }
        swap(state, &turned, n, p);
    }
}

/// A head's step size, and what a state keeps over a step.
#[derive(Clone, Copy)]
struct Step {
    dt: f32,
    decay: f32,
}

impl Mixer<'_> {
    #[inline(always)]
    fn step(&self, row: &[f32], head: usize) -> Step {
        let dt = softplus(row[self.width - self.config.num_heads + head] + self.dt_bias[head]);
        Step { dt, decay: (dt * self.rates[head]).exp() }
    }

    /// Takes a head's state, among those of all heads `[h, n, p]`, over a step, and writes what it outputs.
    #[inline(always)]
    fn advance(&self, head: usize, step: Step, xbc: &[f32], state: &mut [f32], y: &mut [f32]) {
        let MambaConfig { d_state: n, num_heads: h, head_dim: p, n_groups, .. } = self.config;
        let Step { dt, decay } = step;
        let (x, rest) = xbc.split_at(h * p);
        let (keys, queries) = rest.split_at(n_groups * n);
        let x = &x[head * p..(head + 1) * p];
        for (y, x) in y.iter_mut().zip(x) {
            *y = x * self.direct[head];
        }
        let group = head / (h / n_groups) * n;
        for (i, state) in state[head * n * p..(head + 1) * n * p].chunks_exact_mut(p).enumerate() {
            let (key, query) = (dt * keys[group + i], queries[group + i]);
            for ((s, x), y) in state.iter_mut().zip(x).zip(y.iter_mut()) {
                *s = *s * decay + x * key;
                *y += *s * query;
            }
        }
    }

    /// `conv(xBC)` of step `t`.
    #[inline(always)]
    fn convolved(&self, sum: &mut [f32], u: &[f32], t: usize) {
        let (taps, inner, channels) =
            (self.config.conv_kernel, self.config.d_inner(), self.config.conv_dim());
        sum.copy_from_slice(self.bias);
        for j in (taps - 1).saturating_sub(t)..taps {
            let step = t + j + 1 - taps;
            let x = &u[step * self.width + inner..][..channels];
            for ((sum, x), w) in sum.iter_mut().zip(x).zip(&self.weight[j * channels..]) {
                *sum += w * x;
            }
        }
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
