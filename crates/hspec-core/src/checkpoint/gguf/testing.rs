//! Builds GGUF files for tests, right and wrong ones.

/// A file in parts; `bytes` puts them together.
#[derive(Clone)]
pub(super) struct Builder {
    pub(super) magic: [u8; 4],
    pub(super) version: u32,
    /// Number of tensors and of metadata entries, where they are to lie.
    pub(super) counts: (Option<u64>, Option<u64>),
    /// Keys, types and values.
    pub(super) metadata: Vec<(Vec<u8>, u32, Vec<u8>)>,
    pub(super) tensors: Vec<Tensor>,
}

#[derive(Clone)]
pub(super) struct Tensor {
    pub(super) name: String,
    /// The fastest first, as in the file.
    pub(super) dims: Vec<u64>,
    pub(super) kind: u32,
    pub(super) data: Vec<u8>,
    /// Where it is to lie instead of behind the tensor before.
    pub(super) offset: Option<u64>,
}

pub(super) fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes()[..], value.as_bytes()].concat()
}

impl Builder {
    pub(super) fn new() -> Self {
        let (metadata, tensors) = (Vec::new(), Vec::new());
        Self { magic: *b"GGUF", version: 3, counts: (None, None), metadata, tensors }
    }

    pub(super) fn raw(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.metadata.retain(|(k, ..)| k != key.as_bytes());
        self.metadata.push((key.as_bytes().to_vec(), kind, value.to_vec()));
    }

    pub(super) fn u32(&mut self, key: &str, value: u32) {
        self.raw(key, 4, &value.to_le_bytes());
    }

    pub(super) fn f32(&mut self, key: &str, value: f32) {
        self.raw(key, 6, &value.to_le_bytes());
    }

    pub(super) fn text(&mut self, key: &str, value: &str) {
        self.raw(key, 8, &text(value));
    }

    pub(super) fn list(&mut self, key: &str, kind: u32, values: &[Vec<u8>]) {
        let head = [&kind.to_le_bytes()[..], &(values.len() as u64).to_le_bytes()].concat();
        self.raw(key, 9, &[head, values.concat()].concat());
    }

    pub(super) fn texts(&mut self, key: &str, values: &[&str]) {
        self.list(key, 8, &values.iter().map(|v| text(v)).collect::<Vec<_>>());
    }

    pub(super) fn tensor(&mut self, name: &str, dims: &[u64], kind: u32, data: Vec<u8>) {
        self.tensors.retain(|t| t.name != name);
        self.tensors.push(Tensor { name: name.to_owned(), dims: dims.to_vec(), kind, data, offset: None });
    }

    pub(super) fn floats(&mut self, name: &str, dims: &[u64], values: impl Iterator<Item = f32>) {
        self.tensor(name, dims, 0, values.flat_map(f32::to_le_bytes).collect());
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut file = [&self.magic[..], &self.version.to_le_bytes()].concat();
        file.extend(self.counts.0.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        file.extend(self.counts.1.unwrap_or(self.metadata.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.metadata {
            file.extend((key.len() as u64).to_le_bytes());
            file.extend(key);
            file.extend(kind.to_le_bytes());
            file.extend(value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            data.resize(data.len().next_multiple_of(32), 0);
            file.extend(text(&tensor.name));
            file.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|d| file.extend(d.to_le_bytes()));
            file.extend(tensor.kind.to_le_bytes());
            file.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
        }
        if !data.is_empty() {
            file.resize(file.len().next_multiple_of(32), 0);
        }
        file.extend(data);
        file
    }

    /// A Llama of one layer: 32 wide, 2 heads and 1 for keys and values, a vocabulary of 6.
    pub(super) fn llama() -> Self {
        let mut file = Self::new();
        file.text("general.architecture", "llama");
        for (key, value) in [
            ("block_count", 1),
            ("context_length", 64),
            ("embedding_length", 32),
            ("feed_forward_length", 32),
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
            ("rope.dimension_count", 16),
        ] {
            file.u32(&format!("llama.{key}"), value);
        }
        file.f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
        file.f32("llama.rope.freq_base", 1e5);
        file.text("tokenizer.ggml.model", "gpt2");
        file.text("tokenizer.ggml.pre", "smollm");
        file.texts("tokenizer.ggml.tokens", &["<|end|>", "a", "b", "ab", "Ġ", "1"]);
        let types = [3i32, 1, 1, 1, 1, 1].map(|t| t.to_le_bytes().to_vec());
        file.list("tokenizer.ggml.token_type", 5, &types);
        file.texts("tokenizer.ggml.merges", &["a b"]);
        file.u32("tokenizer.ggml.eos_token_id", 0);
        file.u32("tokenizer.ggml.bos_token_id", 0);
        file.text("tokenizer.chat_template", "{{ messages[0].content }}{{ eos_token }}");

        let ramp = |n: usize| (0..n).map(|i| i as f32);
        file.floats("token_embd.weight", &[32, 6], ramp(32 * 6));
        file.floats("output_norm.weight", &[32], ramp(32));
        for (part, rows) in [("attn_q", 32), ("attn_k", 16), ("attn_v", 16), ("attn_output", 32)] {
            file.floats(&format!("blk.0.{part}.weight"), &[32, rows], ramp(32 * rows as usize));
        }
        file.tensor("blk.0.ffn_up.weight", &[32, 2], 8, vec![0x11; 2 * 34]);
        file
    }
}
