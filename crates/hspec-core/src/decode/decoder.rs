//! Decoding one request, plainly or with a drafter.

use super::{
    Chance, CounterRng, Draft, Law, PerRound, Purpose, SamplingParams, Schedule, schedule::Scheduler, verify,
};
use crate::{
    Error, Result, TokenId,
    drafter::{Drafter, Session, walk::host},
    target::{Pass, Rows, Target, Want},
};
use burn::tensor::{Tensor, backend::Backend};
use hspec_attn::KvCache;
use hspec_sched::{Verified, draft_length};
use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

/// One request.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// Tokens of the prompt, at least one.
    pub prompt: &'a [TokenId],
    /// How to sample.
    pub sampling: SamplingParams,
    /// Seed and number of the request: together they fix every random choice.
    pub seed: u64,
    /// See `seed`.
    pub id: u64,
    /// Most tokens to emit.
    pub max_new_tokens: usize,
    /// Most tokens to draft at once; the drafter may allow fewer.
    pub k: usize,
    /// Tokens that end the answer; the one that does is emitted.
    pub stop_tokens: &'a [TokenId],
}

/// Why decoding ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A stop token.
    Stop,
    /// `max_new_tokens`.
    Length,
    /// The end of the context.
    Context,
    /// The caller asked to stop.
    Cancelled,
}

/// One draft-and-verify round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Round {
    /// Tokens proposed, cut at an accepted stop token.
    pub proposed: usize,
    /// Tokens accepted, up to and including a stop token.
    pub accepted: usize,
    /// Whether an accepted draft was a stop token: then no bonus token follows.
    pub stopped: bool,
}

/// Where the time went.
#[derive(Debug, Clone, Copy, Default)]
pub struct Timing {
    /// Processing the prompt and sampling the first token.
    pub prefill: Duration,
    /// Drafter passes, sampling of drafts and taking in what became final included; not the prompt's.
    pub draft: Duration,
    /// Target passes after the prompt.
    pub target: Duration,
    /// Sampling and verification.
    pub sampling: Duration,
    /// Everything.
    pub total: Duration,
}

/// What a request produced.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Tokens emitted.
    pub tokens: Vec<TokenId>,
    /// Why it ended.
    pub finish: Finish,
    /// Speculative rounds, in order; plain steps are not among them.
    pub rounds: Vec<Round>,
    /// For a drafter with a confidence head: per speculative round, what it said of the drafts verified and
    /// how many were accepted; cut as the round is.
    pub verified: Vec<Verified>,
    /// Target passes after the prompt's.
    pub target_passes: usize,
    /// Confidences that were no probabilities; a schedule takes them for 0.
    pub unusable_confidences: usize,
    /// Where the time went.
    pub timing: Timing,
}

/// Decodes requests, one at a time.
#[derive(Clone, Copy)]
pub struct Decoder<'a, B: Backend> {
    target: &'a Target<B>,
    drafter: Option<&'a dyn Drafter<B>>,
    schedule: Option<&'a Schedule>,
}

impl<'a, B: Backend> Decoder<'a, B> {
    /// Plain decoding without a drafter, speculative with one; the output law is the same.
    pub fn new(target: &'a Target<B>, drafter: Option<&'a dyn Drafter<B>>) -> Self {
        Self { target, drafter, schedule: None }
    }

    /// Verifies only the drafts that a schedule admits, all of them without one; the output law is the same.
    #[must_use]
    pub fn scheduled(self, schedule: impl Into<Option<&'a Schedule>>) -> Self {
        Self { schedule: schedule.into(), ..self }
    }

    /// Decodes a request; `emit` sees tokens as they are final and may stop it.
    ///
    /// # Errors
    /// A prompt that is empty, does not fit the context, or holds an unknown token; logits that are
    /// not finite; a schedule that cannot be right or needs confidences the drafter has not.
    pub fn generate(
        &self,
        request: &Request<'_>,
        emit: &mut dyn FnMut(&[TokenId]) -> ControlFlow<()>,
    ) -> Result<Generation> {
        self.generate_with(request, &mut CounterRng::new(request.seed, request.id), emit)
    }

    /// [`generate`](Self::generate) with `chance` for all random choices; the request's seed has no say.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub fn generate_with(
        &self,
        request: &Request<'_>,
        chance: &mut dyn Chance,
        emit: &mut dyn FnMut(&[TokenId]) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let context = self.target.config().max_position_embeddings;
        let n = request.prompt.len();
        if n == 0 || n >= context {
            return Err(Error::Request {
                what: "prompt length in tokens",
                found: n.to_string(),
                expected: format!("1 to {}, so that a token fits behind it in the context", context - 1),
            });
        }
        let start = Instant::now();
        let k = self.drafter.map_or(0, |d| request.k.min(d.max_draft()));
        let capacity = n.saturating_add(request.max_new_tokens).saturating_add(k + 1).min(context);
        let mut run = Run {
            request,
            target: self.target,
            cache: self.target.cache(1, capacity),
            chance,
            captured: self.drafter.map_or(&[], |d| d.feature_layers()),
            session: self.drafter.map(|d| d.session(capacity)),
            scheduler: self.schedule.map(Scheduler::new).transpose()?,
            out: Generation {
                tokens: Vec::new(),
                finish: Finish::Length,
                rounds: Vec::new(),
                verified: Vec::new(),
                target_passes: 0,
                unusable_confidences: 0,
                timing: Timing::default(),
            },
        };
        if request.max_new_tokens == 0 {
            return Ok(run.out);
        }
        let mut new = vec![run.prefill()?];
        run.out.timing.prefill = start.elapsed();
        run.out.finish = loop {
            let stop = new.iter().position(|t| request.stop_tokens.contains(t));
            new.truncate(stop.map_or(new.len(), |at| at + 1));
            run.out.tokens.extend(&new);
            if emit(&new).is_break() {
                break Finish::Cancelled;
            }
            if stop.is_some() {
                break Finish::Stop;
            }
            let left = request.max_new_tokens - run.out.tokens.len();
            if left == 0 {
                break Finish::Length;
            }
            if run.cache.len() >= context {
                break Finish::Context;
            }
            new = match (self.drafter, draft_length(k, run.cache.len(), context, left)) {
                (Some(drafter), k) if k > 0 => run.speculate(drafter, k)?,
                _ => vec![run.plain()?],
            };
        };
        run.out.timing.total = start.elapsed();
        Ok(run.out)
    }
}

/// The state of one request.
struct Run<'a, B: Backend> {
    request: &'a Request<'a>,
    target: &'a Target<B>,
    cache: KvCache<B>,
    chance: &'a mut dyn Chance,
    captured: &'a [usize],
    /// What the drafter remembers.
    session: Option<Box<dyn Session<B> + 'a>>,
    scheduler: Option<Scheduler<'a>>,
    out: Generation,
}

impl<B: Backend> Run<'_, B> {
    fn prefill(&mut self) -> Result<TokenId> {
        let (prompt, n) = (self.request.prompt, self.request.prompt.len());
        let mut pass = self.pass(prompt, Rows::Last)?;
        self.observe(prompt, &pass);
        let law = self.law(&host_logits(&mut pass), n as u64)?;
        Ok(self.chance.pick(n as u64, Purpose::Bonus, &law))
    }

    fn plain(&mut self) -> Result<TokenId> {
        let anchor = self.anchor();
        let at = (self.cache.len() + 1) as u64;
        let start = Instant::now();
        let mut pass = self.pass(&[anchor], Rows::Last)?;
        let logits = host_logits(&mut pass);
        self.out.target_passes += 1;
        self.out.timing.target += start.elapsed();
        let start = Instant::now();
        self.observe(&[anchor], &pass);
        self.out.timing.draft += start.elapsed();
        let start = Instant::now();
        let law = self.law(&logits, at)?;
        let token = self.chance.pick(at, Purpose::Bonus, &law);
        self.out.timing.sampling += start.elapsed();
        Ok(token)
    }

    /// Drafts `k` tokens, verifies them, and returns what the round emits.
    fn speculate(&mut self, drafter: &dyn Drafter<B>, k: usize) -> Result<Vec<TokenId>> {
        let begin = Instant::now();
        let anchor = self.anchor();
        let position = self.cache.len();
        let first = (position + 1) as u64;
        let mut own;
        let chance: &mut dyn Chance = if self.scheduler.as_ref().is_some_and(Scheduler::remembers) {
            own = PerRound::new(&mut *self.chance, first);
            &mut own
        } else {
            &mut *self.chance
        };
        let sampling = self.request.sampling;
        let mut laws: Vec<Law> = Vec::with_capacity(k);
        let session = self.session.as_mut().expect("there is a drafter");
        let proposal = session.draft(anchor, &self.cache, k, &mut |slot, logits| {
            let at = first + slot as u64 - 1;
            let law = sampling.draft_distribution(logits, drafter.vocabulary(), at)?;
            let token = chance.pick(at, Purpose::Draft, &law);
            laws.push(law);
            Ok(token)
        })?;
        let admitted = match &mut self.scheduler {
            Some(scheduler) => {
                let (admitted, unusable) = scheduler.round(self.request.id, &proposal)?;
                self.out.unusable_confidences += unusable;
                admitted
            }
            None => proposal.tokens.len(),
        };
        let tokens = &proposal.tokens[..admitted];
        self.out.timing.draft += begin.elapsed();

        let mut ids = vec![anchor];
        ids.extend(tokens);
        let begin = Instant::now();
        let want = Want { logits: Rows::All, hidden: self.captured };
        let mut pass = self.target.forward(&ids, &mut self.cache, &want)?;
        let logits = host_logits(&mut pass);
        self.out.target_passes += 1;
        self.out.timing.target += begin.elapsed();

        let begin = Instant::now();
        let width = self.target.config().vocab_size;
        let drafts: Vec<Draft> = tokens.iter().zip(laws).map(|(&token, law)| Draft { token, law }).collect();
        let row = |row: usize| {
            self.request.sampling.distribution(&logits[row * width..(row + 1) * width], first + row as u64)
        };
        let verdict = verify(&drafts, row, first, chance)?;
        let mut new = tokens[..verdict.accepted].to_vec();
        let stop = new.iter().position(|t| self.request.stop_tokens.contains(t));
        let round = match stop {
            Some(at) => Round { proposed: at + 1, accepted: at + 1, stopped: true },
            None => Round { proposed: tokens.len(), accepted: verdict.accepted, stopped: false },
        };
        self.out.rounds.push(round);
        if !proposal.confidence.is_empty() {
            let logits = proposal.confidence.iter().take(round.proposed).map(|&z| f64::from(z)).collect();
            self.out.verified.push(Verified { logits, accepted: round.accepted });
        }
        new.push(verdict.next);
        // What the target wrote for rejected drafts is forgotten, and the drafter never hears of them.
        self.cache.truncate(position + 1 + verdict.accepted);
        self.out.timing.sampling += begin.elapsed();
        let begin = Instant::now();
        self.observe(&ids[..=verdict.accepted], &pass);
        self.out.timing.draft += begin.elapsed();
        Ok(new)
    }

    fn pass(&mut self, ids: &[TokenId], logits: Rows) -> Result<Pass<B>> {
        self.target.forward(ids, &mut self.cache, &Want { logits, hidden: self.captured })
    }

    /// Shows the drafter the first tokens of a pass: those that are final.
    fn observe(&mut self, tokens: &[TokenId], pass: &Pass<B>) {
        let Some(session) = &mut self.session else { return };
        let n = tokens.len();
        let rows = |h: &Tensor<B, 3>| h.clone().narrow(1, 0, n).squeeze_dim::<2>(0);
        let features = match pass.hidden.as_slice() {
            [] => Tensor::zeros([n, 0], self.target.device()),
            hidden => Tensor::cat(hidden.iter().map(rows).collect(), 1),
        };
        session.observe(tokens, features);
    }

    fn law(&self, logits: &[f32], position: u64) -> Result<Law> {
        self.request.sampling.distribution(logits, position)
    }

    fn anchor(&self) -> TokenId {
        *self.out.tokens.last().expect("the prompt's pass sampled a token")
    }
}

/// Takes the logits out of a pass that was asked for them.
fn host_logits<B: Backend>(pass: &mut Pass<B>) -> Vec<f32> {
    host(pass.logits.take().expect("asked for"))
}
