//! A report as Markdown, made from the same numbers as its JSON.

use crate::{DrafterReport, Report, TaskReport};

pub(crate) fn render(report: &Report, command: &str, date: &str) -> String {
    let settings = &report.settings;
    let mut lines = vec![
        "# Acceptance and speed".to_owned(),
        String::new(),
        format!("- command: `{command}`"),
        format!("- date: {date}"),
        format!("- machine: {}, {} threads", report.machine.cpu, report.machine.threads),
        format!("- commit: {}", report.commit),
        format!(
            "- target: {}; k = {}, temperature {}, at most {} new tokens",
            settings.target, settings.k, settings.temperature, settings.max_new_tokens
        ),
    ];
    lines.extend(settings.schedule.iter().map(|schedule| format!("- schedule: {schedule}")));
    report.drafters.iter().for_each(|drafter| render_drafter(drafter, settings.k, &mut lines));
    lines.join("\n") + "\n"
}

fn render_drafter(drafter: &DrafterReport, k: usize, lines: &mut Vec<String>) {
    let facts = &drafter.facts;
    lines.extend([
        String::new(),
        format!("## {} ({})", facts.path, facts.kind),
        String::new(),
        format!(
            "{} trainable and {} frozen parameters; {} bytes of its own cache per token, {} bytes of state.",
            facts.params_trainable, facts.params_frozen, facts.kv_bytes_per_token, facts.state_bytes
        ),
        format!(
            "Mean tau {:.2} (bonus included); speed-up {:.2}, {}.",
            drafter.mean_tau,
            drafter.speedup,
            match drafter.interval() {
                Some([low, high]) =>
                    format!("95 % interval {low:.2} to {high:.2} (paired bootstrap over prompts)"),
                None => "without an interval, which one prompt cannot give".to_owned(),
            }
        ),
        String::new(),
    ]);
    let titles = [
        "task",
        "prompts",
        "rounds",
        "tokens",
        "drafts a round",
        "tau",
        "ms per token",
        "plain",
        "speed-up",
        "draft ms",
        "verify ms",
        "same text",
    ];
    row(lines, titles.map(str::to_owned));
    rule(lines, titles.len());
    for task in &drafter.tasks {
        row(lines, summary(task));
    }
    lines.extend([
        String::new(),
        "By position: acceptance among the rounds that reached the slot (conditional, with counts), and \
         among all that proposed it (survival)."
            .to_owned(),
        String::new(),
    ]);
    row(lines, ["task".to_owned(), String::new()].into_iter().chain((1..=k).map(|slot| slot.to_string())));
    rule(lines, k + 2);
    for task in &drafter.tasks {
        row(lines, [escaped(&task.task), "conditional".into()].into_iter().chain(conditional(task)));
        // A slot that was never proposed was reached by none of the rounds either.
        let survival = task.survival.iter().zip(&task.proposed).map(|(share, proposed)| match proposed {
            0 => "–".to_owned(),
            _ => format!("{share:.3}"),
        });
        row(lines, [escaped(&task.task), "survival".into()].into_iter().chain(survival));
    }
    if let Some(fit) = &drafter.calibration {
        lines.extend([
            String::new(),
            format!(
                "Calibration of the confidences, fitted to these {} rounds: temperature of each slot, and \
                 expected calibration error of the survival up to it, on the same rounds.",
                fit.rounds
            ),
            String::new(),
        ]);
        row(lines, [String::new()].into_iter().chain((1..=fit.temperatures.len()).map(|s| s.to_string())));
        rule(lines, fit.temperatures.len() + 1);
        for (title, values) in
            [("temperature", &fit.temperatures), ("before", &fit.ece_before), ("after", &fit.ece_after)]
        {
            row(lines, [title.to_owned()].into_iter().chain(values.iter().map(|x| format!("{x:.3}"))));
        }
    }
}

fn summary(task: &TaskReport) -> [String; 12] {
    [
        escaped(&task.task),
        task.prompts.to_string(),
        task.rounds.to_string(),
        task.tokens.to_string(),
        format!("{:.2}", task.drafts_per_round()),
        format!("{:.2}", task.tau),
        format!("{:.2}", task.ms_per_token),
        format!("{:.2}", task.ms_per_token_plain),
        format!("{:.2}", task.ms_per_token_plain / task.ms_per_token),
        format!("{:.2}", task.draft_ms),
        format!("{:.2}", task.verify_ms),
        format!("{} of {}", task.same_text, task.prompts),
    ]
}

fn conditional(task: &TaskReport) -> impl Iterator<Item = String> + '_ {
    task.accepted.iter().zip(&task.reached).zip(&task.conditional).map(|((accepted, reached), share)| {
        match reached {
            0 => "–".to_owned(),
            _ => format!("{share:.3} ({accepted}/{reached})"),
        }
    })
}

fn row(lines: &mut Vec<String>, cells: impl IntoIterator<Item = String>) {
    let cells: Vec<_> = cells.into_iter().collect();
    lines.push(format!("| {} |", cells.join(" | ")));
}

fn rule(lines: &mut Vec<String>, columns: usize) {
    lines.push(format!("|{}", "---|".repeat(columns)));
}

/// A name must not end its cell.
fn escaped(name: &str) -> String {
    name.replace('|', "\\|")
}
