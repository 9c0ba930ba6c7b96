//! Samples with the tokens shown that are learned from.

use hspec_core::text::Tokenizer;
use hspec_train::responses::Response;
use std::io::{IsTerminal, Write};

/// Writes the first samples to standard error: supervised tokens in green, or in brackets where there are no colours.
pub(crate) fn show(documents: &[Response], samples: usize, tokenizer: &Tokenizer) -> anyhow::Result<()> {
    let mut out = std::io::stderr().lock();
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let around = if out.is_terminal() && !plain { ("\x1b[32m", "\x1b[0m") } else { ("⟦", "⟧") };
    for document in documents.iter().take(samples) {
        writeln!(out, "{}", sample(document, tokenizer, around)?)?;
    }
    Ok(())
}

fn sample(document: &Response, tokenizer: &Tokenizer, around: (&str, &str)) -> anyhow::Result<String> {
    let (ids, mask): (Vec<_>, Vec<bool>) = document.ids().zip(document.loss_mask()).unzip();
    let mut text = format!(
        "--- {}: {} of {} tokens are supervised\n",
        document.id,
        document.supervised(),
        document.tokens()
    );
    let mut at = 0;
    while at < ids.len() {
        let run = mask[at..].iter().take_while(|m| **m == mask[at]).count();
        // A run is decoded as a whole: a character may take several tokens.
        let part = tokenizer.decode(&ids[at..at + run], false)?;
        text += &if mask[at] { format!("{}{part}{}", around.0, around.1) } else { part };
        at += run;
    }
    Ok(text)
}
