//! What a comparison is to measure: the file beside its journal.

use super::Cell;
use crate::{DrafterFacts, Machine};
use serde::{Deserialize, Serialize};

/// The plan of a comparison, enough to make its report from the records.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of this layout: 1.
    pub schema: u32,
    /// The command that was run.
    pub command: String,
    /// The day it began.
    pub date: String,
    /// The commit that measured.
    pub commit: String,
    /// The machine that measured.
    pub machine: Machine,
    /// The target.
    pub target: TargetFacts,
    /// The most tokens of an answer.
    pub max_new_tokens: usize,
    /// Drafts per round.
    pub ks: Vec<usize>,
    /// Sampling temperatures.
    pub temperatures: Vec<f64>,
    /// Seeds of the sampling: each decodes every prompt once more.
    pub seeds: Vec<u64>,
    /// What is compared.
    pub drafters: Vec<DrafterEntry>,
    /// The tasks, each context length for itself.
    pub tasks: Vec<TaskEntry>,
    /// Sets that were asked for and could not be had.
    pub missing: Vec<Missing>,
}

/// The target of a comparison.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetFacts {
    /// Its directory or file.
    pub path: String,
    /// Says whether it is still the same.
    pub fingerprint: String,
    /// Bytes of its cache per token as computed with here, in f32.
    pub kv_bytes_per_token: u64,
}

/// A drafter of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DrafterEntry {
    /// Its name in tables and records.
    pub name: String,
    /// Says whether it is still the same.
    pub fingerprint: String,
    /// What it is.
    #[serde(flatten)]
    pub facts: DrafterFacts,
}

impl DrafterEntry {
    /// What its name has in common with those of other trainings of it: all before the first `#`, as in `hspec#1`.
    pub fn family(&self) -> &str {
        self.name.split('#').next().unwrap_or_default()
    }
}

/// A row of a report: one drafter, or several trainings of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The drafter's name, or what those of its trainings have in common ([`DrafterEntry::family`]).
    pub name: String,
    /// Its drafters' places in [`Manifest::drafters`]; at least one.
    pub drafters: Vec<usize>,
}

/// A task of a comparison at one context length.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskEntry {
    /// Its name.
    pub task: String,
    /// Length in tokens that its prompts were made to have.
    pub context: Option<usize>,
    /// Its prompts, in order.
    pub prompts: Vec<PromptEntry>,
}

/// A prompt of a comparison.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptEntry {
    /// Its name.
    pub id: String,
    /// Its length in tokens.
    pub tokens: usize,
    /// Says whether its tokens are still the same.
    pub fingerprint: String,
}

/// A set that was asked for and could not be had.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// Its name.
    pub set: String,
    /// What stood in the way.
    pub why: String,
}

impl Manifest {
    /// Why records made by `earlier` cannot stand beside those of this plan; none if they can. Drafters,
    /// tasks and settings may be added or left out; what carries the same name must be the same.
    pub fn conflict(&self, earlier: &Self) -> Option<String> {
        if self.target.fingerprint != earlier.target.fingerprint {
            return Some(format!(
                "target: {} is another model than {}",
                self.target.path, earlier.target.path
            ));
        }
        if self.max_new_tokens != earlier.max_new_tokens {
            let (now, then) = (self.max_new_tokens, earlier.max_new_tokens);
            return Some(format!("max_new_tokens: found {now}, expected {then}"));
        }
        for drafter in &self.drafters {
            let other = earlier.drafters.iter().find(|d| d.name == drafter.name);
            if other.is_some_and(|other| other.fingerprint != drafter.fingerprint) {
                return Some(format!("drafter {}: its files have changed", drafter.name));
            }
        }
        for task in &self.tasks {
            let same = |t: &&TaskEntry| t.task == task.task && t.context == task.context;
            let Some(other) = earlier.tasks.iter().find(same) else { continue };
            // The number of a prompt chooses its random numbers: lists may only grow at their end.
            if other.prompts.iter().zip(&task.prompts).any(|(a, b)| a != b) {
                return Some(format!("task {}: its prompts have changed", task.task));
            }
        }
        None
    }

    /// Every cell with its task, in the order of the report.
    pub fn cells(&self) -> impl Iterator<Item = (Cell, &TaskEntry)> {
        let settings = self.settings();
        settings.into_iter().flat_map(move |(k, temperature, context)| {
            let tasks = self.tasks.iter().filter(move |task| task.context == context);
            tasks.flat_map(move |task| {
                self.drafters.iter().map(move |drafter| {
                    let (drafter, name) = (drafter.name.clone(), task.task.clone());
                    (Cell { drafter, task: name, k, temperature, context }, task)
                })
            })
        })
    }

    /// The rows of a report, in the order of the drafters. A drafter alone in its row keeps its whole name.
    pub fn rows(&self) -> Vec<Row> {
        let mut rows: Vec<Row> = Vec::new();
        for (i, drafter) in self.drafters.iter().enumerate() {
            let name = drafter.family();
            match rows.iter_mut().find(|row| row.name == name) {
                Some(row) => row.drafters.push(i),
                None => rows.push(Row { name: name.to_owned(), drafters: vec![i] }),
            }
        }
        for row in rows.iter_mut().filter(|row| row.drafters.len() == 1) {
            row.name.clone_from(&self.drafters[row.drafters[0]].name);
        }
        rows
    }

    /// Draft length, temperature and context length of every table: prompts of their own length first.
    pub fn settings(&self) -> Vec<(usize, f64, Option<usize>)> {
        let mut contexts: Vec<_> = self.tasks.iter().map(|task| task.context).collect();
        contexts.sort_unstable();
        contexts.dedup();
        let mut settings = Vec::new();
        for context in contexts {
            for &temperature in &self.temperatures {
                settings.extend(self.ks.iter().map(|&k| (k, temperature, context)));
            }
        }
        settings
    }
}
