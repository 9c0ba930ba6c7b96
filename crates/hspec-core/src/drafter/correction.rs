//! What restores the order inside a block: a Markov head (H-Spec and DSpark as released), or Domino's or
//! DFlash-2's, which H-Spec proposes to put in its place.

use super::{
    HSpec,
    walk::{Correct, additive},
};
use crate::TokenId;
use burn::tensor::{Int, Tensor, backend::Backend};
use hspec_heads::{CandidateSelector, CausalCorrection, Domino, MarkovHead, MarkovKind};

/// A drafter's correction; a configuration allows at most one.
pub(super) enum Correction<'a, B: Backend> {
    Markov(&'a MarkovHead<B>),
    Domino(Domino<'a, B>),
    Selector(&'a CandidateSelector<B>),
}

impl<B: Backend> HSpec<B> {
    pub(super) fn correction(&self) -> Option<Correction<'_, B>> {
        let model = &self.model;
        if let Some(head) = &model.markov_head {
            Some(Correction::Markov(head))
        } else if let Some(head) = &model.domino_head {
            Some(Correction::Domino(head.over(model.embed_tokens.weight.val())))
        } else {
            model.candidate_selector.as_ref().map(Correction::Selector)
        }
    }
}

impl<B: Backend> Correction<'_, B> {
    /// Logits `[n, slots, Vd]` with the correction for known previous tokens, finite wherever the base is:
    /// a selector's candidates get their scores, and the other tokens keep their logits.
    pub(super) fn block(
        &self,
        base: Tensor<B, 3>,
        previous: Tensor<B, 2, Int>,
        hidden: Tensor<B, 3>,
    ) -> Tensor<B, 3> {
        match self {
            Self::Markov(head) => base + head.block(previous, hidden),
            Self::Domino(head) => base + head.block(previous, hidden),
            Self::Selector(selector) => selector.rescore(base, previous, hidden),
        }
    }

    /// The same slot by slot, in order; a selector then excludes all tokens but its candidates. `leading` is
    /// the hidden state `[1, H]` of the anchor's slot where that slot predicts nothing.
    pub(super) fn steps(
        &self,
        anchor: TokenId,
        leading: Option<Tensor<B, 2>>,
        device: &B::Device,
    ) -> Correct<'_, B> {
        match self {
            // The recurrent heads first step over a slot that predicts nothing.
            Self::Markov(head) => {
                let leading = leading.filter(|_| head.kind() == MarkovKind::Rnn);
                additive(*head, anchor, leading, device)
            }
            Self::Domino(head) => additive(head, anchor, leading, device),
            Self::Selector(selector) => {
                Box::new(|base, previous, hidden| selector.step(base, previous, hidden))
            }
        }
    }
}
