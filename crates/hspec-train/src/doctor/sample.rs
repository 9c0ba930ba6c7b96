//! The texts that checks run on, and whether what is supervised in them is what a drafter will meet.

use super::{
    Doctor,
    check::{Told, Verdict},
    target::{Opened, Text},
};
use crate::responses::{self, Finish, Response};
use burn::tensor::backend::Backend;
use hspec_core::{
    Result, TokenId,
    decode::{Decoder, Request, SamplingParams},
    text::Message,
};
use std::{ops::ControlFlow, path::Path};

/// Asked where nothing else is given.
const PROMPTS: [&str; 3] = [
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "List three ways to save water at home and explain each.",
];
/// Tokens of an answer to them.
const ANSWER: usize = 48;
/// Longest text that checks run on; its logits are kept for every token.
const LONGEST: usize = 192;
/// Tokens more than a header's that are looked at for its text.
const TAIL: usize = 8;
/// Texts.
const DOCUMENTS: usize = 6;

/// Texts with answers, from a file or just made.
pub(super) fn documents<B: Backend>(
    doctor: &Doctor<'_>,
    opened: &Opened<B>,
    told: &mut Told<'_>,
) -> Vec<Response> {
    let found = match doctor.responses {
        Some(file) => of_file(file, opened, told),
        None => {
            if let Some(text) = &opened.text {
                supervised(text, told);
            }
            let prompts = doctor.prompt.map_or(PROMPTS.to_vec(), |prompt| vec![prompt]);
            let answers: Result<Vec<Response>> =
                prompts.iter().map(|prompt| answered(prompt, opened)).collect();
            told.attempt("answers of the target", "text to check on", || {
                answers.map(|answers| (counts(&answers), answers))
            })
        }
    };
    let mut documents = found.unwrap_or_default();
    let short: Vec<Response> = documents
        .iter()
        .filter(|d| d.tokens() <= LONGEST && d.supervised() >= 8)
        .take(DOCUMENTS)
        .cloned()
        .collect();
    if short.is_empty() {
        // A longer one is better than none, within reason.
        documents.retain(|d| d.tokens() <= 8 * LONGEST);
        return documents.into_iter().min_by_key(Response::tokens).into_iter().collect();
    }
    short
}

fn counts(documents: &[Response]) -> String {
    let tokens: usize = documents.iter().map(Response::tokens).sum();
    let supervised: usize = documents.iter().map(Response::supervised).sum();
    let share = 100.0 * supervised as f64 / tokens.max(1) as f64;
    format!("{} texts, {tokens} tokens, {share:.0} % of them supervised", documents.len())
}

fn of_file<B: Backend>(file: &Path, opened: &Opened<B>, told: &mut Told<'_>) -> Option<Vec<Response>> {
    let read = told.attempt("responses", "answers that can be learned from", || {
        let (origin, found) = responses::read(file)?;
        Ok((counts(&found), (origin, found)))
    });
    let (origin, found) = read?;
    let template = opened.text.as_ref().and_then(|text| text.template.as_ref());
    match (origin, template) {
        (Some(origin), Some(template)) => {
            told.equal("chat template of the responses", origin.template.as_str(), template.hash())
        }
        (None, _) => told.skip("chat template of the responses", "the file does not say"),
        (_, None) => told.skip("chat template of the responses", "the target has none"),
    }
    let vocabulary = opened.target.config().vocab_size;
    let outside = found.iter().flat_map(Response::ids).find(|id| id.index() >= vocabulary);
    let outside = outside.map_or("none outside".into(), |id| format!("token {}", id.0));
    told.equal("tokens of the responses", outside, "none outside".to_owned());
    if let Some(text) = &opened.text {
        boundaries(text, &found, told);
    }
    let mut found = found;
    found.sort_by(|a, b| (&a.id, a.turn).cmp(&(&b.id, b.turn)));
    Some(responses::documents(found))
}

/// Whether answers begin where the template lets the assistant begin, and end with a token that ends them.
fn boundaries(text: &Text, found: &[Response], told: &mut Told<'_>) {
    let answers = || found.iter().filter(|response| response.finish != Some(Finish::Given));
    let ends = text.tokenizer.eos_ids();
    let stopped = || answers().filter(|response| response.finish == Some(Finish::Stop));
    let ended = stopped().filter(|r| r.response_ids.last().is_some_and(|id| ends.contains(id))).count();
    match stopped().count() {
        0 => told.skip("ends of supervised answers", "none says that it ended by itself"),
        all => told.holds(
            "ends of supervised answers",
            ended == all,
            format!("{ended} of {all} end with a token that ends them"),
            "all",
        ),
    }
    let Some((words, header)) = header(text).filter(|(_, header)| !header.is_empty()) else {
        told.skip("starts of supervised answers", "the template adds nothing before an answer");
        return;
    };
    // By its text too: some tokenizers cut the first word of a text in another way than one in its middle.
    let behind = |r: &Response| {
        let tail = &r.prompt_ids[r.prompt_ids.len().saturating_sub(header.len() + TAIL)..];
        tail.ends_with(&header)
            || text.tokenizer.decode(tail, false).is_ok_and(|written| written.ends_with(&words))
    };
    let (all, begun) = (answers().count(), answers().filter(|r| behind(r)).count());
    told.holds(
        "starts of supervised answers",
        begun == all,
        format!("{begun} of {all} directly behind the assistant's header"),
        "all",
    );
}

/// What the template writes where the assistant is to begin, and its tokens alone.
fn header(text: &Text) -> Option<(String, Vec<TokenId>)> {
    let template = text.template.as_ref()?;
    let messages = [Message::user("x")];
    let (with, without) = (template.render(&messages, true).ok()?, template.render(&messages, false).ok()?);
    let words = with.strip_prefix(&without)?;
    Some((words.to_owned(), text.tokenizer.encode(words).ok()?))
}

/// Whether an answer that stands in a conversation is supervised as a whole, and nothing but it, and whether the
/// text before it is the one that serving renders.
fn supervised(text: &Text, told: &mut Told<'_>) {
    let name = "loss mask of a built-in conversation";
    let Some(template) = &text.template else {
        told.skip(name, "the target has no chat template");
        return;
    };
    let answer = "Light of short waves is scattered more.";
    let question = Message::user(PROMPTS[0]);
    let masked = || -> Result<[String; 3]> {
        let rendered = template.render_answers(&[question.clone(), Message::assistant(answer)])?;
        let (ids, mask) = text.tokenizer.encode_within(&rendered.text, &rendered.answers)?;
        let pick = |wanted: bool| -> Vec<TokenId> {
            ids.iter().zip(&mask).filter(|(_, mask)| **mask == wanted).map(|(id, _)| *id).collect()
        };
        let served = template.render(std::slice::from_ref(&question), true)?;
        // A vocabulary that cannot say the answer says something else in its place.
        let sayable = text.tokenizer.decode(&text.tokenizer.encode(answer)?, true)?;
        let before = if rendered.text.starts_with(&served) { "as served" } else { "not as served" };
        Ok([text.tokenizer.decode(&pick(true), true)?, sayable, before.to_owned()])
    };
    match masked() {
        Ok([found, sayable, before]) => {
            // Tokens that reach across the border of an answer are left out of it.
            let whole = !found.is_empty() && sayable.contains(found.trim());
            told.holds(name, whole, format!("{found:?}"), format!("{sayable:?} or its whole tokens"));
            let verdict = if before == "as served" { Verdict::Ok } else { Verdict::Warning };
            told.add("prompt of a built-in conversation", verdict, before, "as served");
        }
        Err(error) => told.add(name, Verdict::Warning, error.to_string(), "a template that can be followed"),
    }
}

/// The target's own answer.
fn answered<B: Backend>(prompt: &str, opened: &Opened<B>) -> Result<Response> {
    let prompt_ids = match &opened.text {
        Some(Text { tokenizer, template: Some(template) }) => {
            tokenizer.encode(&template.render(&[Message::user(prompt)], true)?)?
        }
        Some(Text { tokenizer, template: None }) => tokenizer.encode(prompt)?,
        // Any text will do for numbers to be compared.
        None => (1..12).map(|i| TokenId(i * 7 % opened.target.config().vocab_size as u32)).collect(),
    };
    let request = Request {
        prompt: &prompt_ids,
        sampling: SamplingParams::greedy(),
        seed: 0,
        id: 0,
        max_new_tokens: ANSWER,
        k: 0,
        stop_tokens: &opened.ends(),
    };
    let decoder = Decoder::new(&opened.target, None);
    let generation = decoder.generate(&request, &mut |_| ControlFlow::Continue(()))?;
    Ok(Response::new(prompt, prompt_ids, generation.tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hspec_core::text::{ChatTemplate, Tokenizer};

    /// Metaspace marks the first word of a text, so that a header by itself has other tokens than behind a prompt.
    #[test]
    fn a_header_is_found_though_it_is_cut_differently_by_itself() {
        let space = serde_json::json!({
            "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first", "split": true,
        });
        let vocab = ["?", "\u{2581}a", "\u{2581}w", "w", "\u{2581}x"];
        let vocab: serde_json::Map<_, _> = (0..).zip(vocab).map(|(i, w)| (w.to_owned(), i.into())).collect();
        let end = serde_json::json!({
            "id": 5, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        });
        let tokenizer = serde_json::json!({
            "version": "1.0", "added_tokens": [end], "pre_tokenizer": space, "decoder": space,
            "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "?" },
        });
        let template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}\
            {% if add_generation_prompt %}w x{% endif %}";
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in [
            ("tokenizer.json", tokenizer.to_string()),
            ("chat_template.jinja", template.to_owned()),
            ("config.json", r#"{"eos_token_id": 5}"#.to_owned()),
        ] {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        let template = ChatTemplate::open(dir.path()).unwrap();
        let text = Text { tokenizer: Tokenizer::open(dir.path()).unwrap(), template };
        let ids = |ids: &[u32]| ids.iter().copied().map(TokenId).collect::<Vec<_>>();
        assert_eq!(text.tokenizer.encode("w x").unwrap(), ids(&[2, 4]));
        let prompt = text.tokenizer.encode("a</s>w x").unwrap();
        assert_eq!(prompt, ids(&[1, 5, 3, 4]));
        for (prompt, verdict) in [(prompt.clone(), Verdict::Ok), (ids(&[1, 5, 3]), Verdict::Differs)] {
            let mut tell = |_: &_| {};
            let mut told = Told::new(&mut tell);
            boundaries(&text, &[Response::new("p", prompt, ids(&[1, 5]))], &mut told);
            let checks = told.end().checks;
            let starts = checks.iter().find(|check| check.name == "starts of supervised answers").unwrap();
            assert_eq!(starts.verdict, verdict, "{}", starts.found);
        }
    }
}
