//! Memory for packed weights, in huge pages where the system has them: a pass walks over all of it, and with
//! pages of 4 KB the look-ups of addresses cost a quarter of a token's time.

use crate::simd::Weight;
use std::{
    alloc::{Layout, alloc, dealloc, handle_alloc_error},
    sync::{Arc, Mutex, PoisonError},
};

/// Bytes of a cache line: what registers are loaded from must not straddle two.
const LINE: usize = 64;
/// Bytes of a huge page.
const PAGE: usize = 2 << 20;
/// Bytes that are asked for at once. A matrix is smaller than a page as a rule, so matrices share.
const CHUNK: usize = 32 << 20;
/// Matrices of fewer bytes have memory of their own, so that a small one does not keep a chunk alive.
const SMALL: usize = 64 << 10;

/// A piece of memory, all zeros at first.
pub(crate) struct Memory {
    chunk: Arc<Chunk>,
    from: usize,
    /// In bytes.
    length: usize,
}

/// What the system gave.
struct Chunk {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: pieces do not overlap, and each is written through `&mut` of its only owner.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

/// The chunk that the next matrices go to, and how much of it is taken.
static OPEN: Mutex<Option<(Arc<Chunk>, usize)>> = Mutex::new(None);

impl Memory {
    /// Room for a number of weights.
    pub(crate) fn zeroed<W: Weight>(weights: usize) -> Self {
        let length = (weights * size_of::<W>()).next_multiple_of(LINE).max(LINE);
        let (chunk, from) = match length {
            ..SMALL => (Arc::new(Chunk::new(length, LINE)), 0),
            SMALL..CHUNK => {
                let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
                let (chunk, taken) = match open.take() {
                    Some((chunk, taken)) if taken + length <= chunk.layout.size() => (chunk, taken),
                    _ => (Arc::new(Chunk::new(CHUNK, PAGE)), 0),
                };
                *open = Some((chunk.clone(), taken + length));
                (chunk, taken)
            }
            _ => (Arc::new(Chunk::new(length.next_multiple_of(PAGE), PAGE)), 0),
        };
        // SAFETY: the piece lies inside the chunk and is nobody else's.
        unsafe { std::ptr::write_bytes(chunk.start.add(from), 0, length) };
        Self { chunk, from, length }
    }

    pub(crate) fn weights<W: Weight>(&self) -> &[W] {
        // SAFETY: the piece lies inside the chunk, was written, starts at a line, and zeros are weights.
        unsafe {
            let start = self.chunk.start.add(self.from).cast();
            std::slice::from_raw_parts(start, self.length / size_of::<W>())
        }
    }

    pub(crate) fn weights_mut<W: Weight>(&mut self) -> &mut [W] {
        // SAFETY: as above, and this is the piece's only owner.
        unsafe {
            let start = self.chunk.start.add(self.from).cast();
            std::slice::from_raw_parts_mut(start, self.length / size_of::<W>())
        }
    }
}

impl Chunk {
    fn new(size: usize, align: usize) -> Self {
        let layout = Layout::from_size_align(size, align).expect("a matrix fits the address space");
        // SAFETY: the size is not zero.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        #[cfg(target_os = "linux")]
        if align == PAGE {
            // SAFETY: the range is this allocation. Where the advice is not taken, nothing changes.
            unsafe { libc::madvise(start.cast(), size, libc::MADV_HUGEPAGE) };
        }
        Self { start, layout }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and no piece is left.
        unsafe { dealloc(self.start, self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_zero_and_do_not_overlap() {
        let sizes = [1, 5000, 20_000, 300_000, 5_000_000, 400_000, 9_000_000, 30_000];
        let mut pieces: Vec<Memory> = sizes.iter().map(|&n| Memory::zeroed::<f32>(n)).collect();
        for (i, (piece, n)) in pieces.iter_mut().zip(sizes).enumerate() {
            let weights = piece.weights_mut::<f32>();
            assert!(weights.len() >= n && weights.as_ptr().addr().is_multiple_of(LINE));
            assert!(weights.iter().all(|w| *w == 0.0));
            weights.fill(i as f32 + 1.0);
        }
        for (i, piece) in pieces.iter().enumerate() {
            assert!(piece.weights::<f32>().iter().all(|w| *w == i as f32 + 1.0));
        }
    }
}
