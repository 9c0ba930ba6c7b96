//! DFlash-2's candidate selector.

use crate::INIT_STD;
use burn::{
    module::{Module, Param, ParamId},
    tensor::{Distribution, IndexingUpdateOp, Int, Tensor, TensorData, backend::Backend},
};
use hspec_nn::Linear;

/// Chooses among the best few tokens of every slot by how well they follow the token before (DFlash-2):
///
/// ```text
/// score_t(b) = logit_t(b) + ⟨A[prev_t] ⊙ W_h hidden_t, B[b]⟩    for the top_k tokens b of slot t
/// ```
///
/// The path is walked from left to right along the tokens really chosen, so a drafted token's law is the
/// softmax of its slot's scores. `prev` is an id of the target's vocabulary; `b` one of the draft's.
/// Field paths are the tensor names of released drafters.
#[derive(Module, Debug)]
pub struct CandidateSelector<B: Backend> {
    /// `A: [target vocabulary, rank]`.
    pub predecessor_codebook: Param<Tensor<B, 2>>,
    /// `B: [draft vocabulary, rank]`.
    pub successor_codebook: Param<Tensor<B, 2>>,
    /// `W_h: [rank, hidden]`.
    pub hidden_projection: Linear<B>,
    /// Candidates per slot; all tokens if the draft vocabulary has fewer.
    pub top_k: usize,
}

/// The candidates of every slot, best logit first, equal logits by ascending id.
#[derive(Debug, Clone)]
pub struct Candidates<B: Backend> {
    /// Draft ids, `[n, k, top_k]`.
    pub ids: Tensor<B, 3, Int>,
    /// Their scores, `[n, k, top_k]`.
    pub scores: Tensor<B, 3>,
}

impl<B: Backend> CandidateSelector<B> {
    /// Fresh weights: `A` and `W_h` from `N(0, 0.02)`, `B` zero, so that scores start as the logits.
    /// Sizes must be at least 1.
    pub fn init(
        vocab: usize,
        draft_vocab: usize,
        rank: usize,
        hidden: usize,
        top_k: usize,
        device: &B::Device,
    ) -> Self {
        let predecessors = Tensor::random([vocab, rank], Distribution::Normal(0.0, INIT_STD), device);
        Self {
            predecessor_codebook: Param::initialized(ParamId::new(), predecessors),
            successor_codebook: Param::initialized(
                ParamId::new(),
                Tensor::zeros([draft_vocab, rank], device),
            ),
            hidden_projection: Linear::random(hidden, rank, false, INIT_STD, device),
            top_k,
        }
    }

    /// Candidates and scores of whole blocks whose previous tokens are known: logits `[n, k, v]`, previous
    /// tokens `[n, k]`, hidden states `[n, k, h]`.
    pub fn block(
        &self,
        logits: Tensor<B, 3>,
        prev: Tensor<B, 2, Int>,
        hidden: Tensor<B, 3>,
    ) -> Candidates<B> {
        let ([n, k, v], h) = (logits.dims(), hidden.dims()[2]);
        let logits = logits.reshape([n * k, v]);
        let ids = self.best(&logits);
        let edges = self.edges(ids.clone(), prev.reshape([n * k]), hidden.reshape([n * k, h]));
        let top = ids.dims()[1];
        let scores = (logits.gather(1, ids.clone()) + edges).reshape([n, k, top]);
        Candidates { ids: ids.reshape([n, k, top]), scores }
    }

    /// The logits of whole blocks with the candidates' scores in place of their logits, and the other
    /// tokens' as they are: `[n, k, v]`. Finite, so that any loss over the vocabulary trains backbone and
    /// selector together; [`CandidateSelector::step`] draws from the candidates alone.
    pub fn rescore(
        &self,
        logits: Tensor<B, 3>,
        prev: Tensor<B, 2, Int>,
        hidden: Tensor<B, 3>,
    ) -> Tensor<B, 3> {
        let ([n, k, v], h) = (logits.dims(), hidden.dims()[2]);
        let logits = logits.reshape([n * k, v]);
        let ids = self.best(&logits);
        let edges = self.edges(ids.clone(), prev.reshape([n * k]), hidden.reshape([n * k, h]));
        logits.scatter(1, ids, edges, IndexingUpdateOp::Add).reshape([n, k, v])
    }

    /// The scores of the next slot as logits over the whole draft vocabulary, -inf outside the candidates:
    /// logits `[n, v]`, previous tokens `[n]`, hidden states `[n, h]` to `[n, v]`. Their softmax, at
    /// whatever temperature, is the law to draw from and to verify with.
    pub fn step(&self, logits: Tensor<B, 2>, prev: Tensor<B, 1, Int>, hidden: Tensor<B, 2>) -> Tensor<B, 2> {
        let ids = self.best(&logits);
        let scores = logits.clone().gather(1, ids.clone()) + self.edges(ids.clone(), prev, hidden);
        let zeros = logits.zeros_like();
        let candidates = zeros.clone().scatter(1, ids.clone(), scores.ones_like(), IndexingUpdateOp::Add);
        let scores = zeros.scatter(1, ids, scores, IndexingUpdateOp::Add);
        scores.mask_fill(candidates.equal_elem(0.0), f32::NEG_INFINITY)
    }

    /// `⟨A[prev] ⊙ W_h hidden, B[id]⟩`: `[m, top_k]`, `[m]`, `[m, h]` to `[m, top_k]`.
    fn edges(&self, ids: Tensor<B, 2, Int>, prev: Tensor<B, 1, Int>, hidden: Tensor<B, 2>) -> Tensor<B, 2> {
        let [m, top] = ids.dims();
        let query = self.predecessor_codebook.val().select(0, prev) * self.hidden_projection.forward(hidden);
        let rank = query.dims()[1];
        let successors = self.successor_codebook.val().select(0, ids.reshape([m * top]));
        successors.reshape([m, top, rank]).matmul(query.reshape([m, rank, 1])).reshape([m, top])
    }

    /// The ids of the best logits, `[m, v] -> [m, top_k]`. Chosen on the host: Burn does not say which of
    /// two equal values comes first, and what may be drafted must not depend on the backend.
    fn best(&self, logits: &Tensor<B, 2>) -> Tensor<B, 2, Int> {
        let [m, v] = logits.dims();
        let top = self.top_k.min(v);
        let values: Vec<f32> = logits.clone().detach().into_data().iter::<f32>().collect();
        let mut best = Vec::with_capacity(m * top);
        let mut order: Vec<usize> = Vec::with_capacity(v);
        for row in values.chunks(v) {
            // Adding 0 makes one zero of the two, which the total order would tell apart.
            let descending =
                |a: &usize, b: &usize| (row[*b] + 0.0).total_cmp(&(row[*a] + 0.0)).then(a.cmp(b));
            order.clear();
            order.extend(0..v);
            if top < v {
                order.select_nth_unstable_by(top, descending);
            }
            order[..top].sort_unstable_by(descending);
            best.extend(order[..top].iter().map(|&id| id as i64));
        }
        Tensor::from_data(TensorData::new(best, [m, top]), &logits.device())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    type B = burn_ndarray::NdArray;

    #[test]
    fn tensor_names_and_shapes_are_those_of_released_drafters() {
        let selector = CandidateSelector::<B>::init(9, 5, 2, 3, 4, &Default::default());
        let found: Vec<_> =
            hspec_nn::params::list(&selector).into_iter().map(|p| (p.name, p.shape)).collect();
        let expected = [
            ("predecessor_codebook", vec![9, 2]),
            ("successor_codebook", vec![5, 2]),
            ("hidden_projection.weight", vec![2, 3]),
        ];
        assert_eq!(found, expected.map(|(name, shape)| (name.to_owned(), shape)));
    }

    #[test]
    fn equal_logits_are_candidates_by_ascending_id() {
        let selector = CandidateSelector::<B>::init(6, 6, 1, 1, 3, &Default::default());
        let logits = Tensor::from_floats([[-0.0, 2.0, 0.0, 2.0, 0.0, -1.0]], &Default::default());
        let best: Vec<i64> = selector.best(&logits).into_data().iter::<i64>().collect();
        assert_eq!(best, [1, 3, 0]);
    }
}
