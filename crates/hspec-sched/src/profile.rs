//! What a step costs by the number of tokens in it.

use crate::{Error, Result, json};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Time of one step over B tokens, measured once for a few B: `SPS(B)` of DSpark, section 3.2, in steps
/// per second. Measure whole rounds where drafting shall count as well.
///
/// Between two rows the time is interpolated linearly; above the last it goes on with the last slope,
/// but never falls; below the first it is the first row's. A staircase takes two rows per stair.
///
/// In JSON: `{"milliseconds": [[1, 4.0], [8, 4.1], [9, 5.9]]}`, or `"steps_per_second"` with rates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Table", into = "Table")]
pub struct ThroughputProfile {
    unit: Unit,
    /// By ascending number of tokens, at least one.
    rows: Vec<Row>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Milliseconds,
    StepsPerSecond,
}

/// Both units are kept: converted there and back, a rate may differ in its last bit, and ties between
/// throughputs would break.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Row {
    tokens: usize,
    ms: f64,
    steps: f64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Table {
    Milliseconds(Vec<(usize, f64)>),
    StepsPerSecond(Vec<(usize, f64)>),
}

impl ThroughputProfile {
    /// From rows of (tokens, milliseconds per step).
    ///
    /// # Errors
    /// [`Error::Value`], naming the row, unless there is one, tokens ascend strictly, and times and
    /// rates are finite and above 0.
    pub fn from_milliseconds(rows: &[(usize, f64)]) -> Result<Self> {
        Self::new(Unit::Milliseconds, rows)
    }

    /// From rows of (tokens, steps per second); errors as [`from_milliseconds`](Self::from_milliseconds).
    pub fn from_steps_per_second(rows: &[(usize, f64)]) -> Result<Self> {
        Self::new(Unit::StepsPerSecond, rows)
    }

    fn new(unit: Unit, rows: &[(usize, f64)]) -> Result<Self> {
        if rows.is_empty() {
            return Err(Error::value("throughput profile", "no row", "at least one"));
        }
        if let Some(i) = (1..rows.len()).find(|&i| rows[i].0 <= rows[i - 1].0) {
            let found = format!("{} after {}", rows[i].0, rows[i - 1].0);
            return Err(Error::value(format!("row {i}, tokens"), found, "numbers that ascend strictly"));
        }
        let row = |(i, &(tokens, value)): (usize, &(usize, f64))| {
            let sane = |x: f64| x.is_finite() && x > 0.0;
            if !(sane(value) && sane(1e3 / value)) {
                let what = match unit {
                    Unit::Milliseconds => "milliseconds",
                    Unit::StepsPerSecond => "steps per second",
                };
                return Err(Error::value(format!("row {i}, {what}"), value, "a finite number above 0"));
            }
            let (ms, steps) = match unit {
                Unit::Milliseconds => (value, 1e3 / value),
                Unit::StepsPerSecond => (1e3 / value, value),
            };
            Ok(Row { tokens, ms, steps })
        };
        Ok(Self { unit, rows: rows.iter().enumerate().map(row).collect::<Result<_>>()? })
    }

    /// The smallest profile above this one in which more tokens never take less time: each row takes
    /// the longest time up to it. Measurement noise then cannot make a longer step look cheaper.
    #[must_use]
    pub fn monotone(mut self) -> Self {
        for i in 1..self.rows.len() {
            let before = self.rows[i - 1];
            if self.rows[i].ms < before.ms {
                self.rows[i] = Row { tokens: self.rows[i].tokens, ..before };
            }
        }
        self
    }

    /// Milliseconds of a step over `tokens` tokens.
    pub fn milliseconds(&self, tokens: usize) -> f64 {
        self.at(tokens).ms
    }

    /// Steps per second over `tokens` tokens: `SPS(B)`.
    pub fn steps_per_second(&self, tokens: usize) -> f64 {
        self.at(tokens).steps
    }

    fn at(&self, tokens: usize) -> Row {
        let next = self.rows.partition_point(|row| row.tokens < tokens);
        let exact = self.rows.get(next).filter(|row| next == 0 || row.tokens == tokens);
        if let Some(row) = exact {
            return *row;
        }
        let last = self.rows[next - 1];
        let slope = |a: Row, b: Row| (b.ms - a.ms) / (b.tokens - a.tokens) as f64;
        let slope = match self.rows.get(next) {
            Some(&row) => slope(last, row),
            None if next > 1 => slope(self.rows[next - 2], last).max(0.0),
            None => 0.0,
        };
        let ms = last.ms + slope * (tokens - last.tokens) as f64;
        Row { tokens, ms, steps: 1e3 / ms }
    }

    /// Reads a profile.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Json`] with the field or row that cannot be right.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        json::load(path.as_ref())
    }

    /// Writes the profile, whole or not at all.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        json::save(self, path.as_ref())
    }
}

impl TryFrom<Table> for ThroughputProfile {
    type Error = Error;

    fn try_from(table: Table) -> Result<Self> {
        match table {
            Table::Milliseconds(rows) => Self::from_milliseconds(&rows),
            Table::StepsPerSecond(rows) => Self::from_steps_per_second(&rows),
        }
    }
}

impl From<ThroughputProfile> for Table {
    fn from(profile: ThroughputProfile) -> Self {
        let rows = profile.rows.into_iter();
        match profile.unit {
            Unit::Milliseconds => Self::Milliseconds(rows.map(|r| (r.tokens, r.ms)).collect()),
            Unit::StepsPerSecond => Self::StepsPerSecond(rows.map(|r| (r.tokens, r.steps)).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn interpolates_between_rows_and_goes_on_with_the_last_slope() {
        let rows = [(2, 4.0), (4, 5.0), (8, 5.0), (10, 8.0)];
        let profile = ThroughputProfile::from_milliseconds(&rows).unwrap();
        for (tokens, ms) in
            [(0, 4.0), (2, 4.0), (3, 4.5), (4, 5.0), (6, 5.0), (9, 6.5), (10, 8.0), (14, 14.0)]
        {
            assert_eq!(profile.milliseconds(tokens), ms, "{tokens} tokens");
            assert_eq!(profile.steps_per_second(tokens), 1e3 / ms, "{tokens} tokens");
        }
        let one = ThroughputProfile::from_milliseconds(&[(3, 7.0)]).unwrap();
        assert_eq!([0, 3, 900].map(|tokens| one.milliseconds(tokens)), [7.0; 3]);
    }

    #[test]
    fn a_falling_end_is_not_continued_to_free_tokens() {
        let profile = ThroughputProfile::from_milliseconds(&[(1, 5.0), (2, 4.0)]).unwrap();
        assert_eq!(profile.milliseconds(1000), 4.0);
        assert_eq!(profile.monotone().milliseconds(1000), 5.0);
    }

    /// 1e3 / (1e3 / rate) may be another number.
    #[test]
    fn a_rate_comes_back_as_it_was_given() {
        let rows: Vec<_> = (1..200).map(|b| (b, 100.0 - 0.37 * b as f64)).collect();
        let profile = ThroughputProfile::from_steps_per_second(&rows).unwrap();
        assert!(rows.iter().any(|&(_, rate)| 1e3 / (1e3 / rate) != rate));
        assert!(rows.iter().all(|&(b, rate)| profile.steps_per_second(b) == rate));
    }

    #[test]
    fn refuses_what_cannot_be_a_profile() {
        for (rows, message) in [
            (vec![], "throughput profile: found no row"),
            (vec![(1, f64::NAN)], "row 0, milliseconds: found NaN"),
            (vec![(1, 1.0), (2, -3.5)], "row 1, milliseconds: found -3.5"),
            (vec![(1, 1.0), (2, 0.0)], "row 1, milliseconds: found 0"),
            (vec![(1, f64::INFINITY)], "row 0, milliseconds: found inf"),
            (vec![(1, 1e-320)], "row 0, milliseconds: found 0.000"),
            (vec![(1, 1.0), (4, 2.0), (3, 3.0)], "row 2, tokens: found 3 after 4"),
            (vec![(1, 1.0), (1, 2.0)], "row 1, tokens: found 1 after 1"),
        ] {
            let error = ThroughputProfile::from_milliseconds(&rows).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
        let error = ThroughputProfile::from_steps_per_second(&[(1, -1.0)]).unwrap_err().to_string();
        assert_eq!(error, "row 0, steps per second: found -1, expected a finite number above 0");
    }

    #[test]
    fn a_file_that_cannot_be_right_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile.json");
        for (text, message) in [
            ("", "EOF"),
            ("[[1, 2.0]]", "expected value at line 1"),
            (r#"{"milliseconds": []}"#, "throughput profile: found no row, expected at least one"),
            (r#"{"milliseconds": [[1, 2.0], [1, 3.0]]}"#, "row 1, tokens: found 1 after 1"),
            (r#"{"milliseconds": [[1, 0.0]]}"#, "row 0, milliseconds: found 0"),
            (r#"{"milliseconds": [[1, null]]}"#, "invalid type: null, expected f64 at line 1"),
            (r#"{"milliseconds": [[-1, 2.0]]}"#, "invalid value: integer `-1`"),
            (r#"{"milliseconds": [[1, 2.0, 3.0]]}"#, "trailing characters"),
            (r#"{"minutes": [[1, 2.0]]}"#, "unknown variant `minutes`"),
            (r#"{"milliseconds": [[1, 2.0]], "unit": 1}"#, "expected value"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = ThroughputProfile::load(&path).unwrap_err().to_string();
            assert!(error.contains("profile.json: ") && error.contains(message), "{error}");
        }
        let missing = folder.path().join("none.json");
        assert!(matches!(ThroughputProfile::load(&missing), Err(Error::Io { .. })));
    }

    proptest! {
        #[test]
        fn comes_back_from_a_file(
            costs in proptest::collection::vec((1usize..5, 0.01f64..100.0), 1..8), rates in any::<bool>(),
        ) {
            let mut tokens = 0;
            let row = |(step, value)| { tokens += step; (tokens, value) };
            let rows: Vec<_> = costs.into_iter().map(row).collect();
            let new = if rates {
                ThroughputProfile::from_steps_per_second
            } else {
                ThroughputProfile::from_milliseconds
            };
            let profile = new(&rows).unwrap();
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("profile.json");
            profile.save(&path).unwrap();
            let read = ThroughputProfile::load(&path).unwrap();
            prop_assert_eq!(read.rows.len(), profile.rows.len());
            for (read, row) in read.rows.iter().zip(&profile.rows) {
                prop_assert_eq!(read.tokens, row.tokens);
                // The last bit of a decimal number is not always read as it was.
                approx::assert_relative_eq!(read.ms, row.ms, max_relative = 1e-15);
                approx::assert_relative_eq!(read.steps, row.steps, max_relative = 1e-15);
            }
            prop_assert_eq!(read.unit, profile.unit);
            prop_assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        }

        #[test]
        fn the_envelope_is_the_longest_time_so_far(
            times in proptest::collection::vec(0.1f64..10.0, 1..12),
        ) {
            let rows: Vec<_> = times.iter().copied().enumerate().collect();
            let plain = ThroughputProfile::from_milliseconds(&rows).unwrap();
            let monotone = plain.clone().monotone();
            let mut longest = 0.0f64;
            for tokens in 0..times.len() {
                longest = longest.max(plain.milliseconds(tokens));
                prop_assert_eq!(monotone.milliseconds(tokens), longest);
                prop_assert_eq!(monotone.steps_per_second(tokens), 1e3 / longest);
            }
            prop_assert!(monotone.milliseconds(times.len() + 9) >= longest);
        }
    }
}
