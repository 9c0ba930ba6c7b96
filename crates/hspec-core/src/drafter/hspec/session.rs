//! H-Spec at work on a request: all it remembers is the target's hidden states at one position.

use super::{Blocks, HSpec, HSpecModel};
use crate::{
    Error, Result, TokenId,
    drafter::{
        Drafter, Footprint, Proposal, Session,
        walk::{Slots, ids, walk},
    },
};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use hspec_attn::{Anchor, KvCache, Prefix};
use hspec_nn::params;

impl<B: Backend> Drafter<B> for HSpec<B> {
    fn kind(&self) -> &'static str {
        "hspec"
    }

    fn max_draft(&self) -> usize {
        self.config.block_size - 1
    }

    fn feature_layers(&self) -> &[usize] {
        &self.fusion
    }

    fn vocabulary(&self) -> Option<&[TokenId]> {
        let pruned = self.vocab.len() < self.config.transformer_layer_config.vocab_size;
        pruned.then(|| self.vocab.targets())
    }

    fn footprint(&self) -> Footprint {
        let size = |frozen: bool| {
            let all = params::list(&self.model).into_iter();
            all.filter(|p| HSpecModel::<B>::frozen(&p.name) == frozen)
                .map(|p| p.shape.iter().product::<usize>())
                .sum()
        };
        let seed = self.fusion.len() * self.config.transformer_layer_config.hidden_size;
        Footprint {
            params_trainable: size(false),
            params_frozen: size(true),
            kv_bytes_per_token: 0,
            state_bytes: seed * size_of::<f32>(),
        }
    }

    fn session(&self, _capacity: usize) -> Box<dyn Session<B> + '_> {
        Box::new(HSpecSession { drafter: self, seed: None })
    }
}

struct HSpecSession<'a, B: Backend> {
    drafter: &'a HSpec<B>,
    /// Fused hidden states of the last processed token: `[1, F * H]`.
    seed: Option<Tensor<B, 2>>,
}

impl<B: Backend> Session<B> for HSpecSession<'_, B> {
    fn observe(&mut self, _tokens: &[TokenId], features: Tensor<B, 2>) {
        let (rows, device) = (features.dims()[0], features.device());
        if let Some(last) = rows.checked_sub(1) {
            // A copy: a view would keep the rows of the whole prompt.
            let last = Tensor::from_data(TensorData::new(vec![last as i64], [1]), &device);
            self.seed = Some(features.select(0, last));
        }
    }

    fn draft(
        &mut self,
        anchor: TokenId,
        cache: &KvCache<B>,
        k: usize,
        pick: &mut dyn FnMut(usize, &[f32]) -> Result<TokenId>,
    ) -> Result<Proposal> {
        let drafter = self.drafter;
        let seed = self.seed.clone().ok_or_else(Error::nothing_observed)?;
        let device = seed.device();
        let prefixes: Vec<Prefix<B>> =
            drafter.config.attn_kv_layer_ids.iter().map(|&layer| cache.lend(layer)).collect();
        let blocks = Blocks {
            anchors: &[Anchor::at(cache.len())],
            tokens: &[anchor],
            seeds: seed,
            prefixes: &prefixes,
            slots: k + 1,
        };
        let (hidden, predicting, base) = hspec_nn::pass::<B, _>(|| {
            let hidden = drafter.forward(&blocks);
            // Slot 0 is the anchor itself: its logits are never needed.
            let predicting = hidden.clone().narrow(1, 1, k);
            let base = drafter.base_logits(predicting.clone());
            (hidden, predicting, base)
        });
        let slots = Slots { base, hidden: predicting.clone() };
        let correction = drafter.correction();
        let first = hidden.narrow(1, 0, 1).squeeze_dim::<2>(1);
        let correct = correction.as_ref().map(|correction| correction.steps(anchor, Some(first), &device));
        let tokens = walk(slots, anchor, correct, pick)?;
        let previous = ids(&[&[anchor], &tokens[..k - 1]].concat(), &device).reshape([1, k]);
        let confidence = drafter.confidence_logits(predicting, previous);
        Ok(Proposal {
            tokens,
            confidence: confidence.map_or_else(Vec::new, |c| c.into_data().iter::<f32>().collect()),
        })
    }
}
