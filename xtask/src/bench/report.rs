//! What a benchmark found: one document, as JSON, as a table and as a page.

use super::{
    stats::Spread,
    sweep::Cell,
    work::{Pass, Work},
};
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use hspec_eval::Machine;
use serde::Serialize;
use std::collections::BTreeMap;

/// A piece of work, and a peer's time for the same.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) work: String,
    pub(crate) ours_ms: Spread,
    pub(crate) peer: Option<&'static str>,
    pub(crate) peer_ms: Option<Spread>,
    /// The peer's time over ours, pair by pair.
    pub(crate) ratio: Option<Spread>,
}

/// The JSON of `bench --json`.
#[derive(Debug, Serialize)]
pub(crate) struct Document {
    pub(crate) schema: u32,
    pub(crate) commit: String,
    pub(crate) date: String,
    pub(crate) machine: Machine,
    pub(crate) backend: String,
    /// How the target's weights are stored, but for works that say otherwise: the word of `--weights`.
    pub(crate) weights: &'static str,
    pub(crate) target: String,
    pub(crate) repeats: usize,
    pub(crate) rows: Vec<Row>,
    /// Medians of our own times, divided: what speculation costs in plain steps.
    pub(crate) cost_ratios: BTreeMap<String, f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) sweep: Vec<Cell>,
}

/// Our cost ratios, of what has been measured.
pub(crate) fn cost_ratios(rows: &[Row]) -> BTreeMap<String, f64> {
    let median = |work: Work| {
        let name = work.to_string();
        rows.iter().find(|row| row.work == name).map(|row| row.ours_ms.median())
    };
    let pairs = [Work::Pass, Work::Rounded].into_iter().flat_map(|stored| {
        let decode = |context| stored(Pass::Decode(context));
        let verify = |context| (stored(Pass::Verify(context)), decode(context));
        [verify(256), verify(1024), (Work::DraftStep, decode(256))]
    });
    let ratio = |(a, b): (Work, Work)| Some((format!("{a} / {b}"), median(a)? / median(b)?));
    pairs.filter_map(ratio).collect()
}

fn milliseconds(x: f64) -> String {
    match x {
        100.0.. => format!("{x:.0}"),
        10.0.. => format!("{x:.1}"),
        _ => format!("{x:.3}"),
    }
}

fn times(spread: &Spread) -> String {
    let [least, greatest] = [spread.least(), spread.greatest()].map(milliseconds);
    format!("{} ({least} to {greatest})", milliseconds(spread.median()))
}

fn factor(spread: &Spread) -> String {
    format!("{:.2} ({:.2} to {:.2})", spread.median(), spread.least(), spread.greatest())
}

const HEADER: [&str; 5] = ["work", "ours, ms", "peer", "peer, ms", "peer / ours"];

fn lines(rows: &[Row]) -> impl Iterator<Item = [String; 5]> + '_ {
    rows.iter().map(|row| {
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        [
            row.work.clone(),
            times(&row.ours_ms),
            or_none(row.peer.map(str::to_owned)),
            or_none(row.peer_ms.as_ref().map(times)),
            or_none(row.ratio.as_ref().map(factor)),
        ]
    })
}

/// For a terminal.
pub(crate) fn table(document: &Document) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(HEADER);
    for line in lines(&document.rows) {
        table.add_row(line);
    }
    for column in [1, 3, 4] {
        table.column_mut(column).expect("it was just made").set_cell_alignment(CellAlignment::Right);
    }
    let mut text = format!("{table}\n");
    for (pair, ratio) in &document.cost_ratios {
        text += &format!("{pair}: {ratio:.2}\n");
    }
    text + &super::sweep::table(&document.sweep)
}

/// Where the page's measured part begins and ends; the rest of an existing page stays.
const BEGIN: &str = "<!-- measured by cargo xtask bench -->";
const END: &str = "<!-- end -->";

/// A page with the figures, or the page that was there with its figures replaced.
pub(crate) fn page(document: &Document, command: &str, before: Option<&str>) -> String {
    let mut measured = format!(
        "{BEGIN}\n{}, {} threads, backend {}, {}, {}, commit {}, {} repetitions:\n\n```sh\n{command}\n```\n\n",
        document.machine.cpu,
        document.machine.threads,
        document.backend,
        document.target,
        document.date,
        document.commit,
        document.repeats,
    );
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    measured += &line(&HEADER.map(str::to_owned));
    measured += &line(&["---".to_owned(), "---:".into(), "---".into(), "---:".into(), "---:".into()]);
    lines(&document.rows).for_each(|cells| measured += &line(&cells));
    measured +=
        "\nMedian (least to greatest). The last column is taken pair by pair: above 1 we are faster.\n\n";
    for (pair, ratio) in &document.cost_ratios {
        measured += &format!("- {pair}: {ratio:.2}\n");
    }
    measured += &super::sweep::markdown(&document.sweep);
    measured += END;
    let around = before.and_then(|page| Some((page.split_once(BEGIN)?.0, page.split_once(END)?.1)));
    match around {
        Some((head, tail)) => format!("{head}{measured}{tail}"),
        None => format!("# Speed\n\n{measured}\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Document {
        let row = |work: &str, ours: f64, peer: Option<f64>| Row {
            work: work.into(),
            ours_ms: Spread::of(vec![ours]),
            peer: peer.map(|_| "torch-f32"),
            peer_ms: peer.map(|ms| Spread::of(vec![ms])),
            ratio: peer.map(|ms| Spread::of(vec![ms / ours])),
        };
        let rows = vec![row("decode@256", 50.0, Some(40.0)), row("verify8@256", 100.0, None)];
        Document {
            schema: 1,
            commit: "abc".into(),
            date: "2026-11-30".into(),
            machine: Machine { cpu: "some".into(), threads: 2 },
            backend: "flex".into(),
            weights: "auto",
            target: "smollm2".into(),
            repeats: 1,
            cost_ratios: cost_ratios(&rows),
            rows,
            sweep: Vec::new(),
        }
    }

    #[test]
    fn rows_have_the_fields_that_readers_know() {
        let json = serde_json::to_value(document()).unwrap();
        let expected = serde_json::json!([
            { "work": "decode@256", "ours_ms": [50.0, 50.0, 50.0], "peer": "torch-f32",
              "peer_ms": [40.0, 40.0, 40.0], "ratio": [0.8, 0.8, 0.8] },
            { "work": "verify8@256", "ours_ms": [100.0, 100.0, 100.0], "peer": null, "peer_ms": null,
              "ratio": null },
        ]);
        assert_eq!(json["rows"], expected);
        assert_eq!(json["cost_ratios"], serde_json::json!({ "verify8@256 / decode@256": 2.0 }));
        assert!(json.get("sweep").is_none());
    }

    #[test]
    fn measuring_again_keeps_what_was_written_around() {
        let first = page(&document(), "cargo xtask bench", None);
        assert!(first.contains("| decode@256 | 50.0 (50.0 to 50.0) | torch-f32 |"), "{first}");
        let written = first.replace("# Speed", "# Speed\n\nWords before.") + "\nWords behind.\n";
        let mut again = document();
        again.commit = "def".into();
        let again = page(&again, "cargo xtask bench", Some(&written));
        assert_eq!(again, written.replace("commit abc", "commit def"));
    }
}
