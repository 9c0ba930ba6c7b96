//! Axes.

/// A range of values on a stretch of the drawing.
#[derive(Clone, Copy)]
pub struct Scale {
    values: (f64, f64),
    places: (f64, f64),
}

impl Scale {
    /// From `low` to the first round number at or above `high`.
    pub fn up_to(low: f64, high: f64, places: (f64, f64)) -> Self {
        let span = (high - low).max(1e-9);
        let step = step(span);
        Self { values: (low, low + (span / step - 1e-9).ceil() * step), places }
    }

    /// From one value to another.
    pub fn exactly(values: (f64, f64), places: (f64, f64)) -> Self {
        Self { values, places }
    }

    /// The place of a value, within the stretch.
    pub fn at(&self, value: f64) -> f64 {
        let share = (value - self.values.0) / (self.values.1 - self.values.0);
        self.places.0 + share.clamp(0.0, 1.0) * (self.places.1 - self.places.0)
    }

    /// Round numbers within, with their texts.
    pub fn ticks(&self) -> Vec<(f64, String)> {
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
}
