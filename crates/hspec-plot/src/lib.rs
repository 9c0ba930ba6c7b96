//! Small SVG drawings, for a page ([`Svg::finish`]) or as a file ([`Svg::document`]).
//!
//! Colours and fonts are classes of a style sheet, so that one drawing reads well in light and in dark.
//!
//! ```
//! use hspec_plot::{Hold, Scale, Svg};
//!
//! let x = Scale::up_to(0.0, 9.0, (20.0, 180.0));
//! let mut svg = Svg::new(200.0, 40.0);
//! for (value, text) in x.ticks() {
//!     svg.text("tick", Hold::Middle, (x.at(value), 36.0), &text);
//! }
//! svg.path("line c0", &[(x.at(0.0), 20.0), (x.at(9.0), 4.0)]);
//! assert!(svg.finish("a line that rises").contains("<polyline class=\"line c0\""));
//! ```

mod scale;
mod svg;

pub use scale::Scale;
pub use svg::{Hold, SERIES, Svg};
