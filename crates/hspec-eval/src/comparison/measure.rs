//! One prompt decoded plainly and with drafters.

use super::{Cell, Record, Timing};
use burn::tensor::backend::Backend;
use hspec_core::{
    Result, TokenId,
    decode::{Decoder, Generation, Request, SamplingParams},
    drafter::Drafter,
    target::Target,
};
use std::{ops::ControlFlow, time::Duration};

/// What all answers of a comparison have in common.
pub struct Measurer<'a, B: Backend> {
    /// The model whose text counts.
    pub target: &'a Target<B>,
    /// The most tokens of an answer.
    pub max_new_tokens: usize,
    /// Tokens that end an answer.
    pub stop_tokens: &'a [TokenId],
}

/// A prompt to be answered.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// Its name.
    pub id: &'a str,
    /// As the target reads it.
    pub tokens: &'a [TokenId],
    /// Its number in its task: with the seed, it fixes every random choice.
    pub number: usize,
    /// See `number`.
    pub seed: u64,
}

/// An answer and what it took.
pub struct Run {
    generation: Generation,
    peak_bytes: Option<u64>,
}

impl<B: Backend> Measurer<'_, B> {
    /// Answers the question plainly and once per contestant, one right after the other, and makes a record of
    /// each contestant: their cells differ in drafter and k alone. `turn` says who begins: counted
    /// up from question to question, a machine that gets slower or faster meanwhile is nobody's advantage.
    ///
    /// # Errors
    /// A prompt that cannot be decoded.
    pub fn measure(
        &self,
        question: &Question<'_>,
        contestants: &[(&dyn Drafter<B>, Cell)],
        turn: usize,
    ) -> Result<Vec<Record>> {
        let Some((_, first)) = contestants.first() else { return Ok(Vec::new()) };
        let sampling = SamplingParams::new(first.temperature, None, None)?;
        let number = contestants.len() + 1;
        let mut runs: Vec<Option<Run>> = (0..number).map(|_| None).collect();
        for place in 0..number {
            let contestant = (turn + place) % number;
            let run = match contestant.checked_sub(1).map(|n| &contestants[n]) {
                None => self.answer(question, None, 0, sampling, self.max_new_tokens)?,
                Some((drafter, cell)) => {
                    self.answer(question, Some(*drafter), cell.k, sampling, self.max_new_tokens)?
                }
            };
            runs[contestant] = Some(run);
        }
        let mut runs = runs.into_iter().flatten();
        let plain = runs.next().expect("every contestant has had its turn");
        Ok(contestants
            .iter()
            .zip(runs)
            .map(|((_, cell), run)| record(cell, question, &plain, &run))
            .collect())
    }

    /// One answer of at most `most` tokens: plainly without a drafter.
    ///
    /// # Errors
    /// A prompt that cannot be decoded.
    pub fn answer(
        &self,
        question: &Question<'_>,
        drafter: Option<&dyn Drafter<B>>,
        k: usize,
        sampling: SamplingParams,
        most: usize,
    ) -> Result<Run> {
        let request = Request {
            prompt: question.tokens,
            sampling,
            seed: question.seed,
            id: question.number as u64,
            max_new_tokens: most,
            k,
            stop_tokens: self.stop_tokens,
        };
        let watched = forget_peak();
        let generation =
            Decoder::new(self.target, drafter).generate(&request, &mut |_| ControlFlow::Continue(()))?;
        let peak_bytes = if watched { peak() } else { None };
        Ok(Run { generation, peak_bytes })
    }
}

fn record(cell: &Cell, question: &Question<'_>, plain: &Run, run: &Run) -> Record {
    let generation = &run.generation;
    let mut rounds: Vec<_> = generation.rounds.iter().map(|r| (r.proposed, r.accepted)).collect();
    rounds.resize(generation.target_passes.max(rounds.len()), (0, 0));
    let confidence = generation.verified.iter().flat_map(|round| {
        let reached = round.logits.iter().take(round.accepted + 1).enumerate();
        reached.map(|(slot, &logit)| (probability(logit), slot < round.accepted))
    });
    Record {
        cell: cell.clone(),
        prompt: question.id.to_owned(),
        seed: question.seed,
        prompt_tokens: question.tokens.len(),
        stopped: generation.rounds.last().is_some_and(|round| round.stopped),
        rounds,
        confidence: confidence.collect(),
        same_text: generation.tokens == plain.generation.tokens,
        plain_tokens: plain.generation.tokens.len().saturating_sub(1) as u64,
        plain: timing(&plain.generation),
        drafted: timing(generation),
        peak_bytes: plain.peak_bytes.zip(run.peak_bytes).map(<[u64; 2]>::from),
    }
}

/// Of a logit; one that is no number promises nothing, as schedules take it.
fn probability(logit: f64) -> f32 {
    if logit.is_nan() { 0.0 } else { (1.0 / (1.0 + (-logit).exp())) as f32 }
}

fn timing(generation: &Generation) -> Timing {
    let timing = &generation.timing;
    Timing {
        total: timing.total.saturating_sub(timing.prefill).as_secs_f64(),
        draft: Duration::as_secs_f64(&timing.draft),
        target: timing.target.as_secs_f64(),
        sampling: timing.sampling.as_secs_f64(),
    }
}

/// Makes the system forget the most memory that this process has held; whether it could.
fn forget_peak() -> bool {
    // proc(5): 5 resets the peak resident set size.
    cfg!(target_os = "linux") && std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// The most memory that this process has held since, in bytes.
fn peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}
