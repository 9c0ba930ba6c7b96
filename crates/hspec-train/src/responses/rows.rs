//! Rows of a batch that are decoded side by side; a row whose answer ends takes the next prompt at once.
//!
//! All rows share one length of the cache and end there, wherever their prompts began: a new row is written into
//! the place of the old one so that its last token stands where the others' do.

use super::{
    Finish, Sampling,
    answer::{Answered, Open, Queue},
};
use burn::tensor::backend::Backend;
use hspec_core::{
    Result, TokenId,
    decode::{Chance, CounterRng, Purpose},
    target::{KvCache, Pass, Rows as Wanted, Target, Want},
};
use std::sync::mpsc::Sender;

/// Tokens by which the cache is made longer, and to a multiple of which prompts are put.
const ROOM: usize = 64;

/// A batch.
pub(super) struct Rows<'a, B: Backend> {
    target: &'a Target<B>,
    sampling: &'a Sampling<'a>,
    rows: Vec<Option<Row>>,
    cache: KvCache<B>,
}

/// An answer in the making.
struct Row {
    open: Open,
    chance: CounterRng,
    response: Vec<TokenId>,
}

impl Row {
    /// How the answer ended, if it did.
    fn finish(&self, sampling: &Sampling<'_>) -> Option<Finish> {
        match self.response.last() {
            Some(token) if sampling.stop_tokens.contains(token) => Some(Finish::Stop),
            _ if self.response.len() == sampling.max_new_tokens => Some(Finish::Length),
            _ => None,
        }
    }

    /// Draws the next token.
    fn draw(&mut self, logits: &[f32], sampling: &Sampling<'_>) -> Result<()> {
        let position = (self.open.prompt.len() + self.response.len()) as u64;
        let law = sampling.params.distribution(logits, position)?;
        self.response.push(self.chance.pick(position, Purpose::Bonus, &law));
        Ok(())
    }
}

impl<'a, B: Backend> Rows<'a, B> {
    /// At most `size` rows.
    pub(super) fn new(target: &'a Target<B>, sampling: &'a Sampling<'a>, size: usize) -> Self {
        let rows = std::iter::repeat_with(|| None).take(size).collect();
        Self { target, sampling, rows, cache: target.cache(size, ROOM) }
    }

    /// Answers prompts of the queue until it is empty or nobody listens.
    pub(super) fn work(&mut self, queue: &Queue, send: &Sender<Result<Answered>>) -> Result<()> {
        loop {
            let mut ended = self.fill(queue)?;
            if ended.is_empty() {
                if self.rows.iter().all(Option::is_none) {
                    return Ok(());
                }
                self.shrink(queue);
                self.make_room(0);
                ended = self.step()?;
            }
            for answered in ended {
                if send.send(Ok(answered)).is_err() {
                    return Ok(());
                }
            }
        }
    }

    /// Puts prompts into empty rows; returns answers that ended with their first token.
    fn fill(&mut self, queue: &Queue) -> Result<Vec<Answered>> {
        let mut ended = Vec::new();
        for r in 0..self.rows.len() {
            while self.rows[r].is_none()
                && let Some(open) = queue.pop()
            {
                let (row, cache) = self.prefill(open)?;
                match row.finish(self.sampling) {
                    Some(finish) => ended.push(Answered { open: row.open, response: row.response, finish }),
                    None => {
                        self.make_room(cache.len());
                        self.cache.admit(r, &cache);
                        self.rows[r] = Some(row);
                    }
                }
            }
        }
        Ok(ended)
    }

    /// Processes a prompt and draws the first token of its answer.
    fn prefill(&self, open: Open) -> Result<(Row, KvCache<B>)> {
        let mut cache = self.target.cache(1, open.prompt.len());
        let want = Want { logits: Wanted::Last, hidden: &[] };
        let logits = floats(self.target.forward(&open.prompt, &mut cache, &want)?);
        let chance = CounterRng::new(self.sampling.seed, open.number as u64);
        let mut row = Row { open, chance, response: Vec::new() };
        row.draw(&logits, self.sampling)?;
        Ok((row, cache))
    }

    /// Drops empty rows when there are many and nothing to fill them with.
    fn shrink(&mut self, queue: &Queue) {
        let active: Vec<usize> = (0..self.rows.len()).filter(|&r| self.rows[r].is_some()).collect();
        if 2 * active.len() <= self.rows.len() && queue.is_empty() {
            self.cache.select_rows(&active, self.target.device());
            self.rows.retain(Option::is_some);
        }
    }

    /// Makes room in the cache for a prompt of this many tokens, and for a token more.
    fn make_room(&mut self, prompt: usize) {
        for r in (0..self.rows.len()).filter(|&r| self.rows[r].is_none()) {
            self.cache.retire(r);
        }
        let (len, capacity) = (self.cache.len(), self.cache.capacity());
        if len < prompt || len == capacity {
            let longest = (len - self.cache.first()).max(prompt).next_multiple_of(ROOM);
            let capacity = capacity.max(longest + longest / 4 + ROOM);
            self.cache.rebase(longest, capacity, self.target.device());
        }
    }

    /// A token for every row; returns answers that ended.
    fn step(&mut self) -> Result<Vec<Answered>> {
        // Empty rows are computed too; nobody reads them.
        let last = |row: &Option<Row>| row.as_ref().and_then(|row| row.response.last().copied());
        let input: Vec<TokenId> = self.rows.iter().map(|row| last(row).unwrap_or(TokenId(0))).collect();
        let want = Want { logits: Wanted::Last, hidden: &[] };
        let logits = floats(self.target.forward(&input, &mut self.cache, &want)?);
        let width = logits.len() / self.rows.len();
        let mut ended = Vec::new();
        for (slot, logits) in self.rows.iter_mut().zip(logits.chunks_exact(width)) {
            let Some(row) = slot else { continue };
            row.draw(logits, self.sampling)?;
            if let Some(finish) = row.finish(self.sampling)
                && let Some(row) = slot.take()
            {
                ended.push(Answered { open: row.open, response: row.response, finish });
            }
        }
        Ok(ended)
    }
}

/// The logits of a pass that was asked for some.
fn floats<B: Backend>(pass: Pass<B>) -> Vec<f32> {
    let logits = pass.logits.expect("asked for").into_data().convert::<f32>();
    logits.into_vec().expect("converted just before")
}
