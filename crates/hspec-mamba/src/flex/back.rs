//! The way back through convolution, scan and gate: each sequence is computed once more, its states kept.

use super::{Mixer, Step, TOGETHER, Values, swap};
use crate::MambaConfig;
use burn_flex::FlexTensor;
use hspec_nn::{
    flex::{self, Gradient},
    simd::{Body, Op, Simd, Vector, exp},
};
use rayon::prelude::*;

/// Gradients of what all sequences share.
struct Shared {
    /// `[conv_kernel, conv_dim]`.
    weight: Vec<f32>,
    bias: Vec<f32>,
    a_log: Vec<f32>,
    d: Vec<f32>,
    dt_bias: Vec<f32>,
}

impl Shared {
    fn zeros(config: &MambaConfig) -> Self {
        let (channels, heads) = (config.conv_dim(), config.num_heads);
        Self {
            weight: vec![0.0; config.conv_kernel * channels],
            bias: vec![0.0; channels],
            a_log: vec![0.0; heads],
            d: vec![0.0; heads],
            dt_bias: vec![0.0; heads],
        }
    }

    fn add(&mut self, other: &Self) {
        for (mine, theirs) in [
            (&mut self.weight, &other.weight),
            (&mut self.bias, &other.bias),
            (&mut self.a_log, &other.a_log),
            (&mut self.d, &other.d),
            (&mut self.dt_bias, &other.dt_bias),
        ] {
            mine.iter_mut().zip(theirs).for_each(|(m, t)| *m += t);
        }
    }
}

impl Gradient<7> for Values {
    fn backward(self, output: &FlexTensor, _: [bool; 7]) -> [Option<FlexTensor>; 7] {
        let MambaConfig { d_state: n, num_heads: h, head_dim: p, conv_kernel, .. } = self.config;
        let (mixer, body) = (self.mixer(), Body::widest());
        let (u, dy) = (flex::values(&self.projected), flex::values(output));
        let initial = flex::values(self.initial.as_ref().expect("zeros where there was none"));
        let sizes = [self.rows * mixer.width, h * p * n, self.rows * h * p];
        let b = u.len() / sizes[0];
        let (mut du, mut d_initial) = (vec![0f32; u.len()], vec![0f32; initial.len()]);
        let outputs =
            du.par_chunks_mut(TOGETHER * sizes[0]).zip(d_initial.par_chunks_mut(TOGETHER * sizes[1]));
        let inputs = u.par_chunks(TOGETHER * sizes[0]).zip(initial.par_chunks(TOGETHER * sizes[1]));
        let parts: Vec<Shared> = outputs
            .zip(inputs.zip(dy.par_chunks(TOGETHER * sizes[2])))
            .map(|((du, d_initial), ((u, initial), dy))| {
                let mut shared = Shared::zeros(&self.config);
                let outputs = du.chunks_mut(sizes[0]).zip(d_initial.chunks_mut(sizes[1]));
                let inputs = u.chunks(sizes[0]).zip(initial.chunks(sizes[1])).zip(dy.chunks(sizes[2]));
                for ((du, d_initial), ((u, initial), dy)) in outputs.zip(inputs) {
                    let shared = &mut shared;
                    body.run(Back { mixer: &mixer, u, initial, dy, du, d_initial, shared });
                }
                shared
            })
            .collect();
        let mut shared = Shared::zeros(&self.config);
        parts.iter().for_each(|part| shared.add(part));
        let channels = self.config.conv_dim();
        let mut weight = vec![0f32; channels * conv_kernel];
        swap(&mut weight, &shared.weight, conv_kernel, channels);
        [
            Some(flex::primitive(du, [b * self.rows, mixer.width])),
            Some(flex::primitive(weight, [channels, 1, conv_kernel])),
            Some(flex::primitive(shared.bias, [channels])),
            Some(flex::primitive(shared.a_log, [h])),
            Some(flex::primitive(shared.d, [h])),
            Some(flex::primitive(shared.dt_bias, [h])),
            Some(flex::primitive(d_initial, [b, h, p, n])),
        ]
    }
}

/// One sequence. `u` and `du`: `[l, width]`; states `[h, p, n]`; `dy: [l, d_inner]`.
struct Back<'a> {
    mixer: &'a Mixer<'a>,
    u: &'a [f32],
    initial: &'a [f32],
    dy: &'a [f32],
    du: &'a mut [f32],
    d_initial: &'a mut [f32],
    shared: &'a mut Shared,
}

impl Op for Back<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, _: Simd<V>) {
        let Self { mixer, u, initial, dy, du, d_initial, shared } = self;
        let MambaConfig { d_state: n, num_heads: h, head_dim: p, n_groups, .. } = mixer.config;
        let (inner, channels, width) = (h * p, mixer.config.conv_dim(), mixer.width);
        let (l, size) = (u.len() / width, initial.len());

        // Once more forwards: convolutions before and after their activation, states, outputs before the gate.
        let (mut sums, mut xbc) = (vec![0f32; l * channels], vec![0f32; l * channels]);
        let mut states = vec![0f32; (l + 1) * size];
        let (mut outputs, mut steps) = (vec![0f32; l * inner], Vec::with_capacity(l * h));
        swap(&mut states[..size], initial, p, n);
        for t in 0..l {
            let row = &u[t * width..(t + 1) * width];
            let (sum, xbc) = (&mut sums[t * channels..][..channels], &mut xbc[t * channels..][..channels]);
            mixer.convolved(sum, u, t);
            for (x, sum) in xbc.iter_mut().zip(sum) {
                *x = *sum / (1.0 + exp(-*sum));
            }
            states.copy_within(t * size..(t + 1) * size, (t + 1) * size);
            for head in 0..h {
                let step = mixer.step(row, head);
                steps.push(step);
                let y = &mut outputs[t * inner + head * p..][..p];
                mixer.advance(head, step, xbc, &mut states[(t + 1) * size..(t + 2) * size], y);
            }
        }

        let mut d_state = vec![0f32; size];
        let (mut d_xbc, mut dy_head) = (vec![0f32; channels], vec![0f32; p]);
        for t in (0..l).rev() {
            let row = &u[t * width..(t + 1) * width];
            let (x, rest) = xbc[t * channels..][..channels].split_at(inner);
            let (keys, queries) = rest.split_at(n_groups * n);
            d_xbc.fill(0.0);
            let (dx, d_rest) = d_xbc.split_at_mut(inner);
            let (d_keys, d_queries) = d_rest.split_at_mut(n_groups * n);
            for head in 0..h {
                let Step { dt, decay } = steps[t * h + head];
                let channels = head * p..(head + 1) * p;
                let (x, dx) = (&x[channels.clone()], &mut dx[channels.clone()]);
                let y = &outputs[t * inner..][channels.clone()];
                let (dy, gate) = (&dy[t * inner..][channels.clone()], &row[channels.clone()]);
                let d_gate = &mut du[t * width..][channels];
                for i in 0..p {
                    let s = 1.0 / (1.0 + exp(-gate[i]));
                    dy_head[i] = dy[i] * gate[i] * s;
                    d_gate[i] = dy[i] * y[i] * s * (1.0 + gate[i] * (1.0 - s));
                }
                shared.d[head] += dot(&dy_head, x);
                for (dx, dy) in dx.iter_mut().zip(&dy_head) {
                    *dx = dy * mixer.direct[head];
                }
                let group = head / (h / n_groups) * n;
                let (mut d_dt, mut d_decay) = (0.0, 0.0);
                for i in 0..n {
                    let at = (head * n + i) * p..(head * n + i + 1) * p;
                    let (before, after) =
                        (&states[t * size..][at.clone()], &states[(t + 1) * size..][at.clone()]);
                    let d_state = &mut d_state[at];
                    let (key, query) = (keys[group + i], queries[group + i]);
                    for (ds, dy) in d_state.iter_mut().zip(&dy_head) {
                        *ds += dy * query;
                    }
                    d_queries[group + i] += dot(&dy_head, after);
                    let written = dot(d_state, x);
                    d_keys[group + i] += written * dt;
                    d_dt += written * key;
                    d_decay += dot(d_state, before);
                    for (dx, ds) in dx.iter_mut().zip(d_state.iter_mut()) {
                        *dx += *ds * dt * key;
                        *ds *= decay;
                    }
                }
                let rate = mixer.rates[head];
                shared.a_log[head] += d_decay * decay * dt * rate;
                d_dt += d_decay * decay * rate;
                let z = row[width - h + head] + mixer.dt_bias[head];
                let dz = d_dt / (1.0 + (-z).exp());
                du[(t + 1) * width - h + head] = dz;
                shared.dt_bias[head] += dz;
            }
            for (dx, sum) in d_xbc.iter_mut().zip(&sums[t * channels..]) {
                let s = 1.0 / (1.0 + exp(-*sum));
                *dx *= s * (1.0 + sum * (1.0 - s));
            }
            mixer.back_through_convolution(&d_xbc, u, du, t, shared);
        }
        swap(d_initial, &d_state, n, p);
    }
}

impl Mixer<'_> {
    #[inline(always)]
    fn back_through_convolution(
        &self,
        d_sum: &[f32],
        u: &[f32],
        du: &mut [f32],
        t: usize,
        shared: &mut Shared,
    ) {
        let (taps, inner, channels) =
            (self.config.conv_kernel, self.config.d_inner(), self.config.conv_dim());
        shared.bias.iter_mut().zip(d_sum).for_each(|(b, d)| *b += d);
        for j in (taps - 1).saturating_sub(t)..taps {
            let at = (t + j + 1 - taps) * self.width + inner;
            let (x, dx) = (&u[at..][..channels], &mut du[at..][..channels]);
            let (w, dw) = (&self.weight[j * channels..][..channels], &mut shared.weight[j * channels..]);
            for ((((dx, dw), d), x), w) in dx.iter_mut().zip(dw).zip(d_sum).zip(x).zip(w) {
                *dx += d * w;
                *dw += d * x;
            }
        }
    }
}

/// The sum of products, in lanes that become registers.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0f32; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    lanes.iter().sum()
}
