//! The figures of an evaluation, as they are written to JSON.

use crate::{Acceptance, CalibrationFit, Error, Machine, Result, bootstrap, markdown};
use hspec_sched::Verified;
use serde::{Deserialize, Serialize};

/// What one prompt gave, decoded plainly and with the drafter. The token that the prompt's own pass
/// yields is the same work in both and counts in neither.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptRun {
    /// Counts of the rounds.
    pub acceptance: Acceptance,
    /// Confidences of the rounds, by [`Generation::verified`](hspec_core::decode::Generation::verified).
    pub verified: Vec<Verified>,
    /// Seconds that the rounds took.
    pub seconds: f64,
    /// Those of them spent drafting.
    pub draft_seconds: f64,
    /// Those of them spent in the target's verifying passes.
    pub verify_seconds: f64,
    /// Seconds of plain decoding after the first token.
    pub plain_seconds: f64,
    /// Tokens of plain decoding after the first.
    pub plain_tokens: u64,
    /// Whether both texts are the same.
    pub same_text: bool,
}

/// An evaluation: the JSON of `eval --json` and of `results.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Version of this layout: 1.
    pub schema: u32,
    /// The commit that measured.
    pub commit: String,
    /// The machine that measured.
    pub machine: Machine,
    /// How was decoded.
    #[serde(flatten)]
    pub settings: Settings,
    /// One entry per drafter.
    pub drafters: Vec<DrafterReport>,
}

/// How was decoded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The target's directory or file.
    pub target: String,
    /// Drafts per round.
    pub k: usize,
    /// Sampling temperature; 0 is greedy.
    pub temperature: f64,
    /// The most tokens of an answer.
    pub max_new_tokens: usize,
    /// What decided how many drafts were verified; all were where it is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<String>,
}

/// What a drafter is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DrafterFacts {
    /// Its directory.
    pub path: String,
    /// Its architecture, as `hspec`.
    pub kind: String,
    /// Parameters that training changes.
    pub params_trainable: u64,
    /// Parameters taken from the target.
    pub params_frozen: u64,
    /// Bytes of its own cache per token of context.
    pub kv_bytes_per_token: u64,
    /// Bytes it keeps between rounds whatever the context.
    pub state_bytes: u64,
}

/// Figures of one drafter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DrafterReport {
    /// What it is.
    #[serde(flatten)]
    pub facts: DrafterFacts,
    /// Unweighted mean of the tasks' tau.
    pub mean_tau: f64,
    /// Plain time per token over speculative time per token, all prompts together; where the texts are
    /// the same, this is the ratio of the total times.
    pub speedup: f64,
    /// 95 % paired bootstrap interval of `speedup` over prompts.
    pub speedup_ci: [f64; 2],
    /// One entry per prompt file.
    pub tasks: Vec<TaskReport>,
    /// The calibration that was fitted to these runs, if one was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationFit>,
}

/// Figures of one drafter on one task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskReport {
    /// Name of the task.
    pub task: String,
    /// Number of prompts.
    pub prompts: usize,
    /// Rounds of drafting and verifying.
    pub rounds: u64,
    /// Tokens that the rounds emitted.
    pub tokens: u64,
    /// Mean accepted length, bonus included.
    pub tau: f64,
    /// `[i]`: rounds that proposed slot i.
    #[serde(default)]
    pub proposed: Vec<u64>,
    /// `[i]`: rounds in which slots before i were all accepted and slot i was proposed.
    pub reached: Vec<u64>,
    /// `[i]`: those in which slot i was accepted too.
    pub accepted: Vec<u64>,
    /// `[i]`: share of the rounds proposing slot i in which it and all before were accepted.
    pub survival: Vec<f64>,
    /// `[i]`: `accepted[i] / reached[i]`, 0 where none was reached.
    pub conditional: Vec<f64>,
    /// Milliseconds per token with the drafter.
    pub ms_per_token: f64,
    /// Milliseconds per token of plain decoding.
    pub ms_per_token_plain: f64,
    /// Milliseconds of drafting per round.
    pub draft_ms: f64,
    /// Milliseconds of verifying per round.
    pub verify_ms: f64,
    /// Prompts whose text equals that of plain decoding.
    pub same_text: usize,
}

impl Report {
    /// A report of the current layout.
    pub fn new(commit: String, machine: Machine, settings: Settings, drafters: Vec<DrafterReport>) -> Self {
        Self { schema: 1, commit, machine, settings, drafters }
    }

    /// Indented JSON with a line end.
    pub fn to_json(&self) -> String {
        let json = serde_json::to_string_pretty(self).expect("structs of texts and numbers are JSON");
        json + "\n"
    }

    /// Markdown: provenance, then two tables per drafter. `command` is what was run, `date` the day.
    pub fn to_markdown(&self, command: &str, date: &str) -> String {
        markdown::render(self, command, date)
    }
}

impl DrafterReport {
    /// Figures from the runs of each task (name, prompts). `seed` is that of the bootstrap.
    ///
    /// # Errors
    /// [`Error::Undefined`] for a task without a token to time, as when every answer ends with its
    /// first token.
    pub fn new(facts: DrafterFacts, tasks: &[(String, Vec<PromptRun>)], seed: u64) -> Result<Self> {
        let reports: Vec<_> =
            tasks.iter().map(|(name, runs)| TaskReport::new(name, runs)).collect::<Result<_>>()?;
        // Prompts that ended with their first token took part in no timing.
        let timed: Vec<_> = tasks.iter().flat_map(|(_, runs)| runs).filter(|run| run.is_timed()).collect();
        let speedup_ci = bootstrap::interval(&timed, seed, |runs| speedup(runs.iter().copied().copied()))?;
        let mean_tau = reports.iter().map(|task| task.tau).sum::<f64>() / reports.len() as f64;
        let speedup = speedup(timed.iter().copied());
        Ok(Self { facts, mean_tau, speedup, speedup_ci, tasks: reports, calibration: None })
    }
}

impl DrafterReport {
    /// The interval of `speedup`, where more than one prompt was measured: one alone says nothing of how
    /// prompts differ.
    pub fn interval(&self) -> Option<[f64; 2]> {
        (self.tasks.iter().map(|task| task.prompts).sum::<usize>() > 1).then_some(self.speedup_ci)
    }
}

impl TaskReport {
    fn new(task: &str, runs: &[PromptRun]) -> Result<Self> {
        let undefined = |why| Err(Error::Undefined { what: format!("task {task}"), why });
        let Some(first) = runs.first() else { return undefined("no prompts") };
        let mut acceptance = Acceptance::new(first.acceptance.k());
        runs.iter().for_each(|run| acceptance.merge(&run.acceptance));
        if !runs.iter().any(PromptRun::is_timed) {
            return undefined("no answer is longer than one token, so that there is nothing to time");
        }
        let timed = || runs.iter().filter(|run| run.is_timed());
        let seconds = |of: fn(&PromptRun) -> f64| timed().map(of).sum::<f64>();
        let rounds = acceptance.rounds() as f64;
        Ok(Self {
            task: task.to_owned(),
            prompts: runs.len(),
            rounds: acceptance.rounds(),
            tokens: acceptance.tokens(),
            tau: acceptance.tau(),
            proposed: acceptance.proposed().to_vec(),
            reached: acceptance.reached().to_vec(),
            accepted: acceptance.accepted().to_vec(),
            survival: acceptance.survival(),
            conditional: acceptance.conditional(),
            ms_per_token: 1e3 * seconds_per_token(timed()),
            ms_per_token_plain: 1e3 * plain_seconds_per_token(timed()),
            draft_ms: 1e3 * seconds(|run| run.draft_seconds) / rounds,
            verify_ms: 1e3 * seconds(|run| run.verify_seconds) / rounds,
            same_text: runs.iter().filter(|run| run.same_text).count(),
        })
    }
}

impl TaskReport {
    /// Drafts verified per round; 0 without rounds.
    pub fn drafts_per_round(&self) -> f64 {
        self.proposed.iter().sum::<u64>() as f64 / self.rounds.max(1) as f64
    }
}

impl PromptRun {
    fn is_timed(&self) -> bool {
        self.acceptance.tokens() > 0 && self.plain_tokens > 0
    }
}

fn seconds_per_token<'a>(runs: impl Iterator<Item = &'a PromptRun>) -> f64 {
    let (seconds, tokens) =
        runs.fold((0.0, 0), |sum, run| (sum.0 + run.seconds, sum.1 + run.acceptance.tokens()));
    seconds / tokens as f64
}

fn plain_seconds_per_token<'a>(runs: impl Iterator<Item = &'a PromptRun>) -> f64 {
    let (seconds, tokens) =
        runs.fold((0.0, 0), |sum, run| (sum.0 + run.plain_seconds, sum.1 + run.plain_tokens));
    seconds / tokens as f64
}

fn speedup<'a>(runs: impl Iterator<Item = &'a PromptRun> + Clone) -> f64 {
    plain_seconds_per_token(runs.clone()) / seconds_per_token(runs)
}
