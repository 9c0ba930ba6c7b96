//! Figures of everything that a comparison has measured.

use super::{
    Estimate, Figures, Gain, Manifest, Record,
    figures::{Parts, estimate},
    gains::{Rival, rivals},
    manifest::{Row, TaskEntry},
    statistics::Statistics,
    sums::Sums,
};
use crate::{Error, Result, bootstrap};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Seed of the resampling, for all figures of a report.
const SEED: u64 = 980_406;

/// A comparison: its `results.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// What was to be measured.
    pub manifest: Manifest,
    /// Answers of the plan that there are no records of yet. Prompts without all of theirs, for every drafter
    /// and seed, are left out of every figure.
    pub unmeasured: usize,
    /// Figures by draft length, temperature and context length.
    pub settings: Vec<Setting>,
}

/// What was measured with one draft length, temperature and context length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Setting {
    /// Drafts per round.
    pub k: usize,
    /// Sampling temperature.
    pub temperature: f64,
    /// Length in tokens that prompts were made to have.
    pub context: Option<usize>,
    /// Figures of each drafter, in the order of the manifest.
    pub drafters: Vec<DrafterResult>,
}

/// Figures of one drafter in one setting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DrafterResult {
    /// Its name.
    pub drafter: String,
    /// All tasks together.
    pub all: Figures,
    /// Each task.
    pub tasks: Vec<TaskResult>,
    /// Each of its trainings, where there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trainings: Vec<TrainingResult>,
}

/// Figures of one training of a drafter on all tasks together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainingResult {
    /// Its name in the manifest, as `hspec#1`.
    pub name: String,
    /// Unweighted mean of the tasks' tau; the interval is over prompts alone.
    pub mean_tau: Option<Estimate>,
    /// Unweighted mean of the tasks' speed-ups.
    pub mean_speedup: Option<Estimate>,
}

/// Figures of one drafter on one task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskResult {
    /// The task's name.
    pub task: String,
    /// Its figures.
    #[serde(flatten)]
    pub figures: Figures,
}

/// Sums of one task: by drafter of the manifest, then by prompt, all of the same prompts.
type Units = Vec<Vec<Sums>>;

/// The records of one task: by drafter of the manifest.
type Sources<'a> = Vec<Vec<&'a Record>>;

impl Results {
    /// Figures from records in any order; those that belong to no cell of the manifest are ignored.
    ///
    /// # Errors
    /// [`Error::Undefined`] for a record with impossible counts or times, and where nothing is complete.
    pub fn new(manifest: Manifest, records: &[Record]) -> Result<Self> {
        if let Some(record) = records.iter().find(|record| !record.is_sound()) {
            let what = format!("task {}, prompt {}", record.cell.task, record.prompt);
            return Err(Error::Undefined { what, why: "its record has impossible counts or times" });
        }
        let known: HashMap<String, &Record> = records.iter().map(|record| (record.key(), record)).collect();
        let (mut settings, mut unmeasured) = (Vec::new(), 0);
        for (k, temperature, context) in manifest.settings() {
            let mut tasks: Vec<(String, Units, Sources<'_>)> = Vec::new();
            for task in manifest.tasks.iter().filter(|task| task.context == context) {
                let (units, sources, missing) = collect(&manifest, &known, task, k, temperature);
                unmeasured += missing;
                if units.first().is_some_and(|prompts| !prompts.is_empty()) {
                    tasks.push((task.task.clone(), units, sources));
                }
            }
            if !tasks.is_empty() {
                let drafters = figures(&manifest, &tasks);
                settings.push(Setting { k, temperature, context, drafters });
            }
        }
        if settings.is_empty() {
            let why = "no prompt has been measured with every drafter and seed";
            return Err(Error::Undefined { what: "comparison".into(), why });
        }
        Ok(Self { manifest, unmeasured, settings })
    }

    /// Indented JSON with a line end.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("structs of texts and finite numbers are JSON") + "\n"
    }
}

/// Sums of the prompts of a task that are complete, seeds together; their records; and how many are missing.
fn collect<'a>(
    manifest: &Manifest,
    known: &HashMap<String, &'a Record>,
    task: &TaskEntry,
    k: usize,
    temperature: f64,
) -> (Units, Sources<'a>, usize) {
    let mut units: Units = vec![Vec::new(); manifest.drafters.len()];
    let mut sources: Sources<'_> = vec![Vec::new(); manifest.drafters.len()];
    let mut missing = 0;
    for prompt in &task.prompts {
        let of = |drafter: &str| -> Vec<&'a Record> {
            let (drafter, name) = (drafter.to_owned(), task.task.clone());
            let cell = super::Cell { drafter, task: name, k, temperature, context: task.context };
            manifest
                .seeds
                .iter()
                .filter_map(|&seed| known.get(&cell.key(&prompt.id, seed)).copied())
                .collect()
        };
        let found: Vec<Vec<&Record>> = manifest.drafters.iter().map(|drafter| of(&drafter.name)).collect();
        let lacking =
            manifest.drafters.len() * manifest.seeds.len() - found.iter().map(Vec::len).sum::<usize>();
        missing += lacking;
        if lacking > 0 {
            continue;
        }
        for (drafter, records) in found.into_iter().enumerate() {
            let mut sums = Sums::new(k);
            records.iter().for_each(|record| sums.add(&Sums::of(record)));
            units[drafter].push(sums);
            sources[drafter].extend(records);
        }
    }
    (units, sources, missing)
}

/// The figures of every row on these tasks, together and each.
fn figures(manifest: &Manifest, tasks: &[(String, Units, Sources<'_>)]) -> Vec<DrafterResult> {
    let units: Vec<&Units> = tasks.iter().map(|(_, units, _)| units).collect();
    let sources: Vec<&Sources<'_>> = tasks.iter().map(|(_, _, sources)| sources).collect();
    let rows = manifest.rows();
    let mut results: Vec<DrafterResult> = analyse(manifest, &rows, &units, &sources)
        .into_iter()
        .zip(&rows)
        .map(|(all, row)| DrafterResult {
            drafter: row.name.clone(),
            all,
            tasks: Vec::new(),
            trainings: Vec::new(),
        })
        .collect();
    for (task, units, sources) in tasks {
        for (result, figures) in results.iter_mut().zip(analyse(manifest, &rows, &[units], &[sources])) {
            result.tasks.push(TaskResult { task: task.clone(), figures });
        }
    }
    if rows.iter().any(|row| row.drafters.len() > 1) {
        let each = manifest.drafters.iter().enumerate();
        let each: Vec<Row> =
            each.map(|(i, drafter)| Row { name: drafter.name.clone(), drafters: vec![i] }).collect();
        let found = analyse(manifest, &each, &units, &sources);
        for (row, result) in rows.iter().zip(&mut results).filter(|(row, _)| row.drafters.len() > 1) {
            result.trainings.extend(row.drafters.iter().map(|&drafter| TrainingResult {
                name: each[drafter].name.clone(),
                mean_tau: found[drafter].mean_tau,
                mean_speedup: found[drafter].time.as_ref().and_then(|time| time.mean_speedup),
            }));
        }
    }
    results
}

/// The figures of every row on these tasks together. What is resampled: the prompts of each task, for all
/// rows alike, and the trainings of each row.
fn analyse(manifest: &Manifest, rows: &[Row], tasks: &[&Units], sources: &[&Sources<'_>]) -> Vec<Figures> {
    let prompts: Vec<usize> = tasks.iter().map(|units| units[0].len()).collect();
    let strata: Vec<usize> =
        prompts.iter().copied().chain(rows.iter().map(|row| row.drafters.len())).collect();
    let k = tasks[0][0][0].acceptance.k();
    let of = |row: usize, drawn: &[Vec<usize>]| {
        let (prompts, trainings) = drawn.split_at(tasks.len());
        let sum = |(task, prompts): (&&Units, &Vec<usize>)| {
            let mut sums = Sums::new(k);
            for &training in &trainings[row] {
                let units = &task[rows[row].drafters[training]];
                prompts.iter().for_each(|&prompt| sums.add(&units[prompt]));
            }
            sums
        };
        tasks.iter().zip(prompts).map(sum).collect::<Vec<Sums>>()
    };
    let everything: Vec<Vec<usize>> = strata.iter().map(|&n| (0..n).collect()).collect();
    let sums: Vec<Vec<Sums>> = (0..rows.len()).map(|row| of(row, &everything)).collect();
    let points: Vec<Statistics> = sums.iter().map(|sums| Statistics::new(sums)).collect();
    let metrics: [fn(&Statistics) -> f64; 2] = [|s| s.mean_tau, |s| s.mean_speedup];
    let rivals: [Vec<Vec<(usize, Rival)>>; 2] =
        metrics.map(|metric| rivals(&points.iter().map(metric).collect::<Vec<_>>()));

    let mut intervals = bootstrap::intervals(&strata, SEED, |drawn, values| {
        let found: Vec<Statistics> = (0..rows.len()).map(|row| Statistics::new(&of(row, drawn))).collect();
        found.iter().for_each(|statistics| statistics.row(values));
        for (metric, rivals) in metrics.iter().zip(&rivals) {
            for (row, rivals) in rivals.iter().enumerate() {
                for &(other, _) in rivals {
                    let (one, other) = (metric(&found[row]), metric(&found[other]));
                    values.extend([one - other, one / other - 1.0]);
                }
            }
        }
    });
    if prompts.iter().all(|&prompts| prompts == 1) {
        // One prompt says nothing of how prompts differ.
        intervals.iter_mut().for_each(|interval| *interval = None);
    }
    let mut rest = intervals[rows.len() * Statistics::width(k)..].iter().copied();
    let [tau_gains, speed_gains] = [0, 1].map(|m| {
        let gains = |(row, rivals): (usize, &Vec<(usize, Rival)>)| -> Vec<Gain> {
            let gain = |&(other, rival): &(usize, Rival)| {
                let cis = [rest.next().flatten(), rest.next().flatten()];
                let (one, two) = (metrics[m](&points[row]), metrics[m](&points[other]));
                Some(Gain {
                    against: rows[other].name.clone(),
                    rival,
                    difference: estimate(one - two, cis[0])?,
                    relative: estimate(one / two - 1.0, cis[1])?,
                })
            };
            rivals.iter().filter_map(gain).collect()
        };
        rivals[m].iter().enumerate().map(gains).collect::<Vec<_>>()
    });
    let gains = tau_gains.into_iter().zip(speed_gains);
    gains
        .enumerate()
        .map(|(row, (tau_gains, speed_gains))| {
            let mut all = Sums::new(k);
            sums[row].iter().for_each(|sums| all.add(sums));
            let trainings = &rows[row].drafters;
            let facts = &manifest.drafters[trainings[0]].facts;
            let tasks = sources.iter().flat_map(|records| trainings.iter().map(|&drafter| &records[drafter]));
            let parts = Parts {
                records: tasks.flatten().copied().collect(),
                prompts: prompts.iter().sum(),
                sums: all,
                drafter_bytes: (facts.kv_bytes_per_token, facts.state_bytes),
                target_bytes_per_token: manifest.target.kv_bytes_per_token,
            };
            let from = row * Statistics::width(k);
            let own = &intervals[from..from + Statistics::width(k)];
            Figures::new(&parts, &points[row], own, tau_gains, speed_gains)
        })
        .collect()
}
