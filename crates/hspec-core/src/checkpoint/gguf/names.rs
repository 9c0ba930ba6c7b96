//! GGUF tensor names as Hugging Face names.

/// The Hugging Face name of a tensor of the Llama and Qwen3 families.
pub(super) fn hugging_face(name: &str) -> Option<String> {
    Some(match name {
        "token_embd.weight" => "model.embed_tokens.weight".to_owned(),
        "output_norm.weight" => "model.norm.weight".to_owned(),
        "output.weight" => "lm_head.weight".to_owned(),
        _ => {
            let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
            let layer: usize = layer.parse().ok()?;
            let part = match part.strip_suffix(".weight")? {
                "attn_norm" => "input_layernorm",
                "attn_q" => "self_attn.q_proj",
                "attn_k" => "self_attn.k_proj",
                "attn_v" => "self_attn.v_proj",
                "attn_output" => "self_attn.o_proj",
                "attn_q_norm" => "self_attn.q_norm",
                "attn_k_norm" => "self_attn.k_norm",
                "ffn_norm" => "post_attention_layernorm",
                "ffn_gate" => "mlp.gate_proj",
                "ffn_up" => "mlp.up_proj",
                "ffn_down" => "mlp.down_proj",
                _ => return None,
            };
            format!("model.layers.{layer}.{part}.weight")
        }
    })
}
