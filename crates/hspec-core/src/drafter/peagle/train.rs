//! The training pass: all sampled pairs of all depths at once.

use super::{PEagle, Samples};
use crate::{TokenId, drafter::eagle3::Visible};
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};

/// Pairs of features with the token that follows them, documents side by side.
#[derive(Debug)]
pub struct PackedPairs<'a, B: Backend> {
    /// The target's features, `[T, F * H]`.
    pub features: Tensor<B, 2>,
    /// The token after each feature's position, `[T]`.
    pub next: &'a [TokenId],
    /// Rotary position of each pair, `[T]`.
    pub positions: &'a [usize],
    /// The number of each pair's document, `[T]`; -1 is padding.
    pub documents: &'a [i64],
}

impl<B: Backend> PEagle<B> {
    /// Logits over the draft vocabulary of every sample: `[n, Vd]`. Within its document a sample sees the
    /// pairs of depth 0 up to its anchor and the samples of its own anchor up to its depth; padding sees
    /// nothing.
    pub fn forward(&self, pairs: &PackedPairs<'_, B>, samples: &Samples) -> Tensor<B, 2> {
        let device = pairs.features.device();
        let (t, n) = (pairs.next.len(), samples.anchors.len());
        let chains: Vec<(usize, usize)> =
            samples.anchors.iter().copied().zip(samples.depths.iter().copied()).collect();
        let visible = Visible::new(
            1,
            n,
            |_, q, k| {
                let ((anchor, depth), (kv_anchor, kv_depth)) = (chains[q], chains[k]);
                let document = pairs.documents[anchor];
                let before = kv_depth == 0 && kv_anchor <= anchor;
                let own = kv_anchor == anchor && kv_depth <= depth;
                document >= 0 && document == pairs.documents[kv_anchor] && (before || own)
            },
            &device,
        );
        let token =
            |&(anchor, depth): &(usize, usize)| if depth == 0 { pairs.next[anchor] } else { self.mask };
        let tokens: Vec<TokenId> = chains.iter().map(token).collect();
        let positions: Vec<usize> = chains.iter().map(|&(a, depth)| pairs.positions[a] + depth).collect();
        // The fused features with the mask's state behind them; every sample picks its row.
        let states = Tensor::cat(vec![self.trunk.fuse(pairs.features.clone()), self.masked()], 0);
        let row = |&(anchor, depth): &(usize, usize)| if depth == 0 { anchor as i64 } else { t as i64 };
        let rows = TensorData::new(chains.iter().map(row).collect::<Vec<_>>(), [n]);
        let states = states.select(0, Tensor::<B, 1, Int>::from_data(rows, &device));
        let out = self
            .trunk
            .run(&tokens, states, &positions, &mut |_, heads| visible.attend(heads.q.clone(), &heads, &[]));
        self.trunk.emit(out).0
    }
}
