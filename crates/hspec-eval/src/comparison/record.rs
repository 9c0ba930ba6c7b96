//! What was measured on one prompt.

use crate::Acceptance;
use serde::{Deserialize, Serialize};

/// What of a record is not the prompt's: figures are made of the records of one cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// The drafter's name.
    pub drafter: String,
    /// The task's name.
    pub task: String,
    /// Drafts per round.
    pub k: usize,
    /// Sampling temperature; 0 is greedy.
    pub temperature: f64,
    /// Length in tokens that prompts were made to have; none for prompts of their own length.
    pub context: Option<usize>,
}

/// One prompt decoded plainly and with a drafter: a line of the journal that a comparison keeps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Where it belongs.
    #[serde(flatten)]
    pub cell: Cell,
    /// The prompt's name in its task.
    pub prompt: String,
    /// Seed of the sampling.
    pub seed: u64,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Rounds as (proposed, accepted), plain steps as (0, 0).
    pub rounds: Vec<(usize, usize)>,
    /// Whether an accepted stop token ended the last round, so that no bonus token followed.
    pub stopped: bool,
    /// Per slot that a round reached: the predicted probability that it is accepted, and whether it was.
    /// Empty for drafters without a confidence head.
    pub confidence: Vec<(f32, bool)>,
    /// Whether both texts are the same.
    pub same_text: bool,
    /// Tokens of plain decoding after the first.
    pub plain_tokens: u64,
    /// Seconds of plain decoding.
    pub plain: Timing,
    /// Seconds with the drafter.
    pub drafted: Timing,
    /// The most memory that the process held meanwhile, in bytes, plainly and with the drafter; none where
    /// the system does not tell.
    pub peak_bytes: Option<[u64; 2]>,
}

/// Seconds after the prompt's own pass, which is the same work either way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Everything.
    pub total: f64,
    /// Drafting.
    pub draft: f64,
    /// The target's passes.
    pub target: f64,
    /// Sampling and verification.
    pub sampling: f64,
}

impl Record {
    /// Counts of the rounds.
    pub fn acceptance(&self) -> Acceptance {
        let mut counts = Acceptance::new(self.cell.k);
        self.each_round(|proposed, accepted, stopped, _| counts.record(proposed, accepted, stopped));
        counts
    }

    /// Calls with proposed, accepted, whether a stop was accepted, and the tokens before the round's drafts.
    pub(crate) fn each_round(&self, mut call: impl FnMut(usize, usize, bool, usize)) {
        // The token that the prompt's pass yields is there before the first round.
        let mut context = self.prompt_tokens + 1;
        for (i, &(proposed, accepted)) in self.rounds.iter().enumerate() {
            call(proposed, accepted, self.stopped && i + 1 == self.rounds.len(), context);
            context += accepted + 1;
        }
    }

    /// What says that two records measure the same: everything before the figures.
    pub fn key(&self) -> String {
        self.cell.key(&self.prompt, self.seed)
    }

    /// Whether all counts are possible, as they may not be in a file that somebody changed.
    pub fn is_sound(&self) -> bool {
        let times = [self.plain, self.drafted];
        let sound =
            |t: &Timing| [t.total, t.draft, t.target, t.sampling].iter().all(|s| s.is_finite() && *s >= 0.0);
        self.rounds.iter().all(|&(proposed, accepted)| accepted <= proposed && proposed <= self.cell.k)
            && (!self.stopped || self.rounds.last().is_some_and(|&(_, accepted)| accepted > 0))
            && self.confidence.iter().all(|(p, _)| p.is_finite())
            && times.iter().all(sound)
    }
}

impl Cell {
    /// Names a prompt and seed in this cell.
    pub fn key(&self, prompt: &str, seed: u64) -> String {
        let Self { drafter, task, k, temperature, context } = self;
        let context = context.map_or_else(String::new, |n| n.to_string());
        // Names may hold any character but this one, which separates them.
        [drafter, task, &k.to_string(), &temperature.to_string(), &context, prompt, &seed.to_string()]
            .join("\u{1f}")
    }
}
