//! The attention of training: all rows at once under an arbitrary rule.

use super::model::Heads;
use burn::tensor::{Bool, DType, Tensor, TensorData, activation::softmax, backend::Backend};

/// Which keys each row sees, as a tensor.
#[derive(Debug, Clone)]
pub(in crate::drafter) struct Visible<B: Backend> {
    /// `[batch, 1, rows, keys]`, true = hidden. Rows that see nothing have no true, so that their softmax
    /// stays finite.
    hidden: Tensor<B, 4, Bool>,
    /// Zero for rows that see nothing and one for the others: `[batch, rows, 1]`.
    sighted: Tensor<B, 3>,
}

impl<B: Backend> Visible<B> {
    /// For `n` rows and `n` keys in each of `batch`; `sees(b, q, k)`.
    pub(in crate::drafter) fn new(
        batch: usize,
        n: usize,
        sees: impl Fn(usize, usize, usize) -> bool,
        device: &B::Device,
    ) -> Self {
        let mut hidden = Vec::with_capacity(batch * n * n);
        let mut sighted = Vec::with_capacity(batch * n);
        for (b, q) in (0..batch).flat_map(|b| (0..n).map(move |q| (b, q))) {
            let row = hidden.len();
            hidden.extend((0..n).map(|k| !sees(b, q, k)));
            let blind = hidden[row..].iter().all(|&hidden| hidden);
            if blind {
                hidden[row..].fill(false);
            }
            sighted.push(if blind { 0f32 } else { 1.0 });
        }
        Self {
            hidden: Tensor::from_data(TensorData::new(hidden, [batch, 1, n, n]), device),
            sighted: Tensor::from_data(TensorData::new(sighted, [batch, n, 1]), device),
        }
    }

    /// Attention of every row to the keys of `context` that it sees and to its own row of each of `own`;
    /// zero for rows that see nothing. All hold `batch * n` rows; returns `[batch * n, heads * head_dim]`.
    pub(in crate::drafter) fn attend(
        &self,
        q: Tensor<B, 3>,
        context: &Heads<B>,
        own: &[Heads<B>],
    ) -> Tensor<B, 2> {
        let [batch, _, n, _] = self.hidden.dims();
        let ([_, heads, d], [_, kv, _]) = (q.dims(), context.k.dims());
        let rep = heads / kv;
        let q = q.reshape([batch, n, kv, rep, d]).permute([0, 2, 3, 1, 4]);
        let keys = |x: &Tensor<B, 3>| x.clone().reshape([batch, n, kv, d]).swap_dims(1, 2);
        // [batch, kv, rep, n, d] times a row's own key, which the heads of a group share.
        let beside = |x: &Tensor<B, 3>| keys(x).unsqueeze_dim::<5>(2);

        let scores = q.clone().reshape([batch, kv, rep * n, d]).matmul(keys(&context.k).swap_dims(2, 3));
        let scores = scores.reshape([batch, heads, n, n]);
        let hidden = self.hidden.clone().expand([batch, heads, n, n]);
        let mut scores = vec![
            scores.cast(DType::F32).mul_scalar((d as f64).powf(-0.5)).mask_fill(hidden, f32::NEG_INFINITY),
        ];
        for own in own {
            let score = (q.clone() * beside(&own.k)).sum_dim(4).cast(DType::F32);
            scores.push(score.mul_scalar((d as f64).powf(-0.5)).reshape([batch, heads, n, 1]));
        }
        let weights = softmax(Tensor::cat(scores, 3), 3).cast(context.v.dtype());

        let first = weights.clone().narrow(3, 0, n).reshape([batch, kv, rep * n, n]);
        let mut out = first.matmul(keys(&context.v)).reshape([batch, kv, rep, n, d]);
        for (i, own) in own.iter().enumerate() {
            let weight = weights.clone().narrow(3, n + i, 1).reshape([batch, kv, rep, n, 1]);
            out = out + weight * beside(&own.v);
        }
        let out = out.permute([0, 3, 1, 2, 4]).reshape([batch, n, heads * d]);
        (out * self.sighted.clone()).reshape([batch * n, heads * d])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Distribution;
    use proptest::prelude::*;
    type B = burn_ndarray::NdArray;

    fn values(x: Tensor<B, 2>) -> Vec<f32> {
        x.into_data().iter::<f32>().collect()
    }

    proptest! {
        /// A row's own keys are what they would be as further keys that only that row sees.
        #[test]
        fn own_keys_equal_keys_on_the_diagonal_of_a_wider_mask(
            n in 1usize..5, kv in 1usize..3, rep in 1usize..3, steps in 0usize..3,
            seen in proptest::collection::vec(any::<bool>(), 2 * 25),
        ) {
            let (device, d, batch) = (Default::default(), 2, 2);
            let random = |h: usize| Tensor::<B, 3>::random(
                [batch * n, h, d], Distribution::Normal(0.0, 1.0), &device,
            );
            let heads = || Heads { q: random(kv * rep), k: random(kv), v: random(kv) };
            let all: Vec<Heads<B>> = (0..=steps).map(|_| heads()).collect();
            let sees = |b: usize, q: usize, k: usize| seen[(b * 5 + q) * 5 + k];
            let visible = Visible::new(batch, n, sees, &device);
            let found = values(visible.attend(all[0].q.clone(), &all[0], &all[1..]));

            let at = |x: &Tensor<B, 3>, row: usize, head: usize| -> Vec<f32> {
                let x = x.clone().slice([row..row + 1, head..head + 1]);
                x.into_data().iter::<f32>().collect()
            };
            let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
            for (row, head) in (0..batch * n).flat_map(|r| (0..kv * rep).map(move |h| (r, h))) {
                let (b, q) = (row / n, row % n);
                let mut keys: Vec<(usize, usize)> =
                    (0..n).filter(|&k| sees(b, q, k)).map(|k| (0, b * n + k)).collect();
                if !keys.is_empty() {
                    keys.extend((1..=steps).map(|s| (s, row)));
                }
                let query = at(&all[0].q, row, head);
                let weights: Vec<f32> = keys.iter()
                    .map(|&(s, r)| (dot(&query, &at(&all[s].k, r, head / rep)) / (d as f32).sqrt()).exp())
                    .collect();
                let total: f32 = weights.iter().sum::<f32>().max(f32::MIN_POSITIVE);
                for c in 0..d {
                    let expected: f32 = keys.iter().zip(&weights)
                        .map(|(&(s, r), w)| w / total * at(&all[s].v, r, head / rep)[c])
                        .sum();
                    let found = found[(row * kv * rep + head) * d + c];
                    prop_assert!((found - expected).abs() < 1e-5, "{found} {expected}");
                }
            }
        }
    }
}
