//! Elementwise functions that the compiler turns into vector code.

/// `eˣ` to within two units of the last place for x in [-87, 88]; beyond, the value at the border: no zero
/// and no infinity. NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, the first exact in few bits.
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer in the low bits
    let x = if x > 88.0 { 88.0 } else { x };
    let x = if x < -87.0 { -87.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * 0.693_359_4) + n * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p * r + c;
    }
    let y = (p * r) * r + r + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    y * scale
}

/// `silu(gate) · up` in place of `gate`.
#[inline(always)]
pub fn gated(gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = *g / (1.0 + exp(-*g)) * u;
    }
}

/// `x / sqrt(mean(x²) + eps) · weight` of one row.
#[inline(always)]
pub fn rms_norm(y: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    const LANES: usize = 16;
    let mut lanes = [0f32; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest: f32 = chunks.remainder().iter().map(|x| x * x).sum();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x * x;
        }
    }
    let mean = (lanes.iter().sum::<f32>() + rest) / x.len() as f32;
    let rms = (mean + eps).sqrt();
    for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
        *y = x / rms * w;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn exp_is_right_to_two_units(x in -86.9f32..87.9) {
            let (found, expected) = (f64::from(exp(x)), f64::from(x).exp());
            prop_assert!((found / expected - 1.0).abs() < 2.4e-7, "{} {}", found, expected);
        }
    }

    #[test]
    fn exp_at_the_ends() {
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(f32::NEG_INFINITY) < 1e-37 && exp(f32::INFINITY) > 1e38);
    }

    #[test]
    fn gated_is_finite_at_both_ends() {
        let mut x = [-200.0f32, -1.0, 0.0, 1.0, 200.0, f32::NAN];
        gated(&mut x, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let expected = [0.0, -0.537_882_84, 0.0, 2.924_234_4, 1000.0];
        for (a, b) in x.iter().zip(expected) {
            approx::assert_abs_diff_eq!(*a, b, epsilon = 1e-6);
        }
        assert!(x[5].is_nan());
    }
}
