//! Answering prompts: what is open, who works on it, what is written.

use super::{Finish, Origin, Response, file::scan, rows::Rows};
use burn::tensor::backend::Backend;
use hspec_core::{Error, Result, TokenId, decode::SamplingParams, prompts::is_gzipped, target::Target};
use serde::Serialize;
use std::{
    collections::{HashMap, HashSet, VecDeque},
    fs::{File, OpenOptions},
    io::{Seek, SeekFrom, Write},
    path::Path,
    sync::{Mutex, MutexGuard, mpsc},
    time::{Duration, Instant},
};

/// Fewest rows that make it worth for a worker to read the target's weights.
const FEWEST_ROWS: usize = 16;
/// Time between flushes to the disk.
const SYNC: Duration = Duration::from_secs(10);

/// A prompt as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptTokens {
    /// The prompt's id.
    pub id: String,
    /// Its tokens.
    pub ids: Vec<TokenId>,
}

/// How responses are sampled.
#[derive(Debug, Clone)]
pub struct Sampling<'a> {
    /// Temperature and truncation.
    pub params: SamplingParams,
    /// Seed; each prompt has its own stream, whatever the batch.
    pub seed: u64,
    /// Longest answer.
    pub max_new_tokens: usize,
    /// Tokens that end it.
    pub stop_tokens: &'a [TokenId],
    /// Prompts answered at once.
    pub batch: usize,
}

/// The next prompt of conversation `number` after the answers so far; none when it is over.
pub type Follow<'a> = dyn Fn(usize, &[Vec<TokenId>]) -> Result<Option<Vec<TokenId>>> + Sync + 'a;

/// How far answering is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    /// Conversations whose last turn is answered.
    pub done: usize,
    /// Conversations in all.
    pub total: usize,
    /// Tokens that the target wrote since it was started.
    pub new_tokens: usize,
}

/// Has a target answer prompts.
pub struct Answering<'a, B: Backend> {
    /// Who answers.
    pub target: &'a Target<B>,
    /// How.
    pub sampling: &'a Sampling<'a>,
    /// Written at the top of the file, and what a file to be continued must say.
    pub origin: Option<&'a Origin>,
    /// Later turns.
    pub follow: &'a Follow<'a>,
    /// Documents that go into the file as they are.
    pub given: &'a [Response],
    /// Threads that compute. Where there are several, the prompts are shared out among workers: much of a
    /// pass keeps one thread busy only.
    pub threads: usize,
}

/// Answers the prompts that `path` lacks, each one turn, and appends them; returns all answers in the order of
/// the prompts. `progress` is told how many of how many prompts are answered.
///
/// # Errors
/// Those of [`Answering::run`].
pub fn answer<B: Backend>(
    target: &Target<B>,
    prompts: &[PromptTokens],
    sampling: &Sampling<'_>,
    path: &Path,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<Response>> {
    let answering =
        Answering { target, sampling, origin: None, follow: &|_, _| Ok(None), given: &[], threads: 1 };
    answering.run(prompts, path, &mut |told| progress(told.done, told.total))
}

/// A prompt to be answered.
pub(super) struct Open {
    /// Place among the prompts, which is also its stream of random numbers.
    pub number: usize,
    pub prompt: Vec<TokenId>,
    /// Answers to earlier turns.
    pub answers: Vec<Vec<TokenId>>,
}

/// A turn that was answered.
pub(super) struct Answered {
    pub open: Open,
    pub response: Vec<TokenId>,
    pub finish: Finish,
}

/// Prompts that nobody works on, shortest first.
pub(super) struct Queue(Mutex<VecDeque<Open>>);

impl Queue {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Open>> {
        // A panic elsewhere leaves a whole queue.
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(super) fn pop(&self) -> Option<Open> {
        self.lock().pop_front()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }
}

impl<B: Backend> Answering<'_, B> {
    /// Answers what `path` lacks, turn by turn, and appends every turn when it ends; returns all turns of all
    /// prompts, in their order. Results do not depend on the batch, on the number of threads, or on how
    /// often the work was interrupted. Given documents are written first and returned last.
    ///
    /// # Errors
    /// When the file cannot be read or written, holds answers to other prompts or from elsewhere.
    pub fn run(
        &self,
        prompts: &[PromptTokens],
        path: &Path,
        tell: &mut dyn FnMut(Told),
    ) -> Result<Vec<Response>> {
        if is_gzipped(path) {
            let expected = "one for plain JSON lines: a gzipped file cannot be continued";
            return Err(Error::invalid(path, "file", "the name of a gzipped file", expected));
        }
        let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(Error::io(path))?;
        let known = scan(path)?;
        file.set_len(known.whole).map_err(Error::io(path))?;
        file.seek(SeekFrom::End(0)).map_err(Error::io(path))?;
        match (self.origin, &known.origin) {
            (Some(origin), Some(found)) => found.expect(origin, path)?,
            (Some(origin), None) if known.whole == 0 => {
                write_line(&mut file, origin).map_err(Error::io(path))?
            }
            _ => {}
        }
        let written: HashSet<&str> = known.responses.iter().map(|r| r.id.as_str()).collect();
        for document in self.given.iter().filter(|document| !written.contains(document.id.as_str())) {
            write_line(&mut file, document).map_err(Error::io(path))?;
        }
        let (mut turns, mut open) = self.sort_out(prompts, known.responses, path)?;
        open.sort_by_key(|open| (open.prompt.len(), open.number));
        let mut told = Told { done: prompts.len() - open.len(), total: prompts.len(), new_tokens: 0 };
        tell(told);
        let queue = Queue(Mutex::new(open.into()));
        let mut synced = Instant::now();
        self.work(&queue, &mut |answered| {
            told.new_tokens += answered.response.len();
            let Answered { mut open, response, finish } = answered;
            let written = Response {
                turn: open.answers.len() + 1,
                finish: Some(finish),
                ..Response::new(&*prompts[open.number].id, open.prompt, response.clone())
            };
            write_line(&mut file, &written).map_err(Error::io(path))?;
            turns[open.number].push(written);
            if synced.elapsed() >= SYNC {
                synced = Instant::now();
                file.sync_data().map_err(Error::io(path))?;
            }
            open.answers.push(response);
            match (self.follow)(open.number, &open.answers)? {
                // At once, so that conversations end in the order in which they began.
                Some(prompt) => queue.lock().push_front(Open { prompt, ..open }),
                None => told.done += 1,
            }
            tell(told);
            Ok(())
        })?;
        file.sync_data().map_err(Error::io(path))?;
        Ok(turns.into_iter().flatten().chain(self.given.iter().cloned()).collect())
    }

    /// The turns known of each prompt, and what is open.
    fn sort_out(
        &self,
        prompts: &[PromptTokens],
        known: Vec<Response>,
        path: &Path,
    ) -> Result<(Vec<Vec<Response>>, Vec<Open>)> {
        let numbers: HashMap<&str, usize> =
            prompts.iter().enumerate().map(|(i, p)| (p.id.as_str(), i)).collect();
        let mut turns = vec![Vec::new(); prompts.len()];
        for response in known {
            if let Some(&number) = numbers.get(response.id.as_str()) {
                turns[number].push(response);
            }
        }
        let mut open = Vec::new();
        for (number, (prompt, turns)) in prompts.iter().zip(&mut turns).enumerate() {
            turns.sort_by_key(|response: &Response| response.turn);
            let (mut next, mut answers) = (Some(prompt.ids.clone()), Vec::new());
            for (response, turn) in turns.iter().zip(1..) {
                if response.turn != turn || next.as_ref() != Some(&response.prompt_ids) {
                    let found = "a response to another prompt or another chat template";
                    return Err(Error::invalid(
                        path,
                        &prompt.id,
                        found,
                        "responses to the prompts given, or another file",
                    ));
                }
                answers.push(response.response_ids.clone());
                next = (self.follow)(number, &answers)?;
            }
            open.extend(next.map(|prompt| Open { number, prompt, answers }));
        }
        Ok((turns, open))
    }

    /// Answers everything in the queue, and what `each` adds to it.
    fn work(&self, queue: &Queue, each: &mut dyn FnMut(Answered) -> Result<()>) -> Result<()> {
        let workers = self.threads.min(self.sampling.batch / FEWEST_ROWS).max(1);
        let size = self.sampling.batch.div_ceil(workers);
        loop {
            std::thread::scope(|scope| {
                let (send, answers) = mpsc::channel();
                for _ in 0..workers {
                    let send = send.clone();
                    scope.spawn(move || {
                        let work = || Rows::new(self.target, self.sampling, size).work(queue, &send);
                        // Each has threads of its own: two that share some would wait for each other.
                        let own = rayon::ThreadPoolBuilder::new().num_threads(self.threads / workers);
                        let done = match own.build() {
                            Ok(pool) if workers > 1 => pool.install(work),
                            _ => work(),
                        };
                        if let Err(error) = done {
                            let _ = send.send(Err(error));
                        }
                    });
                }
                drop(send);
                // Where this returns early, nobody hears the workers any more and they stop.
                answers.into_iter().try_for_each(|answered| each(answered?))
            })?;
            // A later turn may have been added when all workers had gone.
            if queue.is_empty() {
                return Ok(());
            }
        }
    }
}

fn write_line(file: &mut File, line: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_string(line)?;
    line.push('\n');
    // In one call: a kill leaves at most one line unfinished.
    file.write_all(line.as_bytes())
}
