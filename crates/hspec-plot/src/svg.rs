//! Drawing.

use std::fmt::Write;

/// A drawing in user units; colours are classes of a style sheet.
pub struct Svg {
    width: f64,
    height: f64,
    body: String,
}

/// Where a text is held.
#[derive(Clone, Copy)]
pub enum Hold {
    /// At its start.
    Start,
    /// At its middle.
    Middle,
    /// At its end.
    End,
}

impl Svg {
    /// An empty drawing of this size.
    pub fn new(width: f64, height: f64) -> Self {
        Self { width, height, body: String::new() }
    }

    /// A line.
    pub fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        self.put(&format!(
            "<line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
            from.0, from.1, to.0, to.1
        ));
    }

    /// A line through points.
    pub fn path(&mut self, class: &str, points: &[(f64, f64)]) {
        let points = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" ");
        self.put(&format!("<polyline class=\"{class}\" points=\"{points}\"/>"));
    }

    /// A bar with a title that browsers show where the pointer rests.
    pub fn bar(&mut self, class: &str, at: (f64, f64), size: (f64, f64), title: &str) {
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
    pub fn mark(&mut self, series: usize, (x, y): (f64, f64), open: bool, title: &str) {
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

    /// A text; what could end it is escaped.
    pub fn text(&mut self, class: &str, hold: Hold, at: (f64, f64), text: &str) {
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

    /// Another drawing with its corner at `at`.
    pub fn place(&mut self, at: (f64, f64), drawing: Self) {
        self.put(&format!("<g transform=\"translate({:.1} {:.1})\">\n{}</g>", at.0, at.1, drawing.body));
    }

    /// The drawing for a page that has its style, told as `label` to who cannot see it.
    pub fn finish(self, label: &str) -> String {
        format!(
            "<svg viewBox=\"0 0 {:.0} {:.0}\" role=\"img\" aria-label=\"{}\">\n{}</svg>",
            self.width,
            self.height,
            escaped(label),
            self.body
        )
    }

    /// The drawing as a file of its own with a style sheet.
    pub fn document(mut self, label: &str, style: &str) -> String {
        self.body.insert_str(0, &format!("<style>{style}</style>\n"));
        let size = format!("width=\"{:.0}\" height=\"{:.0}\"", self.width, self.height);
        let svg = self.finish(label);
        svg.replacen("<svg", &format!("<svg xmlns=\"http://www.w3.org/2000/svg\" {size}"), 1) + "\n"
    }

    fn put(&mut self, element: &str) {
        writeln!(self.body, "{element}").expect("a String takes everything");
    }
}

/// Number of colours; more drafters share them but not their shapes.
pub const SERIES: usize = 7;

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_break_out_of_the_drawing() {
        let mut svg = Svg::new(10.0, 10.0);
        svg.text("t", Hold::Start, (0.0, 0.0), "</text><script>\"&");
        let text = svg.finish("a\"b");
        assert!(text.contains("&lt;/text&gt;&lt;script&gt;&quot;&amp;</text>"), "{text}");
        assert!(text.contains("aria-label=\"a&quot;b\""), "{text}");
    }
}
