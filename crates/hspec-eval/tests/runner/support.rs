//! A drafter of random weights for any target.

use burn::{
    module::{Param, ParamId},
    tensor::backend::Backend,
};
use hspec_core::{
    TokenId,
    config::HSpecConfig,
    drafter::{DraftVocab, HSpec, HSpecModel, pruned_head},
    target::Target,
};
use serde_json::json;
use std::path::Path;

/// A small H-Spec drafter, half of the target's vocabulary, that has learnt nothing.
pub fn random_drafter<B: Backend>(target: &Target<B>) -> HSpec<B> {
    let (c, file) = (target.config(), Path::new("config.json"));
    let config: HSpecConfig = serde_json::from_value(json!({
        "speculators_model_type": "mamba_attn_hybrid",
        "draft_vocab_size": c.vocab_size / 2,
        "block_size": 8,
        "aux_hidden_state_layer_ids": [1, c.num_hidden_layers / 2],
        "mask_token_id": 0,
        "latent_fusion_layer_ids": [1, c.num_hidden_layers / 2],
        "attn_kv_layer_ids": [c.num_hidden_layers - 1],
        "block_pattern": "mamba mlp mamba attention mlp",
        "use_qk_norm": false,
        "mamba_d_state": 4,
        "mamba_num_heads": 2,
        "mamba_head_dim": 16,
        "markov_rank": 4,
        "enable_confidence_head": true,
        "transformer_layer_config": {
            "vocab_size": c.vocab_size,
            "hidden_size": c.hidden_size,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": c.num_attention_heads,
            "num_key_value_heads": c.num_key_value_heads,
            "head_dim": c.head_dim,
            "rms_norm_eps": c.rms_norm_eps,
            "rope_parameters": c.rope_parameters,
        },
        "speculators_config": {
            "algorithm": "mamba_attn_hybrid",
            "default_proposal_method": "greedy",
            "proposal_methods": [{ "proposal_type": "greedy", "speculative_tokens": 7 }],
            "verifier": { "name_or_path": null },
        },
    }))
    .unwrap();
    let kept = (0..c.vocab_size as u32 / 2).map(|id| TokenId(2 * id)).collect();
    let vocab = DraftVocab::new(kept, c.vocab_size, file).unwrap();
    B::seed(target.device(), 7);
    let mut model = HSpecModel::init(&config, target.device());
    model.embed_tokens.weight = Param::initialized(ParamId::new(), target.embedding());
    model.lm_head = pruned_head(target, &vocab);
    HSpec::new(config, model, vocab, file).unwrap()
}
