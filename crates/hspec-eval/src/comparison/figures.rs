//! Figures of a drafter on one task or on all, as they are written to JSON.

use super::{CONTEXTS, Gain, Record, statistics::Statistics, sums::Sums};
use hspec_sched::{BINS, LatencyModel, Reliability};
use serde::{Deserialize, Serialize};

/// A figure and how far it could move if other prompts of the same kind had been drawn, and the drafter's trainings
/// where it has several.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// Over all that was measured.
    pub value: f64,
    /// 95 % interval, low end first; none where there are too few prompts for one.
    pub ci: Option<[f64; 2]>,
}

/// Figures of one drafter. What nothing was counted of is absent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Prompts, the unit that is resampled.
    pub prompts: usize,
    /// Answers with the drafter: prompts times seeds times trainings.
    pub answers: usize,
    /// Target passes after the prompts'.
    pub rounds: u64,
    /// Tokens that they emitted.
    pub tokens: u64,
    /// Tokens over rounds, the bonus token included.
    pub tau: Option<Estimate>,
    /// Unweighted mean of the tasks' tau.
    pub mean_tau: Option<Estimate>,
    /// `mean_tau` against the other drafters'.
    pub tau_gains: Vec<Gain>,
    /// `[i]`: rounds that proposed slot i.
    pub proposed: Vec<u64>,
    /// `[i]`: rounds in which slots before i were all accepted and slot i was proposed.
    pub reached: Vec<u64>,
    /// `[i]`: those in which slot i was accepted too.
    pub accepted: Vec<u64>,
    /// `[i]`: `accepted[i] / proposed[i]`.
    pub survival: Vec<Option<Estimate>>,
    /// `[i]`: `accepted[i] / reached[i]`.
    pub conditional: Vec<Option<Estimate>>,
    /// How far the drafter's own confidence can be trusted; absent without a confidence head.
    pub confidence: Option<Calibration>,
    /// tau by the length of the context that a round began with.
    pub contexts: Vec<ContextFigures>,
    /// Answers whose text equals that of plain decoding.
    pub same_text: usize,
    /// Times; absent where no answer is longer than a token.
    pub time: Option<Times>,
    /// Memory.
    pub memory: Memory,
}

/// A confidence head's predictions of conditional acceptance against what happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Number of predictions: slots reached.
    pub predictions: usize,
    /// Expected calibration error over 20 bins.
    pub ece: f64,
    /// Probability that an accepted slot was given more confidence than a rejected one; absent where all had
    /// the same outcome.
    pub auroc: Option<f64>,
}

/// Acceptance in contexts of some length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContextFigures {
    /// Least number of tokens before a round's drafts.
    pub from: usize,
    /// That of the next range; absent for the last.
    pub below: Option<usize>,
    /// Rounds.
    pub rounds: u64,
    /// Tokens over rounds.
    pub tau: Estimate,
}

/// Where the time went, over answers longer than a token. Milliseconds are per token emitted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// Plain time per token over time per token.
    pub speedup: Estimate,
    /// Unweighted mean of the tasks' speed-ups.
    pub mean_speedup: Option<Estimate>,
    /// `mean_speedup` against the other drafters'.
    pub gains: Vec<Gain>,
    /// What the latency model makes of the measured passes: `tau T / (T_D + T_V)`, `T` a plain pass of the
    /// target, `T_V` its verifying pass, `T_D` drafting (H-Spec, section 2).
    pub predicted_speedup: Option<f64>,
    /// The same if verifying took as long as a plain pass, as where reading the weights is all that counts.
    pub predicted_if_verifying_were_free: Option<f64>,
    /// With the drafter.
    pub ms_per_token: Estimate,
    /// Of it, drafting.
    pub draft_ms: f64,
    /// Of it, the target's passes.
    pub verify_ms: f64,
    /// Of it, sampling and verification.
    pub sampling_ms: f64,
    /// Plain decoding.
    pub plain: PlainTime,
}

/// Where the time of plain decoding went, in milliseconds per token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlainTime {
    /// Everything.
    pub ms_per_token: Estimate,
    /// Of it, the target's passes.
    pub target_ms: f64,
    /// Of it, sampling.
    pub sampling_ms: f64,
}

/// What a drafter keeps, and what the process held.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Bytes that the drafter keeps per token of context.
    pub drafter_bytes_per_token: u64,
    /// The longest context, in tokens.
    pub longest_context: usize,
    /// Bytes that the drafter keeps of it between rounds.
    pub drafter_bytes: u64,
    /// Bytes that the target's cache keeps of it.
    pub target_bytes: u64,
    /// The most memory that the process held while decoding with the drafter, all models' weights included
    /// (VmHWM); absent where the system does not tell.
    pub peak_bytes: Option<u64>,
    /// The same while decoding plainly.
    pub peak_bytes_plain: Option<u64>,
}

/// What [`Figures`] are made of beside the statistics.
pub(crate) struct Parts<'a> {
    pub(crate) records: Vec<&'a Record>,
    pub(crate) prompts: usize,
    pub(crate) sums: Sums,
    pub(crate) drafter_bytes: (u64, u64),
    pub(crate) target_bytes_per_token: u64,
}

pub(crate) fn estimate(value: f64, ci: Option<[f64; 2]>) -> Option<Estimate> {
    value.is_finite().then_some(Estimate { value, ci })
}

impl Figures {
    /// `intervals` are those of the values of [`Statistics::row`].
    pub(crate) fn new(
        parts: &Parts<'_>,
        statistics: &Statistics,
        intervals: &[Option<[f64; 2]>],
        tau_gains: Vec<Gain>,
        speed_gains: Vec<Gain>,
    ) -> Self {
        let Parts { records, sums, .. } = parts;
        let counts = &sums.acceptance;
        let k = counts.k();
        let list = |values: &[f64], from: usize| -> Vec<Option<Estimate>> {
            values.iter().zip(&intervals[from..]).map(|(&value, &ci)| estimate(value, ci)).collect()
        };
        let ranges = list(&statistics.contexts, 6 + 2 * k).into_iter().zip(sums.contexts).enumerate();
        let contexts = ranges.filter_map(|(i, (tau, (_, rounds)))| {
            let (from, below) = (CONTEXTS[i], CONTEXTS.get(i + 1).copied());
            Some(ContextFigures { from, below, rounds, tau: tau? })
        });
        Self {
            prompts: parts.prompts,
            answers: records.len(),
            rounds: counts.rounds(),
            tokens: counts.tokens(),
            tau: estimate(statistics.tau, intervals[0]),
            mean_tau: estimate(statistics.mean_tau, intervals[1]),
            tau_gains,
            proposed: counts.proposed().to_vec(),
            reached: counts.reached().to_vec(),
            accepted: counts.accepted().to_vec(),
            survival: list(&statistics.survival, 6),
            conditional: list(&statistics.conditional, 6 + k),
            confidence: Calibration::new(records),
            contexts: contexts.collect(),
            same_text: records.iter().filter(|record| record.same_text).count(),
            time: Times::new(sums, statistics, intervals, speed_gains),
            memory: Memory::new(parts),
        }
    }
}

impl Calibration {
    fn new(records: &[&Record]) -> Option<Self> {
        let pairs = records.iter().flat_map(|record| &record.confidence);
        let pairs = pairs.map(|&(p, came_true)| (f64::from(p), came_true));
        // The only refusals are those of no pairs, and of numbers that a record does not hold.
        let found = Reliability::new(pairs, BINS).ok()?;
        Some(Self { predictions: found.total.count, ece: found.ece(), auroc: found.auroc })
    }
}

impl Times {
    fn new(
        sums: &Sums,
        statistics: &Statistics,
        intervals: &[Option<[f64; 2]>],
        gains: Vec<Gain>,
    ) -> Option<Self> {
        let speedup = estimate(statistics.speedup, intervals[2])?;
        let ms_per_token = estimate(statistics.seconds_per_token, intervals[4])?;
        let plain = estimate(statistics.plain_seconds_per_token, intervals[5])?;
        let milliseconds =
            |e: Estimate| Estimate { value: 1e3 * e.value, ci: e.ci.map(|ends| ends.map(|end| 1e3 * end)) };
        let per = |seconds: f64, number: u64| seconds / number as f64;
        let (draft, verify) = (per(sums.drafted.draft, sums.rounds), per(sums.drafted.target, sums.rounds));
        let pass = per(sums.plain.target, sums.plain_tokens);
        let tau = per(sums.tokens as f64, sums.rounds);
        let predicted = |verify| LatencyModel::new(draft, verify, pass).and_then(|m| m.speedup(tau)).ok();
        Some(Self {
            speedup,
            mean_speedup: estimate(statistics.mean_speedup, intervals[3]),
            gains,
            predicted_speedup: predicted(verify),
            predicted_if_verifying_were_free: predicted(pass),
            ms_per_token: milliseconds(ms_per_token),
            draft_ms: 1e3 * per(sums.drafted.draft, sums.tokens),
            verify_ms: 1e3 * per(sums.drafted.target, sums.tokens),
            sampling_ms: 1e3 * per(sums.drafted.sampling, sums.tokens),
            plain: PlainTime {
                ms_per_token: milliseconds(plain),
                target_ms: 1e3 * per(sums.plain.target, sums.plain_tokens),
                sampling_ms: 1e3 * per(sums.plain.sampling, sums.plain_tokens),
            },
        })
    }
}

impl Memory {
    fn new(parts: &Parts<'_>) -> Self {
        let longest = |record: &&Record| {
            let mut longest = record.prompt_tokens + 1;
            record.each_round(|_, accepted, _, context| longest = context + accepted + 1);
            longest
        };
        let longest_context = parts.records.iter().map(longest).max().unwrap_or(0);
        let (bytes_per_token, state) = parts.drafter_bytes;
        let peak = |which: usize| parts.records.iter().filter_map(|r| Some(r.peak_bytes?[which])).max();
        Self {
            drafter_bytes_per_token: bytes_per_token,
            longest_context,
            drafter_bytes: bytes_per_token * longest_context as u64 + state,
            target_bytes: parts.target_bytes_per_token * longest_context as u64,
            peak_bytes: peak(1),
            peak_bytes_plain: peak(0),
        }
    }
}
