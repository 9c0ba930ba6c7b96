//! Results as tables, for Markdown and for the page alike.

use super::{DrafterResult, Estimate, Figures, Gain, Rival, Setting};

/// A table of texts.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub(crate) struct Table {
    pub(crate) title: String,
    pub(crate) note: String,
    pub(crate) head: Vec<String>,
    pub(crate) rows: Vec<Vec<Entry>>,
}

/// A cell; `best` are printed bold.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub(crate) struct Entry {
    pub(crate) text: String,
    pub(crate) best: bool,
}

impl From<String> for Entry {
    fn from(text: String) -> Self {
        Self { text, best: false }
    }
}

/// What stands for a figure that there is none of.
const NONE: &str = "–";

impl Setting {
    /// As a heading.
    pub(crate) fn title(&self) -> String {
        let greedy = if self.temperature == 0.0 { " (greedy)" } else { "" };
        let context = self.context.map_or_else(String::new, |n| format!(", context {n}"));
        format!("k = {}, temperature {}{greedy}{context}", self.k, self.temperature)
    }
}

/// The tables of one setting.
pub(crate) fn tables(setting: &Setting) -> Vec<Table> {
    let mut tables = vec![by_task(setting), gains(setting)];
    tables.extend(trainings(setting));
    tables.extend([task_gains(setting), positions(setting)]);
    tables.extend([times(setting), memory(setting), contexts(setting)]);
    tables.extend(confidence(setting));
    tables
}

/// Acceptance and speed by task, as in the paper's Table 2.
fn by_task(setting: &Setting) -> Table {
    let mut head = vec!["drafter".to_owned()];
    for task in &setting.drafters[0].tasks {
        head.extend([format!("{} tau", task.task), "Spd.".to_owned()]);
    }
    head.extend(["mean tau".to_owned(), "mean Spd.".to_owned()]);
    let values = |drafter: &DrafterResult| {
        let mut values = Vec::new();
        for figures in drafter.tasks.iter().map(|t| &t.figures).chain([&drafter.all]) {
            values.extend([figures.mean_tau, figures.time.as_ref().and_then(|time| time.mean_speedup)]);
        }
        values.into_iter().map(|e| e.map(|e| e.value)).collect::<Vec<_>>()
    };
    let all: Vec<Vec<Option<f64>>> = setting.drafters.iter().map(values).collect();
    let entry = |drafter: usize, column: usize| {
        let Some(value) = all[drafter][column] else { return NONE.to_owned().into() };
        let best = all.len() > 1 && all.iter().filter_map(|row| row[column]).all(|other| other <= value);
        Entry { text: format!("{value:.2}"), best }
    };
    let row = |(i, drafter): (usize, &DrafterResult)| {
        let name = [Entry::from(drafter.drafter.clone())];
        name.into_iter().chain((0..all[i].len()).map(|column| entry(i, column))).collect()
    };
    Table {
        title: "Acceptance and speed by task".into(),
        note: "tau: tokens per target pass, bonus token included. Spd.: plain time per token over time per \
               token, above 1 is faster. Means are unweighted over tasks. Bold: the best of the column."
            .into(),
        head,
        rows: setting.drafters.iter().enumerate().map(row).collect(),
    }
}

fn against(gains: &[Gain], rival: Rival) -> String {
    gains.iter().find(|gain| gain.rival == rival).map_or_else(|| NONE.to_owned(), told)
}

fn speed_gains(figures: &Figures) -> &[Gain] {
    figures.time.as_ref().map_or(&[], |time| &time.gains)
}

fn gains(setting: &Setting) -> Table {
    let row = |drafter: &DrafterResult| {
        let figures = &drafter.all;
        let time = figures.time.as_ref();
        let speed_gains = speed_gains(figures);
        let cells = [
            drafter.drafter.clone(),
            format!("{} / {} / {}", figures.prompts, figures.rounds, figures.tokens),
            interval(figures.mean_tau),
            against(&figures.tau_gains, Rival::Best),
            against(&figures.tau_gains, Rival::RunnerUp),
            interval(time.and_then(|time| time.mean_speedup)),
            against(speed_gains, Rival::Best),
            against(speed_gains, Rival::RunnerUp),
            interval(figures.tau),
            interval(time.map(|time| time.speedup)),
        ];
        cells.map(Entry::from).to_vec()
    };
    let head = [
        "drafter",
        "prompts / rounds / tokens",
        "mean tau",
        "against the best other",
        "against the runner-up",
        "mean speed-up",
        "against the best other",
        "against the runner-up",
        "tau, all rounds",
        "speed-up, all tokens",
    ];
    Table {
        title: "How sure".into(),
        note:
            "In brackets 95 % intervals: 10,000 paired resamples of the prompts within each task, all seeds \
               of a prompt together, and of the trainings where a drafter has several. Differences are relative; * marks those whose interval leaves out 0."
                .into(),
        head: head.map(str::to_owned).to_vec(),
        rows: setting.drafters.iter().map(row).collect(),
    }
}

/// Where drafters were trained more than once.
fn trainings(setting: &Setting) -> Option<Table> {
    let rows = setting.drafters.iter().flat_map(|drafter| {
        drafter.trainings.iter().map(|training| {
            let cells = [
                drafter.drafter.clone(),
                training.name.clone(),
                interval(training.mean_tau),
                interval(training.mean_speedup),
            ];
            cells.map(Entry::from).to_vec()
        })
    });
    let rows: Vec<Vec<Entry>> = rows.collect();
    let head = ["drafter", "training", "mean tau", "mean speed-up"].map(str::to_owned).to_vec();
    let note = "The same recipe with other random numbers. Intervals here are over prompts alone; those of the \
                other tables resample the trainings too.";
    let title = "Each training".to_owned();
    (!rows.is_empty()).then(|| Table { title, note: note.into(), head, rows })
}

/// The same for each task.
fn task_gains(setting: &Setting) -> Table {
    let mut rows = Vec::new();
    for task in 0..setting.drafters[0].tasks.len() {
        for drafter in &setting.drafters {
            let figures = &drafter.tasks[task].figures;
            let cells = [
                drafter.tasks[task].task.clone(),
                drafter.drafter.clone(),
                format!("{} / {} / {}", figures.prompts, figures.rounds, figures.tokens),
                interval(figures.tau),
                against(&figures.tau_gains, Rival::Best),
                against(&figures.tau_gains, Rival::RunnerUp),
                interval(figures.time.as_ref().map(|time| time.speedup)),
                against(speed_gains(figures), Rival::Best),
                against(speed_gains(figures), Rival::RunnerUp),
            ];
            rows.push(cells.map(Entry::from).to_vec());
        }
    }
    let head = [
        "task",
        "drafter",
        "prompts / rounds / tokens",
        "tau",
        "against the best other",
        "against the runner-up",
        "speed-up",
        "against the best other",
        "against the runner-up",
    ];
    Table {
        title: "How sure, by task".into(),
        note: "As above, from the prompts of one task.".into(),
        head: head.map(str::to_owned).to_vec(),
        rows,
    }
}

fn positions(setting: &Setting) -> Table {
    let mut rows = Vec::new();
    for drafter in &setting.drafters {
        let figures = &drafter.all;
        let conditional = figures.conditional.iter().enumerate().map(|(i, share)| match share {
            Some(_) => format!("{} ({}/{})", interval(*share), figures.accepted[i], figures.reached[i]),
            None => NONE.to_owned(),
        });
        let survival = figures.survival.iter().map(|share| interval(*share));
        let row = |name: &str, cells: &mut dyn Iterator<Item = String>| {
            let first = [drafter.drafter.clone(), name.to_owned()];
            first.into_iter().chain(cells).map(Entry::from).collect::<Vec<_>>()
        };
        rows.push(row("conditional", &mut conditional.into_iter()));
        rows.push(row("survival", &mut survival.into_iter()));
    }
    let slots = (1..=setting.k).map(|slot| format!("slot {slot}"));
    Table {
        title: "Acceptance by position".into(),
        note:
            "Conditional: accepted among the rounds that reached the slot (counts in parentheses). Survival: \
               this slot and all before accepted, among the rounds that proposed it. All tasks together."
                .into(),
        head: ["drafter".to_owned(), String::new()].into_iter().chain(slots).collect(),
        rows,
    }
}

fn times(setting: &Setting) -> Table {
    let ratio = |value: Option<f64>| value.map_or_else(|| NONE.to_owned(), |v| format!("{v:.2}"));
    let row = |drafter: &DrafterResult| {
        let Some(time) = &drafter.all.time else { return vec![drafter.drafter.clone().into()] };
        let rest = |total: f64, parts: &[f64]| (total - parts.iter().sum::<f64>()).max(0.0);
        let total = time.ms_per_token.value;
        let cells = [
            drafter.drafter.clone(),
            interval(Some(time.ms_per_token)),
            format!("{:.2}", time.draft_ms),
            format!("{:.2}", time.verify_ms),
            format!("{:.2}", time.sampling_ms),
            format!("{:.2}", rest(total, &[time.draft_ms, time.verify_ms, time.sampling_ms])),
            interval(Some(time.plain.ms_per_token)),
            format!("{:.2}", time.speedup.value),
            ratio(time.predicted_speedup),
            ratio(time.predicted_if_verifying_were_free),
        ];
        cells.map(Entry::from).to_vec()
    };
    let head = [
        "drafter",
        "ms per token",
        "drafting",
        "verifying",
        "sampling",
        "other",
        "plain ms per token",
        "speed-up measured",
        "predicted",
        "predicted if verifying cost one plain pass",
    ];
    Table {
        title: "Where the time goes".into(),
        note: "Milliseconds per token emitted, after the prompt's pass; plain decoding of the same prompts was \
               measured in turn with each drafter. Predicted: the latency model, tau T / (T_D + T_V), from the \
               measured times of the passes."
            .into(),
        head: head.map(str::to_owned).to_vec(),
        rows: setting.drafters.iter().map(row).collect(),
    }
}

fn memory(setting: &Setting) -> Table {
    let mib = |bytes: Option<u64>| {
        bytes.map_or_else(|| NONE.to_owned(), |b| format!("{:.1}", b as f64 / f64::from(1 << 20)))
    };
    let row = |drafter: &DrafterResult| {
        let memory = &drafter.all.memory;
        let cells = [
            drafter.drafter.clone(),
            memory.drafter_bytes_per_token.to_string(),
            memory.longest_context.to_string(),
            mib(Some(memory.drafter_bytes)),
            mib(Some(memory.target_bytes)),
            mib(memory.peak_bytes),
            mib(memory.peak_bytes_plain),
        ];
        cells.map(Entry::from).to_vec()
    };
    let head = [
        "drafter",
        "its bytes per token",
        "longest context",
        "it keeps of that, MiB",
        "the target's cache, MiB",
        "peak of the process, MiB",
        "plainly, MiB",
    ];
    Table {
        title: "Memory".into(),
        note:
            "The first figures follow from the shapes, in f32 as computed with here. The peak is the largest \
               resident size (VmHWM) of the process while it decoded, all models' weights included."
                .into(),
        head: head.map(str::to_owned).to_vec(),
        rows: setting.drafters.iter().map(row).collect(),
    }
}

fn contexts(setting: &Setting) -> Table {
    let all = |figures: &Figures| figures.contexts.iter().map(|c| (c.from, c.below)).collect::<Vec<_>>();
    let mut ranges: Vec<_> = setting.drafters.iter().flat_map(|drafter| all(&drafter.all)).collect();
    ranges.sort_unstable_by_key(|(from, _)| *from);
    ranges.dedup();
    let row = |drafter: &DrafterResult| {
        let cell = |(from, _): &(usize, Option<usize>)| {
            let found = drafter.all.contexts.iter().find(|c| c.from == *from);
            found.map_or_else(|| NONE.to_owned(), |c| format!("{} ({})", interval(Some(c.tau)), c.rounds))
        };
        let name = [drafter.drafter.clone()];
        name.into_iter().chain(ranges.iter().map(cell)).map(Entry::from).collect()
    };
    let title = |(from, below): &(usize, Option<usize>)| match below {
        Some(below) => format!("{from} to {}", below - 1),
        None => format!("{from} and more"),
    };
    Table {
        title: "tau by length of the context".into(),
        note: "Tokens before the round's drafts; in parentheses the number of rounds.".into(),
        head: ["drafter".to_owned()].into_iter().chain(ranges.iter().map(title)).collect(),
        rows: setting.drafters.iter().map(row).collect(),
    }
}

/// Where there are confidence heads.
fn confidence(setting: &Setting) -> Option<Table> {
    let mut rows = Vec::new();
    for drafter in &setting.drafters {
        let tasks = drafter.tasks.iter().map(|task| (task.task.as_str(), &task.figures));
        for (task, figures) in tasks.chain([("all", &drafter.all)]) {
            let Some(found) = &figures.confidence else { continue };
            let auroc = found.auroc.map_or_else(|| NONE.to_owned(), |a| format!("{a:.3}"));
            let cells = [
                drafter.drafter.clone(),
                task.to_owned(),
                found.predictions.to_string(),
                format!("{:.3}", found.ece),
                auroc,
            ];
            rows.push(cells.map(Entry::from).to_vec());
        }
    }
    let head = ["drafter", "task", "slots reached", "ECE", "AUROC"].map(str::to_owned).to_vec();
    let note = "The confidence head's probability of acceptance, given that all slots before were accepted, \
                against what happened. ECE over 20 bins: 0 is honest. AUROC: 1 tells accepted from rejected, \
                0.5 guesses.";
    let title = "Confidence".to_owned();
    (!rows.is_empty()).then(|| Table { title, note: note.into(), head, rows })
}

/// A figure with its interval.
pub(crate) fn interval(estimate: Option<Estimate>) -> String {
    match estimate {
        None => NONE.to_owned(),
        Some(Estimate { value, ci: None }) => format!("{value:.2}"),
        Some(Estimate { value, ci: Some([low, high]) }) => format!("{value:.2} [{low:.2}, {high:.2}]"),
    }
}

/// A relative gain in percent with its interval.
pub(crate) fn percent(gain: &Gain) -> String {
    let Estimate { value, ci } = gain.relative;
    match ci {
        None => format!("{:+.1} %", 100.0 * value),
        Some([low, high]) => format!("{:+.1} % [{:+.1}, {:+.1}]", 100.0 * value, 100.0 * low, 100.0 * high),
    }
}

/// A relative gain, against whom, and whether it is clear.
pub(crate) fn told(gain: &Gain) -> String {
    let star = if gain.is_clear() { " *" } else { "" };
    format!("{} ({}){star}", percent(gain), gain.against)
}
