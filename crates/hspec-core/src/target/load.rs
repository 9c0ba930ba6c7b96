//! Reading a target from a folder or a GGUF file.

use super::{Layer, Target};
use crate::{
    Error, Result,
    checkpoint::{Weights, model_json},
    config::{Family, TargetConfig},
};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use hspec_nn::{Linear, RmsNorm, SwiGlu, WeightStorage};
use std::path::Path;

impl<B: Backend> Target<B> {
    /// Loads a Hugging Face directory or a `.gguf` file.
    ///
    /// # Errors
    /// Files that are missing, damaged, of another family, or lack a tensor.
    pub fn load(path: &Path, device: &B::Device) -> Result<Self> {
        Self::load_as(path, WeightStorage::Lossless, device)
    }

    /// [`Target::load`] with the storage of the matrices chosen, where the backend has a choice: flex.
    ///
    /// # Errors
    /// As [`Target::load`].
    pub fn load_as(path: &Path, storage: WeightStorage, device: &B::Device) -> Result<Self> {
        let weights = Weights::open(path)?;
        let config = model_json(path, "config.json")?
            .ok_or_else(|| Error::invalid(path, "config.json", "nothing", "a model configuration"))?;
        let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        let reader = Reader { weights: &weights, device };
        Self::build(TargetConfig::from_value(&config, &file)?, &reader, storage, device)
    }

    /// Builds a target of the given shape from a checkpoint's tensors.
    ///
    /// # Errors
    /// A tensor that is missing or has another shape.
    pub fn from_weights(config: TargetConfig, weights: &Weights, device: &B::Device) -> Result<Self> {
        Self::build(config, &Reader { weights, device }, WeightStorage::Lossless, device)
    }

    pub(super) fn build(
        config: TargetConfig,
        reader: &impl Source<B>,
        storage: WeightStorage,
        device: &B::Device,
    ) -> Result<Self> {
        let (h, d) = (config.hidden_size, config.head_dim);
        let (heads, kv) = (config.num_attention_heads * d, config.num_key_value_heads * d);
        let norm = |name: String, n: usize| -> Result<RmsNorm<B>> {
            Ok(RmsNorm::new(reader.tensor::<1>(&format!("{name}.weight"), [n])?, config.rms_norm_eps))
        };
        let linear = |name: String, output: usize, input: usize, bias: bool| -> Result<Linear<B>> {
            let weight = reader.tensor::<2>(&format!("{name}.weight"), [output, input])?;
            let bias = bias.then(|| reader.tensor::<1>(&format!("{name}.bias"), [output])).transpose()?;
            Ok(Linear::new(weight, bias).prepack(storage))
        };
        let layer = |i: usize| -> Result<Layer<B>> {
            let at = |name: &str| format!("model.layers.{i}.{name}");
            let head_norm =
                |name: &str| (config.family == Family::Qwen3).then(|| norm(at(name), d)).transpose();
            let bias = config.attention_bias;
            Ok(Layer {
                input_layernorm: norm(at("input_layernorm"), h)?,
                q_proj: linear(at("self_attn.q_proj"), heads, h, bias)?,
                k_proj: linear(at("self_attn.k_proj"), kv, h, bias)?,
                v_proj: linear(at("self_attn.v_proj"), kv, h, bias)?,
                o_proj: linear(at("self_attn.o_proj"), h, heads, bias)?,
                q_norm: head_norm("self_attn.q_norm")?,
                k_norm: head_norm("self_attn.k_norm")?,
                post_attention_layernorm: norm(at("post_attention_layernorm"), h)?,
                mlp: SwiGlu {
                    gate_proj: linear(at("mlp.gate_proj"), config.intermediate_size, h, false)?,
                    up_proj: linear(at("mlp.up_proj"), config.intermediate_size, h, false)?,
                    down_proj: linear(at("mlp.down_proj"), h, config.intermediate_size, false)?,
                },
            })
        };
        let embed = linear("model.embed_tokens".to_owned(), config.vocab_size, h, false)?;
        // A file may state tied embeddings and still carry a head; then the head is the one to use.
        let (embed, lm_head) = if config.tie_word_embeddings && !reader.contains("lm_head.weight") {
            (None, embed)
        } else {
            (Some(embed), linear("lm_head".to_owned(), config.vocab_size, h, false)?)
        };
        Ok(Self {
            embed,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            norm: norm("model.norm".to_owned(), h)?,
            lm_head,
            rope: config.rope()?,
            device: device.clone(),
            config,
        })
    }
}

/// Where the tensors of a target come from.
pub(super) trait Source<B: Backend> {
    /// Whether there is a tensor of this name.
    fn contains(&self, name: &str) -> bool;

    /// The tensor of this name and shape.
    fn tensor<const D: usize>(&self, name: &str, shape: [usize; D]) -> Result<Tensor<B, D>>;
}

struct Reader<'a, B: Backend> {
    weights: &'a Weights,
    device: &'a B::Device,
}

impl<B: Backend> Source<B> for Reader<'_, B> {
    fn contains(&self, name: &str) -> bool {
        self.weights.contains(name)
    }

    fn tensor<const D: usize>(&self, name: &str, shape: [usize; D]) -> Result<Tensor<B, D>> {
        let data: TensorData = self.weights.tensor(name)?.ok_or_else(|| {
            Error::invalid(
                self.weights.path(),
                name,
                "no such tensor",
                format!("a tensor of shape {shape:?}"),
            )
        })?;
        if data.shape.to_vec() != shape {
            return Err(Error::invalid(
                self.weights.path(),
                name,
                format!("shape {:?}", data.shape.to_vec()),
                format!("{shape:?}"),
            ));
        }
        Ok(Tensor::from_data(data, self.device))
    }
}
