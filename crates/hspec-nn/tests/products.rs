//! Every body of this machine against plain sums, and each row alone against the same row in company.
#![cfg(feature = "flex")]

use hspec_nn::{
    WeightStorage,
    multiply::{gated_product, products},
    panels::Panels,
    simd::Body,
};
use proptest::prelude::*;

fn values(n: usize, seed: u32) -> Vec<f32> {
    let value = |i: usize| (i as u32).wrapping_add(seed).wrapping_mul(2_654_435_761) >> 8;
    (0..n).map(|i| value(i * 7 + 1) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn plain(x: &[f32], w: &[f32]) -> f64 {
    w.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

#[test]
fn a_machine_has_at_least_the_portable_body() {
    let all = Body::all();
    assert_eq!(all[0], Body::widest());
    assert!(!all.is_empty() && all.windows(2).all(|pair| pair[0] != pair[1]), "{all:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn every_body_and_storage_equals_the_plain_sum(
        m in 1usize..=40, input in 1usize..70, output in 1usize..100, seed in 0u32..1000,
    ) {
        let (x, w) = (values(m * input, seed), values(output * input, seed + 77));
        for storage in [WeightStorage::F32, WeightStorage::Bf16] {
            let packed = Panels::pack(&w, output, input, storage);
            let w = packed.unpack();
            for body in Body::all() {
                let y = products(body, &x, &[&packed, &packed]);
                prop_assert_eq!(&y[0], &y[1]);
                for r in 0..m {
                    let x = &x[r * input..(r + 1) * input];
                    let alone = &products(body, x, &[&packed])[0];
                    for (o, alone) in alone.iter().enumerate() {
                        prop_assert_eq!(y[0][r * output + o].to_bits(), alone.to_bits());
                        let expected = plain(x, &w[o * input..(o + 1) * input]);
                        prop_assert!((f64::from(*alone) - expected).abs() < 1e-6 * (1.0 + input as f64));
                    }
                }
            }
        }
    }

    #[test]
    fn a_gated_product_equals_its_parts_whatever_the_company(
        m in 1usize..=20, input in 1usize..40, output in 1usize..70, seed in 0u32..1000,
    ) {
        let x = values(m * input, seed);
        let [gate, up] = [1, 2].map(|s| values(output * input, seed + s * 500));
        for storage in [WeightStorage::F32, WeightStorage::Bf16] {
            let [g, u] = [&gate, &up].map(|w| Panels::pack(w, output, input, storage));
            let [gate, up] = [&g, &u].map(Panels::unpack);
            for body in Body::all() {
                let y = gated_product(body, &x, &g, &u);
                for r in 0..m {
                    let x = &x[r * input..(r + 1) * input];
                    let alone = gated_product(body, x, &g, &u);
                    for (o, alone) in alone.iter().enumerate() {
                        prop_assert_eq!(y[r * output + o].to_bits(), alone.to_bits());
                        let gate = plain(x, &gate[o * input..(o + 1) * input]);
                        let up = plain(x, &up[o * input..(o + 1) * input]);
                        let expected = gate / (1.0 + (-gate).exp()) * up;
                        prop_assert!((f64::from(*alone) - expected).abs() < 1e-5 * (1.0 + input as f64));
                    }
                }
            }
        }
    }
}

/// The sizes of a model, where several threads share the work.
#[test]
fn large_products_are_the_same_in_any_company() {
    let (input, output) = (576, 1537);
    let w = Panels::pack(&values(output * input, 3), output, input, WeightStorage::F32);
    let x = values(100 * input, 5);
    for body in Body::all() {
        let all = &products(body, &x, &[&w])[0];
        for (from, m) in [(0, 1), (3, 8), (17, 2), (40, 13), (99, 1)] {
            let some = &products(body, &x[from * input..(from + m) * input], &[&w])[0];
            assert_eq!(some, &all[from * output..(from + m) * output]);
        }
    }
}

#[test]
fn nan_is_passed_on_by_its_own_row_and_column_only() {
    let (m, input, output) = (9, 5, 40);
    let (mut x, mut w) = (values(m * input, 1), values(output * input, 2));
    x[3 * input + 2] = f32::NAN;
    w[33 * input] = f32::NAN;
    for storage in [WeightStorage::F32, WeightStorage::Bf16] {
        let packed = Panels::pack(&w, output, input, storage);
        for body in Body::all() {
            for (i, y) in products(body, &x, &[&packed])[0].iter().enumerate() {
                assert_eq!(y.is_nan(), i / output == 3 || i % output == 33, "{i} {body:?} {storage:?}");
            }
        }
    }
}
