//! DFlash and DSpark at work on a request: keys and values of every final token.

use super::{DSpark, DSparkModel};
use crate::{
    Error, Result, TokenId,
    drafter::{
        Drafter, Footprint, Proposal, Session,
        walk::{Slots, ids, walk},
    },
};
use burn::tensor::{Tensor, backend::Backend};
use hspec_attn::{Anchor, KvCache};
use hspec_nn::params;

impl<B: Backend> Drafter<B> for DSpark<B> {
    fn kind(&self) -> &'static str {
        self.shape.kind.name()
    }

    fn max_draft(&self) -> usize {
        self.shape.max_draft()
    }

    fn feature_layers(&self) -> &[usize] {
        &self.shape.feature_layers
    }

    fn vocabulary(&self) -> Option<&[TokenId]> {
        (self.vocab.len() < self.shape.vocab_size).then(|| self.vocab.targets())
    }

    fn footprint(&self) -> Footprint {
        let size = |frozen: bool| {
            let all = params::list(&self.model).into_iter();
            all.filter(|p| DSparkModel::<B>::frozen(&p.name) == frozen)
                .map(|p| p.shape.iter().product::<usize>())
                .sum()
        };
        let entry = self.shape.num_key_value_heads * self.shape.head_dim;
        Footprint {
            params_trainable: size(false),
            params_frozen: size(true),
            kv_bytes_per_token: 2 * self.shape.rules.len() * entry * size_of::<f32>(),
            state_bytes: 0,
        }
    }

    fn session(&self, capacity: usize) -> Box<dyn Session<B> + '_> {
        Box::new(self.start(capacity))
    }
}

/// What the drafter remembers of a request: per layer, keys and values of the final tokens' context vectors.
#[derive(Debug)]
pub struct DSparkSession<'a, B: Backend> {
    drafter: &'a DSpark<B>,
    context: KvCache<B>,
}

impl<B: Backend> DSpark<B> {
    /// A session of a request of at most `capacity` tokens.
    pub fn start(&self, capacity: usize) -> DSparkSession<'_, B> {
        let (s, device) = (&self.shape, self.model.norm.weight.device());
        let context = KvCache::new(s.rules.len(), 1, s.num_key_value_heads, capacity, s.head_dim, &device);
        DSparkSession { drafter: self, context }
    }
}

impl<B: Backend> DSparkSession<'_, B> {
    /// The cached keys and values.
    pub fn context(&self) -> &KvCache<B> {
        &self.context
    }

    /// The hidden states of the block behind the context: `[1, block_size, H]`. All slots always run, as
    /// they see each other.
    fn block(&self, anchor: TokenId) -> Tensor<B, 3> {
        let layers = 0..self.drafter.shape.rules.len();
        let prefixes: Vec<_> = layers.map(|layer| self.context.lend(layer)).collect();
        self.drafter.forward(&[Anchor::at(self.context.len())], &[anchor], &prefixes)
    }
}

impl<B: Backend> Session<B> for DSparkSession<'_, B> {
    fn observe(&mut self, tokens: &[TokenId], features: Tensor<B, 2>) {
        let (from, n) = (self.context.len(), tokens.len());
        let fused = self.drafter.fuse(features);
        let positions: Vec<usize> = (from..from + n).collect();
        for (layer, (keys, values)) in self.drafter.context(&fused, &positions).into_iter().enumerate() {
            self.context.write(layer, keys.unsqueeze(), values.unsqueeze());
        }
        self.context.advance(n);
    }

    fn draft(
        &mut self,
        anchor: TokenId,
        cache: &KvCache<B>,
        k: usize,
        pick: &mut dyn FnMut(usize, &[f32]) -> Result<TokenId>,
    ) -> Result<Proposal> {
        if self.context.is_empty() {
            return Err(Error::nothing_observed());
        }
        debug_assert_eq!(self.context.len(), cache.len(), "all that is final has been observed");
        let (drafter, model, layout) = (self.drafter, &self.drafter.model, self.drafter.shape.layout);
        let k = k.min(drafter.shape.max_draft());
        let (hidden, predicting, base) = hspec_nn::pass::<B, _>(|| {
            let hidden = self.block(anchor);
            let predicting = hidden.clone().narrow(1, layout.first(), k);
            let base = drafter.base_logits(predicting.clone());
            (hidden, predicting, base)
        });
        let device = hidden.device();
        let slots = Slots { base, hidden: predicting.clone() };

        let domino = model.domino(&drafter.shape);
        let correction = drafter.correction(domino.as_ref());
        let leading = (layout.first() > 0).then(|| hidden.narrow(1, 0, 1).squeeze_dim::<2>(1));
        let correct = correction.as_ref().map(|correction| correction.steps(anchor, leading, &device));
        let tokens = walk(slots, anchor, correct, pick)?;
        let previous = ids(&[&[anchor], &tokens[..k - 1]].concat(), &device).reshape([1, k]);
        let confidence = drafter.confidence_logits(predicting, previous);
        Ok(Proposal {
            tokens,
            confidence: confidence.map_or_else(Vec::new, |c| c.into_data().iter::<f32>().collect()),
        })
    }
}
