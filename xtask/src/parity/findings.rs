//! The largest difference of each component, and whether it is small enough.

use burn::tensor::{Tensor, backend::Backend};
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use serde::Serialize;

/// A component over all of its cases.
#[derive(Debug, Serialize)]
pub(crate) struct Finding {
    pub(crate) component: String,
    /// Tensors compared.
    pub(crate) tensors: usize,
    /// Largest difference; none where something is not finite.
    pub(crate) absolute: Option<f64>,
    /// Largest difference over `1 + max|reference|` of its tensor.
    pub(crate) relative: Option<f64>,
    /// Largest relative difference that passes.
    pub(crate) tolerance: f64,
    pub(crate) pass: bool,
}

/// Findings in the order of their components' first tensors.
#[derive(Debug)]
pub(crate) struct Findings {
    pub(crate) all: Vec<Finding>,
    tolerance: f64,
}

impl Findings {
    /// With the relative difference that modules may have.
    pub(crate) fn new(tolerance: f64) -> Self {
        Self { all: Vec::new(), tolerance }
    }

    pub(crate) fn tensor<B: Backend, const D: usize>(
        &mut self,
        component: &str,
        found: Tensor<B, D>,
        reference: &[f32],
    ) -> anyhow::Result<()> {
        self.compare(component, &found.into_data().iter::<f32>().collect::<Vec<_>>(), reference)
    }

    pub(crate) fn compare(
        &mut self,
        component: &str,
        found: &[f32],
        reference: &[f32],
    ) -> anyhow::Result<()> {
        self.compare_within(component, 1.0, found, reference)
    }

    /// With a tolerance `factor` times as wide.
    ///
    /// # Errors
    /// Another number of elements: the fixture is damaged.
    pub(crate) fn compare_within(
        &mut self,
        component: &str,
        factor: f64,
        found: &[f32],
        reference: &[f32],
    ) -> anyhow::Result<()> {
        let (n, expected) = (found.len(), reference.len());
        anyhow::ensure!(n == expected, "{component}: found {n} elements, expected the fixture's {expected}");
        let largest = reference.iter().fold(0f32, |m, r| m.max(r.abs()));
        let difference = found.iter().zip(reference).map(|(a, b)| f64::from((a - b).abs()));
        // A NaN is no larger than anything, so that it would get lost in a maximum.
        let absolute = difference.fold(0.0, |m: f64, d| if d.is_finite() { m.max(d) } else { f64::INFINITY });
        self.record(component, absolute, absolute / (1.0 + f64::from(largest)), factor * self.tolerance);
        Ok(())
    }

    /// Adds a difference to its component.
    pub(crate) fn record(&mut self, component: &str, absolute: f64, relative: f64, tolerance: f64) {
        let at = self.all.iter().position(|f| f.component == component).unwrap_or(self.all.len());
        if at == self.all.len() {
            let (absolute, relative) = (Some(0.0), Some(0.0));
            let component = component.to_owned();
            self.all.push(Finding { component, tensors: 0, absolute, relative, tolerance, pass: true });
        }
        let finding = &mut self.all[at];
        let larger = |known: Option<f64>, new: f64| known.map(|k| k.max(new)).filter(|x| x.is_finite());
        finding.tensors += 1;
        finding.absolute = larger(finding.absolute, absolute);
        finding.relative = larger(finding.relative, relative);
        finding.pass &= relative <= tolerance;
    }

    /// Components that are not within their tolerance.
    pub(crate) fn failed(&self) -> Vec<&str> {
        self.all.iter().filter(|f| !f.pass).map(|f| f.component.as_str()).collect()
    }

    /// For a terminal.
    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(["component", "tensors", "largest difference", "relative", "tolerance", ""]);
        let number = |x: Option<f64>| x.map_or_else(|| "not finite".into(), |x| format!("{x:.2e}"));
        for f in &self.all {
            table.add_row([
                f.component.clone(),
                f.tensors.to_string(),
                number(f.absolute),
                number(f.relative),
                format!("{:.0e}", f.tolerance),
                if f.pass { "pass" } else { "FAIL" }.to_owned(),
            ]);
        }
        for column in 1..5 {
            table.column_mut(column).expect("it was just made").set_cell_alignment(CellAlignment::Right);
        }
        format!("{table}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_difference_of_all_cases_counts() {
        let mut findings = Findings::new(1e-3);
        findings.compare("a", &[1.0, 3.0], &[1.0, 3.002]).unwrap();
        findings.compare("a", &[0.0], &[0.0005]).unwrap();
        findings.compare("b", &[1.0], &[1.1]).unwrap();
        let [a, b] = &findings.all[..] else { panic!("two components") };
        assert_eq!(a.tensors, 2);
        assert!((a.absolute.unwrap() - 2e-3).abs() < 1e-6 && a.pass, "{a:?}");
        assert!((a.relative.unwrap() - 2e-3 / 4.002).abs() < 1e-6, "{a:?}");
        assert!(!b.pass);
        assert_eq!(findings.failed(), ["b"]);
        assert!(findings.compare("a", &[1.0], &[]).is_err());
    }

    #[test]
    fn a_nan_fails_wherever_it_stands() {
        for found in [[f32::NAN, 1.0], [1.0, f32::NAN], [f32::INFINITY, 1.0]] {
            let mut findings = Findings::new(1e9);
            findings.compare("a", &found, &[1.0, 1.0]).unwrap();
            findings.compare("a", &[1.0], &[1.0]).unwrap();
            assert_eq!((findings.all[0].absolute, findings.all[0].pass), (None, false));
        }
    }
}
