//! Keys of an H-Spec configuration that the released format does not have. Each is absent by default; a
//! reader that does not know them cannot use the drafter.

use super::{HSpecConfig, hspec_check::bounded};
use crate::{Error, Result};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::path::Path;

/// What an H-Spec drafter may have beside what is released: the future work of H-Spec section 5 and of its
/// appendix on DFlash-2. Stored as keys of these names at the top level of `config.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HSpecExtensions {
    /// Per attention sub-layer, the target's key-value heads that it reads, ascending. All lists have
    /// `num_key_value_heads` entries, and the query heads are grouped over those.
    pub attn_kv_head_ids: Option<Vec<Vec<usize>>>,
    /// Domino's recurrence over the block's tokens in place of the Markov head.
    pub domino: Option<DominoOptions>,
    /// DFlash-2's convolutions around attention and feed-forward sub-layers. Mamba sub-layers have their
    /// own.
    pub block_conv: Option<BlockConvOptions>,
    /// DFlash-2's selector in place of the Markov head.
    pub candidate_selector: Option<SelectorOptions>,
}

/// Domino, with the key names of its own checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DominoOptions {
    /// Width between the two projections.
    pub emb_dim: usize,
    /// Width of the recurrent state.
    pub gru_hidden_dim: usize,
    /// Drafted tokens at the front of the block that keep their base logits.
    #[serde(default)]
    pub pure_draft_prefix_len: usize,
}

/// DFlash-2's convolution, with the key names of its checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockConvOptions {
    /// Slots that a slot sees, itself included.
    pub conv_kernel_size: usize,
    /// Consecutive channels with one dynamic kernel.
    pub conv_group_size: usize,
}

/// DFlash-2's selector, with the key names of its checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SelectorOptions {
    /// Width of the codebooks.
    pub selector_rank: usize,
    /// Candidates per slot.
    pub selector_top_k: usize,
}

impl HSpecConfig {
    /// The keys of [`HSpecExtensions`]; `file` names the source in errors.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming a key whose value has another form.
    pub fn extensions(&self, file: &Path) -> Result<HSpecExtensions> {
        Ok(HSpecExtensions {
            attn_kv_head_ids: self.key("attn_kv_head_ids", file)?,
            domino: self.key("domino", file)?,
            block_conv: self.key("block_conv", file)?,
            candidate_selector: self.key("candidate_selector", file)?,
        })
    }

    fn key<T: DeserializeOwned>(&self, name: &str, file: &Path) -> Result<Option<T>> {
        let value = self.extra.get(name).unwrap_or(&Value::Null);
        Option::deserialize(value)
            .map_err(|e| Error::invalid(file, name, format!("{value} ({e})"), "the fields of this key"))
    }

    /// Refuses extensions that cannot be right.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub(super) fn check_extensions(&self, file: &Path) -> Result<()> {
        let refuse =
            |field: &str, found: String, expected: String| Err(Error::invalid(file, field, found, expected));
        let HSpecExtensions { attn_kv_head_ids, domino, block_conv, candidate_selector } =
            self.extensions(file)?;
        let layer = &self.transformer_layer_config;
        let h = layer.hidden_size;
        if let Some(heads) = &attn_kv_head_ids {
            let (lists, kv) = (self.attention_layers(), layer.num_key_value_heads);
            let right = |ids: &Vec<usize>| ids.len() == kv && ids.is_sorted_by(|a, b| a < b);
            if heads.len() != lists || !heads.iter().all(right) {
                let expected = format!(
                    "{lists} lists, one per attention sub-layer, of num_key_value_heads = {kv} ascending heads"
                );
                return refuse("attn_kv_head_ids", format!("{heads:?}"), expected);
            }
        }
        let corrections = [
            ("markov_rank", self.markov_rank > 0),
            ("domino", domino.is_some()),
            ("candidate_selector", candidate_selector.is_some()),
        ];
        let mut present = corrections.iter().filter(|(_, there)| *there).map(|(name, _)| name);
        if let (Some(first), Some(second)) = (present.next(), present.next()) {
            return refuse(second, format!("it beside {first}"), "one correction of the logits".into());
        }
        let mut sizes = Vec::new();
        if let Some(d) = domino {
            sizes.extend([("domino.emb_dim", d.emb_dim), ("domino.gru_hidden_dim", d.gru_hidden_dim)]);
            let most = self.block_size - 2;
            if d.pure_draft_prefix_len > most {
                let expected = format!("at most {most}, so that a slot is corrected");
                let found = d.pure_draft_prefix_len.to_string();
                return refuse("domino.pure_draft_prefix_len", found, expected);
            }
            let inputs = h.max(d.gru_hidden_dim);
            bounded("domino.gru_hidden_dim", d.gru_hidden_dim.saturating_mul(3), inputs, file)?;
            let width = h.saturating_add(d.gru_hidden_dim).max(self.draft_vocab_size);
            bounded("domino.emb_dim", d.emb_dim, width, file)?;
        }
        if let Some(s) = candidate_selector {
            sizes.push(("candidate_selector.selector_rank", s.selector_rank));
            bounded("candidate_selector.selector_rank", layer.vocab_size, s.selector_rank, file)?;
            let most = self.draft_vocab_size;
            if !(1..=most).contains(&s.selector_top_k) {
                let expected = format!("1 to {most}, the draft vocabulary");
                return refuse("candidate_selector.selector_top_k", s.selector_top_k.to_string(), expected);
            }
        }
        if let Some(c) = block_conv {
            if !(1..=self.block_size).contains(&c.conv_kernel_size) {
                let expected = format!("1 to {}, the block", self.block_size);
                return refuse("block_conv.conv_kernel_size", c.conv_kernel_size.to_string(), expected);
            }
            if c.conv_group_size == 0 || !h.is_multiple_of(c.conv_group_size) {
                let expected = format!("a divisor of hidden_size {h}");
                return refuse("block_conv.conv_group_size", c.conv_group_size.to_string(), expected);
            }
            let rows = (h / c.conv_group_size).saturating_mul(2 * c.conv_kernel_size);
            bounded("block_conv.conv_group_size", rows, h, file)?;
        }
        match sizes.into_iter().find(|(_, size)| *size == 0) {
            Some((field, _)) => refuse(field, "0".into(), "a positive size".into()),
            None => Ok(()),
        }
    }
}
