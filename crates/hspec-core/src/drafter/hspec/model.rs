//! The parameters of an H-Spec drafter; field paths are the file's tensor names.

use crate::{
    config::{HSpecConfig, SeedMode, SubLayerKind},
    drafter::embedding::{Embedding, STD},
};
use burn::{module::Module, tensor::backend::Backend};
use hspec_attn::PrefixAttention;
use hspec_heads::{
    BlockConv, CandidateSelector, ConfidenceHead, DominoConfig, DominoHead, MarkovHead, MarkovKind,
};
use hspec_mamba::Mamba2Mixer;
use hspec_nn::{Linear, RmsNorm, SwiGlu, WeightStorage};
use std::path::Path;

/// One pre-norm residual sub-layer.
#[derive(Module, Debug)]
#[allow(missing_docs, clippy::large_enum_variant)] // the names are the file format's
pub enum SubLayer<B: Backend> {
    /// `h + Mixer(norm(h), S)`.
    Mamba(MambaLayer<B>),
    /// `h + Attention(norm(h))`.
    Attention(AttentionLayer<B>),
    /// `h + SwiGLU(norm(h))`.
    Mlp(MlpLayer<B>),
}

/// A Mamba-2 sub-layer.
#[derive(Module, Debug)]
#[allow(missing_docs)] // the names are the file format's
pub struct MambaLayer<B: Backend> {
    pub ssm_norm: RmsNorm<B>,
    pub ssm: Mamba2Mixer<B>,
}

/// An attention sub-layer.
#[derive(Module, Debug)]
#[allow(missing_docs)] // the names are the file format's
pub struct AttentionLayer<B: Backend> {
    pub input_layernorm: RmsNorm<B>,
    pub self_attn: PrefixAttention<B>,
    pub attention_conv: Option<BlockConv<B>>,
}

/// A feed-forward sub-layer.
#[derive(Module, Debug)]
#[allow(missing_docs)] // the names are the file format's
pub struct MlpLayer<B: Backend> {
    pub mlp_norm: RmsNorm<B>,
    pub mlp: SwiGlu<B>,
    pub mlp_conv: Option<BlockConv<B>>,
}

/// All parameters (H-Spec section 3).
#[derive(Module, Debug)]
pub struct HSpecModel<B: Backend> {
    /// Frozen copy of the target's, `[V, H]`.
    pub embed_tokens: Embedding<B>,
    /// Frozen rows of the target's head, `[Vd, H]`.
    pub lm_head: Linear<B>,
    /// Final norm.
    pub norm: RmsNorm<B>,
    /// Fuses the F captured states, `[H, F * H]`; absent without state injection.
    pub fc: Option<Linear<B>>,
    /// One norm per captured state, if configured.
    pub fc_norm: Vec<RmsNorm<B>>,
    /// Norm of the fused state.
    pub hidden_norm: Option<RmsNorm<B>>,
    /// Projections to Mamba states, `[heads * P * N, H]`.
    pub seed_projs: Vec<Linear<B>>,
    /// In the order of the pattern.
    pub layers: Vec<SubLayer<B>>,
    /// Restores the order inside a block, if configured.
    pub markov_head: Option<MarkovHead<B>>,
    /// Does so in its place, if configured.
    pub domino_head: Option<DominoHead<B>>,
    /// Does so in its place, if configured.
    pub candidate_selector: Option<CandidateSelector<B>>,
    /// Predicts acceptance, if configured.
    pub confidence_head: Option<ConfidenceHead<B>>,
}

impl<B: Backend> HSpecModel<B> {
    /// Fresh weights: `N(0, 0.02)`, norms one, biases zero, `A_log = ln(1..heads)`; convolutions of DFlash-2
    /// are the identity, its selector keeps the logits. For a validated configuration.
    pub fn init(config: &HSpecConfig, device: &B::Device) -> Self {
        let layer = &config.transformer_layer_config;
        let (h, d, eps) = (layer.hidden_size, config.head_dim(), layer.rms_norm_eps);
        let mamba = config.mamba();
        let extensions = config.extensions(Path::new("config.json")).unwrap_or_default();
        let norm = |n| RmsNorm::ones(n, eps, device);
        let linear = |input, output| Linear::random(input, output, false, STD, device);
        let convolution = || {
            let c = extensions.block_conv?;
            Some(BlockConv::identity(h, c.conv_kernel_size, c.conv_group_size, device))
        };
        let (q, kv) = (layer.num_attention_heads * d, layer.num_key_value_heads * d);
        let sub_layer = |kind: &SubLayerKind| match kind {
            SubLayerKind::Mamba => {
                SubLayer::Mamba(MambaLayer { ssm_norm: norm(h), ssm: Mamba2Mixer::init(&mamba, device) })
            }
            SubLayerKind::Attention => SubLayer::Attention(AttentionLayer {
                input_layernorm: norm(h),
                self_attn: PrefixAttention {
                    q_proj: linear(h, q),
                    k_proj: linear(h, kv),
                    v_proj: linear(h, kv),
                    o_proj: linear(q, h),
                    q_norm: config.use_qk_norm.then(|| norm(d)),
                    k_norm: config.use_qk_norm.then(|| norm(d)),
                    head_dim: d,
                },
                attention_conv: convolution(),
            }),
            SubLayerKind::Mlp => SubLayer::Mlp(MlpLayer {
                mlp_norm: norm(h),
                mlp: SwiGlu::random(h, layer.intermediate_size, STD, device),
                mlp_conv: convolution(),
            }),
        };
        let seeded = !config.disable_mamba_init_state_injection;
        let fused = config.latent_fusion_layer_ids.len();
        let projections = match config.mamba_seed_mode {
            SeedMode::PerLayer => config.mamba_layers(),
            SeedMode::Shared | SeedMode::Once => 1,
        };
        let state = config.mamba_num_heads * config.mamba_head_dim * config.mamba_d_state;
        let markov = (config.markov_rank > 0).then(|| {
            let kind: MarkovKind = config.markov_head_type.parse().unwrap_or(MarkovKind::Vanilla);
            MarkovHead::init(kind, layer.vocab_size, config.draft_vocab_size, config.markov_rank, h, device)
        });
        let domino = extensions.domino.map(|d| {
            let config = DominoConfig {
                draft_vocab: config.draft_vocab_size,
                hidden: h,
                embedding: h,
                gru_hidden_dim: d.gru_hidden_dim,
                emb_dim: d.emb_dim,
                pure_draft_prefix_len: d.pure_draft_prefix_len,
                // A slot predicts the token at its own position.
                shift_label: false,
            };
            DominoHead::init(&config, device)
        });
        let selector = extensions.candidate_selector.map(|s| {
            let (vocab, draft) = (layer.vocab_size, config.draft_vocab_size);
            CandidateSelector::init(vocab, draft, s.selector_rank, h, s.selector_top_k, device)
        });
        let confidence = config.enable_confidence_head.then(|| {
            let features = if config.confidence_head_with_markov { config.markov_rank } else { 0 };
            ConfidenceHead::init(h + features, device)
        });
        Self {
            embed_tokens: Embedding::random(layer.vocab_size, h, device),
            lm_head: linear(h, config.draft_vocab_size),
            norm: norm(h),
            fc: seeded.then(|| linear(fused * h, h)),
            fc_norm: (0..if seeded && config.fc_norm { fused } else { 0 }).map(|_| norm(h)).collect(),
            hidden_norm: seeded.then(|| norm(h)),
            seed_projs: (0..if seeded { projections } else { 0 }).map(|_| linear(h, state)).collect(),
            layers: config.block_pattern.0.iter().map(sub_layer).collect(),
            markov_head: markov,
            domino_head: domino,
            candidate_selector: selector,
            confidence_head: confidence,
        }
    }

    /// The same model for decoding, see [`Linear::prepack`].
    #[must_use]
    pub fn prepack(self) -> Self {
        let storage = WeightStorage::Lossless;
        let pack = |l: Linear<B>| l.prepack(storage);
        let sub_layer = |layer| match layer {
            SubLayer::Mamba(l) => SubLayer::Mamba(MambaLayer { ssm: l.ssm.prepack(storage), ..l }),
            SubLayer::Attention(l) => {
                SubLayer::Attention(AttentionLayer { self_attn: l.self_attn.prepack(storage), ..l })
            }
            SubLayer::Mlp(l) => SubLayer::Mlp(MlpLayer { mlp: l.mlp.prepack(storage), ..l }),
        };
        Self {
            lm_head: pack(self.lm_head),
            fc: self.fc.map(pack),
            seed_projs: self.seed_projs.into_iter().map(pack).collect(),
            layers: self.layers.into_iter().map(sub_layer).collect(),
            markov_head: self.markov_head.map(|head| head.prepack(storage)),
            ..self
        }
    }

    /// Whether the parameter of this name is a copy of the target's that no one trains.
    pub fn frozen(name: &str) -> bool {
        matches!(name, "embed_tokens.weight" | "lm_head.weight")
    }
}
