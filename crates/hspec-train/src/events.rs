//! What a run tells while it goes on.

use serde::Serialize;

/// What a step measured; a line of `metrics.jsonl`.
#[derive(Debug, Clone, Serialize)]
pub struct StepMetrics {
    /// Steps done, this one included.
    pub step: usize,
    /// The objective.
    pub loss: f64,
    /// Its cross-entropy term.
    pub ce: f64,
    /// Its total variation term.
    pub tv: f64,
    /// Divergence; 0 where it has no weight.
    pub kl: f64,
    /// Its confidence term.
    pub confidence: f64,
    /// Agreement with the target's best token at the slots that predict.
    pub accuracy: Vec<f64>,
    /// Expected accepted length from those, without the bonus token.
    pub expected_length: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Share of the peak learning rate.
    pub lr_scale: f64,
    /// Blocks drafted from in the step.
    pub anchors: usize,
    /// Share of the step's supervised tokens that some slot was to predict.
    pub coverage: f64,
    /// Packed tokens per second.
    pub tokens_per_second: f64,
    /// Seconds of the step.
    pub seconds: f64,
}

/// Simulated acceptance through the decoding path; a line of `metrics.jsonl`.
#[derive(Debug, Clone, Serialize)]
pub struct Simulation {
    /// Steps done.
    pub step: usize,
    /// Tokens per target pass on held-out prompts, greedy.
    pub tau: f64,
    /// Target passes behind it.
    pub passes: usize,
}

/// What a run tells its caller.
#[derive(Debug, Clone)]
pub enum Event<'a> {
    /// Before the first step.
    Start {
        /// Documents to train on.
        documents: usize,
        /// Their supervised tokens.
        supervised: usize,
        /// Share of those that the draft vocabulary holds.
        coverage: f64,
        /// Trained parameters.
        parameters: usize,
        /// Steps done before.
        resumed_at: usize,
        /// Steps in all.
        steps: usize,
        /// Best simulated tau before.
        best_tau: f64,
    },
    /// After a step.
    Step(&'a StepMetrics),
    /// After a measurement.
    Simulated(&'a Simulation),
}

/// How a run ended: with a checkpoint of its last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finish {
    /// Steps done.
    pub step: usize,
    /// Steps in all; more than `step` where time ran out.
    pub steps: usize,
}
