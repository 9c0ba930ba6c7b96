//! The headline figures as a drawing by itself.

use super::charts::{WIDTH, conditional, short};
use crate::comparison::{Setting, tables::interval};
use hspec_plot::{Hold, SERIES, Scale, Svg};

/// Height of both halves.
const HEIGHT: f64 = 300.0;
/// Where the halves begin below their titles.
const TOP: f64 = 34.0;

/// tau of every drafter on the left, its acceptance by position on the right.
pub(super) fn draw(setting: &Setting, style: &str) -> String {
    let mut svg = Svg::new(2.0 * WIDTH, HEIGHT);
    svg.bar("paper", (0.0, 0.0), (2.0 * WIDTH, HEIGHT), &setting.title());
    svg.text("strong", Hold::Start, (14.0, 20.0), "Tokens per target pass (tau)");
    svg.text("strong", Hold::Start, (WIDTH + 14.0, 20.0), "Conditional acceptance, by position");
    svg.place((0.0, TOP), taus(setting));
    // What few prompts reached would be the first thing to be seen.
    svg.place((WIDTH, TOP), conditional(setting, |share| share.ci.is_some()));
    svg.document("tau of each drafter, and the share of its tokens accepted at each position", style)
}

fn taus(setting: &Setting) -> Svg {
    let drafters = &setting.drafters;
    let ends = drafters.iter().filter_map(|d| d.all.mean_tau).map(|e| e.ci.map_or(e.value, |[_, high]| high));
    let (left, right, top, bottom) = (128.0, WIDTH - 56.0, 8.0, 216.0);
    let scale = Scale::up_to(1.0, ends.fold(1.5, f64::max), (left, right));
    let pitch = (bottom - top) / drafters.len() as f64;
    let mut svg = Svg::new(WIDTH, HEIGHT - TOP);
    for (value, text) in scale.ticks() {
        svg.line("grid", (scale.at(value), top), (scale.at(value), bottom));
        svg.text("tick", Hold::Middle, (scale.at(value), bottom + 15.0), &text);
    }
    let what = format!("mean over tasks, {}; 1 is plain decoding", setting.title());
    svg.text("axis", Hold::Start, (14.0, bottom + 31.0), &what);
    for (i, drafter) in drafters.iter().enumerate() {
        let y = top + pitch * (i as f64 + 0.5);
        svg.text("label", Hold::End, (left - 24.0, y + 4.0), &short(&drafter.drafter, 15));
        svg.mark(i, (left - 13.0, y), false, &drafter.drafter);
        let Some(tau) = drafter.all.mean_tau else { continue };
        if let Some([low, high]) = tau.ci {
            svg.line(&format!("whisker c{}", i % SERIES), (scale.at(low), y), (scale.at(high), y));
        }
        let title = format!("{}: {}", drafter.drafter, interval(Some(tau)));
        svg.mark(i, (scale.at(tau.value), y), tau.ci.is_none(), &title);
        svg.text("value", Hold::Start, (right + 8.0, y + 4.0), &format!("{:.2}", tau.value));
    }
    svg
}
