//! A target's head: its own, or the embedding.

#![allow(clippy::unwrap_used)] // a test may panic

use hspec_core::{
    TokenId,
    checkpoint::{Weights, read_json},
    config::TargetConfig,
    target::{Rows, Target, Want},
};

type B = burn_flex::Flex;

/// Logits behind three tokens, of a fixture's weights under another flag.
fn logits(name: &str, tied: bool) -> hspec_core::Result<Vec<f32>> {
    let dir = hspec_goldens::root().join("targets").join(name);
    let file = dir.join("config.json");
    let mut config = TargetConfig::from_value(&read_json(&file)?, &file)?;
    config.tie_word_embeddings = tied;
    let target = Target::<B>::from_weights(config, &Weights::open(&dir)?, &Default::default())?;
    let mut cache = target.cache(1, 3);
    let ids = [TokenId(1), TokenId(5), TokenId(9)];
    let pass = target.forward(&ids, &mut cache, &Want { logits: Rows::Last, hidden: &[] })?;
    Ok(pass.logits.unwrap().into_data().to_vec().unwrap())
}

/// Some files state tied embeddings and carry a head all the same.
#[test]
fn a_head_in_the_file_is_used_though_the_flag_says_tied() {
    let stated = logits("qwen3-tiny-untied", false).unwrap();
    assert_eq!(logits("qwen3-tiny-untied", true).unwrap(), stated);
    assert_ne!(logits("qwen3-tiny-tied", true).unwrap(), stated, "fixtures differ");
}

#[test]
fn an_untied_target_without_a_head_is_refused_with_its_name() {
    logits("qwen3-tiny-tied", true).unwrap();
    let error = logits("qwen3-tiny-tied", false).unwrap_err().to_string();
    assert!(
        error.contains("qwen3-tiny-tied") && error.contains("lm_head.weight: found no such tensor"),
        "{error}"
    );
}
