//! What a check found.

use hspec_core::Result;
use serde::Serialize;
use std::fmt::Display;

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Not what it must be.
    Differs,
    /// Unusual; it may be meant.
    Warning,
    /// It could not be run, or there is nothing to be checked.
    Skipped,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    /// What was checked.
    pub name: &'static str,
    /// How it ended.
    pub verdict: Verdict,
    /// What is there.
    pub found: String,
    /// What should be.
    pub expected: String,
    /// The largest difference between numbers that were compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub difference: Option<f64>,
}

/// All checks, in order.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Diagnosis {
    /// In the order in which they were run.
    pub checks: Vec<Check>,
}

impl Diagnosis {
    /// The first check that differs.
    pub fn first_difference(&self) -> Option<&Check> {
        self.checks.iter().find(|check| check.verdict == Verdict::Differs)
    }
}

/// Checks so far, and who hears of them.
pub(super) struct Told<'a> {
    tell: &'a mut dyn FnMut(&Check),
    checks: Vec<Check>,
}

impl<'a> Told<'a> {
    pub(super) fn new(tell: &'a mut dyn FnMut(&Check)) -> Self {
        Self { tell, checks: Vec::new() }
    }

    pub(super) fn end(self) -> Diagnosis {
        Diagnosis { checks: self.checks }
    }

    fn push(&mut self, check: Check) {
        (self.tell)(&check);
        self.checks.push(check);
    }

    pub(super) fn add(
        &mut self,
        name: &'static str,
        verdict: Verdict,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) {
        self.push(Check { name, verdict, found: found.into(), expected: expected.into(), difference: None });
    }

    pub(super) fn skip(&mut self, name: &'static str, why: &str) {
        self.add(name, Verdict::Skipped, why, "");
    }

    /// Something that holds or does not.
    pub(super) fn holds(
        &mut self,
        name: &'static str,
        holds: bool,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) {
        self.add(name, if holds { Verdict::Ok } else { Verdict::Differs }, found, expected);
    }

    /// Two values that must be the same.
    pub(super) fn equal<T: PartialEq + Display>(&mut self, name: &'static str, found: T, expected: T) {
        self.holds(name, found == expected, found.to_string(), expected.to_string());
    }

    /// Numbers of which some may differ from those expected, the furthest by `difference`.
    pub(super) fn measured(
        &mut self,
        name: &'static str,
        verdict: Verdict,
        (found, expected): (String, &str),
        difference: f64,
    ) {
        self.push(Check { name, verdict, found, expected: expected.into(), difference: Some(difference) });
    }

    /// Numbers that must be the same up to `tolerance` times one more than the largest.
    pub(super) fn close(&mut self, name: &'static str, compared: Compared, expected: &str, tolerance: f64) {
        let limit = tolerance * (1.0 + compared.largest);
        let found = format!("{} numbers up to {:.3}", compared.count, compared.largest);
        let expected = format!("{expected}, within {limit:.1e}");
        // Written so that a NaN, which no comparison accepts, differs.
        let verdict = if compared.difference <= limit { Verdict::Ok } else { Verdict::Differs };
        self.measured(name, verdict, (found, &expected), compared.difference);
    }

    /// Something that works or fails with an error; it returns what was found.
    pub(super) fn attempt<T>(
        &mut self,
        name: &'static str,
        expected: &str,
        work: impl FnOnce() -> Result<(String, T)>,
    ) -> Option<T> {
        match work() {
            Ok((found, value)) => {
                self.add(name, Verdict::Ok, found, expected);
                Some(value)
            }
            Err(error) => {
                self.add(name, Verdict::Differs, error.to_string(), expected);
                None
            }
        }
    }
}

/// How far numbers lie apart.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Compared {
    /// How many were compared.
    pub count: usize,
    /// The largest difference; NaN where one is.
    pub difference: f64,
    /// The largest number that was expected.
    pub largest: f64,
}

impl Compared {
    /// Takes in more numbers, of which there are as many on both sides.
    pub(super) fn add(&mut self, found: &[f32], expected: &[f32]) {
        self.count += expected.len();
        for (a, b) in found.iter().zip(expected) {
            let difference = f64::from((a - b).abs());
            // `max` would lose a NaN, which no number is above.
            if difference.is_nan() || difference > self.difference {
                self.difference = difference;
            }
            self.largest = self.largest.max(f64::from(b.abs()));
        }
    }

    pub(super) fn of(found: &[f32], expected: &[f32]) -> Self {
        let mut compared = Self::default();
        compared.add(found, expected);
        compared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nan_differs_and_the_first_difference_is_the_first() {
        let mut heard = Vec::new();
        let mut tell = |check: &Check| heard.push(check.name);
        let mut told = Told::new(&mut tell);
        told.close("near", Compared::of(&[1.0, 2.0], &[1.0, 2.00001]), "the same", 1e-3);
        told.add("odd", Verdict::Warning, "a", "b");
        told.close("no number", Compared::of(&[f32::NAN, 2.0], &[1.0, 2.0]), "the same", 1e-3);
        told.close("far", Compared::of(&[1.0], &[2.0]), "the same", 1e-3);
        told.equal("size", 3, 3);
        let diagnosis = told.end();
        let first = diagnosis.first_difference().unwrap();
        assert_eq!(first.name, "no number");
        assert!(first.difference.unwrap().is_nan());
        assert_eq!(diagnosis.checks[3].difference, Some(1.0));
        assert_eq!(heard, ["near", "odd", "no number", "far", "size"]);
    }
}
