//! What a DFlash or DSpark drafter looks like, whichever layout states it.

use super::Layout;
use crate::{
    Error, Result, TokenId,
    config::{LayerConfig, MOST_ELEMENTS, MOST_SLOTS, RopeParameters, TargetConfig},
};
use hspec_attn::{BlockRule, Rope, WindowRule};
use hspec_heads::MarkovKind;
use std::path::Path;

/// Which of the drafters of this family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The backbone alone.
    DFlash,
    /// With a Markov or a confidence head.
    DSpark,
    /// With convolutions over the block and a candidate selector.
    DFlash2,
    /// With a recurrence over the block's tokens (arXiv 2605.29707).
    Domino,
}

impl Kind {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::DFlash => "dflash",
            Self::DSpark => "dspark",
            Self::DFlash2 => "dflash2",
            Self::Domino => "domino",
        }
    }
}

/// A Markov head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MarkovShape {
    /// Which of the three.
    pub kind: MarkovKind,
    /// Width of the token features.
    pub rank: usize,
}

/// DFlash-2's convolutions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvShape {
    /// Slots that the kernel covers.
    pub taps: usize,
    /// Channels that share the dynamic part of the kernel.
    pub group_size: usize,
}

/// DFlash-2's candidate selector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectorShape {
    /// Width of the codebooks.
    pub rank: usize,
    /// Candidates per slot.
    pub top_k: usize,
}

/// Domino's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DominoShape {
    /// Width between its two projections.
    pub emb_dim: usize,
    /// Width of its recurrent state.
    pub gru_hidden_dim: usize,
    /// Slots that predict and keep their base logits.
    pub pure_draft_prefix_len: usize,
}

/// The sizes and rules of a drafter, with layer ids in this crate's terms.
#[derive(Debug, Clone, PartialEq)]
pub struct DSparkShape {
    /// What it is.
    pub kind: Kind,
    /// Width of the residual stream, H; the target's.
    pub hidden_size: usize,
    /// Width of the feed-forward blocks.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key-value heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Added to mean squares.
    pub rms_norm_eps: f64,
    /// Whether the attention projections have biases.
    pub attention_bias: bool,
    /// Rotary frequencies.
    pub rope: Rope,
    /// Visibility, per layer.
    pub rules: Vec<BlockRule>,
    /// The target's vocabulary, V.
    pub vocab_size: usize,
    /// The drafter's, Vd.
    pub draft_vocab_size: usize,
    /// Slots of a block, the anchor's included.
    pub block_size: usize,
    /// Stands for a token that is not known yet.
    pub mask_token: TokenId,
    /// Where slots point.
    pub layout: Layout,
    /// Hidden ids of the target that are fused, ascending: the residual streams *entering* these layers.
    pub feature_layers: Vec<usize>,
    /// Layers of the target, where the file says.
    pub target_layers: Option<usize>,
    /// Corrects logits by the token before.
    pub markov: Option<MarkovShape>,
    /// Whether it predicts acceptance.
    pub confidence: bool,
    /// Whether that prediction reads the Markov head's token features.
    pub confidence_with_markov: bool,
    /// Factor of the block's embeddings.
    pub embedding_scale: f64,
    /// Factor of the head's logits, before the cap.
    pub output_multiplier: f64,
    /// Logits are `c tanh(logits / c)`.
    pub softcap: Option<f64>,
    /// Convolutions around every sub-layer.
    pub conv: Option<ConvShape>,
    /// Chooses among the best tokens of a slot.
    pub selector: Option<SelectorShape>,
    /// Corrects logits by all tokens before.
    pub domino: Option<DominoShape>,
}

impl DSparkShape {
    /// What all layouts say in the same words. `at` is the place of `layer` in its file, empty or ending in
    /// a dot; windowed layers follow `rule` and are causal inside a block, all layers if `causal` says so.
    /// The rest is that of a DFlash drafter without slots and features.
    pub(super) fn from_layer(
        layer: &LayerConfig,
        at: &str,
        rule: WindowRule,
        causal: Option<bool>,
        file: &Path,
    ) -> Result<Self> {
        let layers = layer.num_hidden_layers;
        let flag = |field: &str| match layer.extra.get(field) {
            None | Some(serde_json::Value::Null) => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| {
                Error::invalid(file, format!("{at}{field}"), value.to_string(), "true or false")
            }),
        };
        if !(1..=MOST_SLOTS).contains(&layers) {
            let expected = format!("1 to {MOST_SLOTS} layers");
            return Err(Error::invalid(file, format!("{at}num_hidden_layers"), layers.to_string(), expected));
        }
        layer.validate(at, layers, file)?;
        let head_dim = layer.head_dim();
        let rope = RopeParameters::from_config(&layer.extra, file)?;
        let rules = (0..layers).map(|i| layer.window(i)).map(|window| BlockRule {
            window,
            rule,
            causal: causal.unwrap_or(window.is_some()),
        });
        Ok(Self {
            kind: Kind::DFlash,
            hidden_size: layer.hidden_size,
            intermediate_size: layer.intermediate_size,
            num_attention_heads: layer.num_attention_heads,
            num_key_value_heads: layer.num_key_value_heads,
            head_dim,
            rms_norm_eps: layer.rms_norm_eps,
            attention_bias: flag("attention_bias")?,
            rope: rope.rope(head_dim, layer.partial_rotary_factor(), file)?,
            rules: rules.collect(),
            vocab_size: layer.vocab_size,
            draft_vocab_size: layer.vocab_size,
            block_size: 0,
            mask_token: TokenId(0),
            layout: Layout::SlotPredictsItself,
            feature_layers: Vec::new(),
            target_layers: None,
            markov: None,
            confidence: false,
            confidence_with_markov: false,
            embedding_scale: 1.0,
            output_multiplier: 1.0,
            softcap: None,
            conv: None,
            selector: None,
            domino: None,
        })
    }

    /// Refuses what cannot be right, and sizes that ask for more memory than any drafter has.
    pub(super) fn validate(&self, file: &Path) -> Result<()> {
        let refuse =
            |field: &str, found: String, expected: String| Err(Error::invalid(file, field, found, expected));
        let (h, v, vd) = (self.hidden_size, self.vocab_size, self.draft_vocab_size);
        let least = self.layout.first() + 1;
        if !(least..=MOST_SLOTS).contains(&self.block_size) {
            return refuse("block_size", self.block_size.to_string(), format!("{least} to {MOST_SLOTS}"));
        }
        if self.mask_token.index() >= v {
            return refuse("mask_token_id", self.mask_token.0.to_string(), format!("below {v}"));
        }
        if !(1..=v).contains(&vd) {
            return refuse("draft_vocab_size", vd.to_string(), format!("1 to {v}"));
        }
        // Their order is that of the features that fc reads.
        let layers = &self.feature_layers;
        if layers.is_empty() || layers.windows(2).any(|w| w[0] >= w[1]) {
            let found = format!("{layers:?} as layers entered");
            return refuse("the layer ids of the features", found, "ids in ascending order".into());
        }
        if self.confidence && self.confidence_with_markov && self.markov.is_none() {
            return refuse("markov_rank", "0".into(), "above 0 with confidence_head_with_markov".into());
        }
        if let Some(ConvShape { taps, group_size }) = self.conv {
            if !(1..=self.block_size).contains(&taps) {
                return refuse("conv_kernel_size", taps.to_string(), format!("1 to {}", self.block_size));
            }
            if group_size == 0 || !h.is_multiple_of(group_size) {
                return refuse("conv_group_size", group_size.to_string(), format!("a divisor of {h}"));
            }
        }
        if let Some(SelectorShape { rank, top_k }) = self.selector {
            for (field, n, most) in
                [("selector_rank", rank, MOST_ELEMENTS / v), ("selector_top_k", top_k, vd)]
            {
                if !(1..=most).contains(&n) {
                    return refuse(field, n.to_string(), format!("1 to {most}"));
                }
            }
        }
        if let Some(domino) = self.domino {
            if domino.emb_dim == 0 || domino.gru_hidden_dim == 0 {
                return refuse("emb_dim and gru_hidden_dim", format!("{domino:?}"), "positive sizes".into());
            }
            let (prefix, most) = (domino.pure_draft_prefix_len, self.max_draft() - 1);
            if prefix > most {
                let expected = format!("at most {most}, so that a slot is corrected");
                return refuse("pure_draft_prefix_len", prefix.to_string(), expected);
            }
        }
        let scales = [("output_multiplier", self.output_multiplier), ("final_logit_softcapping", self.cap())];
        if let Some((field, x)) = scales.into_iter().find(|(_, x)| !(x.is_finite() && *x > 0.0)) {
            return refuse(field, x.to_string(), "a positive number".into());
        }
        for (field, rows, columns) in [
            ("vocab_size", v, h),
            ("intermediate_size", self.intermediate_size, h),
            ("num_attention_heads", self.num_attention_heads.saturating_mul(self.head_dim), h),
            ("the layer ids of the features", layers.len().saturating_mul(h), h),
            ("markov_rank", v, self.markov.map_or(0, |m| m.rank)),
            ("emb_dim", vd, self.domino.map_or(0, |d| d.emb_dim)),
            ("gru_hidden_dim", self.domino.map_or(0, |d| d.gru_hidden_dim.saturating_mul(3)), h),
        ] {
            if rows.checked_mul(columns).is_none_or(|n| n > MOST_ELEMENTS) {
                let found = format!("a matrix of {rows} x {columns}");
                return refuse(field, found, format!("at most {MOST_ELEMENTS} elements"));
            }
        }
        Ok(())
    }

    fn cap(&self) -> f64 {
        self.softcap.unwrap_or(1.0)
    }

    /// Most tokens of a draft.
    pub fn max_draft(&self) -> usize {
        self.block_size - self.layout.first()
    }

    /// Whether it can draft for a target.
    ///
    /// # Errors
    /// [`Error::Mismatch`] naming the first size that differs.
    pub fn check_target(&self, target: &TargetConfig) -> Result<()> {
        let other =
            |what: String| Err(Error::Mismatch(format!("the drafter was made for another target: {what}")));
        for (what, ours, theirs) in [
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
        ] {
            if ours != theirs {
                return other(format!("its {what} is {ours}, the target's is {theirs}"));
            }
        }
        let layers = target.num_hidden_layers;
        if let Some(stated) = self.target_layers.filter(|&stated| stated != layers) {
            return other(format!("its num_target_layers is {stated}, the target has {layers}"));
        }
        match self.feature_layers.last().filter(|&&last| last >= layers) {
            Some(last) => other(format!(
                "it reads what enters layer {last}, and the target has {layers} layers, from 0"
            )),
            None => Ok(()),
        }
    }
}
