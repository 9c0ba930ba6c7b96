//! The plots.

use super::Figure;
use crate::comparison::{DrafterResult, Estimate, Figures, Results, Setting, tables::interval};
use hspec_plot::{Hold, SERIES, Scale, Svg};

/// Width of a plot in its own units, about as many as a phone has pixels.
pub(super) const WIDTH: f64 = 380.0;

const ACROSS: &str = "tokens of context";

/// The plots of one setting.
pub(super) fn of_setting(setting: &Setting) -> Vec<Figure> {
    vec![by_task(setting), by_position(setting), time(setting), memory(setting)]
}

/// The plots over context lengths that prompts were made to have, one pair for each draft length and
/// temperature.
pub(super) fn across_contexts(results: &Results) -> Vec<Figure> {
    let mut figures = Vec::new();
    for &temperature in &results.manifest.temperatures {
        for &k in &results.manifest.ks {
            let chosen = |s: &&Setting| s.k == k && s.temperature == temperature && s.context.is_some();
            let settings: Vec<&Setting> = results.settings.iter().filter(chosen).collect();
            let Some(first) = settings.first() else { continue };
            let how = format!("k = {k}, temperature {temperature}");
            let line = |of: &dyn Fn(&Figures) -> Option<Estimate>| -> Vec<(String, Vec<Point>)> {
                let drafters = first.drafters.iter().enumerate();
                drafters
                    .map(|(i, drafter)| {
                        let point =
                            |s: &&Setting| Some(((s.context? as f64).log2(), of(&s.drafters[i].all)?));
                        (drafter.drafter.clone(), settings.iter().filter_map(point).collect())
                    })
                    .collect()
            };
            let contexts: Vec<usize> = settings.iter().filter_map(|s| s.context).collect();
            let ticks: Vec<_> = contexts.iter().map(|&n| ((n as f64).log2(), n.to_string())).collect();
            let tau = line(&|figures| figures.mean_tau);
            let speed = line(&|figures| figures.time.as_ref()?.mean_speedup);
            figures.push(Figure {
                title: format!("Speed against plain decoding, by context ({how})"),
                note: "Above the line at 1, the drafter saves time. Contexts in tokens.".into(),
                svg: lines(&ticks, ACROSS, 0.0, &speed, Some(1.0), "speed-up")
                    .finish("speed-up against tokens of context, one line per drafter"),
            });
            figures.push(Figure {
                title: format!("Tokens per target pass, by context ({how})"),
                note: "tau on the prompts made to this length.".into(),
                svg: lines(&ticks, ACROSS, 1.0, &tau, None, "tau")
                    .finish("tau against tokens of context, one line per drafter"),
            });
            figures.push(kept(&settings, &how));
        }
    }
    figures
}

/// A place on the horizontal axis and what stands over it.
type Point = (f64, Estimate);

fn by_task(setting: &Setting) -> Figure {
    let drafters = &setting.drafters;
    let tasks = &drafters[0].tasks;
    let names = tasks.iter().map(|task| task.task.as_str()).chain((tasks.len() > 1).then_some("mean"));
    let figures = |drafter: &DrafterResult, row: usize| {
        drafter.tasks.get(row).map_or(drafter.all.mean_tau, |task| task.figures.mean_tau)
    };
    let names: Vec<&str> = names.collect();
    let high = drafters.iter().flat_map(|d| (0..names.len()).filter_map(|row| figures(d, row)));
    let high = high.map(|e| e.ci.map_or(e.value, |[_, high]| high)).fold(1.5, f64::max);
    let (left, right, top) = (96.0, WIDTH - 12.0, 6.0);
    let pitch = 13.0;
    let block = pitch * drafters.len() as f64 + 12.0;
    let bottom = top + block * names.len() as f64;
    let scale = Scale::up_to(1.0, high, (left, right));
    let mut svg = Svg::new(WIDTH, bottom + 34.0);
    for (value, text) in scale.ticks() {
        svg.line("grid", (scale.at(value), top), (scale.at(value), bottom));
        svg.text("tick", Hold::Middle, (scale.at(value), bottom + 14.0), &text);
    }
    svg.text("axis", Hold::Middle, ((left + right) / 2.0, bottom + 29.0), "tokens per target pass (tau)");
    for (row, name) in names.iter().enumerate() {
        let y = top + block * row as f64;
        let class = if *name == "mean" && row == tasks.len() { "label strong" } else { "label" };
        svg.text(class, Hold::End, (left - 8.0, y + block / 2.0 + 4.0), &short(name, 15));
        if row > 0 {
            svg.line("rule", (left, y), (right, y));
        }
        for (i, drafter) in drafters.iter().enumerate() {
            let Some(tau) = figures(drafter, row) else { continue };
            let y = y + 6.0 + pitch * (i as f64 + 0.5);
            if let Some([low, high]) = tau.ci {
                svg.line(&format!("whisker c{}", i % SERIES), (scale.at(low), y), (scale.at(high), y));
            }
            let title = format!("{}, {name}: {}", drafter.drafter, interval(Some(tau)));
            svg.mark(i, (scale.at(tau.value), y), tau.ci.is_none(), &title);
        }
    }
    Figure {
        title: "Tokens per target pass, by task".into(),
        note: "Further right is better; 1 is plain decoding. Lines are 95 % intervals.".into(),
        svg: svg.finish("tau of each drafter on each task, with intervals"),
    }
}

fn by_position(setting: &Setting) -> Figure {
    Figure {
        title: "Conditional acceptance, by position".into(),
        note: "Of the rounds that got as far as this slot, the share that kept its token. Few get far: late \
               slots have wide intervals, and open marks have none, too few prompts having got there."
            .into(),
        svg: conditional(setting, |_| true)
            .finish("share accepted against slot of the block, one line per drafter"),
    }
}

/// The share accepted at each slot, where it is to be shown.
pub(super) fn conditional(setting: &Setting, shown: fn(&Estimate) -> bool) -> Svg {
    let ticks: Vec<_> = (1..=setting.k).map(|slot| (slot as f64, slot.to_string())).collect();
    let series = |drafter: &DrafterResult| {
        let shares = drafter.all.conditional.iter().enumerate();
        let points = shares.filter_map(|(i, share)| Some(((i + 1) as f64, share.filter(shown)?))).collect();
        (drafter.drafter.clone(), points)
    };
    let series: Vec<(String, Vec<Point>)> = setting.drafters.iter().map(series).collect();
    lines(&ticks, "slot of the block", 0.0, &series, None, "share accepted")
}

/// Lines with marks and intervals; `mark` is a horizontal line of reference.
fn lines(
    ticks: &[(f64, String)],
    across: &str,
    from: f64,
    series: &[(String, Vec<Point>)],
    mark: Option<f64>,
    what: &str,
) -> Svg {
    let (left, right, top, bottom) = (44.0, WIDTH - 16.0, 20.0, 226.0);
    let points = || series.iter().flat_map(|(_, points)| points);
    let high = points().map(|(_, e)| e.ci.map_or(e.value, |[_, high]| high)).fold(from + 0.5, f64::max);
    let high = high.max(mark.unwrap_or(high));
    let y = Scale::up_to(from, high, (bottom, top));
    let ends = |pick: fn(f64, f64) -> f64, start| ticks.iter().map(|(x, _)| *x).fold(start, pick);
    let (first, last) = (ends(f64::min, f64::INFINITY), ends(f64::max, f64::NEG_INFINITY));
    // A single place stands in the middle.
    let margin = if last > first { 0.04 * (last - first) } else { 1.0 };
    let x = Scale::exactly((first - margin, last + margin), (left, right));
    let mut svg = Svg::new(WIDTH, bottom + 36.0);
    for (value, text) in y.ticks() {
        svg.line("grid", (left, y.at(value)), (right, y.at(value)));
        svg.text("tick", Hold::End, (left - 6.0, y.at(value) + 4.0), &text);
    }
    svg.text("axis", Hold::Start, (4.0, 11.0), what);
    for (value, text) in ticks {
        svg.text("tick", Hold::Middle, (x.at(*value), bottom + 15.0), text);
    }
    svg.text("axis", Hold::Middle, ((left + right) / 2.0, bottom + 31.0), across);
    if let Some(mark) = mark {
        svg.line("mark-line", (left, y.at(mark)), (right, y.at(mark)));
    }
    for (i, (name, points)) in series.iter().enumerate() {
        let colour = format!("c{}", i % SERIES);
        // Side by side, so that intervals do not hide each other.
        let shift = 3.5 * (i as f64 - (series.len() - 1) as f64 / 2.0);
        let place = |(at, e): &Point| (x.at(*at) + shift, y.at(e.value));
        svg.path(&format!("line {colour}"), &points.iter().map(place).collect::<Vec<_>>());
        for point in points {
            let (px, py) = place(point);
            if let Some([low, high]) = point.1.ci {
                svg.line(&format!("whisker {colour}"), (px, y.at(low)), (px, y.at(high)));
            }
            let tick = ticks.iter().find(|(at, _)| *at == point.0).map_or("", |(_, text)| text);
            let title = format!("{name}, {tick}: {}", interval(Some(point.1)));
            svg.mark(i, (px, py), point.1.ci.is_none(), &title);
        }
    }
    svg
}

/// Horizontal bars of parts that add up.
struct Bars {
    rows: Vec<(String, Vec<f64>)>,
    classes: Vec<&'static str>,
    parts: Vec<&'static str>,
    across: &'static str,
    total: fn(f64) -> String,
}

impl Bars {
    fn draw(&self, label: &str) -> String {
        let (left, right, top, pitch) = (96.0, WIDTH - 44.0, 6.0, 30.0);
        let bottom = top + pitch * self.rows.len() as f64;
        let totals = self.rows.iter().map(|(_, parts)| parts.iter().sum::<f64>());
        let scale = Scale::up_to(0.0, totals.fold(0.0, f64::max).max(1e-3), (left, right));
        let keys = if self.parts.len() > 1 { 22.0 } else { 0.0 };
        let mut svg = Svg::new(WIDTH, bottom + 34.0 + keys);
        for (value, text) in scale.ticks() {
            svg.line("grid", (scale.at(value), top), (scale.at(value), bottom));
            svg.text("tick", Hold::Middle, (scale.at(value), bottom + 14.0), &text);
        }
        svg.text("axis", Hold::Middle, ((left + right) / 2.0, bottom + 29.0), self.across);
        for (row, (name, parts)) in self.rows.iter().enumerate() {
            let y = top + pitch * row as f64 + 5.0;
            svg.text("label", Hold::End, (left - 8.0, y + 14.0), &short(name, 15));
            let mut from = 0.0;
            for ((part, class), what) in parts.iter().zip(&self.classes).zip(&self.parts) {
                let (start, end) = (scale.at(from), scale.at(from + part));
                let title = format!("{name}, {what}: {part:.2}");
                svg.bar(&format!("part {class}"), (start, y), (end - start, 20.0), &title);
                from += part;
            }
            svg.text("value", Hold::Start, (scale.at(from) + 5.0, y + 14.0), &(self.total)(from));
        }
        if keys > 0.0 {
            let mut x = 14.0;
            for (part, class) in self.parts.iter().zip(&self.classes) {
                svg.bar(&format!("part {class}"), (x, bottom + 41.0), (10.0, 10.0), part);
                svg.text("tick", Hold::Start, (x + 14.0, bottom + 50.0), part);
                x += 30.0 + 5.6 * part.len() as f64;
            }
        }
        svg.finish(label)
    }
}

fn time(setting: &Setting) -> Figure {
    let mut rows = Vec::new();
    let with_times = || setting.drafters.iter().filter_map(|d| Some((&d.drafter, d.all.time.as_ref()?)));
    // Plain decoding was measured once more with each drafter; the first stands for all.
    if let Some((_, time)) = with_times().next() {
        let plain = &time.plain;
        let rest = plain.ms_per_token.value - plain.target_ms - plain.sampling_ms;
        rows.push(("plain".to_owned(), vec![0.0, plain.target_ms, plain.sampling_ms, rest.max(0.0)]));
    }
    for (name, time) in with_times() {
        let rest = time.ms_per_token.value - time.draft_ms - time.verify_ms - time.sampling_ms;
        let parts = vec![time.draft_ms, time.verify_ms, time.sampling_ms, rest.max(0.0)];
        rows.push((name.clone(), parts));
    }
    let bars = Bars {
        rows,
        classes: vec!["s0", "s1", "s2", "s3"],
        parts: vec!["drafting", "target's passes", "sampling", "other"],
        across: "milliseconds per token",
        total: |ms| format!("{ms:.1}"),
    };
    Figure {
        title: "Where the time goes".into(),
        note:
            "Shorter is better. With a drafter the target's passes are fewer, but each checks k + 1 tokens."
                .into(),
        svg: bars.draw("milliseconds per token of plain decoding and of each drafter, by part"),
    }
}

fn memory(setting: &Setting) -> Figure {
    let kib = |bytes: u64| bytes as f64 / 1024.0;
    let Some(first) = setting.drafters.first() else {
        return Figure { title: String::new(), note: String::new(), svg: String::new() };
    };
    let tokens = first.all.memory.longest_context.max(1) as u64;
    let mut rows = vec![("target's cache".to_owned(), vec![kib(first.all.memory.target_bytes / tokens)])];
    rows.extend(
        setting
            .drafters
            .iter()
            .map(|drafter| (drafter.drafter.clone(), vec![kib(drafter.all.memory.drafter_bytes_per_token)])),
    );
    let bars = Bars {
        rows,
        classes: vec!["s1"],
        parts: vec!["KiB per token"],
        across: "KiB per token of context",
        total: |kib| if kib == 0.0 { "0".to_owned() } else { format!("{kib:.1}") },
    };
    Figure {
        title: "Memory per token of context".into(),
        note: "The target keeps its cache either way; what a drafter keeps comes on top, for every token of \
               every request. In f32, as computed with here."
            .into(),
        svg: bars.draw("KiB per token that the target's cache and each drafter keep"),
    }
}

/// What drafters keep of a request at each context length.
fn kept(settings: &[&Setting], how: &str) -> Figure {
    let ticks: Vec<_> =
        settings.iter().filter_map(|s| s.context).map(|n| ((n as f64).log2(), n.to_string())).collect();
    let drafters = settings[0].drafters.iter().enumerate();
    let series: Vec<(String, Vec<Point>)> = drafters
        .map(|(i, drafter)| {
            let point = |s: &&Setting| {
                let mib = s.drafters[i].all.memory.drafter_bytes as f64 / f64::from(1 << 20);
                // Known exactly.
                Some(((s.context? as f64).log2(), Estimate { value: mib, ci: Some([mib, mib]) }))
            };
            (drafter.drafter.clone(), settings.iter().filter_map(point).collect())
        })
        .collect();
    Figure {
        title: format!("What the drafter keeps of a request, by context ({how})"),
        note: "A flat line is memory that does not grow with the context.".into(),
        svg: lines(&ticks, ACROSS, 0.0, &series, None, "MiB")
            .finish("MiB against tokens of context, one line per drafter"),
    }
}

pub(super) fn short(name: &str, most: usize) -> String {
    if name.chars().count() <= most {
        return name.to_owned();
    }
    name.chars().take(most - 1).chain(['…']).collect()
}
