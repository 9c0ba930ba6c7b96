//! Learning rates over a run.

use serde::{Deserialize, Serialize};

/// How the learning rate falls after its linear warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// To zero along half a cosine, as H-Spec.
    #[default]
    Cosine,
    /// DeepSpec's cosine: recursive, so that it starts one step late and overshoots the peak a little at
    /// the hand-over.
    Deepspec,
    /// To zero along a line.
    Linear,
    /// Not at all.
    Constant,
}

impl Schedule {
    /// Share of the peak rate at a 0-based step of `steps`, the first `warmup` share of which warm up.
    pub fn scale(self, step: usize, steps: usize, warmup: f64) -> f64 {
        let warm = match self {
            Self::Deepspec => (warmup * steps as f64) as usize,
            _ => (warmup * steps as f64).ceil() as usize,
        };
        if step < warm {
            return (step + 1) as f64 / warm as f64;
        }
        let rest = steps.saturating_sub(warm).max(1) as f64;
        let progress = ((step - warm) as f64 / rest).min(1.0);
        let cosine = |progress: f64| 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
        match self {
            Self::Cosine => cosine(progress),
            // One step alone has nothing to fall along.
            Self::Deepspec if rest > 1.0 => cosine(progress) / cosine(1.0 / rest),
            Self::Linear => 1.0 - progress,
            Self::Deepspec | Self::Constant => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_abs_diff_eq;

    #[test]
    fn every_schedule_warms_up_to_its_peak_and_falls_as_it_says() {
        for (schedule, half, last) in [
            (Schedule::Cosine, 0.5, 0.5 * (1.0 + (std::f64::consts::PI * 0.9).cos())),
            (Schedule::Linear, 0.5, 0.1),
            (Schedule::Constant, 1.0, 1.0),
        ] {
            let scale = |step| schedule.scale(step, 12, 2.0 / 12.0);
            assert_eq!((scale(0), scale(1)), (0.5, 1.0));
            assert_abs_diff_eq!(scale(2), 1.0, epsilon = 1e-12);
            assert_abs_diff_eq!(scale(7), half, epsilon = 1e-12);
            assert_abs_diff_eq!(scale(11), last, epsilon = 1e-12);
        }
    }

    #[test]
    fn no_length_of_run_divides_by_zero() {
        for schedule in [Schedule::Cosine, Schedule::Deepspec, Schedule::Linear, Schedule::Constant] {
            for steps in 1..5 {
                for warmup in [0.0, 0.3, 1.0] {
                    for step in 0..steps {
                        let scale = schedule.scale(step, steps, warmup);
                        assert!(
                            (0.0..=2.001).contains(&scale),
                            "{schedule:?} {step} {steps} {warmup}: {scale}"
                        );
                    }
                }
            }
        }
    }
}
