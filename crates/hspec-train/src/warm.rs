//! A fresh drafter for a target: configuration, vocabulary, and the weights it starts from.

use crate::recipe::{Recipe, Shape, WarmStart};
use burn::tensor::backend::Backend;
use hspec_core::{
    Error, Result, TokenId,
    config::{
        AttnRope, Family, HSpecConfig, LayerConfig, ProposalMethod, SPECULATORS_VERSION, SeedMode,
        SpeculatorsConfig, SubLayerKind, Verifier,
    },
    drafter::{DraftVocab, HSpec, HSpecModel, SubLayer, pruned_head},
    target::Target,
};
use hspec_nn::{Linear, params};
use serde_json::json;
use std::path::Path;

/// The configuration that a recipe gives for a target; `file` names the recipe in errors.
///
/// # Errors
/// A shape that cannot be right or does not fit the target.
pub fn config<B: Backend>(
    recipe: &Recipe,
    target: &Target<B>,
    name: &str,
    file: &Path,
) -> Result<HSpecConfig> {
    let Shape {
        block_pattern,
        block_size,
        fusion_layers,
        kv_layers,
        intermediate_size,
        mamba_heads,
        mamba_head_dim,
        mamba_state,
        mamba_groups,
        mamba_conv,
        draft_vocab,
        markov_rank,
        sliding_window,
        mask_token,
    } = &recipe.drafter;
    let t = target.config();
    let attention = block_pattern.split_whitespace().filter(|w| w.eq_ignore_ascii_case("attention")).count();
    let mut kv_set = kv_layers.clone();
    kv_set.sort_unstable();
    kv_set.dedup();
    let rope = &t.rope_parameters;
    let qk_norm = t.family == Family::Qwen3;
    let extra = |value: serde_json::Value| value.as_object().cloned().unwrap_or_default();
    let rope_of_target = AttnRope {
        rope_parameters: rope.clone(),
        sliding_window: None,
        layer_type: Some("full_attention".into()),
    };
    let pattern = serde_json::from_value(json!(block_pattern)).map_err(|e| {
        Error::invalid(file, "drafter.block_pattern", e.to_string(), "mamba, attention and mlp")
    })?;
    let config = HSpecConfig {
        speculators_model_type: "mamba_attn_hybrid".into(),
        architectures: vec!["MambaAttnHybridDraftModel".into()],
        draft_vocab_size: *draft_vocab,
        block_size: *block_size,
        max_anchors: recipe.train.anchors_per_step,
        aux_hidden_state_layer_ids: kv_set,
        mask_token_id: *mask_token,
        latent_fusion_layer_ids: fusion_layers.clone(),
        attn_kv_layer_ids: kv_layers.clone(),
        block_pattern: pattern,
        attn_rope: Some(vec![rope_of_target; attention]),
        use_qk_norm: qk_norm,
        mamba_d_state: *mamba_state,
        mamba_num_heads: *mamba_heads,
        mamba_head_dim: *mamba_head_dim,
        mamba_n_groups: *mamba_groups,
        mamba_conv_kernel: *mamba_conv,
        mamba_seed_mode: SeedMode::Shared,
        fc_norm: false,
        disable_mamba_init_state_injection: false,
        disable_target_kv_reuse: false,
        markov_rank: *markov_rank,
        markov_head_type: "vanilla".into(),
        enable_confidence_head: true,
        confidence_head_with_markov: *markov_rank > 0,
        sliding_window_non_causal: false,
        sliding_window_prefix: 0,
        transformer_layer_config: LayerConfig {
            vocab_size: t.vocab_size,
            hidden_size: t.hidden_size,
            intermediate_size: *intermediate_size,
            num_hidden_layers: attention,
            num_attention_heads: t.num_attention_heads,
            num_key_value_heads: t.num_key_value_heads,
            head_dim: Some(t.head_dim),
            rms_norm_eps: t.rms_norm_eps,
            layer_types: Some(vec!["sliding_attention".into(); attention]),
            sliding_window: Some(*sliding_window),
            extra: extra(json!({
                "model_type": "qwen3",
                "hidden_act": "silu",
                "max_position_embeddings": t.max_position_embeddings,
                "attention_bias": false,
                "attention_dropout": 0.0,
                "use_sliding_window": true,
                "rope_parameters": rope,
                "partial_rotary_factor": rope.partial_rotary_factor.unwrap_or(1.0),
                "tie_word_embeddings": false,
                "use_qk_norm": qk_norm,
            })),
        },
        speculators_config: SpeculatorsConfig {
            algorithm: "mamba_attn_hybrid".into(),
            default_proposal_method: "greedy".into(),
            proposal_methods: vec![ProposalMethod {
                proposal_type: "greedy".into(),
                speculative_tokens: block_size.saturating_sub(1),
                verifier_accept_k: 1,
                accept_tolerance: 0.0,
            }],
            verifier: Verifier {
                name_or_path: Some(name.into()),
                architectures: vec![architecture(t.family).into()],
            },
        },
        extra: extra(json!({
            "speculators_version": SPECULATORS_VERSION,
            "mamba_expand": 1,
            "tie_word_embeddings": false,
            "trainable_q_proj": true,
            "trainable_kv_proj": true,
            "trainable_q_norm": false,
            "trainable_k_norm": false,
            "verifier_layer_prefix": "model.layers",
        })),
    };
    config.validate(file).map_err(in_recipe)?;
    let layers = t.num_hidden_layers;
    for (field, ids, last) in
        [("drafter.kv_layers", kv_layers, layers - 1), ("drafter.fusion_layers", fusion_layers, layers)]
    {
        if let Some(id) = ids.iter().find(|&&id| id > last) {
            let expected = format!("at most {last}: the target has {layers} layers");
            return Err(Error::invalid(file, field, id.to_string(), expected));
        }
    }
    config.check_target(t)?;
    Ok(config)
}

/// What is wrong with a checkpoint's field, told of the recipe's field that gave its value.
fn in_recipe(error: Error) -> Error {
    let Error::Invalid { file, field, found, expected } = error else { return error };
    let own = match field.strip_prefix("transformer_layer_config.").unwrap_or(&field) {
        "latent_fusion_layer_ids" => "fusion_layers",
        "attn_kv_layer_ids" => "kv_layers",
        "mamba_num_heads" => "mamba_heads",
        "mamba_d_state" => "mamba_state",
        "mamba_n_groups" => "mamba_groups",
        "mamba_conv_kernel" => "mamba_conv",
        "draft_vocab_size" => "draft_vocab",
        "mask_token_id" => "mask_token",
        same => same,
    };
    Error::Invalid { file, field: format!("drafter.{own}"), found, expected }
}

/// Everything about a recipe that can be wrong for a target, found before any work is done.
///
/// # Errors
/// [`Error::Invalid`] naming the field.
pub fn check<B: Backend>(recipe: &Recipe, target: &Target<B>, prompts: usize, file: &Path) -> Result<()> {
    let config = config(recipe, target, "", file)?;
    let refuse =
        |field: &str, found: String, expected: String| Err(Error::invalid(file, field, found, expected));
    let data = &recipe.data;
    let context = target.config().max_position_embeddings;
    if data.max_prompt_tokens.saturating_add(data.max_new_tokens) > context {
        let found = format!("{} behind {} prompt tokens", data.max_new_tokens, data.max_prompt_tokens);
        return refuse(
            "data.max_new_tokens",
            found,
            format!("at most {context} in all, the target's context"),
        );
    }
    if data.validation >= prompts {
        return refuse(
            "data.validation",
            data.validation.to_string(),
            format!("fewer than the {prompts} prompts"),
        );
    }
    if recipe.train.tokens_per_step <= config.block_size {
        let found = recipe.train.tokens_per_step.to_string();
        return refuse(
            "train.tokens_per_step",
            found,
            format!("more than block_size, {}", config.block_size),
        );
    }
    let (mlps, given) = (
        config.block_pattern.0.iter().filter(|k| **k == SubLayerKind::Mlp).count(),
        &recipe.train.mlp_layers,
    );
    match recipe.train.warm_start {
        WarmStart::Attention if !given.is_empty() => {
            return refuse(
                "train.mlp_layers",
                format!("{given:?}"),
                "none, with warm_start = \"attention\"".into(),
            );
        }
        WarmStart::Layers if given.len() != mlps => {
            return refuse("train.mlp_layers", format!("{given:?}"), format!("{mlps} layers, one per mlp"));
        }
        WarmStart::Layers => {
            let theirs = target.config().intermediate_size;
            if recipe.drafter.intermediate_size != theirs {
                let expected = format!("{theirs}, the target's, with warm_start = \"layers\"");
                return refuse(
                    "drafter.intermediate_size",
                    recipe.drafter.intermediate_size.to_string(),
                    expected,
                );
            }
            if let Some(id) = given.iter().find(|&&id| target.layer(id).is_none()) {
                let expected = format!("layers below {}", target.config().num_hidden_layers);
                return refuse("train.mlp_layers", id.to_string(), expected);
            }
        }
        WarmStart::Attention => {}
    }
    let row = target.embedding().clone().narrow(0, config.mask_token_id as usize, 1);
    let norm: f32 = row.into_data().iter::<f32>().map(|x| x * x).sum::<f32>().sqrt();
    if norm < 1e-4 {
        let expected = "a token whose embedding is not zero, or every slot would start from nothing";
        return refuse("drafter.mask_token", config.mask_token_id.to_string(), expected.into());
    }
    Ok(())
}

fn architecture(family: Family) -> &'static str {
    match family {
        Family::Qwen3 => "Qwen3ForCausalLM",
        _ => "LlamaForCausalLM",
    }
}

/// A fresh drafter whose copies and warm start come from the target.
///
/// # Errors
/// A vocabulary that does not ascend; what [`check`] would have found.
pub fn drafter<B: Backend>(
    config: HSpecConfig,
    target: &Target<B>,
    vocab: Vec<TokenId>,
    recipe: &Recipe,
    file: &Path,
) -> Result<HSpec<B>> {
    B::seed(target.device(), recipe.train.seed);
    let vocab = DraftVocab::new(vocab, target.config().vocab_size, file)?;
    let mut model = HSpecModel::init(&config, target.device());
    model.embed_tokens.weight = model.embed_tokens.weight.map(|_| target.embedding().clone());
    model.lm_head = pruned_head(target, &vocab);
    copy_layers(&mut model, &config, target, recipe, file)?;
    let values = params::collect(&model);
    let model = params::fill(model, target.device(), |n| values.get(n).cloned(), |_| false)
        .map_err(|e| Error::Mismatch(format!("warm start: {e}")))?;
    HSpec::new(config, model, vocab, file)
}

fn copy_layers<B: Backend>(
    model: &mut HSpecModel<B>,
    config: &HSpecConfig,
    target: &Target<B>,
    recipe: &Recipe,
    file: &Path,
) -> Result<()> {
    let whole = recipe.train.warm_start == WarmStart::Layers;
    let from = |id: usize, field: &str| {
        target.layer(id).ok_or_else(|| {
            let layers = target.config().num_hidden_layers;
            Error::invalid(file, field, id.to_string(), format!("a layer of the target, below {layers}"))
        })
    };
    let copy = |linear: &mut Linear<B>, source: &Linear<B>| linear.weight = source.weight.clone();
    let (mut attention, mut mlp) = (0, 0);
    for sub_layer in &mut model.layers {
        match sub_layer {
            SubLayer::Attention(layer) => {
                let source = from(config.attn_kv_layer_ids[attention], "drafter.kv_layers")?;
                attention += 1;
                copy(&mut layer.self_attn.q_proj, &source.q_proj);
                copy(&mut layer.self_attn.k_proj, &source.k_proj);
                copy(&mut layer.self_attn.v_proj, &source.v_proj);
                layer.self_attn.q_norm = source.q_norm.clone().or(layer.self_attn.q_norm.take());
                layer.self_attn.k_norm = source.k_norm.clone().or(layer.self_attn.k_norm.take());
                if whole {
                    copy(&mut layer.self_attn.o_proj, &source.o_proj);
                    layer.input_layernorm = source.input_layernorm.clone();
                }
            }
            SubLayer::Mlp(layer) if whole => {
                let Some(&id) = recipe.train.mlp_layers.get(mlp) else {
                    let found = format!("{} layers", recipe.train.mlp_layers.len());
                    return Err(Error::invalid(file, "train.mlp_layers", found, "one layer per mlp"));
                };
                mlp += 1;
                let source = from(id, "train.mlp_layers")?;
                layer.mlp = source.mlp.clone();
                layer.mlp_norm = source.post_attention_layernorm.clone();
            }
            _ => {}
        }
    }
    if whole {
        model.norm = target.norm().clone();
    }
    Ok(())
}
