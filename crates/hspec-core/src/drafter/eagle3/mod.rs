//! EAGLE-3 (arXiv 2503.01840): a decoder layer that reads the target's features beside the next token.
//!
//! Pair `t` joins the target's features at position `t` with the token at `t + 1`, and predicts the token
//! at `t + 2`. With `x_t` that token's embedding and `g_t` the features:
//!
//! ```text
//! h_t   = fc(g_t)                                        only where the target has processed t
//! o_t   = layers([norm(x_t) ; norm(h_t)])                causal over the pairs before
//! token = lm_head(norm(o_t)),   h_{t+1} = o_t            from then on the drafter feeds itself
//! ```
//!
//! Training unrolls the same steps over all pairs at once ([`Eagle3::ttt`]); decoding keeps the keys and
//! values of the pairs of final tokens, and drops those of its own steps.

mod attention;
mod config;
mod convert;
mod deepspec;
mod io;
mod model;
mod session;
mod speculators;
mod stated;
#[cfg(test)]
mod testing;
mod ttt;

pub(super) use attention::Visible;
pub(super) use config::WORDS;
pub use config::{Eagle3Config, Eagle3Shape};
pub use deepspec::DeepSpecFile;
pub(super) use model::Heads;
pub use model::{Eagle3Layer, Eagle3Model, SelfAttention};
pub(super) use session::PairCache;
pub use speculators::SpeculatorsFile;
pub(super) use stated::state;
pub use ttt::{Context, Pairs, TttStep};

use super::{DraftVocab, Footprint, walk::ids};
use crate::TokenId;
use burn::tensor::{Tensor, backend::Backend};
use hspec_attn::Position;
use hspec_nn::params;
use model::Rotation;

/// A loaded or freshly initialised EAGLE-3 drafter; also the trunk of a P-EAGLE drafter.
#[derive(Debug, Clone)]
pub struct Eagle3<B: Backend> {
    /// Its configuration as the file states it.
    pub config: Eagle3Config,
    /// What that means.
    pub shape: Eagle3Shape,
    /// Its parameters.
    pub model: Eagle3Model<B>,
    /// Its vocabulary.
    pub vocab: DraftVocab,
}

impl<B: Backend> Eagle3<B> {
    /// Fuses the target's features: `[n, F * H] -> [n, H]`.
    pub fn fuse(&self, features: Tensor<B, 2>) -> Tensor<B, 2> {
        let normed = match &self.model.input_norm {
            Some(norm) => norm.forward(features),
            None => features,
        };
        let normed = if self.model.fc_norm.is_empty() {
            normed
        } else {
            let h = self.shape.hidden_size;
            let parts = self.model.fc_norm.iter().enumerate();
            Tensor::cat(parts.map(|(f, norm)| norm.forward(normed.clone().narrow(1, f * h, h))).collect(), 1)
        };
        self.model.fc.forward(normed)
    }

    /// Runs the layers over pairs of a token and a state `[n, H]` at their rotary positions: `[n, H]`,
    /// before the final norm. `attend` gets each layer's number and its queries, keys and values, and
    /// returns `[n, heads * head_dim]`.
    pub(super) fn run(
        &self,
        tokens: &[TokenId],
        states: Tensor<B, 2>,
        positions: &[usize],
        attend: &mut dyn FnMut(usize, Heads<B>) -> Tensor<B, 2>,
    ) -> Tensor<B, 2> {
        let (shape, device) = (&self.shape, states.device());
        let positions: Vec<Position> = positions.iter().copied().map(Position).collect();
        let rotation = Rotation {
            q: shape.rope.tables(&positions, shape.num_attention_heads, &device),
            k: shape.rope.tables(&positions, shape.num_key_value_heads, &device),
        };
        let embedded = self.model.embed_tokens.forward(ids(tokens, &device));
        let mut h = states;
        for (i, layer) in self.model.layers.iter().enumerate() {
            let (input, residual) = match &layer.hidden_norm {
                Some(norm) => {
                    let state = norm.forward(h.clone());
                    let token = layer.input_layernorm.forward(embedded.clone());
                    let residual = if shape.norm_before_residual { state.clone() } else { h };
                    (Tensor::cat(vec![token, state], 1), residual)
                }
                None => (layer.input_layernorm.forward(h.clone()), h),
            };
            let attended = attend(i, layer.self_attn.project(input, &rotation));
            let x = residual + layer.self_attn.o_proj.forward(attended);
            h = x.clone() + layer.mlp.forward(layer.post_attention_layernorm.forward(x));
        }
        h
    }

    /// From the layers' output `[n, H]`: logits over the draft vocabulary `[n, Vd]`, and the state that the
    /// next step starts from `[n, H]`.
    pub(super) fn emit(&self, out: Tensor<B, 2>) -> (Tensor<B, 2>, Tensor<B, 2>) {
        let normed = self.model.norm.forward(out.clone());
        let logits = self.model.lm_head.forward(normed.clone());
        (logits, if self.shape.norm_output { normed } else { out })
    }

    /// The target's token of each draft id, where the vocabulary is pruned.
    pub(super) fn pruned(&self) -> Option<&[TokenId]> {
        (self.vocab.len() < self.shape.vocab_size).then(|| self.vocab.targets())
    }

    /// What it weighs, and what a session of it keeps: keys and values of every final token in every layer,
    /// and the fused features of the tokens that became final since the last draft.
    pub(super) fn weigh(&self) -> Footprint {
        let shape = &self.shape;
        let size = |frozen: bool| {
            let all = params::list(&self.model).into_iter();
            all.filter(|p| shape.frozen(&p.name) == frozen).map(|p| p.shape.iter().product::<usize>()).sum()
        };
        let per_layer = 2 * shape.num_key_value_heads * shape.head_dim;
        Footprint {
            params_trainable: size(false),
            params_frozen: size(true),
            kv_bytes_per_token: shape.num_hidden_layers * per_layer * size_of::<f32>(),
            state_bytes: (shape.max_draft + 2) * shape.hidden_size * size_of::<f32>(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Distribution;
    use std::path::Path;
    type B = burn_ndarray::NdArray;

    fn drafter(flags: &[&str]) -> Eagle3<B> {
        let (file, device) = (Path::new("c"), Default::default());
        let mut config = testing::speculators();
        config["norm_before_residual"] = false.into();
        for flag in flags {
            config[*flag] = true.into();
        }
        let config = Eagle3Config::from_value(&config, file).unwrap();
        let shape = config.shape(None, file).unwrap();
        let mut model = Eagle3Model::init(&shape, &device);
        for norm in model.input_norm.iter_mut().chain(&mut model.fc_norm).chain([&mut model.norm]) {
            let n = norm.weight.dims()[0];
            *norm = hspec_nn::RmsNorm::new(
                Tensor::random([n], Distribution::Uniform(0.5, 2.0), &device),
                norm.eps,
            );
        }
        Eagle3 { config, vocab: DraftVocab::full(shape.vocab_size), shape, model }
    }

    fn same<const D: usize>(a: Tensor<B, D>, b: Tensor<B, D>) -> bool {
        a.into_data().iter::<f32>().zip(b.into_data().iter::<f32>()).all(|(a, b)| (a - b).abs() < 1e-5)
    }

    /// `norm_before_fc` once stayed unread, and `fc_norm` was loaded and never applied.
    #[test]
    fn configured_norms_of_the_features_are_applied() {
        let x = Tensor::<B, 2>::random([3, 24], Distribution::Normal(0.0, 5.0), &Default::default());
        let plain = drafter(&[]);
        assert!(same(plain.fuse(x.clone()), plain.model.fc.forward(x.clone())));
        let whole = drafter(&["norm_before_fc"]);
        let normed = whole.model.input_norm.as_ref().unwrap().forward(x.clone());
        assert!(same(whole.fuse(x.clone()), whole.model.fc.forward(normed)));
        let each = drafter(&["fc_norm"]);
        let part = |f: usize| each.model.fc_norm[f].forward(x.clone().narrow(1, 8 * f, 8));
        let normed = Tensor::cat((0..3).map(part).collect(), 1);
        assert!(same(each.fuse(x.clone()), each.model.fc.forward(normed)));
    }

    /// The head always reads the normed output; whether the next step does was once mixed up with it.
    #[test]
    fn the_head_reads_the_norm_whatever_the_next_step_reads() {
        let x = Tensor::<B, 2>::random([3, 8], Distribution::Normal(0.0, 5.0), &Default::default());
        for (drafter, normed) in [(drafter(&[]), false), (drafter(&["norm_output"]), true)] {
            let after = drafter.model.norm.forward(x.clone());
            let (logits, state) = drafter.emit(x.clone());
            assert!(same(logits, drafter.model.lm_head.forward(after.clone())));
            assert!(same(state, if normed { after } else { x.clone() }));
        }
    }

    #[test]
    fn the_footprint_counts_two_vectors_per_layer_head_and_token() {
        let footprint = drafter(&[]).weigh();
        assert_eq!(footprint.kv_bytes_per_token, 2 * 2 * 4 * 4);
        assert_eq!(footprint.state_bytes, 5 * 8 * 4);
        assert_eq!(footprint.params_frozen, 2 * 16 * 8);
        // fc; q, k, v, o; head norms; feed-forward; four norms of width 8.
        let trained = 24 * 8 + (16 + 8 + 8) * 16 + 8 * 16 + 2 * 4 + 3 * 8 * 12 + 4 * 8;
        assert_eq!(footprint.params_trainable, trained);
    }
}
