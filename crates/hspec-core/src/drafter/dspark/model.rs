//! The parameters of a DFlash or DSpark drafter; field paths are the files' tensor names.

use super::{DSparkShape, Layout};
use crate::drafter::{
    embedding::{Embedding, STD},
    hspec::convolved,
};
use burn::{
    module::Module,
    tensor::{Tensor, backend::Backend},
};
use hspec_attn::{Anchor, BlockRope, BlockRule, Prefix, PrefixAttention};
use hspec_heads::{
    BlockConv, CandidateSelector, ConfidenceHead, DominoConfig, DominoHead, Gru, MarkovHead, Silu,
};
use hspec_nn::{Linear, RmsNorm, SwiGlu, WeightStorage};

/// One decoder layer over the slots of blocks.
#[derive(Module, Debug)]
#[allow(missing_docs)] // the names are the file format's
pub struct BlockLayer<B: Backend> {
    pub input_layernorm: RmsNorm<B>,
    pub self_attn: PrefixAttention<B>,
    pub post_attention_layernorm: RmsNorm<B>,
    pub mlp: SwiGlu<B>,
    /// Around the attention, in DFlash-2.
    pub attention_conv: Option<BlockConv<B>>,
    /// Around the feed-forward block, in DFlash-2.
    pub mlp_conv: Option<BlockConv<B>>,
}

impl<B: Backend> BlockLayer<B> {
    fn init(shape: &DSparkShape, device: &B::Device) -> Self {
        let (h, d, bias) = (shape.hidden_size, shape.head_dim, shape.attention_bias);
        let norm = |n| RmsNorm::ones(n, shape.rms_norm_eps, device);
        let linear = |input, output| Linear::random(input, output, bias, STD, device);
        let (q, kv) = (shape.num_attention_heads * d, shape.num_key_value_heads * d);
        let conv = || shape.conv.map(|c| BlockConv::identity(h, c.taps, c.group_size, device));
        Self {
            input_layernorm: norm(h),
            self_attn: PrefixAttention {
                q_proj: linear(h, q),
                k_proj: linear(h, kv),
                v_proj: linear(h, kv),
                o_proj: linear(q, h),
                q_norm: Some(norm(d)),
                k_norm: Some(norm(d)),
                head_dim: d,
            },
            post_attention_layernorm: norm(h),
            mlp: SwiGlu::random(h, shape.intermediate_size, STD, device),
            attention_conv: conv(),
            mlp_conv: conv(),
        }
    }

    /// `[n, K, H] -> [n, K, H]`, one block per anchor.
    pub(super) fn forward(
        &self,
        h: Tensor<B, 3>,
        anchors: &[Anchor],
        rope: &BlockRope<B>,
        prefix: &Prefix<B>,
        rule: &BlockRule,
    ) -> Tensor<B, 3> {
        let attend = |x| self.self_attn.forward(x, anchors, rope, Some(prefix), rule);
        let x = self.input_layernorm.forward(h.clone());
        let h = h + convolved(self.attention_conv.as_ref(), x, attend);
        let x = self.post_attention_layernorm.forward(h.clone());
        h + convolved(self.mlp_conv.as_ref(), x, |x| self.mlp.forward(x))
    }
}

/// All parameters.
#[derive(Module, Debug)]
pub struct DSparkModel<B: Backend> {
    /// Frozen copy of the target's, `[V, H]`.
    pub embed_tokens: Embedding<B>,
    /// Frozen rows of the target's head, `[Vd, H]`.
    pub lm_head: Linear<B>,
    /// Fuses the F captured states into a context vector, `[H, F * H]`.
    pub fc: Linear<B>,
    /// Norm of the context vector.
    pub hidden_norm: RmsNorm<B>,
    /// Final norm.
    pub norm: RmsNorm<B>,
    /// The layers.
    pub layers: Vec<BlockLayer<B>>,
    /// Corrects logits by the token before, in DSpark.
    pub markov_head: Option<MarkovHead<B>>,
    /// Predicts acceptance, in DSpark.
    pub confidence_head: Option<ConfidenceHead<B>>,
    /// Chooses among the best tokens of a slot, in DFlash-2.
    pub candidate_selector: Option<CandidateSelector<B>>,
    /// Reads the block's tokens, in Domino: a correction is built over it for each pass.
    pub prefix_gru: Option<Gru<B>>,
    /// Corrects logits by what the recurrence read, in Domino.
    pub embed_proj: Option<(Linear<B>, Silu, Linear<B>)>,
}

impl<B: Backend> DSparkModel<B> {
    /// Fresh weights: `N(0, 0.02)`, norms one, biases zero; convolutions and selector without effect.
    pub fn init(shape: &DSparkShape, device: &B::Device) -> Self {
        let (h, v, vd) = (shape.hidden_size, shape.vocab_size, shape.draft_vocab_size);
        let norm = || RmsNorm::ones(h, shape.rms_norm_eps, device);
        let linear = |input, output| Linear::random(input, output, false, STD, device);
        let features = shape.markov.filter(|_| shape.confidence_with_markov).map_or(0, |m| m.rank);
        let domino = shape.domino.map(|d| {
            let config = DominoConfig {
                draft_vocab: vd,
                hidden: h,
                embedding: h,
                gru_hidden_dim: d.gru_hidden_dim,
                emb_dim: d.emb_dim,
                pure_draft_prefix_len: d.pure_draft_prefix_len,
                shift_label: shape.layout == Layout::AnchorPredicts,
            };
            DominoHead::init(&config, device)
        });
        let (prefix_gru, embed_proj) = domino.map(|head| (head.prefix_gru, head.embed_proj)).unzip();
        Self {
            embed_tokens: Embedding::random(v, h, device),
            lm_head: linear(h, vd),
            fc: linear(shape.feature_layers.len() * h, h),
            hidden_norm: norm(),
            norm: norm(),
            layers: shape.rules.iter().map(|_| BlockLayer::init(shape, device)).collect(),
            markov_head: shape.markov.map(|m| MarkovHead::init(m.kind, v, vd, m.rank, h, device)),
            confidence_head: shape.confidence.then(|| ConfidenceHead::init(h + features, device)),
            candidate_selector: shape
                .selector
                .map(|s| CandidateSelector::init(v, vd, s.rank, h, s.top_k, device)),
            prefix_gru,
            embed_proj,
        }
    }

    /// The same model for decoding, see [`Linear::prepack`].
    #[must_use]
    pub fn prepack(self) -> Self {
        let storage = WeightStorage::Lossless;
        let pack = |l: Linear<B>| l.prepack(storage);
        let layer = |l: BlockLayer<B>| BlockLayer {
            self_attn: l.self_attn.prepack(storage),
            mlp: l.mlp.prepack(storage),
            ..l
        };
        Self {
            lm_head: pack(self.lm_head),
            fc: pack(self.fc),
            layers: self.layers.into_iter().map(layer).collect(),
            markov_head: self.markov_head.map(|head| head.prepack(storage)),
            embed_proj: self.embed_proj.map(|(first, silu, last)| (pack(first), silu, pack(last))),
            ..self
        }
    }

    /// Domino's head, whose parts lie side by side in files.
    pub(super) fn domino(&self, shape: &DSparkShape) -> Option<DominoHead<B>> {
        Some(DominoHead {
            prefix_gru: self.prefix_gru.clone()?,
            embed_proj: self.embed_proj.clone()?,
            suffix_start: shape.domino?.pure_draft_prefix_len + shape.layout.first(),
            shift_label: shape.layout == Layout::AnchorPredicts,
        })
    }

    /// Whether the parameter of this name is a copy of the target's that no one trains.
    pub fn frozen(name: &str) -> bool {
        matches!(name, "embed_tokens.weight" | "lm_head.weight")
    }
}
