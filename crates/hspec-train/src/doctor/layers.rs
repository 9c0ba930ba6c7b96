//! Whether other layers of the target would suit a drafter better than those that it reads: ids that are off by
//! one, as conventions differ, leave a file that nothing else gives away.

use super::{
    check::Told,
    forward::{FirstSlots, Learning, acceptance},
};
use crate::{features::Reads, kinds::Learner, pack::Packed, responses::Response};
use burn::tensor::{
    Tensor,
    backend::{AutodiffBackend, Backend},
};
use hspec_core::{
    Result, TokenId,
    target::{KvCache, Rows, Target, Want},
};

/// Texts that are tried.
const DOCUMENTS: usize = 3;
/// Acceptance that other layers must gain, and in standard errors over blocks.
const GAIN: f64 = 0.01;
const ERRORS: f64 = 4.0;

/// Tries neighbours of the layers.
pub(super) fn check<A: AutodiffBackend, L: Learner<A>>(
    learning: &Learning<'_, A, L>,
    documents: &[Response],
    told: &mut Told<'_>,
) {
    let name = "layers that suit it";
    let reads = &learning.reads;
    let all: Vec<Reads> = std::iter::once(reads.clone())
        .chain(neighbours(reads, learning.target.config().num_hidden_layers))
        .collect();
    let tried = match tried(learning, documents, &all) {
        Ok(tried) => tried,
        Err(error) => return told.holds(name, false, error.to_string(), "a pass over the text"),
    };
    let Some((own, others)) = tried.split_first().filter(|(own, _)| own.accepted.len() > 1) else {
        return told.skip(name, "no text is long enough to draft in");
    };
    let text = |reads: &Reads| format!("hidden {:?}, key-value {:?}", reads.hidden, reads.kv);
    let best = others.iter().zip(&all[1..]).max_by(|a, b| a.0.mean().total_cmp(&b.0.mean()));
    let Some((other, best)) = best else {
        return told.skip(name, "they have no neighbours");
    };
    // One that has not learned anything is right by chance, with whatever layers.
    let learned = other.first.share() > other.first.chance();
    let found = format!("acceptance {:.3} of {} in {} blocks", own.mean(), text(reads), own.accepted.len());
    let expected =
        format!("no less than {:.3}, the best of {} neighbours: {}", other.mean(), others.len(), text(best));
    told.holds(name, !(learned && gains(&own.accepted, &other.accepted)), found, expected);
}

/// What a drafter makes of some layers.
#[derive(Default, Clone)]
struct Tried {
    /// The mean probability of acceptance of every block.
    accepted: Vec<f64>,
    first: FirstSlots,
}

impl Tried {
    fn mean(&self) -> f64 {
        mean(&self.accepted)
    }
}

/// Each choice of layers on the same blocks.
fn tried<A: AutodiffBackend, L: Learner<A>>(
    learning: &Learning<'_, A, L>,
    documents: &[Response],
    all: &[Reads],
) -> Result<Vec<Tried>> {
    let mut tried = vec![Tried::default(); all.len()];
    for (number, document) in documents.iter().take(DOCUMENTS).enumerate() {
        let captured = Captured::of(document, learning.target)?;
        for (tried, reads) in tried.iter_mut().zip(all) {
            let Some(forward) = learning.forward(&captured.packed(reads), number) else { continue };
            tried.first.add(&forward, learning.learner.first_slot());
            tried.accepted.extend(acceptance(forward));
        }
    }
    Ok(tried)
}

/// What a target computes for a text, at every layer.
struct Captured<B: Backend> {
    hidden: Vec<Tensor<B, 2>>,
    cache: KvCache<B>,
    document: Response,
}

impl<B: Backend> Captured<B> {
    /// # Errors
    /// Those of [`Target::forward`].
    fn of(document: &Response, target: &Target<B>) -> Result<Self> {
        let ids: Vec<TokenId> = document.ids().collect();
        let mut cache = target.cache(1, ids.len());
        let all: Vec<usize> = (0..=target.config().num_hidden_layers).collect();
        let pass = target.forward(&ids, &mut cache, &Want { logits: Rows::None, hidden: &all })?;
        let hidden = pass.hidden.into_iter().map(|h| h.squeeze_dim(0)).collect();
        Ok(Self { hidden, cache, document: document.clone() })
    }

    /// The row of this text alone for a drafter that reads these layers.
    fn packed(&self, reads: &Reads) -> Packed<B> {
        let fused = reads.hidden.iter().map(|&id| self.hidden[id].clone()).collect();
        Packed {
            ids: self.document.ids().collect(),
            loss_mask: self.document.loss_mask(),
            positions: (0..self.document.tokens()).collect(),
            fused: Tensor::cat(fused, 1),
            last: self.hidden.last().expect("a target has layers").clone(),
            prefixes: reads.kv.iter().map(|&layer| self.cache.lend(layer)).collect(),
        }
    }
}

/// All ids one up or down, and those of hidden states or of the cache alone.
fn neighbours(reads: &Reads, layers: usize) -> Vec<Reads> {
    let mut all = Vec::new();
    for up in [true, false] {
        let moved = |id: usize| if up { Some(id + 1) } else { id.checked_sub(1) };
        let hidden: Option<Vec<usize>> = reads.hidden.iter().map(|&id| moved(id)).collect();
        let hidden = hidden.filter(|ids| ids.iter().all(|&id| id <= layers));
        let kv: Option<Vec<usize>> = reads.kv.iter().map(|&id| moved(id)).collect();
        let kv = kv.filter(|ids| !ids.is_empty() && ids.iter().all(|&id| id < layers));
        if let (Some(hidden), Some(kv)) = (&hidden, &kv) {
            all.push(Reads { hidden: hidden.clone(), kv: kv.clone() });
        }
        all.extend(hidden.map(|hidden| Reads { hidden, ..reads.clone() }));
        all.extend(kv.map(|kv| Reads { kv, ..reads.clone() }));
    }
    all
}

fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len().max(1) as f64
}

/// Whether `other` is above `own`, block by block, by more than chance.
fn gains(own: &[f64], other: &[f64]) -> bool {
    if own.len() != other.len() {
        return false;
    }
    let gains: Vec<f64> = other.iter().zip(own).map(|(a, b)| a - b).collect();
    let (n, gain) = (gains.len() as f64, mean(&gains));
    let variance = gains.iter().map(|g| (g - gain).powi(2)).sum::<f64>() / (n - 1.0);
    gain > GAIN && gain > ERRORS * (variance / n).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_stay_within_the_target() {
        let reads = Reads { hidden: vec![1, 2, 4], kv: vec![3] };
        let all = neighbours(&reads, 4);
        assert!(all.iter().all(|r| r.hidden.iter().all(|&id| id <= 4) && r.kv.iter().all(|&id| id < 4)));
        assert!(all.contains(&Reads { hidden: vec![0, 1, 3], kv: vec![2] }));
        // Up is beyond the last.
        assert_eq!(all.len(), 3);
    }

    #[test]
    fn a_gain_must_be_large_and_sure() {
        let own: Vec<f64> = (0..20).map(|i| 0.3 + 0.001 * f64::from(i)).collect();
        let moved = |by: f64| own.iter().map(|x| x + by).collect::<Vec<_>>();
        assert!(gains(&own, &moved(0.05)) && !gains(&own, &moved(0.005)) && !gains(&own, &moved(-0.05)));
        let wild: Vec<f64> = (0..20).map(|i| if i % 2 == 0 { 0.9 } else { -0.2 } + own[i]).collect();
        assert!(!gains(&own, &wild));
    }
}
