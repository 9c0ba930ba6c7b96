//! How large a drafter of a configuration is, without building it: drafters are compared at equal size
//! (H-Spec section 4.3 matches its ablations within 5.2 %).

use super::{HSpecConfig, SeedMode, SubLayerKind};
use hspec_heads::MarkovKind;
use std::path::Path;

impl HSpecConfig {
    /// Number of parameters that training changes; embedding and output head are the target's. For a
    /// validated configuration.
    pub fn trainable_parameters(&self) -> usize {
        let extensions = self.extensions(Path::new("config.json")).unwrap_or_default();
        let layer = &self.transformer_layer_config;
        let h = layer.hidden_size;
        let convolution = extensions.block_conv.map_or(0, |c| {
            let taps = 2 * c.conv_kernel_size;
            taps * h + taps * (h / c.conv_group_size) * h
        });
        let sub_layer = |kind: &SubLayerKind| match kind {
            SubLayerKind::Mamba => h + self.mixer_parameters(),
            SubLayerKind::Attention => h + self.attention_parameters() + convolution,
            SubLayerKind::Mlp => h + 3 * h * layer.intermediate_size + convolution,
        };
        let sub_layers: usize = self.block_pattern.0.iter().map(sub_layer).sum();

        let (v, kept) = (layer.vocab_size, self.draft_vocab_size);
        let domino = extensions.domino.map_or(0, |d| {
            let g = d.gru_hidden_dim;
            3 * g * (h + g) + d.emb_dim * (h + g + kept)
        });
        let selector = extensions.candidate_selector.map_or(0, |s| s.selector_rank * (v + kept + h));
        let correction = self.markov_parameters() + domino + selector;
        let features = if self.confidence_head_with_markov { self.markov_rank } else { 0 };
        let confidence = if self.enable_confidence_head { h + features + 1 } else { 0 };
        h + self.seed_parameters() + sub_layers + correction + confidence
    }

    fn mixer_parameters(&self) -> usize {
        let m = self.mamba();
        let convolution = m.conv_dim() * (m.conv_kernel + 1);
        m.in_proj_dim() * m.hidden + convolution + 3 * m.num_heads + m.d_inner() * (1 + m.hidden)
    }

    fn attention_parameters(&self) -> usize {
        let layer = &self.transformer_layer_config;
        let (h, d) = (layer.hidden_size, self.head_dim());
        let norms = if self.use_qk_norm { 2 * d } else { 0 };
        2 * h * d * (layer.num_attention_heads + layer.num_key_value_heads) + norms
    }

    fn seed_parameters(&self) -> usize {
        if self.disable_mamba_init_state_injection {
            return 0;
        }
        let (h, fused) = (self.transformer_layer_config.hidden_size, self.latent_fusion_layer_ids.len());
        let projections = match self.mamba_seed_mode {
            SeedMode::PerLayer => self.mamba_layers(),
            SeedMode::Shared | SeedMode::Once => 1,
        };
        let norms = if self.fc_norm { fused + 1 } else { 1 };
        fused * h * h + norms * h + projections * h * self.mamba().d_inner() * self.mamba_d_state
    }

    fn markov_parameters(&self) -> usize {
        let (layer, r) = (&self.transformer_layer_config, self.markov_rank);
        let h = layer.hidden_size;
        let mixing = match self.markov_head_type.parse() {
            _ if r == 0 => 0,
            Ok(MarkovKind::Gated) => r * (h + r + 1),
            Ok(MarkovKind::Rnn) => 3 * r * (2 * r + h + 1),
            Ok(MarkovKind::Vanilla) | Err(_) => 0,
        };
        r * (layer.vocab_size + self.draft_vocab_size) + mixing
    }
}
