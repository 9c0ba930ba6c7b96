//! The latency model of a single request.

use crate::{Error, Result};

/// Seconds that the passes of one request take (H-Spec, section 2): `L = (T_D + T_T) / tau`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatencyModel {
    draft: f64,
    verify: f64,
    plain: f64,
}

impl LatencyModel {
    /// `draft`: seconds to draft k tokens, `verify`: seconds of the target's pass over k + 1 tokens,
    /// `plain`: seconds of its pass over one token.
    ///
    /// # Errors
    /// Unless all are finite, `draft` at least 0 and the others above 0.
    pub fn new(draft: f64, verify: f64, plain: f64) -> Result<Self> {
        if !(draft.is_finite() && draft >= 0.0) {
            return Err(Error::value("draft time", draft, "finite seconds, at least 0"));
        }
        for (what, found) in [("verify time", verify), ("plain decoding time", plain)] {
            if !(found.is_finite() && found > 0.0) {
                return Err(Error::value(what, found, "finite seconds above 0"));
            }
        }
        Ok(Self { draft, verify, plain })
    }

    /// Seconds per token at a mean accepted length of `tau` tokens per round, bonus included.
    ///
    /// # Errors
    /// Unless `tau` is finite and at least 1, the token that every round emits.
    pub fn seconds_per_token(&self, tau: f64) -> Result<f64> {
        if !(tau.is_finite() && tau >= 1.0) {
            return Err(Error::value("tau", tau, "a finite number of at least 1"));
        }
        Ok((self.draft + self.verify) / tau)
    }

    /// How many times faster than plain decoding: plain seconds per token over
    /// [`seconds_per_token`](Self::seconds_per_token), whose errors it shares.
    pub fn speedup(&self, tau: f64) -> Result<f64> {
        Ok(self.plain / self.seconds_per_token(tau)?)
    }

    /// The tau at which a round takes as long per token as plain decoding. Below 1 no tau can lose.
    pub fn break_even(&self) -> f64 {
        (self.draft + self.verify) / self.plain
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_hand_computed_case() {
        let model = LatencyModel::new(3.0, 9.0, 8.0).unwrap();
        assert_eq!(model.seconds_per_token(4.0).unwrap(), 3.0);
        assert_eq!(model.speedup(4.0).unwrap(), 8.0 / 3.0);
        assert_eq!(model.break_even(), 1.5);
    }

    #[test]
    fn refuses_numbers_that_cannot_be() {
        for (draft, verify, plain, what) in [
            (f64::NAN, 1.0, 1.0, "draft time"),
            (-1.0, 1.0, 1.0, "draft time"),
            (0.0, 0.0, 1.0, "verify time"),
            (0.0, f64::INFINITY, 1.0, "verify time"),
            (0.0, 1.0, f64::NAN, "plain decoding time"),
            (0.0, 1.0, -2.0, "plain decoding time"),
        ] {
            let error = LatencyModel::new(draft, verify, plain).unwrap_err().to_string();
            assert!(error.starts_with(what), "{error}");
        }
        let model = LatencyModel::new(0.0, 1.0, 1.0).unwrap();
        for tau in [f64::NAN, f64::INFINITY, -1.0, 0.0, 0.99] {
            for result in [model.seconds_per_token(tau), model.speedup(tau)] {
                assert!(result.unwrap_err().to_string().starts_with("tau: found"));
            }
        }
        let message = model.speedup(0.5).unwrap_err().to_string();
        assert_eq!(message, "tau: found 0.5, expected a finite number of at least 1");
    }

    proptest! {
        #[test]
        fn break_even_is_where_the_speedup_is_one(
            draft in 0.0f64..10.0, verify in 0.1f64..10.0, plain in 0.1f64..10.0, more in 1.01f64..4.0,
        ) {
            let model = LatencyModel::new(draft, verify, plain).unwrap();
            let tau = model.break_even();
            if tau >= 1.0 {
                approx::assert_relative_eq!(model.speedup(tau).unwrap(), 1.0, max_relative = 1e-12);
                prop_assert!(model.speedup(tau * more).unwrap() > 1.0);
            } else {
                prop_assert!(model.speedup(1.0).unwrap() > 1.0);
            }
        }
    }
}
