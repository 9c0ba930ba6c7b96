//! Targets: the fixtures' tiny ones against the reference implementation, and a real or random one on two
//! backends.

use super::{findings::Findings, fixture::Fixture};
use anyhow::Context;
use burn::tensor::{Tensor, backend::Backend};
use hspec_attn::Position;
use hspec_core::{
    TokenId,
    target::{Rows, Target, Want},
};
use std::path::{Path, PathBuf};

/// Far positions lose digits in their angles on every implementation.
const FAR: f64 = 25.0;
/// Tokens of the prompt, tokens decoded behind it, and the last of those that are verified again at once.
const PROMPT: usize = 24;
const DECODED: usize = 24;
const VERIFIED: usize = 8;

/// Logits of every fixture of a target: a plain row, a padded batch, far positions.
pub(super) fn all<B: Backend>(root: &Path, device: &B::Device, to: &mut Findings) -> anyhow::Result<()> {
    let entries = std::fs::read_dir(root.join("targets")).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    folders.retain(|path| path.join("golden.safetensors").exists());
    folders.sort();
    for folder in folders {
        let golden = Fixture::open(&folder, "golden")?;
        let target = Target::<B>::load(&folder, device)?;
        for case in ["full", "batch", "far"] {
            compare(&golden, case, &target, to).with_context(|| format!("{}: {case}", folder.display()))?;
        }
    }
    Ok(())
}

fn compare<B: Backend>(
    golden: &Fixture,
    case: &str,
    target: &Target<B>,
    to: &mut Findings,
) -> anyhow::Result<()> {
    let input = golden.data(&format!("{case}.input_ids"))?;
    let [batch, t] = input.shape.to_vec()[..] else { anyhow::bail!("input_ids has no two dimensions") };
    let ids: Vec<TokenId> = input.iter::<i64>().map(|id| TokenId(id as u32)).collect();
    let mask = format!("{case}.attention_mask");
    let counts: Vec<bool> = match golden.has(&mask) {
        true => golden.ints(&mask)?.iter().map(|&m| m == 1).collect(),
        false => vec![true; batch * t],
    };
    let mut cache = target.cache(batch, t);
    cache.set_starts(counts.chunks(t).map(|row| row.iter().filter(|c| !**c).count()).collect());
    let positions = golden.usizes(&format!("{case}.position_ids"))?;
    let positions: Vec<Position> = positions.into_iter().map(Position).collect();
    let want = Want { logits: Rows::All, hidden: &[] };
    let found = host(target.forward_at(&ids, &positions, &mut cache, &want)?.logits)?;
    let reference = golden.f32s(&format!("{case}.logits"))?;
    let (component, factor) =
        if case == "far" { ("target, far positions", FAR) } else { ("target, logits", 1.0) };
    anyhow::ensure!(
        found.len() == reference.len(),
        "found {} logits, expected {}",
        found.len(),
        reference.len()
    );
    let width = found.len() / counts.len();
    // What stands where padding is means nothing.
    for (row, _) in counts.iter().enumerate().filter(|(_, counts)| **counts) {
        let at = row * width..(row + 1) * width;
        to.compare_within(component, factor, &found[at.clone()], &reference[at])?;
    }
    Ok(())
}

fn host<B: Backend>(logits: Option<Tensor<B, 3>>) -> anyhow::Result<Vec<f32>> {
    Ok(logits.context("the target gave no logits")?.into_data().iter::<f32>().collect())
}

/// Index of the largest value, the first of equals.
fn best(row: &[f32]) -> usize {
    (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0)
}

/// Prefill, greedy decoding and verification on `B` against the same tokens in one pass on a CPU in f32.
///
/// Tokens need not be the same for two numbers formats to agree: where the best two lie closer than rounding,
/// either is right. So the rule is that each token that `B` chose has a logit, in the reference, at most
/// `distance` below the largest.
pub(super) fn decode<B: Backend, R: Backend>(
    target: &Target<B>,
    reference: &Target<R>,
    distance: f64,
    to: &mut Findings,
) -> anyhow::Result<()> {
    let vocab = target.config().vocab_size;
    let mut ids: Vec<TokenId> = (0..PROMPT).map(|i| TokenId((37 + i * 7919) as u32 % vocab as u32)).collect();
    let total = PROMPT + DECODED;
    let mut cache = target.cache(1, total);
    let all = Want { logits: Rows::All, hidden: &[] };
    let prefill = host(target.forward(&ids, &mut cache, &all)?.logits)?;
    let mut decoded = Vec::new();
    let mut last = prefill[prefill.len() - vocab..].to_vec();
    for _ in 0..DECODED {
        let token = TokenId(best(&last) as u32);
        ids.push(token);
        last = host(target.forward(&[token], &mut cache, &all)?.logits)?;
        decoded.extend_from_slice(&last);
    }
    cache.truncate(total - VERIFIED);
    let verified = host(target.forward(&ids[total - VERIFIED..], &mut cache, &all)?.logits)?;

    let expected = host(reference.forward(&ids, &mut reference.cache(1, total), &all)?.logits)?;
    let row = |i: usize| &expected[i * vocab..(i + 1) * vocab];
    to.compare("prefill, logits", &prefill, &expected[..PROMPT * vocab])?;
    to.compare("decode, logits", &decoded, &expected[PROMPT * vocab..])?;
    to.compare("verify 8, logits", &verified, &expected[(total - VERIFIED) * vocab..])?;
    for (i, token) in ids.iter().enumerate().skip(PROMPT) {
        let row = row(i - 1);
        let gap = f64::from(row[best(row)] - row[token.index()]);
        to.record("decode, chosen tokens", gap, gap, distance);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hspec_core::{checkpoint::Weights, config::TargetConfig};
    type Flex = burn_flex::Flex;
    type NdArray = burn_ndarray::NdArray;

    fn folder() -> PathBuf {
        hspec_goldens::root().join("targets/llama31-tiny")
    }

    fn decoded(reference: &Target<NdArray>) -> Findings {
        let target = Target::<Flex>::load(&folder(), &Default::default()).unwrap();
        let mut findings = Findings::new(2e-5);
        decode(&target, reference, 1e-3, &mut findings).unwrap();
        findings
    }

    #[test]
    fn two_backends_decode_alike() {
        let reference = Target::<NdArray>::load(&folder(), &Default::default()).unwrap();
        let findings = decoded(&reference);
        assert_eq!(findings.failed(), [""; 0], "{}", findings.table());
        let tokens = &findings.all[3];
        assert_eq!((tokens.component.as_str(), tokens.tensors), ("decode, chosen tokens", DECODED));
    }

    /// A target that differs in one number of its configuration.
    #[test]
    fn a_target_that_rotates_otherwise_is_found_out() {
        let file = folder().join("config.json");
        let mut config = serde_json::from_slice::<serde_json::Value>(&std::fs::read(&file).unwrap()).unwrap();
        config["rms_norm_eps"] = 1e-2.into();
        let config = TargetConfig::from_value(&config, &file).unwrap();
        let weights = Weights::open(&folder()).unwrap();
        let findings = decoded(&Target::from_weights(config, &weights, &Default::default()).unwrap());
        for component in ["prefill, logits", "decode, logits", "verify 8, logits"] {
            assert!(findings.failed().contains(&component), "{}", findings.table());
        }
    }
}
