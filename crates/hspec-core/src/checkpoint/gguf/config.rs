//! A model's settings, from the metadata to Hugging Face's `config.json` and `generation_config.json`.

use super::{Family, Gguf};
use crate::error::Result;
use serde_json::{Value, json};

/// Original context, low and high frequency factor of every published Llama 3.1 and later. A GGUF keeps
/// only the resulting divisors; these and the largest divisor give them back.
const LLAMA3: (f64, f64, f64) = (8192.0, 1.0, 4.0);

impl Gguf {
    /// What `config.json` of the same model says; weights count as float32, which [`Gguf::tensor`] gives.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where a setting is absent, or asks for what is not supported: rotation of
    /// a part of a head, or a scaling of the rotary frequencies other than Llama 3's.
    pub fn config(&self) -> Result<Value> {
        let (architecture, model_type) = match self.family {
            Family::Llama => ("LlamaForCausalLM", "llama"),
            Family::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
        };
        let (hidden, heads) = (self.count("embedding_length")?, self.count("attention.head_count")?);
        let head_dim = match self.setting("attention.key_length") {
            Some(_) => self.count("attention.key_length")?,
            None => hidden / heads,
        };
        if self.setting("rope.dimension_count").is_some() && self.count("rope.dimension_count")? != head_dim {
            let found = self.count("rope.dimension_count")?.to_string();
            return Err(self.invalid("rope.dimension_count", found, format!("head_dim {head_dim}")));
        }
        if let Some(scaling) = self.setting("rope.scaling.type").and_then(Value::as_str)
            && scaling != "none"
        {
            return Err(self.invalid("rope.scaling.type", scaling, "none"));
        }
        let rope_theta = self.setting("rope.freq_base").map_or(Some(10_000.0), Value::as_f64);
        let rope_theta = rope_theta.ok_or_else(|| self.invalid("rope.freq_base", "no number", "a number"))?;
        let epsilon = self.setting("attention.layer_norm_rms_epsilon").and_then(Value::as_f64);
        let epsilon = epsilon
            .ok_or_else(|| self.invalid("attention.layer_norm_rms_epsilon", "no number", "a number"))?;
        let embedding = self.shape("model.embed_tokens.weight");
        let Some([vocabulary, _]) = embedding.as_deref() else {
            return Err(self.invalid("token_embd.weight", "no matrix", "[vocabulary, hidden size]"));
        };
        Ok(json!({
            "architectures": [architecture],
            "model_type": model_type,
            "attention_bias": false,
            "attention_dropout": 0.0,
            "bos_token_id": self.metadata("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata("tokenizer.ggml.eos_token_id"),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": self.count("feed_forward_length")?,
            "max_position_embeddings": self.count("context_length")?,
            "mlp_bias": false,
            "num_attention_heads": heads,
            "num_hidden_layers": self.count("block_count")?,
            "num_key_value_heads": self.count("attention.head_count_kv")?,
            "rms_norm_eps": epsilon,
            "rope_scaling": self.rope_scaling(head_dim, rope_theta)?,
            "rope_theta": rope_theta,
            "tie_word_embeddings": !self.tensors.contains_key("lm_head.weight"),
            "torch_dtype": "float32",
            "vocab_size": vocabulary,
        }))
    }

    /// What `generation_config.json` says. Where the file names a token that ends a turn besides the one
    /// that ends a text, both stop.
    pub(super) fn generation_config(&self) -> Value {
        let id = |name: &str| self.metadata(&format!("tokenizer.ggml.{name}_token_id"));
        let eos = match (id("eos"), id("eot")) {
            (Some(eos), Some(eot)) if eos != eot => json!([eos, eot]),
            (eos, eot) => json!(eos.or(eot)),
        };
        json!({
            "_from_model_config": true,
            "bos_token_id": id("bos"),
            "eos_token_id": eos,
            "pad_token_id": id("padding"),
        })
    }

    /// Llama 3's `rope_scaling`, worked out from the divisors in `rope_freqs.weight` and checked against
    /// each of them; null where there are none.
    fn rope_scaling(&self, head_dim: usize, theta: f64) -> Result<Value> {
        let Some(divisors) = &self.rope_factors else { return Ok(Value::Null) };
        let factor = divisors.iter().copied().fold(1.0, f32::max);
        if factor == 1.0 {
            return Ok(Value::Null);
        }
        let (original, low, high) = LLAMA3;
        let expected = (0..head_dim / 2).map(|i| {
            let wavelength = std::f64::consts::TAU * theta.powf(2.0 * i as f64 / head_dim as f64);
            let smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
            1.0 / ((1.0 - smooth) / f64::from(factor) + smooth)
        });
        let close = |(&found, expected): (&f32, f64)| (f64::from(found) / expected - 1.0).abs() < 1e-3;
        if divisors.len() != head_dim / 2 || !divisors.iter().zip(expected).all(close) {
            let expected = "the divisors of Llama 3's scaling of an original context of 8192";
            return Err(self.invalid("rope_freqs.weight", "other values", expected));
        }
        Ok(json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original as u64,
        }))
    }
}
