//! Acceptance, residual and next-token law against the reference implementation of rejection sampling.

use hspec_core::{
    TokenId,
    decode::{Chance, Draft, Law, Purpose, SamplingParams, verify, verify_block},
};
use hspec_goldens::{Golden, Tolerance, assert_close};

const CLOSE: Tolerance = Tolerance::Absolute(2e-5);

/// Decides with given numbers and remembers what it was asked.
struct Recorded<'a> {
    uniforms: &'a [f32],
    accept: Vec<f32>,
    next: Option<Law>,
}

impl Chance for Recorded<'_> {
    fn accept(&mut self, position: u64, probability: f64) -> bool {
        self.accept.push(probability as f32);
        f64::from(self.uniforms[position as usize]) < probability
    }

    fn pick(&mut self, _: u64, _: Purpose, law: &Law) -> TokenId {
        self.next = Some(law.clone());
        law.quantile(0.5)
    }
}

fn laws(golden: &Golden, name: &str, vocabulary: usize) -> Vec<Law> {
    let row = |row: &[f32]| {
        let weights = (0..).map(TokenId).zip(row.iter().map(|&p| f64::from(p)));
        Law::from_weights(weights).expect("a row of probabilities")
    };
    golden.f32s(name).chunks(vocabulary).map(row).collect()
}

fn dense(law: &Law, vocabulary: usize) -> Vec<f32> {
    (0..vocabulary as u32).map(|t| law.prob(TokenId(t)) as f32).collect()
}

fn most_probable(law: &Law) -> TokenId {
    law.iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("a law has a token").0
}

#[test]
fn golden_rejection_sampling() {
    let golden = Golden::open("dspark/rejection");
    let logits = golden.f32s("target_logits");
    let uniforms = golden.f32s("uniforms");
    let k = uniforms.len();
    let vocabulary = logits.len() / (k + 1);
    let cases = golden.notes["cases"].as_object().expect("cases by name");
    assert!(!cases.is_empty());
    for case in cases.keys() {
        let of = |what: &str| format!("{case}/{what}");
        let p = laws(&golden, &of("target_probs"), vocabulary);
        let q = laws(&golden, &of("draft_probs"), vocabulary);
        // The tokens that the case was drafted with; the others show their maxima.
        let prefix = case.split('_').next().unwrap_or_default();
        let tokens = match prefix {
            "full" => Some("tokens_full"),
            "pruned" => Some("tokens_pruned"),
            "topk8" => Some("tokens_trunc"),
            _ => None,
        };
        let tokens: Vec<_> = match tokens {
            Some(name) => golden.ints(name).into_iter().map(|t| TokenId(t as u32)).collect(),
            None => q.iter().map(most_probable).collect(),
        };
        let drafts: Vec<_> =
            tokens.iter().zip(&q).map(|(&token, law)| Draft { token, law: law.clone() }).collect();

        let residuals: Vec<_> =
            p.iter().zip(&q).flat_map(|(p, q)| dense(&p.residual(q), vocabulary)).collect();
        assert_close(&of("residual"), &residuals, &golden.f32s(&of("residual")), CLOSE);
        let alpha = |(p, q): (&Law, &Law)| p.iter().map(|(t, p)| p.min(q.prob(t))).sum::<f64>() as f32;
        let alphas: Vec<_> = p.iter().zip(&q).map(alpha).collect();
        assert_close(&of("alpha"), &alphas, &golden.f32s(&of("alpha")), CLOSE);

        if drafts.iter().any(|d| d.law.prob(d.token) == 0.0) {
            // Tokens that this drafter cannot have drawn.
            continue;
        }
        if matches!(prefix, "full" | "pruned" | "topk8") {
            let mut accept = vec![];
            for (i, draft) in drafts.iter().enumerate() {
                let mut chance = Recorded { uniforms: &[1.0], accept: vec![], next: None };
                verify(std::slice::from_ref(draft), |_| Ok(p[i].clone()), 0, &mut chance)
                    .expect("laws exist");
                accept.extend(chance.accept);
            }
            assert_close(&of("accept_prob"), &accept, &golden.f32s(&of("accept_prob")), CLOSE);
        }
        let mut chance = Recorded { uniforms: &uniforms, accept: vec![], next: None };
        let verdict = verify(&drafts, |row| Ok(p[row].clone()), 0, &mut chance).expect("laws exist");
        assert_eq!(verdict.accepted as i64, golden.ints(&of("num_accepted"))[0], "{case}");
        let next = dense(&chance.next.expect("one token is always picked"), vocabulary);
        assert_close(&of("next_token_dist"), &next, &golden.f32s(&of("next_token_dist")), CLOSE);
    }
}

#[test]
fn golden_rejection_target_laws() {
    let golden = Golden::open("dspark/rejection");
    let logits = golden.f32s("target_logits");
    let vocabulary = logits.len() / (golden.f32s("uniforms").len() + 1);
    let rows = |logits: &[f32], draft: bool, params: &SamplingParams| -> Vec<f32> {
        let law = |row| match draft {
            true => params.draft_distribution(row, None, 0).expect("finite logits"),
            false => params.distribution(row, 0).expect("finite logits"),
        };
        logits.chunks(vocabulary).flat_map(|row| dense(&law(row), vocabulary)).collect()
    };
    let params = |t, k, p| SamplingParams::new(t, k, p).expect("valid");
    for (case, params) in [
        ("full_t1", params(1.0, None, None)),
        ("full_t06", params(0.6, None, None)),
        ("greedy", SamplingParams::greedy()),
        ("topk8_topp09_target_only", params(0.7, Some(8), Some(0.9))),
    ] {
        let found = rows(&logits, false, &params);
        assert_close(case, &found, &golden.f32s(&format!("{case}/target_probs")), CLOSE);
        let found = rows(&golden.f32s("draft_logits"), true, &params);
        let draft_probs = golden.f32s(&format!("{case}/draft_probs"));
        assert_close(case, &found, &draft_probs, CLOSE);
    }
    let kept: Vec<_> = golden.ints("keep_ids").into_iter().map(|t| TokenId(t as u32)).collect();
    let plain = params(1.0, None, None);
    let pruned = golden.f32s("draft_logits_pruned");
    let law = |row| plain.draft_distribution(row, Some(&kept), 0).expect("finite logits");
    let found: Vec<_> = pruned.chunks(kept.len()).flat_map(|row| dense(&law(row), vocabulary)).collect();
    assert_close("pruned_t1", &found, &golden.f32s("pruned_t1/draft_probs"), CLOSE);
}

/// Block verification on the laws, tokens and uniforms of the plain case.
#[test]
fn golden_rejection_block() {
    let golden = Golden::open("dspark/rejection");
    let uniforms = golden.f32s("uniforms");
    let k = uniforms.len();
    let vocabulary = golden.f32s("target_logits").len() / (k + 1);
    let p = laws(&golden, "full_t1/target_probs", vocabulary);
    let q = laws(&golden, "full_t1/draft_probs", vocabulary);
    let tokens = golden.ints("tokens_full").into_iter().map(|t| TokenId(t as u32));
    let drafts: Vec<_> = tokens.zip(&q).map(|(token, law)| Draft { token, law: law.clone() }).collect();
    let mut chance = Recorded { uniforms: &uniforms, accept: vec![], next: None };
    let verdict = verify_block(&drafts, |row| Ok(p[row].clone()), 0, &mut chance).expect("laws exist");
    assert_eq!(verdict.accepted as i64, golden.ints("block/num_accepted")[0]);
    assert_close("block/h", &chance.accept, &golden.f32s("block/h"), CLOSE);
    let next = dense(&chance.next.expect("one token is always picked"), vocabulary);
    assert_close("block/residual", &next, &golden.f32s("block/residual"), CLOSE);
    // P of a prefix is the last decision about a block that ends with it.
    for (i, reference) in golden.f32s("block/prefix_ratio").into_iter().enumerate() {
        let mut chance = Recorded { uniforms: &uniforms, accept: vec![], next: None };
        verify_block(&drafts[..=i], |row| Ok(p[row].clone()), 0, &mut chance).expect("laws exist");
        assert_close("block/prefix_ratio", &chance.accept[i..], &[reference], CLOSE);
    }
}
