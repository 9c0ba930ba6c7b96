//! Where a token stands, as its rotary embedding counts.

use std::ops::Add;

/// A rotary position. It is no index: not of a cache's entries, which a left-padded batch counts from its padding
/// on, nor of a packed row's tokens, which several documents share. So it has a type of its own, and one place
/// where the two meet, [`KvCache::position`](crate::KvCache::position).
///
/// ```compile_fail
/// # let cache = hspec_attn::KvCache::<burn_ndarray::NdArray>::new(1, 1, 1, 8, 2, &Default::default());
/// cache.keys(0, 0, hspec_attn::Position(3));
/// ```
/// ```compile_fail
/// # let rope = hspec_attn::Rope::new(10_000.0, 2, hspec_attn::RopeScaling::None);
/// # let cache = hspec_attn::KvCache::<burn_ndarray::NdArray>::new(1, 1, 1, 8, 2, &Default::default());
/// rope.tables::<burn_ndarray::NdArray>(&[cache.len()], 1, &Default::default());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position(pub usize);

impl Add<usize> for Position {
    type Output = Self;

    fn add(self, tokens: usize) -> Self {
        Self(self.0 + tokens)
    }
}
