//! The arguments that say how many drafts of a round are verified.

use anyhow::{Context, bail};
use hspec_core::decode::Schedule;
use hspec_sched::{Policy, PrefixScheduler, StsCalibration, ThroughputProfile};
use std::path::PathBuf;

/// How many drafts of a round to verify.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ScheduleArgs {
    /// How many drafts of a round to verify: `fixed=N`, `threshold=P` (those before the first whose
    /// confidence is below P), `early-stop` (DSpark's Algorithm 1) or `stale-budget` (its form for jagged
    /// profiles) [default: all of them].
    ///
    /// All but `fixed` need a drafter with a confidence head. The text stays the target's own.
    #[arg(long, value_name = "POLICY", value_parser = policy, requires = "drafter")]
    schedule: Option<Word>,
    /// What a pass of the target costs by its tokens, for `early-stop` and `stale-budget`: JSON such as
    /// `{"milliseconds": [[1, 24.0], [8, 47.5]]}`, or `"steps_per_second"`.
    #[arg(
        long,
        value_name = "FILE",
        requires = "schedule",
        required_if_eq_any([("schedule", "early-stop"), ("schedule", "stale-budget")])
    )]
    profile: Option<PathBuf>,
    /// What makes confidences mean what they say: a file of `eval --fit-calibration`.
    #[arg(long, value_name = "FILE", requires = "schedule")]
    calibration: Option<PathBuf>,
}

/// A policy as it is written.
#[derive(Debug, Clone, PartialEq)]
enum Word {
    Fixed(usize),
    Threshold(f64),
    EarlyStop,
    StaleBudget,
}

fn policy(text: &str) -> Result<Word, String> {
    let wrong = |what: &str| format!("found {text}, expected {what}");
    match text.split_once('=') {
        None if text == "early-stop" => Ok(Word::EarlyStop),
        None if text == "stale-budget" => Ok(Word::StaleBudget),
        Some(("fixed", length)) => length.parse().map(Word::Fixed).map_err(|_| wrong("fixed=N, N from 0")),
        Some(("threshold", p)) => {
            let confidence = p.parse().map_err(|_| wrong("threshold=P, P from 0 to 1"))?;
            match PrefixScheduler::new(Policy::Threshold { confidence }) {
                Ok(_) => Ok(Word::Threshold(confidence)),
                Err(error) => Err(error.to_string()),
            }
        }
        _ => Err(wrong("fixed=N, threshold=P, early-stop or stale-budget")),
    }
}

impl std::fmt::Display for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fixed(length) => write!(f, "fixed={length}"),
            Self::Threshold(confidence) => write!(f, "threshold={confidence}"),
            Self::EarlyStop => f.write_str("early-stop"),
            Self::StaleBudget => f.write_str("stale-budget"),
        }
    }
}

impl ScheduleArgs {
    /// The policy as reports name it, its files included.
    pub(crate) fn name(&self) -> Option<String> {
        let file = |what: &str, path: &Option<PathBuf>| {
            path.as_ref().map_or_else(String::new, |path| format!(", {what} {}", path.display()))
        };
        let files = file("profile", &self.profile) + &file("calibration", &self.calibration);
        self.schedule.as_ref().map(|word| format!("{word}{files}"))
    }

    /// The schedule, its files read; none where all drafts are verified.
    pub(crate) fn load(&self) -> anyhow::Result<Option<Schedule>> {
        let Some(word) = &self.schedule else { return Ok(None) };
        let profile = match (word, &self.profile) {
            (Word::EarlyStop | Word::StaleBudget, Some(path)) => {
                Some(ThroughputProfile::load(path).context("--profile")?)
            }
            (_, None) => None,
            (_, Some(_)) => bail!("--profile: --schedule {word} does not look at what a pass costs"),
        };
        let policy = match (word, profile) {
            (Word::Fixed(length), _) => Policy::Fixed { length: *length },
            (Word::Threshold(confidence), _) => Policy::Threshold { confidence: *confidence },
            (Word::EarlyStop, Some(profile)) => Policy::EarlyStop { profile },
            (Word::StaleBudget, Some(profile)) => Policy::StaleBudget { profile },
            (_, None) => bail!("--schedule {word}: needs a --profile"),
        };
        let calibration = match (word, &self.calibration) {
            (Word::Fixed(_), Some(_)) => {
                bail!("--calibration: --schedule {word} does not look at confidences")
            }
            (_, Some(path)) => Some(StsCalibration::load(path).context("--calibration")?),
            (_, None) => None,
        };
        Ok(Some(Schedule { policy, calibration }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_read_as_they_are_written() {
        for (text, word) in [
            ("fixed=0", Word::Fixed(0)),
            ("threshold=0.25", Word::Threshold(0.25)),
            ("early-stop", Word::EarlyStop),
            ("stale-budget", Word::StaleBudget),
        ] {
            assert_eq!(policy(text), Ok(word.clone()));
            assert_eq!(word.to_string(), text);
        }
        for (text, part) in [
            ("fixed", "expected fixed=N, threshold=P, early-stop or stale-budget"),
            ("early-stop=3", "expected fixed=N"),
            ("fixed=-1", "expected fixed=N, N from 0"),
            ("threshold=low", "expected threshold=P, P from 0 to 1"),
            ("threshold=1.5", "confidence threshold: found 1.5, expected a number from 0 to 1"),
            ("threshold=NaN", "confidence threshold: found NaN"),
        ] {
            let message = policy(text).unwrap_err();
            assert!(message.contains(part), "{message}");
        }
    }
}
