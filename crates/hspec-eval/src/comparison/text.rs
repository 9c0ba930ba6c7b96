//! Results as text: for a terminal, as Markdown, and where they come from.

use super::{
    Results,
    tables::{Entry, Table, interval, percent, tables},
};

impl Results {
    /// Per setting, how good each drafter is: for a terminal.
    pub fn summary(&self) -> String {
        let mut lines = Vec::new();
        for setting in &self.settings {
            lines.push(setting.title());
            for drafter in &setting.drafters {
                let time = drafter.all.time.as_ref();
                lines.push(format!(
                    "  {}: tau {}, speed {} of plain decoding",
                    drafter.drafter,
                    interval(drafter.all.mean_tau),
                    interval(time.and_then(|time| time.mean_speedup)),
                ));
                let gains = drafter.all.tau_gains.iter();
                lines.extend(gains.map(|gain| {
                    let clear = if gain.is_clear() { "" } else { ", no clear difference" };
                    format!("    tau {} against {}{clear}", percent(gain), gain.against)
                }));
            }
        }
        lines.join("\n") + "\n"
    }

    /// Markdown: the findings in words, where they come from, and the tables of every setting.
    pub fn to_markdown(&self) -> String {
        let mut lines = vec!["# Drafters compared".to_owned(), String::new()];
        for (heading, sentences) in crate::page::words(self) {
            lines.extend([format!("**{heading}** {}", sentences.join(" ")), String::new()]);
        }
        lines.extend(self.provenance().into_iter().map(|(what, text)| match what {
            "command" => format!("- {what}: `{text}`"),
            _ => format!("- {what}: {text}"),
        }));
        for setting in &self.settings {
            lines.extend([String::new(), format!("## {}", setting.title())]);
            for table in tables(setting) {
                lines.extend([String::new(), format!("### {}", table.title), String::new()]);
                lines.extend([table.note.clone(), String::new()]);
                table.markdown(&mut lines);
            }
        }
        lines.join("\n") + "\n"
    }

    /// What was measured, where, when and with which command.
    pub(crate) fn provenance(&self) -> Vec<(&'static str, String)> {
        let manifest = &self.manifest;
        let mut list = vec![
            ("command", manifest.command.clone()),
            ("date", manifest.date.clone()),
            ("machine", format!("{}, {} threads", manifest.machine.cpu, manifest.machine.threads)),
            ("commit", manifest.commit.clone()),
            ("target", manifest.target.path.clone()),
            ("longest answer", format!("{} tokens", manifest.max_new_tokens)),
            ("seeds", manifest.seeds.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")),
        ];
        for drafter in &manifest.drafters {
            let facts = &drafter.facts;
            list.push((
                "drafter",
                format!(
                    "{} ({}): {}; {} trainable and {} frozen parameters",
                    drafter.name, facts.kind, facts.path, facts.params_trainable, facts.params_frozen
                ),
            ));
        }
        list.extend(manifest.missing.iter().map(|gap| ("missing", format!("{}: {}", gap.set, gap.why))));
        if self.unmeasured > 0 {
            list.push(("missing", format!("{} answers are not measured yet", self.unmeasured)));
        }
        list
    }
}

impl Table {
    fn markdown(&self, lines: &mut Vec<String>) {
        let row = |cells: &mut dyn Iterator<Item = String>| {
            format!("| {} |", cells.map(|text| text.replace('|', "\\|")).collect::<Vec<_>>().join(" | "))
        };
        lines.push(row(&mut self.head.iter().cloned()));
        lines.push(format!("|{}", "---|".repeat(self.head.len())));
        for entries in &self.rows {
            let strong = |entry: &Entry| match entry.best {
                true => format!("**{}**", entry.text),
                false => entry.text.clone(),
            };
            lines.push(row(&mut entries.iter().map(strong)));
        }
    }
}
