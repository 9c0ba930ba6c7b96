//! The target by itself: its files, and whether what training captures of it is what decoding sees.

use super::{
    Doctor,
    check::{Compared, Told, Verdict},
};
use crate::responses::Response;
use burn::tensor::{Tensor, backend::Backend};
use hspec_core::{
    Result, TokenId,
    checkpoint::Weights,
    target::{Rows, Target, Want},
    text::{ChatTemplate, Tokenizer},
};

/// Tokens over which hidden states are compared.
const TOKENS: usize = 48;
/// Tokens of them that go through the target one by one.
const SINGLE: usize = 12;
/// Kernels may add in another order where a pass has another length.
const TOLERANCE: f64 = 1e-3;

/// A target with its text side.
pub(super) struct Opened<B: Backend> {
    pub target: Target<B>,
    /// None where its files have no readable one.
    pub text: Option<Text>,
}

/// How the target reads and writes.
pub(super) struct Text {
    pub tokenizer: Tokenizer,
    pub template: Option<ChatTemplate>,
}

impl<B: Backend> Opened<B> {
    pub(super) fn layers(&self) -> usize {
        self.target.config().num_hidden_layers
    }

    /// Tokens that end an answer.
    pub(super) fn ends(&self) -> Vec<TokenId> {
        self.text.as_ref().map(|text| text.tokenizer.eos_ids()).unwrap_or_default()
    }
}

/// Opens the target and checks its files.
pub(super) fn open<B: Backend>(
    doctor: &Doctor<'_>,
    device: &B::Device,
    told: &mut Told<'_>,
) -> Option<Opened<B>> {
    let path = doctor.target;
    let target = told.attempt("target files", "a readable model", || {
        let target = Target::<B>::load_as(path, doctor.storage, device)?;
        let c = target.config();
        Ok((format!("{:?}, {} layers of {}", c.family, c.num_hidden_layers, c.hidden_size), target))
    })?;
    told.attempt("target weights", "finite numbers", || {
        let weights = Weights::open(path)?;
        Ok((finite(&weights)?, ()))
    });
    let text = told.attempt("tokenizer", "a tokenizer and, for chat models, a template", || {
        let text = Text { tokenizer: Tokenizer::open(path)?, template: ChatTemplate::open(path)? };
        let template = match &text.template {
            Some(template) => format!("chat template {}", template.hash()),
            None => "no chat template".into(),
        };
        Ok((format!("{} tokens, {template}", text.tokenizer.vocab_size()), text))
    });
    let rows = target.config().vocab_size;
    told.equal("rows of the output head", target.head().shape()[0], rows);
    if let Some(text) = &text {
        let tokens = text.tokenizer.vocab_size();
        told.holds(
            "tokenizer's size",
            tokens <= rows,
            tokens.to_string(),
            format!("at most {rows}, the head's"),
        );
        let ends = text.tokenizer.eos_ids();
        let inside = ends.iter().all(|id| id.index() < rows);
        match ends.is_empty() {
            true => told.add("ends of text", Verdict::Warning, "none", "a token that ends an answer"),
            false => told.holds("ends of text", inside, list(&ends), format!("ids below {rows}")),
        }
    }
    Some(Opened { target, text })
}

/// Counts the numbers of a checkpoint.
///
/// # Errors
/// A file that cannot be read, or the first tensor with a number that is not finite.
pub(super) fn finite(weights: &Weights) -> Result<String> {
    let (names, mut numbers) = (weights.names(), 0);
    for name in &names {
        let Some(tensor) = weights.tensor(name)? else { continue };
        numbers += tensor.num_elements();
        let bad = tensor.dtype.is_float().then(|| tensor.iter::<f32>().find(|x| !x.is_finite())).flatten();
        if let Some(bad) = bad {
            return Err(hspec_core::Error::invalid(weights.path(), name, bad.to_string(), "finite numbers"));
        }
    }
    Ok(format!("{} tensors, {numbers} numbers", names.len()))
}

/// Whether captured hidden states give back the logits, and do not depend on how a text is cut into passes.
pub(super) fn hidden_states<B: Backend>(opened: &Opened<B>, documents: &[Response], told: &mut Told<'_>) {
    let logits = "logits of the captured last hidden state";
    let parts = "hidden states of a text in parts";
    let Some(document) = documents.first() else {
        told.skip(logits, "there is no text");
        return;
    };
    let ids: Vec<TokenId> = document.ids().take(TOKENS).collect();
    match compared(&opened.target, &ids) {
        Ok([of_logits, of_parts]) => {
            told.close(logits, of_logits, "the logits of the same pass", TOLERANCE);
            told.close(parts, of_parts, "those of one pass, at all layers", TOLERANCE);
        }
        Err(error) => told.holds(logits, false, error.to_string(), "a pass of the target"),
    }
}

fn compared<B: Backend>(target: &Target<B>, ids: &[TokenId]) -> Result<[Compared; 2]> {
    let all: Vec<usize> = (0..=target.config().num_hidden_layers).collect();
    let want = Want { logits: Rows::All, hidden: &all };
    let whole = target.forward(ids, &mut target.cache(1, ids.len()), &want)?;
    let width = target.config().hidden_size;
    let hidden: Vec<Vec<f32>> = whole.hidden.iter().cloned().map(floats).collect();
    let last = whole.hidden.into_iter().next_back().expect("the last layer's output was asked for");
    let again = target.head().forward(target.norm().forward(last.squeeze_dim::<2>(0)));
    let logits = Compared::of(&floats(again), &whole.logits.map(floats).unwrap_or_default());

    let single = SINGLE.min(ids.len() / 2);
    let mut cache = target.cache(1, ids.len());
    let mut cut = vec![Vec::new(); all.len()];
    let (first, rest) = ids.split_at(ids.len() - single);
    for part in std::iter::once(first).chain(rest.chunks(1)) {
        let pass = target.forward(part, &mut cache, &Want { logits: Rows::None, hidden: &all })?;
        for (all, part) in cut.iter_mut().zip(pass.hidden) {
            all.extend(floats(part));
        }
    }
    let mut parts = Compared::default();
    for (found, expected) in cut.iter().zip(&hidden) {
        // In units of each position's own size: that of the first is hundreds of times the others'.
        for (found, expected) in found.chunks_exact(width).zip(expected.chunks_exact(width)) {
            let size =
                (expected.iter().map(|x| x * x).sum::<f32>() / width as f32).sqrt() + f32::MIN_POSITIVE;
            let scaled = |row: &[f32]| row.iter().map(|x| x / size).collect::<Vec<_>>();
            parts.add(&scaled(found), &scaled(expected));
        }
    }
    Ok([logits, parts])
}

pub(super) fn floats<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

/// Tokens for people.
pub(super) fn list(ids: &[TokenId]) -> String {
    ids.iter().map(|id| id.0.to_string()).collect::<Vec<_>>().join(" ")
}
