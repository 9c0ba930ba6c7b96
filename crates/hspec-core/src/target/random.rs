//! A target without a checkpoint, for measurements.

use super::{Target, load::Source};
use crate::{Result, config::TargetConfig};
use burn::tensor::{Distribution, Tensor, TensorData, backend::Backend};
use hspec_nn::{WeightStorage, params::fingerprint};

/// Standard deviation of the weights.
const STD: f64 = 0.02;

impl<B: Backend> Target<B> {
    /// A target of the given shape whose matrices are noise of standard deviation 0.02, with norms of one and
    /// biases of zero: what it says means nothing, and it takes as long as any other of its shape. With a seed
    /// the weights are the same on every backend, made on the host; without one the device draws them.
    ///
    /// # Errors
    /// None for a configuration that came from [`TargetConfig::from_value`].
    pub fn random(config: TargetConfig, seed: Option<u64>, device: &B::Device) -> Result<Self> {
        let tied = config.tie_word_embeddings;
        Self::build(config, &Random { tied, seed, device }, WeightStorage::Lossless, device)
    }
}

struct Random<'a, B: Backend> {
    tied: bool,
    seed: Option<u64>,
    device: &'a B::Device,
}

impl<B: Backend> Source<B> for Random<'_, B> {
    fn contains(&self, name: &str) -> bool {
        name != "lm_head.weight" || !self.tied
    }

    fn tensor<const D: usize>(&self, name: &str, shape: [usize; D]) -> Result<Tensor<B, D>> {
        Ok(if name.ends_with("norm.weight") {
            Tensor::ones(shape, self.device)
        } else if name.ends_with(".bias") {
            Tensor::zeros(shape, self.device)
        } else if let Some(seed) = self.seed {
            let key = fingerprint(name.bytes()) ^ seed;
            let values: Vec<f32> =
                (0..shape.iter().product::<usize>() as u64).map(|i| noise(key, i)).collect();
            Tensor::from_data(TensorData::new(values, shape), self.device)
        } else {
            Tensor::random(shape, Distribution::Normal(0.0, STD), self.device)
        })
    }
}

/// Value `i` of a tensor, uniform with the standard deviation of the others (splitmix64).
fn noise(key: u64, i: u64) -> f32 {
    let mut z = key.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let unit = ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32;
    (2.0 * unit - 1.0) * (3f32.sqrt() * STD as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        TokenId,
        target::{Rows, Want},
    };
    use serde_json::json;
    use std::path::Path;

    fn config(tied: bool) -> TargetConfig {
        let config = json!({
            "model_type": "qwen3", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "rope_theta": 10000.0,
            "attention_bias": true, "tie_word_embeddings": tied,
        });
        TargetConfig::from_value(&config, Path::new("config.json")).unwrap()
    }

    #[test]
    fn a_random_target_has_its_shape_and_says_finite_things() {
        type B = burn_ndarray::NdArray;
        for (tied, seed) in [(true, None), (false, None), (false, Some(1))] {
            let target = Target::<B>::random(config(tied), seed, &Default::default()).unwrap();
            let same = target.head().weight.val().into_data() == target.embedding().to_data();
            assert_eq!(same, tied);
            let mut cache = target.cache(1, 8);
            let want = Want { logits: Rows::All, hidden: &[] };
            let pass = target.forward(&[1, 2, 3].map(TokenId), &mut cache, &want).unwrap();
            let logits: Vec<f32> = pass.logits.unwrap().into_data().iter::<f32>().collect();
            assert_eq!(logits.len(), 3 * 40);
            assert!(logits.iter().all(|x| x.is_finite()) && logits.iter().any(|x| x.abs() > 1e-4));
        }
    }

    #[test]
    fn seeded_weights_are_the_same_on_every_backend_and_spread_as_told() {
        fn head<B: Backend>(seed: u64) -> Vec<f32> {
            let target = Target::<B>::random(config(false), Some(seed), &Default::default()).unwrap();
            target.head().weight.val().into_data().iter::<f32>().collect()
        }
        let values = head::<burn_ndarray::NdArray>(7);
        assert_eq!(values, head::<burn_flex::Flex>(7));
        assert_ne!(values, head::<burn_flex::Flex>(8));
        let n = values.len() as f64;
        let moment = |power: i32| values.iter().map(|&x| f64::from(x).powi(power)).sum::<f64>() / n;
        assert!(moment(1).abs() < 4.0 * STD / n.sqrt(), "{}", moment(1));
        assert!((moment(2).sqrt() - STD).abs() < 0.1 * STD, "{}", moment(2).sqrt());
    }
}
