//! Drawing.

use std::fmt::Write;

/// A drawing in user units; colours are classes of the page's style.
pub(crate) struct Svg {
    width: f64,
    height: f64,
    body: String,
}

/// Where a text is held.
#[derive(Clone, Copy)]
pub(crate) enum Hold {
    Start,
    Middle,
    End,
}

impl Svg {
    pub(crate) fn new(width: f64, height: f64) -> Self {
        Self { width, height, body: String::new() }
    }

    pub(crate) fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        self.put(&format!(
            "<line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
            from.0, from.1, to.0, to.1
        ));
    }

    pub(crate) fn path(&mut self, class: &str, points: &[(f64, f64)]) {
        let points = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" ");
        self.put(&format!("<polyline class=\"{class}\" points=\"{points}\"/>"));
    }

    /// A bar with a title that browsers show where the pointer rests.
    pub(crate) fn bar(&mut self, class: &str, at: (f64, f64), size: (f64, f64), title: &str) {
        self.put(&format!(
            "<rect class=\"{class}\" x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\">\
             <title>{}</title></rect>",
            at.0,
            at.1,
            size.0,
            size.1,
            escaped(title)
        ));
    }

    /// The mark of drafter number `series`: each has its own shape, so that colours are not needed. A figure
    /// without an interval has an open one.
    pub(crate) fn mark(&mut self, series: usize, (x, y): (f64, f64), open: bool, title: &str) {
        let class = format!("mark{} c{}", if open { " open" } else { "" }, series % SERIES);
        let polygon = |corners: &[(f64, f64)]| {
            let points = corners.iter().map(|(dx, dy)| format!("{:.1},{:.1}", x + dx, y + dy));
            format!("<polygon class=\"{class}\" points=\"{}\">", points.collect::<Vec<_>>().join(" "))
        };
        let (open, close) = match series % 4 {
            0 => (format!("<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\">"), "circle"),
            1 => (polygon(&[(-3.6, -3.6), (3.6, -3.6), (3.6, 3.6), (-3.6, 3.6)]), "polygon"),
            2 => (polygon(&[(0.0, -4.8), (4.6, 3.4), (-4.6, 3.4)]), "polygon"),
            _ => (polygon(&[(0.0, -5.2), (5.2, 0.0), (0.0, 5.2), (-5.2, 0.0)]), "polygon"),
        };
        self.put(&format!("{open}<title>{}</title></{close}>", escaped(title)));
    }

    pub(crate) fn text(&mut self, class: &str, hold: Hold, at: (f64, f64), text: &str) {
        let anchor = match hold {
            Hold::Start => "start",
            Hold::Middle => "middle",
            Hold::End => "end",
        };
        self.put(&format!(
            "<text class=\"{class}\" text-anchor=\"{anchor}\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            at.0,
            at.1,
            escaped(text)
        ));
    }

    /// The drawing, told as `label` to who cannot see it.
    pub(crate) fn finish(self, label: &str) -> String {
        format!(
            "<svg viewBox=\"0 0 {:.0} {:.0}\" role=\"img\" aria-label=\"{}\">\n{}</svg>",
            self.width,
            self.height,
            escaped(label),
            self.body
        )
    }

    fn put(&mut self, element: &str) {
        writeln!(self.body, "{element}").expect("a String takes everything");
    }
}

/// Number of colours; more drafters share them but not their shapes.
pub(crate) const SERIES: usize = 7;

/// A range of values on a stretch of the drawing.
#[derive(Clone, Copy)]
pub(crate) struct Scale {
    values: (f64, f64),
    places: (f64, f64),
}

impl Scale {
    /// From `low` to the first round number at or above `high`.
    pub(crate) fn up_to(low: f64, high: f64, places: (f64, f64)) -> Self {
        let span = (high - low).max(1e-9);
        let step = step(span);
        Self { values: (low, low + (span / step - 1e-9).ceil() * step), places }
    }

    pub(crate) fn exactly(values: (f64, f64), places: (f64, f64)) -> Self {
        Self { values, places }
    }

    pub(crate) fn at(&self, value: f64) -> f64 {
        let share = (value - self.values.0) / (self.values.1 - self.values.0);
        self.places.0 + share.clamp(0.0, 1.0) * (self.places.1 - self.places.0)
    }

    /// Round numbers within, with their texts.
    pub(crate) fn ticks(&self) -> Vec<(f64, String)> {
        let (low, high) = self.values;
        let step = step(high - low);
        let digits = if step >= 1.0 { 0 } else { (-step.log10()).ceil() as usize };
        let count = ((high - low) / step + 1e-9).floor() as usize;
        (0..=count).map(|i| low + i as f64 * step).map(|v| (v, format!("{v:.digits$}"))).collect()
    }
}

/// The least of 1, 2 and 5 times a power of ten that divides `span` into at most six parts.
fn step(span: f64) -> f64 {
    let power = 10f64.powf((span / 6.0).log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|m| m * power).find(|step| span / step <= 6.0).unwrap_or(10.0 * power)
}

pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_end_at_round_numbers() {
        let texts = |scale: Scale| scale.ticks().into_iter().map(|(_, text)| text).collect::<Vec<_>>();
        let scale = Scale::up_to(1.0, 2.3, (0.0, 140.0));
        assert_eq!(texts(scale), ["1.0", "1.5", "2.0", "2.5"]);
        assert_eq!((scale.at(1.0), scale.at(2.5), scale.at(1.75), scale.at(9.0)), (0.0, 140.0, 70.0, 140.0));
        assert_eq!(texts(Scale::up_to(0.0, 0.83, (0.0, 1.0))), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(texts(Scale::up_to(0.0, 41.0, (0.0, 1.0))), ["0", "10", "20", "30", "40", "50"]);
        assert_eq!(
            texts(Scale::up_to(0.0, 0.0, (0.0, 1.0))).first().map(String::as_str),
            Some("0.0000000000")
        );
    }

    #[test]
    fn names_cannot_break_out_of_the_drawing() {
        let mut svg = Svg::new(10.0, 10.0);
        svg.text("t", Hold::Start, (0.0, 0.0), "</text><script>\"&");
        let text = svg.finish("a\"b");
        assert!(text.contains("&lt;/text&gt;&lt;script&gt;&quot;&amp;</text>"), "{text}");
        assert!(text.contains("aria-label=\"a&quot;b\""), "{text}");
    }
}
