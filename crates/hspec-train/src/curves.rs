//! `curves.svg`: a plot for each term of the loss and for simulated tau, against steps.

use hspec_plot::{Hold, Scale, Svg};
use serde_json::Value;

/// What is plotted: a key of `metrics.jsonl`, a title, what the vertical axis counts, and where it begins.
const PLOTS: [(&str, &str, &str, f64); 6] = [
    ("tau", "Simulated tau on held-out prompts", "tokens per target pass", 1.0),
    ("loss", "Loss", "objective", 0.0),
    ("ce", "Cross-entropy", "nats", 0.0),
    ("tv", "Total variation distance", "1 - acceptance", 0.0),
    ("kl", "Divergence from the target", "nats", 0.0),
    ("confidence", "Confidence loss", "nats", 0.0),
];
/// Points of a line; more are averaged.
const POINTS: usize = 160;
/// Size of a plot with what belongs to it.
const CELL: (f64, f64) = (400.0, 230.0);
const STYLE: &str = "
svg { color-scheme: light dark; --paper: #fdfdfc; --ink: #1c1e21; --soft: #5c6168; --rule: #dcdfe3; --c0: #0b62a8; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #14161a; --ink: #e7e9ec; --soft: #a3aab3; --rule: #343a42; --c0: #6db3f2; }
}
.paper { fill: var(--paper); }
text { font: 11px system-ui, 'DejaVu Sans', sans-serif; fill: var(--soft); }
.title { font-size: 13px; font-weight: 600; fill: var(--ink); }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke: var(--c0); stroke-width: 1.6; stroke-linejoin: round; }
.mark { fill: var(--c0); stroke: var(--paper); stroke-width: 0.8; }
";

/// Values by step.
#[derive(Debug, Default)]
pub(crate) struct Curves([Vec<(f64, f64)>; PLOTS.len()]);

impl Curves {
    /// Takes in a line of `metrics.jsonl`.
    pub(crate) fn take(&mut self, line: &Value) {
        let Some(step) = line["step"].as_f64() else { return };
        for (points, (key, ..)) in self.0.iter_mut().zip(PLOTS) {
            points.extend(line[key].as_f64().map(|value| (step, value)));
        }
    }

    /// The drawing. A term that never counted, as one without weight, has no plot.
    pub(crate) fn draw(&self) -> String {
        let told = |points: &[(f64, f64)]| points.iter().any(|(_, value)| *value != 0.0);
        let plots: Vec<_> = PLOTS.iter().zip(&self.0).filter(|(_, points)| told(points)).collect();
        let last = self.0.iter().flatten().map(|(step, _)| *step).fold(1.0, f64::max);
        let rows = plots.len().div_ceil(2).max(1);
        let (width, height) = (2.0 * CELL.0, rows as f64 * CELL.1);
        let mut svg = Svg::new(width, height);
        svg.bar("paper", (0.0, 0.0), (width, height), "Loss and simulated tau of a training run");
        for (i, (&(_, title, what, from), points)) in plots.into_iter().enumerate() {
            let corner = ((i % 2) as f64 * CELL.0, (i / 2) as f64 * CELL.1);
            plot(&mut svg, corner, (title, what), (from, last), points);
        }
        svg.document("Loss and simulated tau against steps", STYLE)
    }
}

/// Draws points into the cell at `corner`; its axes begin at `from` and at step 0.
fn plot(
    svg: &mut Svg,
    corner: (f64, f64),
    (title, what): (&str, &str),
    (from, last): (f64, f64),
    points: &[(f64, f64)],
) {
    let (left, right) = (corner.0 + 48.0, corner.0 + CELL.0 - 20.0);
    let (top, bottom) = (corner.1 + 48.0, corner.1 + CELL.1 - 42.0);
    let shown = averaged(points);
    let low = shown.iter().map(|(_, value)| *value).fold(from, f64::min);
    let high = shown.iter().map(|(_, value)| *value).fold(low + 1e-3, f64::max);
    let (x, y) = (Scale::up_to(0.0, last, (left, right)), Scale::up_to(low, high, (bottom, top)));
    svg.text("title", Hold::Start, (corner.0 + 12.0, corner.1 + 20.0), title);
    svg.text("axis", Hold::Start, (corner.0 + 12.0, corner.1 + 36.0), what);
    for (value, text) in y.ticks() {
        svg.line("grid", (left, y.at(value)), (right, y.at(value)));
        svg.text("tick", Hold::End, (left - 6.0, y.at(value) + 4.0), &text);
    }
    for (value, text) in x.ticks() {
        svg.text("tick", Hold::Middle, (x.at(value), bottom + 16.0), &text);
    }
    svg.text("axis", Hold::Middle, ((left + right) / 2.0, bottom + 32.0), "steps");
    let places: Vec<_> = shown.iter().map(|&(step, value)| (x.at(step), y.at(value))).collect();
    svg.path("line", &places);
    // Few points are measurements to point at, many are a line.
    if shown.len() <= 40 {
        for ((step, value), place) in shown.iter().zip(places) {
            svg.mark(0, place, false, &format!("step {step:.0}: {value:.3}"));
        }
    }
}

/// At most [`POINTS`] points, means of neighbours.
fn averaged(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let group = points.len().div_ceil(POINTS).max(1);
    let mean = |group: &[(f64, f64)]| {
        let n = group.len() as f64;
        (group.iter().map(|p| p.0).sum::<f64>() / n, group.iter().map(|p| p.1).sum::<f64>() / n)
    };
    points.chunks(group).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_term_that_counts_has_a_titled_plot() {
        let mut curves = Curves::default();
        curves.take(&json!({ "step": 0, "tau": 1.0, "passes": 9 }));
        for step in 1..=1000 {
            curves.take(&json!({ "step": step, "loss": 9.0 / step as f64, "ce": 2.0, "tv": 0.5, "kl": 0.0 }));
        }
        curves.take(&json!({ "step": 1000, "tau": 1.75 }));
        let svg = curves.draw();
        for part in ["Simulated tau", "Loss", "Cross-entropy", "nats", "steps", "prefers-color-scheme"] {
            assert!(svg.contains(part), "{part}");
        }
        assert!(!svg.contains("Divergence") && !svg.contains("NaN"));
        assert!(svg.contains("step 1000: 1.750"), "measurements are marked");
        assert_eq!(svg.matches("<polyline").count(), 4);
        assert!(svg.len() < 40_000, "{} bytes", svg.len());
    }

    #[test]
    fn many_points_are_averaged_and_few_are_not() {
        let line = |n: usize| (0..n).map(|i| (i as f64, 2.0)).collect::<Vec<_>>();
        assert_eq!(averaged(&line(POINTS)), line(POINTS));
        let shown = averaged(&line(4 * POINTS));
        assert_eq!((shown.len(), shown[0]), (POINTS, (1.5, 2.0)));
        assert_eq!(averaged(&[]), []);
    }

    /// A run that has measured nothing yet has an empty drawing.
    #[test]
    fn nothing_is_drawn_of_nothing() {
        assert!(Curves::default().draw().contains("</svg>"));
    }
}
