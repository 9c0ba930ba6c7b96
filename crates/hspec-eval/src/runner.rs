//! Decodes prompts plainly and with drafters, side by side.

use crate::{Acceptance, DrafterFacts, Error, PromptRun, Result};
use burn::tensor::backend::Backend;
use hspec_core::{
    TokenId,
    decode::{Decoder, Generation, Request, SamplingParams, Schedule},
    drafter::Drafter,
    target::Target,
};
use std::{ops::ControlFlow, path::Path};

/// The most tokens of the decodings before the first that counts, which pay for pages and threads that
/// all later ones find ready.
const WARM_UP: usize = 16;

/// Prompts of one kind, measured together.
#[derive(Debug, Clone)]
pub struct Task {
    /// Its name in reports.
    pub name: String,
    /// At least one.
    pub prompts: Vec<TaskPrompt>,
}

/// A prompt as the target reads it.
#[derive(Debug, Clone)]
pub struct TaskPrompt {
    /// Names it in errors.
    pub id: String,
    /// Its tokens, chat template included.
    pub tokens: Vec<TokenId>,
}

/// What to decode with and how: the same for all prompts, plain or not.
pub struct Evaluation<'a, B: Backend> {
    /// The model whose text counts.
    pub target: &'a Target<B>,
    /// What to measure beside plain decoding.
    pub drafters: &'a [Box<dyn Drafter<B>>],
    /// Drafts per round.
    pub k: usize,
    /// Decides how many of them are verified; all are without one.
    pub schedule: Option<&'a Schedule>,
    /// The most tokens of an answer.
    pub max_new_tokens: usize,
    /// How to sample.
    pub sampling: SamplingParams,
    /// Of all that is random.
    pub seed: u64,
    /// Tokens that end an answer.
    pub stop_tokens: &'a [TokenId],
}

/// The runs of each task, by name: what [`DrafterReport::new`](crate::DrafterReport::new) takes.
pub type TaskRuns = Vec<(String, Vec<PromptRun>)>;

impl<B: Backend> Evaluation<'_, B> {
    /// Decodes every prompt once plainly and once with each drafter, one right after the other, and
    /// returns the runs of each drafter. Who begins changes from prompt to prompt, so that a machine
    /// that gets slower or faster meanwhile is nobody's advantage. `progress` gets the number of
    /// answers done and of all.
    ///
    /// # Errors
    /// [`Error::Prompt`] for the first prompt that cannot be decoded; of those that are too long for
    /// the target, before anything is decoded.
    pub fn run(&self, tasks: &[Task], progress: &mut dyn FnMut(usize, usize)) -> Result<Vec<TaskRuns>> {
        let prompts = || tasks.iter().flat_map(|task| task.prompts.iter().map(move |prompt| (task, prompt)));
        for (task, prompt) in prompts() {
            // A request of no tokens is checked and nothing more.
            self.decode(0, &prompt.tokens, 0, 0).map_err(named(task, prompt))?;
        }
        let contestants = self.drafters.len() + 1;
        if let Some((task, prompt)) = prompts().next() {
            for contestant in 0..contestants {
                let tokens = self.max_new_tokens.min(WARM_UP);
                self.decode(contestant, &prompt.tokens, 0, tokens).map_err(named(task, prompt))?;
            }
        }
        let total = prompts().count() * contestants;
        let mut done = 0;
        let nothing = tasks.iter().map(|task| (task.name.clone(), Vec::new())).collect();
        let mut runs: Vec<TaskRuns> = vec![nothing; self.drafters.len()];
        for (t, task) in tasks.iter().enumerate() {
            for prompt in &task.prompts {
                let number = done / contestants;
                let mut answers: Vec<Option<Generation>> = vec![None; contestants];
                for turn in 0..contestants {
                    let contestant = (number + turn) % contestants;
                    let answer = self.decode(contestant, &prompt.tokens, number, self.max_new_tokens);
                    answers[contestant] = Some(answer.map_err(named(task, prompt))?);
                    done += 1;
                    progress(done, total);
                }
                let mut answers = answers.into_iter().flatten();
                let plain = answers.next().expect("every contestant has had its turn");
                for (runs, answer) in runs.iter_mut().zip(answers) {
                    runs[t].1.push(PromptRun::new(self.k, &plain, &answer));
                }
            }
        }
        Ok(runs)
    }

    /// Contestant 0 decodes plainly, the others with the drafter of the number before.
    fn decode(
        &self,
        contestant: usize,
        prompt: &[TokenId],
        id: usize,
        max_new_tokens: usize,
    ) -> hspec_core::Result<Generation> {
        let drafter = contestant.checked_sub(1).map(|number| &*self.drafters[number]);
        let request = Request {
            prompt,
            sampling: self.sampling,
            seed: self.seed,
            id: id as u64,
            max_new_tokens,
            k: self.k,
            stop_tokens: self.stop_tokens,
        };
        let decoder = Decoder::new(self.target, drafter).scheduled(self.schedule);
        decoder.generate(&request, &mut |_| ControlFlow::Continue(()))
    }
}

fn named(task: &Task, prompt: &TaskPrompt) -> impl FnOnce(hspec_core::Error) -> Error {
    let (task, prompt) = (task.name.clone(), prompt.id.clone());
    move |source| Error::Prompt { task, prompt, source: Box::new(source) }
}

impl Acceptance {
    /// Counts of one request's rounds of at most `k` drafts, steps without drafts included: its tokens
    /// are all that the request emitted after the first.
    pub fn of(generation: &Generation, k: usize) -> Self {
        let mut counts = Self::new(k);
        for round in &generation.rounds {
            counts.record(round.proposed, round.accepted, round.stopped);
        }
        for _ in generation.rounds.len()..generation.target_passes {
            counts.record(0, 0, false);
        }
        counts
    }
}

impl PromptRun {
    /// One prompt decoded plainly and with rounds of at most `k` drafts.
    pub fn new(k: usize, plain: &Generation, speculative: &Generation) -> Self {
        // Both have processed the prompt in the same way.
        let seconds = |g: &Generation| g.timing.total.saturating_sub(g.timing.prefill).as_secs_f64();
        Self {
            acceptance: Acceptance::of(speculative, k),
            verified: speculative.verified.clone(),
            seconds: seconds(speculative),
            draft_seconds: speculative.timing.draft.as_secs_f64(),
            verify_seconds: speculative.timing.target.as_secs_f64(),
            plain_seconds: seconds(plain),
            plain_tokens: plain.tokens.len().saturating_sub(1) as u64,
            same_text: plain.tokens == speculative.tokens,
        }
    }
}

impl DrafterFacts {
    /// Of the drafter in the folder `path`.
    pub fn new<B: Backend>(path: &Path, drafter: &dyn Drafter<B>) -> Self {
        let footprint = drafter.footprint();
        Self {
            path: path.display().to_string(),
            kind: drafter.kind().to_owned(),
            params_trainable: footprint.params_trainable as u64,
            params_frozen: footprint.params_frozen as u64,
            kv_bytes_per_token: footprint.kv_bytes_per_token as u64,
            state_bytes: footprint.state_bytes as u64,
        }
    }
}
