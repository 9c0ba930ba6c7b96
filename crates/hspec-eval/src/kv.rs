//! How much KV cache a drafter adds to its target's, per token of context (H-Spec, section 2).
//!
//! A DFlash or DSpark drafter keeps keys and values of its own for every token:
//!
//! ```text
//! bytes per token = 2 * layers * kv_heads * head_dim * bytes per value
//! inflation       = (target + drafter) / target
//! ```
//!
//! An H-Spec drafter reads the target's cache in place and adds nothing: inflation 1.

use hspec_core::{Error, Result};
use serde::Serialize;
use serde_json::Value;
use std::path::Path;

/// Layers of a DFlash drafter, where nothing else is known.
const DRAFT_LAYERS: usize = 5;

/// What of a model's shape its KV cache depends on. Layers that keep no keys, such as linear attention,
/// do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Layers with attention over all of the context.
    pub layers: usize,
    /// Layers with attention over a window, which keep no more than its tokens.
    pub window_layers: usize,
    /// Tokens of that window.
    pub window: usize,
    /// Key-value heads of such a layer.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl KvShape {
    /// Bytes per token at `width` bytes per value, of the layers over all of the context.
    pub fn bytes_per_token(&self, width: usize) -> usize {
        2 * self.layers * self.kv_heads * self.head_dim * width
    }

    /// The most bytes that the windowed layers keep together, however long the context.
    pub fn window_bytes(&self, width: usize) -> usize {
        2 * self.window_layers * self.window * self.kv_heads * self.head_dim * width
    }

    /// Reads a model's `config.json`; of a multimodal one, its `text_config`. In hybrid models the layers
    /// that attend are those that `layer_types` calls `full_attention`, or every
    /// `full_attention_interval`th; `sliding_attention` are those over the last `sliding_window` tokens.
    ///
    /// # Errors
    /// A field that is missing or no sensible size; a window of layers that are not told; layers whose cache
    /// is not one of keys and values of tokens: latent attention.
    pub fn from_config(config: &Value, file: &Path) -> Result<Self> {
        let config = config.get("text_config").unwrap_or(config);
        let bounded = |field: &str, most: u64| match config.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64() {
                Some(n) if (1..=most).contains(&n) => Ok(Some(n as usize)),
                _ => {
                    let expected = format!("a number from 1 to {most}");
                    Err(Error::invalid(file, field, value.to_string(), expected))
                }
            },
        };
        // Larger than any model, and small enough that bytes can be counted.
        let optional = |field: &str| bounded(field, 0xffff);
        let number = |field: &str| {
            optional(field)?.ok_or_else(|| Error::invalid(file, field, "nothing", "a number from 1 to 65535"))
        };
        if let Some(rank) = config.get("kv_lora_rank").filter(|rank| !rank.is_null()) {
            let expected = "no latent attention, whose cache is not counted";
            return Err(Error::invalid(file, "kv_lora_rank", rank.to_string(), expected));
        }
        let heads = number("num_attention_heads")?;
        let layers = number("num_hidden_layers")?;
        let kinds = config.get("layer_types").filter(|kinds| !kinds.is_null());
        let unused = config.get("use_sliding_window").is_some_and(|used| *used == false);
        let stated = if unused { None } else { bounded("sliding_window", 1 << 24)? };
        let (attending, window_layers) = match (kinds, optional("full_attention_interval")?) {
            (Some(kinds), _) => attending(kinds, layers, file)?,
            (None, _) if stated.is_some() => {
                let expected = "a list of the kinds of layers, to tell which have the sliding_window";
                return Err(Error::invalid(file, "layer_types", "nothing", expected));
            }
            (None, Some(every)) => (layers / every, 0),
            (None, None) => (layers, 0),
        };
        let window = match stated {
            _ if window_layers == 0 => 0,
            Some(window) => window,
            None => {
                let expected = "the tokens of the layers with sliding_attention";
                return Err(Error::invalid(file, "sliding_window", "nothing", expected));
            }
        };
        let head_dim = match optional("head_dim")? {
            Some(width) => width,
            None => match number("hidden_size")? {
                hidden if hidden % heads == 0 => hidden / heads,
                hidden => {
                    let expected = format!("a multiple of the {heads} heads, or a head_dim");
                    return Err(Error::invalid(file, "hidden_size", hidden.to_string(), expected));
                }
            },
        };
        let kv_heads = optional("num_key_value_heads")?.unwrap_or(heads);
        Ok(Self { layers: attending, window_layers, window, kv_heads, head_dim })
    }

    /// The cache of a DFlash drafter for this target: five layers with the target's heads, as the
    /// published ones for Qwen3 and Llama have.
    pub const fn dflash(self) -> Self {
        Self { layers: DRAFT_LAYERS, window_layers: 0, window: 0, ..self }
    }
}

/// Layers that `layer_types` says attend to everything, and those that do to a window.
fn attending(kinds: &Value, layers: usize, file: &Path) -> Result<(usize, usize)> {
    let words = kinds.as_array().filter(|words| words.len() == layers);
    let words = words.ok_or_else(|| {
        Error::invalid(file, "layer_types", kinds.to_string(), format!("a list of {layers} kinds of layers"))
    })?;
    let (mut full, mut windowed) = (0, 0);
    for word in words {
        match word.as_str() {
            Some("full_attention") => full += 1,
            Some("sliding_attention") => windowed += 1,
            Some("linear_attention" | "mamba") => {}
            _ => {
                let expected = "full_attention, sliding_attention, linear_attention or mamba";
                return Err(Error::invalid(file, "layer_types", word.to_string(), expected));
            }
        }
    }
    Ok((full, windowed))
}

/// One line of the table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KvRow {
    /// The target.
    pub target: String,
    /// Bytes per token of its own cache.
    pub target_bytes_per_token: usize,
    /// Bytes of its windowed layers, which do not grow with the context beyond the window.
    #[serde(skip_serializing_if = "is_zero")]
    pub target_window_bytes: usize,
    /// The drafter.
    pub drafter: String,
    /// Bytes per token that the drafter keeps beside it.
    pub drafter_bytes_per_token: usize,
    /// Both per token over the target's: what a long context grows by.
    pub inflation: f64,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // the signature that serde asks for
fn is_zero(bytes: &usize) -> bool {
    *bytes == 0
}

impl KvRow {
    /// The line of a drafter that keeps `drafter_bytes` per token.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a target whose cache does not grow, so that the ratio is undefined.
    pub fn new(
        target: &str,
        shape: KvShape,
        drafter: &str,
        drafter_bytes: usize,
        width: usize,
    ) -> Result<Self> {
        let bytes = shape.bytes_per_token(width);
        if bytes == 0 {
            return Err(Error::Mismatch(format!("{target}: no layer keeps keys and values of every token")));
        }
        Ok(Self {
            target: target.to_owned(),
            target_bytes_per_token: bytes,
            target_window_bytes: shape.window_bytes(width),
            drafter: drafter.to_owned(),
            drafter_bytes_per_token: drafter_bytes,
            inflation: (bytes + drafter_bytes) as f64 / bytes as f64,
        })
    }
}

/// Targets of the paper's Table 1 with the published DFlash drafters' caches. The drafters for Qwen3.5 have
/// heads of their own, 8 of 128; their six layers follow from the paper's 24 KiB per token.
pub fn paper_targets() -> [(&'static str, KvShape, KvShape); 5] {
    let shape =
        |layers, kv_heads, head_dim| KvShape { layers, window_layers: 0, window: 0, kv_heads, head_dim };
    [
        ("Qwen3-4B", shape(36, 8, 128), shape(5, 8, 128)),
        ("Qwen3-8B", shape(36, 8, 128), shape(5, 8, 128)),
        ("Llama-3.1-8B", shape(32, 8, 128), shape(5, 8, 128)),
        ("Qwen3.5-27B", shape(16, 4, 256), shape(6, 8, 128)),
        ("Qwen3.5-397B-A17B", shape(15, 2, 256), shape(6, 8, 128)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_papers_inflations_follow_from_the_shapes() {
        let expected = [1.139, 1.139, 1.156, 1.375, 1.800];
        for ((target, shape, dflash), expected) in paper_targets().into_iter().zip(expected) {
            let row = KvRow::new(target, shape, "dflash", dflash.bytes_per_token(2), 2).unwrap();
            assert_eq!((row.inflation * 1000.0).round() / 1000.0, expected, "{target}");
            assert_eq!(KvRow::new(target, shape, "hspec", 0, 2).unwrap().inflation, 1.0);
        }
        assert_eq!(paper_targets()[0].2.bytes_per_token(2), 20 << 10);
        assert_eq!(paper_targets()[4].2.bytes_per_token(2), 24 << 10);
    }

    #[test]
    fn linear_attention_layers_keep_no_keys() {
        let read = |value: &Value| KvShape::from_config(value, Path::new("config.json"));
        let mut kinds = vec!["linear_attention"; 48];
        kinds.extend(["full_attention"; 16]);
        let mut config = json!({"text_config": {"num_hidden_layers": 64, "num_attention_heads": 24,
            "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 5120, "layer_types": kinds}});
        let shape = KvShape { layers: 16, window_layers: 0, window: 0, kv_heads: 4, head_dim: 256 };
        assert_eq!(read(&config).unwrap(), shape);
        let text = config["text_config"].as_object_mut().unwrap();
        text.remove("layer_types");
        text.insert("full_attention_interval".into(), json!(4));
        assert_eq!(read(&config).unwrap(), shape);
        config["text_config"]["num_attention_heads"] = json!("24");
        let message = read(&config).unwrap_err().to_string();
        assert_eq!(
            message,
            "config.json: num_attention_heads: found \"24\", expected a number from 1 to 65535"
        );
    }

    #[test]
    fn configurations_that_cannot_be_counted_are_refused() {
        let base = json!({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32});
        for (field, value, part) in [
            ("num_hidden_layers", json!(16_777_216), "num_hidden_layers: found 16777216"),
            ("hidden_size", json!(33), "hidden_size: found 33, expected a multiple of the 4 heads"),
            ("hidden_size", json!(2), "hidden_size: found 2, expected a multiple of the 4 heads"),
            ("layer_types", json!(["full_attention"]), "expected a list of 2 kinds"),
            ("layer_types", json!(["full_attention", "chunked_attention"]), "found \"chunked_attention\""),
            ("layer_types", json!(["full_attention", "sliding_attention"]), "sliding_window: found nothing"),
            ("sliding_window", json!(4096), "layer_types: found nothing, expected a list of the kinds"),
            ("sliding_window", json!(0), "sliding_window: found 0, expected a number from 1 to 16777216"),
            ("kv_lora_rank", json!(512), "expected no latent attention"),
        ] {
            let mut config = base.clone();
            config[field] = value;
            let message = KvShape::from_config(&config, Path::new("config.json")).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
    }

    /// Gemma 3's pattern: five windowed layers and one over all of the context.
    #[test]
    fn windowed_layers_count_up_to_their_window() {
        let mut kinds = vec!["sliding_attention"; 5];
        kinds.push("full_attention");
        let mut config = json!({"num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 32,
            "sliding_window": 512, "layer_types": kinds});
        let shape = |config: &Value| KvShape::from_config(config, Path::new("config.json")).unwrap();
        let gemma = shape(&config);
        assert_eq!(
            (gemma.bytes_per_token(2), gemma.window_bytes(2)),
            (2 * 4 * 8 * 2, 5 * 512 * 2 * 4 * 8 * 2)
        );
        assert_eq!((gemma.dflash().layers, gemma.dflash().window_bytes(2)), (5, 0));
        let row = KvRow::new("gemma", gemma, "dflash", gemma.dflash().bytes_per_token(2), 2).unwrap();
        assert_eq!((row.inflation, row.target_window_bytes), (6.0, 327_680));
        let json = |row: &KvRow| serde_json::to_value(row).unwrap();
        assert_eq!(json(&row)["target_window_bytes"], 327_680);
        // A window that is switched off is none.
        config["use_sliding_window"] = false.into();
        config.as_object_mut().unwrap().remove("layer_types");
        let plain = shape(&config);
        assert_eq!((plain.layers, plain.window_layers), (6, 0));
        assert!(
            json(&KvRow::new("plain", plain, "hspec", 0, 2).unwrap()).get("target_window_bytes").is_none()
        );
        config["layer_types"] = vec!["sliding_attention"; 6].into();
        config["use_sliding_window"] = true.into();
        let message = KvRow::new("all", shape(&config), "hspec", 0, 2).unwrap_err().to_string();
        assert_eq!(message, "all: no layer keeps keys and values of every token");
    }

    #[test]
    fn absent_heads_and_widths_take_their_defaults() {
        let config = json!({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32});
        let shape = KvShape::from_config(&config, Path::new("config.json")).unwrap();
        let expected = KvShape { layers: 2, window_layers: 0, window: 0, kv_heads: 4, head_dim: 8 };
        assert_eq!(shape, expected);
        assert_eq!(shape.dflash().bytes_per_token(4), 2 * 5 * 4 * 8 * 4);
    }
}
