//! The subset of a data set that DeepSpec's evaluation takes: `random.Random(980406).shuffle` of Python, then
//! the first n.

use rand_mt::Mt;

/// The seed that DeepSpec shuffles with.
pub const SEED: u32 = 980_406;

/// Shuffles as Python's `random.Random(seed).shuffle(items)`.
///
/// ```
/// use hspec_eval::subset::{SEED, shuffle};
///
/// let mut items: Vec<usize> = (0..10).collect();
/// shuffle(&mut items, SEED);
/// assert_eq!(items, [2, 0, 1, 5, 4, 8, 7, 6, 9, 3]);
/// ```
///
/// # Panics
/// With 2^32 items or more.
pub fn shuffle<T>(items: &mut [T], seed: u32) {
    assert!(u32::try_from(items.len()).is_ok(), "more items than 32 bits count");
    let mut twister = Mt::new_with_key([seed]);
    for last in (1..items.len()).rev() {
        // A number of just enough bits, drawn again until it is small enough.
        let bound = last as u32 + 1;
        let shift = bound.leading_zeros();
        let other = loop {
            let number = twister.next_u32() >> shift;
            if number < bound {
                break number as usize;
            }
        };
        items.swap(last, other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Python 3.11 prints.
    #[test]
    fn the_order_is_python_s() {
        let first = |n: usize| {
            let mut items: Vec<usize> = (0..n).collect();
            shuffle(&mut items, SEED);
            items[..12].to_vec()
        };
        assert_eq!(first(257), [94, 116, 115, 25, 150, 131, 83, 71, 236, 216, 57, 61]);
        assert_eq!(first(1319), [435, 902, 303, 1168, 403, 611, 608, 977, 229, 1263, 566, 1191]);
        shuffle::<u8>(&mut [], SEED);
    }
}
