//! The key-value cache of a target.

use crate::{Position, Prefix};
use burn::tensor::{Tensor, TensorData, backend::Backend};

/// Post-RoPE keys and values of every layer, preallocated and written in place.
///
/// All rows of a batch share one length; row `r` of a left-padded batch is valid from
/// [`KvCache::start`]`(r)` on. Rows may leave and others take their place. Drafters borrow it immutably.
#[derive(Debug)]
pub struct KvCache<B: Backend> {
    layers: Vec<LayerCache<B>>,
    len: usize,
    starts: Vec<usize>,
}

#[derive(Debug)]
struct LayerCache<B: Backend> {
    /// `[batch, kv_heads, capacity, head_dim]`; `None` only while a write owns the tensor.
    keys: Option<Tensor<B, 4>>,
    values: Option<Tensor<B, 4>>,
}

const PRESENT: &str = "a layer's tensors are put back before a write returns";

impl<B: Backend> KvCache<B> {
    /// An empty cache for sequences of at most `capacity` tokens.
    pub fn new(
        layers: usize,
        batch: usize,
        kv_heads: usize,
        capacity: usize,
        head_dim: usize,
        device: &B::Device,
    ) -> Self {
        let zeros = || Some(Tensor::zeros([batch, kv_heads, capacity, head_dim], device));
        let layers = (0..layers).map(|_| LayerCache { keys: zeros(), values: zeros() }).collect();
        Self { layers, len: 0, starts: vec![0; batch] }
    }

    /// Tokens processed so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing has been processed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Most tokens it can hold.
    pub fn capacity(&self) -> usize {
        self.layers.first().map_or(0, |l| l.keys.as_ref().expect(PRESENT).dims()[2])
    }

    /// Rows of the batch.
    pub fn batch(&self) -> usize {
        self.starts.len()
    }

    /// First valid index of row `r`.
    pub fn start(&self, r: usize) -> usize {
        self.starts[r]
    }

    /// Position of the token at an index of row `r`, which counts from the row's first valid entry; 0 for padding.
    pub fn position(&self, r: usize, index: usize) -> Position {
        Position(index.saturating_sub(self.starts[r]))
    }

    /// Declares how many entries at the left of each row are padding. For an empty cache.
    pub fn set_starts(&mut self, starts: Vec<usize>) {
        assert!(self.is_empty() && starts.len() == self.starts.len(), "starts are set once per batch");
        self.starts = starts;
    }

    /// First index that a row uses: what lies before is padding in all of them.
    pub fn first(&self) -> usize {
        self.starts.iter().copied().min().unwrap_or(0).min(self.len)
    }

    /// Empties a row: nothing that it holds will be visible, and no other row is kept back by it.
    pub fn retire(&mut self, row: usize) {
        self.starts[row] = self.len;
    }

    /// Puts the tokens of `from`, a cache of one row, into a row, which then ends where all others end. Keys
    /// carry their positions, so that indices may change.
    ///
    /// # Panics
    /// If there are more tokens than this cache has processed; see [`KvCache::rebase`].
    pub fn admit(&mut self, row: usize, from: &Self) {
        let tokens = from.len - from.first();
        assert!(tokens <= self.len, "callers make room first");
        let at = self.len - tokens;
        for (to, layer) in self.layers.iter_mut().zip(0..) {
            let keys = from.keys(layer, from.first(), from.len).swap_dims(1, 2);
            let values = from.values(layer, from.first(), from.len).swap_dims(1, 2);
            to.keys = to.keys.take().map(|cache| write_at(cache, keys, row, at));
            to.values = to.values.take().map(|cache| write_at(cache, values, row, at));
        }
        self.starts[row] = at;
    }

    /// Moves what the rows hold so that they end at index `len`, in tensors for `capacity` tokens.
    ///
    /// # Panics
    /// If the longest row does not fit below `len`, or `len` exceeds the capacity.
    pub fn rebase(&mut self, len: usize, capacity: usize, device: &B::Device) {
        let (first, old) = (self.first(), self.len);
        assert!(old - first <= len && len <= capacity, "callers make room for the longest row");
        for layer in &mut self.layers {
            for tensor in [&mut layer.keys, &mut layer.values] {
                *tensor = tensor.take().map(|cache| {
                    let [batch, kv, _, d] = cache.dims();
                    let fresh = Tensor::zeros([batch, kv, capacity, d], device);
                    if old == first {
                        return fresh;
                    }
                    let kept = cache.narrow(2, first, old - first).swap_dims(1, 2);
                    write_at(fresh, kept, 0, len - (old - first))
                });
            }
        }
        self.starts = self.starts.iter().map(|start| start + len - old).collect();
        self.len = len;
    }

    /// Forgets everything from index `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Writes `[batch, t, kv_heads, head_dim]` of one layer behind the current length, which stays as
    /// it is until [`KvCache::advance`].
    pub fn write(&mut self, layer: usize, keys: Tensor<B, 4>, values: Tensor<B, 4>) {
        let at = self.len;
        let layer = &mut self.layers[layer];
        layer.keys = layer.keys.take().map(|cache| write_at(cache, keys, 0, at));
        layer.values = layer.values.take().map(|cache| write_at(cache, values, 0, at));
    }

    /// Counts `t` written tokens as processed.
    pub fn advance(&mut self, t: usize) {
        self.len += t;
        assert!(self.len <= self.capacity(), "callers check the capacity before a forward pass");
    }

    /// Keys of a layer at indices `from..to`: `[batch, kv_heads, to - from, head_dim]`, a view.
    pub fn keys(&self, layer: usize, from: usize, to: usize) -> Tensor<B, 4> {
        self.layers[layer].keys.clone().expect(PRESENT).narrow(2, from, to - from)
    }

    /// Values of a layer, as [`KvCache::keys`].
    pub fn values(&self, layer: usize, from: usize, to: usize) -> Tensor<B, 4> {
        self.layers[layer].values.clone().expect(PRESENT).narrow(2, from, to - from)
    }

    /// A layer's keys and values of all processed tokens, for a drafter to read. For a batch of one.
    pub fn lend(&self, layer: usize) -> Prefix<B> {
        Prefix {
            keys: self.keys(layer, 0, self.len).squeeze_dim(0),
            values: self.values(layer, 0, self.len).squeeze_dim(0),
        }
    }

    /// Keeps only the given rows of the batch, in that order.
    pub fn select_rows(&mut self, rows: &[usize], device: &B::Device) {
        let indices: Vec<i64> = rows.iter().map(|&r| r as i64).collect();
        let indices = Tensor::from_data(TensorData::new(indices, [rows.len()]), device);
        for layer in &mut self.layers {
            layer.keys = layer.keys.take().map(|t| t.select(0, indices.clone()));
            layer.values = layer.values.take().map(|t| t.select(0, indices.clone()));
        }
        self.starts = rows.iter().map(|&r| self.starts[r]).collect();
    }
}

impl<B: Backend> Prefix<B> {
    /// Some of the heads, in the order of `ids`: a view where they are neighbours, a copy otherwise.
    pub fn heads(&self, ids: &[usize]) -> Self {
        let neighbours = ids.windows(2).all(|w| w[0] + 1 == w[1]);
        let some = |x: &Tensor<B, 3>| match ids {
            [first, ..] if neighbours => x.clone().narrow(0, *first, ids.len()),
            _ => {
                let ids: Vec<i64> = ids.iter().map(|&id| id as i64).collect();
                let ids = TensorData::new(ids.clone(), [ids.len()]);
                x.clone().select(0, Tensor::from_data(ids, &x.device()))
            }
        };
        Self { keys: some(&self.keys), values: some(&self.values) }
    }
}

/// `cache[row..row+b, :, at..at+t, :] = new`, with `new: [b, t, kv_heads, head_dim]`.
fn write_at<B: Backend>(cache: Tensor<B, 4>, new: Tensor<B, 4>, row: usize, at: usize) -> Tensor<B, 4> {
    #[cfg(feature = "flex")]
    let (cache, new) = match crate::flex::write_at(cache, new, row, at) {
        Ok(cache) => return cache,
        Err(unchanged) => unchanged,
    };
    let [b, t, kv, d] = new.dims();
    cache.slice_assign([row..row + b, 0..kv, at..at + t, 0..d], new.swap_dims(1, 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill<B: Backend>() -> Vec<f32> {
        let device = Default::default();
        let mut cache = KvCache::<B>::new(1, 2, 2, 5, 1, &device);
        for (t, from) in [(2, 0.0), (1, 100.0)] {
            let n = 2 * t * 2;
            let new: Vec<f32> = (0..n).map(|i| from + i as f32).collect();
            let new = Tensor::from_data(TensorData::new(new, [2, t, 2, 1]), &device);
            cache.write(0, new.clone(), new);
            cache.advance(t);
        }
        let keys = cache.keys(0, 0, 3).into_data().to_vec().unwrap();
        assert_eq!(keys, cache.values(0, 0, 3).into_data().to_vec::<f32>().unwrap());
        cache.truncate(2);
        assert_eq!((cache.len(), cache.capacity(), cache.batch()), (2, 5, 2));
        keys
    }

    #[test]
    fn in_place_and_plain_writes_agree() {
        let expected = vec![0., 2., 100., 1., 3., 101., 4., 6., 102., 5., 7., 103.];
        assert_eq!(fill::<burn_ndarray::NdArray>(), expected);
        assert_eq!(fill::<burn_flex::Flex>(), expected);
    }

    fn lent_heads<B: Backend>() {
        let device = Default::default();
        let mut cache = KvCache::<B>::new(1, 1, 4, 5, 2, &device);
        let keys: Vec<f32> = (0..3 * 4 * 2).map(|i| i as f32).collect();
        let keys = Tensor::from_data(TensorData::new(keys, [1, 3, 4, 2]), &device);
        cache.write(0, keys.clone(), keys + 100.0);
        cache.advance(3);
        for ids in [vec![2], vec![1, 2], vec![0, 3], vec![0, 1, 2, 3], vec![1, 3]] {
            let lent = cache.lend(0).heads(&ids);
            // Token t, head q, width w was 8 t + 2 q + w.
            let at = |q: usize, t: usize, w: usize| (8 * t + 2 * q + w) as f32;
            let expected: Vec<f32> = (ids.iter())
                .flat_map(|&q| (0..3).flat_map(move |t| (0..2).map(move |w| at(q, t, w))))
                .collect();
            assert_eq!(lent.keys.into_data().to_vec::<f32>().unwrap(), expected, "{ids:?}");
            let values: Vec<f32> = expected.iter().map(|x| x + 100.0).collect();
            assert_eq!(lent.values.into_data().to_vec::<f32>().unwrap(), values, "{ids:?}");
        }
    }

    #[test]
    fn lent_heads_are_those_asked_for() {
        lent_heads::<burn_ndarray::NdArray>();
        lent_heads::<burn_flex::Flex>();
    }

    /// A rotary position in the place of a cache's index once wrote over other tokens' keys (vllm#54716).
    #[test]
    fn an_index_of_the_cache_is_no_rotary_position() {
        let mut cache = KvCache::<burn_flex::Flex>::new(1, 2, 1, 8, 2, &Default::default());
        cache.set_starts(vec![0, 3]);
        let positions = |r| (0..5).map(|index| cache.position(r, index).0).collect::<Vec<_>>();
        assert_eq!(positions(0), [0, 1, 2, 3, 4]);
        // Padding has none; what is at index 3 is the row's first token.
        assert_eq!(positions(1), [0, 0, 0, 0, 1]);
        // The next token of both rows goes to the same entry, and turns by another angle.
        assert_eq!((cache.position(0, 5), cache.position(1, 5)), (Position(5), Position(2)));
    }

    /// Rows that come and go share one length; each sees its own tokens, wherever they lie.
    fn rows_come_and_go<B: Backend>() {
        let device = Default::default();
        let cache = |capacity: usize, batch: usize| KvCache::<B>::new(1, batch, 2, capacity, 1, &device);
        let push = |cache: &mut KvCache<B>, values: &[f32]| {
            let (batch, t) = (cache.batch(), values.len() / cache.batch());
            // Two heads, the second with the negated value.
            let both: Vec<f32> = values.iter().flat_map(|&v| [v, -v]).collect();
            let new = Tensor::from_data(TensorData::new(both, [batch, t, 2, 1]), &device);
            cache.write(0, new.clone(), new + 0.5);
            cache.advance(t);
        };
        let row = |cache: &KvCache<B>, r: usize| {
            let (from, to) = (cache.start(r), cache.len());
            let part = |x: Tensor<B, 4>| x.narrow(0, r, 1).into_data().to_vec::<f32>().unwrap();
            let (keys, values) = (part(cache.keys(0, from, to)), part(cache.values(0, from, to)));
            let n = to - from;
            for i in 0..n {
                assert_eq!([keys[i] + 0.5, -keys[i] + 0.5], [values[i], values[n + i]]);
            }
            keys[..n].to_vec()
        };
        let mut all = cache(4, 2);
        let mut one = cache(3, 1);
        push(&mut one, &[1., 2., 3.]);
        all.rebase(3, 4, &device);
        all.retire(1);
        all.admit(0, &one);
        push(&mut all, &[4., 9.]);
        assert_eq!((row(&all, 0), all.first(), all.len()), (vec![1., 2., 3., 4.], 0, 4));
        all.retire(1);
        // The first row leaves, a short one takes the place of the idle one, and there is room again.
        all.retire(0);
        let mut two = cache(2, 1);
        push(&mut two, &[5., 6.]);
        all.admit(1, &two);
        assert_eq!((all.first(), row(&all, 1)), (2, vec![5., 6.]));
        all.rebase(2, 4, &device);
        push(&mut all, &[9., 7.]);
        assert_eq!((all.start(1), row(&all, 1)), (0, vec![5., 6., 7.]));
        // A longer one needs more room than there is.
        all.retire(0);
        all.rebase(5, 6, &device);
        let mut three = cache(5, 1);
        push(&mut three, &[1., 2., 3., 4., 5.]);
        all.admit(0, &three);
        push(&mut all, &[6., 8.]);
        assert_eq!((row(&all, 0), row(&all, 1)), (vec![1., 2., 3., 4., 5., 6.], vec![5., 6., 7., 8.]));
    }

    #[test]
    fn rows_that_come_and_go_keep_their_tokens() {
        rows_come_and_go::<burn_ndarray::NdArray>();
        rows_come_and_go::<burn_flex::Flex>();
    }

    #[test]
    fn selected_rows_keep_their_entries_and_starts() {
        let device = Default::default();
        let mut cache = KvCache::<burn_flex::Flex>::new(1, 3, 1, 2, 1, &device);
        cache.set_starts(vec![0, 1, 2]);
        let new = Tensor::from_data(TensorData::new(vec![1f32, 2., 3.], [3, 1, 1, 1]), &device);
        cache.write(0, new.clone(), new);
        cache.advance(1);
        cache.select_rows(&[2, 0], &device);
        assert_eq!(cache.keys(0, 0, 1).into_data().to_vec::<f32>().unwrap(), [3.0, 1.0]);
        assert_eq!((cache.start(0), cache.start(1)), (2, 0));
    }
}
