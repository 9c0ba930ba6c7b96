//! Where the assistant's text lies in a rendered conversation, and which tokens are whole inside it.
//!
//! 1. The conversation is rendered once as it is, and once more with marks in the assistant's messages, which the
//!    template carries to where it puts the text: it may trim it, or keep only what follows a thought.
//! 2. The rendered text is tokenised as a whole, as serving does, and tokens are found by their offsets. Tokens of
//!    a part of the text would be others where a token reaches across its border.

use super::{ChatTemplate, Message, Tokenizer};
use crate::{
    error::{Error, Result},
    ids::TokenId,
};
use std::ops::Range;

/// Characters for marks, which stand in no text: a plane that is for private use.
const MARKS: Range<u32> = 0xF_0000..0xF_FFFE;
/// What surrounds thoughts, which some templates move or drop.
const TAGS: [&str; 2] = ["<think>", "</think>"];

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// Bytes of it that are the assistant's, one range per message that the template wrote, ascending. What
    /// the template adds by itself (a header, an empty thought) is not in them.
    pub answers: Vec<Range<usize>>,
}

/// A place in a message.
struct Mark {
    message: usize,
    /// What of the message stands before it, back to the tag that begins it.
    piece: String,
    end: bool,
}

impl ChatTemplate {
    /// Renders a whole conversation and finds the assistant's text in it.
    ///
    /// # Errors
    /// Those of [`ChatTemplate::render`]; [`Error::Request`] where the template changes the assistant's text in
    /// a way that cannot be followed.
    pub fn render_answers(&self, messages: &[Message]) -> Result<Rendered> {
        let refuse = |found: &str| {
            Err(Error::Request {
                what: "messages",
                found: found.to_owned(),
                expected: "a conversation whose answers can be found in the rendered text".to_owned(),
            })
        };
        if messages.iter().any(|m| m.content.chars().any(is_mark)) {
            return refuse("characters of the private use plane 15");
        }
        let text = self.render(messages, false)?;
        // Templates that trim must not meet a mark outside of the white space, and others keep that.
        for outer in [true, false] {
            let mut marks = Vec::new();
            let marked: Vec<Message> = (messages.iter().enumerate())
                .map(|(i, message)| Message {
                    content: mark(message, i, outer, &mut marks),
                    ..message.clone()
                })
                .collect();
            if marks.len() >= MARKS.len() {
                return refuse("more thoughts than there are marks");
            }
            let (plain, places) = unmark(&self.render(&marked, false)?);
            if plain == text {
                return Ok(Rendered { answers: answers(&text, &marks, &places), text });
            }
        }
        refuse("a chat template that changes the assistant's text")
    }
}

fn is_mark(c: char) -> bool {
    MARKS.contains(&u32::from(c))
}

/// The message's text with marks at its ends and behind tags. Blank texts have none.
fn mark(message: &Message, number: usize, outer: bool, marks: &mut Vec<Mark>) -> String {
    let content = message.content.as_str();
    if !message.is_assistant() || content.trim().is_empty() {
        return content.to_owned();
    }
    let from = if outer { 0 } else { content.len() - content.trim_start().len() };
    let to = if outer { content.len() } else { content.trim_end().len() };
    let mut marked = content[..from].to_owned();
    let mut push = |marked: &mut String, piece: &str, end: bool| {
        // Beyond the plane there are too many anyway.
        marked.extend(char::from_u32(MARKS.start + marks.len() as u32));
        marks.push(Mark { message: number, piece: piece.to_owned(), end });
    };
    push(&mut marked, "", false);
    let mut at = from;
    while let Some(run) = tags(&content[at..to]) {
        let (tag, rest) = (at + run.start, at + run.end);
        marked += &content[at..rest];
        push(&mut marked, &content[tag..rest], false);
        at = rest;
    }
    marked += &content[at..to];
    push(&mut marked, "", true);
    marked + &content[to..]
}

/// The first run of tags with the white space behind each.
fn tags(text: &str) -> Option<Range<usize>> {
    let start = TAGS.iter().filter_map(|tag| text.find(tag)).min()?;
    let mut end = start;
    while let Some(tag) = TAGS.iter().find(|tag| text[end..].starts_with(**tag)) {
        let rest = &text[end + tag.len()..];
        end = text.len() - rest.trim_start().len();
    }
    Some(start..end)
}

/// The text without marks, and where each mark stood: its number and a place in the text.
fn unmark(marked: &str) -> (String, Vec<(usize, usize)>) {
    let (mut plain, mut places) = (String::with_capacity(marked.len()), Vec::new());
    for c in marked.chars() {
        if is_mark(c) {
            places.push(((u32::from(c) - MARKS.start) as usize, plain.len()));
        } else {
            plain.push(c);
        }
    }
    (plain, places)
}

fn answers(text: &str, marks: &[Mark], places: &[(usize, usize)]) -> Vec<Range<usize>> {
    let mut answers: Vec<Range<usize>> = Vec::new();
    let mut open: Option<(usize, usize)> = None;
    for &(number, at) in places {
        let Some(mark) = marks.get(number) else { continue };
        match open {
            Some((message, start)) if message == mark.message && mark.end => {
                answers.push(start..at);
                open = None;
            }
            Some((message, _)) if message == mark.message => {}
            // The first place of a message that the template kept. A tag that the message has and the template
            // wrote anew is the assistant's too.
            _ if !mark.end => {
                let own = text[..at].ends_with(&mark.piece);
                open = Some((mark.message, if own { at - mark.piece.len() } else { at }));
            }
            _ => {}
        }
    }
    answers.retain(|range| !range.is_empty());
    answers
}

impl Tokenizer {
    /// Tokens of a text, and which of them lie wholly within one of the ascending `ranges` of its bytes. A token
    /// that ends a response and stands directly behind a range belongs to it: the model has to say it. A token
    /// that reaches across a border does not: no prompt that ends there would have been continued by it.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_within(&self, text: &str, ranges: &[Range<usize>]) -> Result<(Vec<TokenId>, Vec<bool>)> {
        let encoding = self.encoding(text)?;
        let (mut ids, mut within) = (Vec::new(), Vec::new());
        let (mut before, mut left) = (0, ranges);
        for (&id, &(start, end)) in encoding.get_ids().iter().zip(encoding.get_offsets()) {
            // Offsets may leave out the white space that a token begins with.
            let from = if self.spaced(id) { start.min(before) } else { start };
            // Nothing stands between a range and the token that ends it.
            let last = |range: &Range<usize>| before == range.end && self.ends(id);
            while let [first, rest @ ..] = left
                && first.end <= from
                && !last(first)
            {
                left = rest;
            }
            ids.push(TokenId(id));
            within.push(left.first().is_some_and(|range| {
                range.start <= from && range.start < end && (end <= range.end || last(range))
            }));
            before = before.max(end);
        }
        Ok((ids, within))
    }
}

#[cfg(test)]
mod tests {
    use super::{super::testing, *};
    use proptest::prelude::*;
    use std::path::Path;

    const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}<end>\n{% endfor %}\
        {% if add_generation_prompt %}<assistant>\n{% endif %}";
    const TRIMS: &str = "{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}<end>{% endfor %}";
    /// Thoughts of earlier turns are dropped; the last turn always has one, which may be empty.
    const THINKS: &str = "{% for m in messages %}<{{ m.role }}>\n{% if m.role == 'assistant' %}\
        {% set parts = m.content.split('</think>') %}\
        {% if loop.last %}<think>\n{{ parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 }}\n</think>\n\n\
        {% endif %}{{ parts[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}";

    fn template(source: &str) -> ChatTemplate {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
        ChatTemplate::open(dir.path()).unwrap().unwrap()
    }

    fn talk(turns: &[&str]) -> Vec<Message> {
        let message = |(i, content): (usize, &&str)| match i % 2 {
            0 => Message::user(*content),
            _ => Message::assistant(*content),
        };
        turns.iter().enumerate().map(message).collect()
    }

    fn answers_of(source: &str, turns: &[&str]) -> Vec<String> {
        let rendered = template(source).render_answers(&talk(turns)).unwrap();
        assert_eq!(rendered.text, template(source).render(&talk(turns), false).unwrap());
        rendered.answers.iter().map(|range| rendered.text[range.clone()].to_owned()).collect()
    }

    #[test]
    fn answers_are_found_where_the_template_puts_them() {
        assert_eq!(answers_of(PLAIN, &["hi", "hi", "hi", " two\n"]), ["hi", " two\n"]);
        assert_eq!(answers_of(TRIMS, &[" hi ", "\nhi ", "x", "two"]), ["hi", "two"]);
        assert_eq!(answers_of(PLAIN, &["only", "", "asked"]), [""; 0]);
        assert_eq!(answers_of("{{ messages[0].content }}", &["a", "b"]), [""; 0]);
    }

    /// Thoughts once fell out of the loss mask, because the template takes them apart.
    #[test]
    fn a_thought_in_the_last_turn_is_the_assistants_with_its_tags() {
        let thought = "<think>\nwhy\n</think>\n\nso";
        assert_eq!(answers_of(THINKS, &["a", thought]), [thought]);
        assert_eq!(answers_of(THINKS, &["a", thought, "b", "c"]), ["so", "c"]);
        let empty = "<think>\n\n</think>\n\nso";
        assert_eq!(answers_of(THINKS, &["a", empty]), [empty]);
        assert_eq!(answers_of(THINKS, &["a", empty, "b", "c"]), ["so", "c"]);
    }

    /// An empty thought that the template adds by itself was once supervised: the model never says it.
    #[test]
    fn an_empty_thought_of_the_templates_is_not_the_assistants() {
        assert_eq!(answers_of(THINKS, &["a", "so"]), ["so"]);
    }

    #[test]
    fn a_reply_of_nothing_but_the_end_of_a_thought() {
        assert_eq!(answers_of(THINKS, &["a", "</think>"]), ["\n</think>\n\n"]);
        assert_eq!(answers_of(PLAIN, &["a", "</think>"]), ["</think>"]);
    }

    #[test]
    fn a_template_that_changes_the_text_is_refused() {
        let upper = "{% for m in messages %}{{ m.content | length }}{% endfor %}";
        let error = template(upper).render_answers(&talk(&["a", "b"])).unwrap_err().to_string();
        assert!(error.contains("changes the assistant's text"), "{error}");
        let error = template(PLAIN).render_answers(&talk(&["a", "\u{f0001}"])).unwrap_err().to_string();
        assert!(error.contains("private use"), "{error}");
    }

    fn encoded(tokenizer: &Tokenizer, text: &str, range: Range<usize>) -> (Vec<TokenId>, Vec<bool>) {
        tokenizer.encode_within(text, std::slice::from_ref(&range)).unwrap()
    }

    fn tokens(text: &str, ranges: &[Range<usize>]) -> Vec<(String, bool)> {
        let tokenizer = testing::tokenizer();
        let (ids, within) = tokenizer.encode_within(text, ranges).unwrap();
        assert_eq!(ids, tokenizer.encode(text).unwrap());
        let text = |id: &TokenId| tokenizer.decode(&[*id], false).unwrap();
        ids.iter().map(text).zip(within).collect()
    }

    #[test]
    fn tokens_within_ranges() {
        let pairs = |tokens: Vec<(String, bool)>| {
            tokens.into_iter().map(|(t, w)| format!("{t}{}", u8::from(w))).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(pairs(tokens("xaby", std::slice::from_ref(&(1..3)))), "x0 a1 b1 y0");
        // "the" is one token: it reaches across either border.
        assert_eq!(pairs(tokens("xthey", std::slice::from_ref(&(2..5)))), "x0 the0 y1");
        assert_eq!(pairs(tokens("xthey", std::slice::from_ref(&(0..3)))), "x1 the0 y0");
        assert_eq!(pairs(tokens("a the b", &[1..5, 6..7])), "a0  the1  0 b1");
        // Two tokens share a character.
        assert_eq!(
            tokens("aäb", std::slice::from_ref(&(1..3))).iter().map(|t| t.1).collect::<Vec<_>>(),
            [false, true, false]
        );
        assert_eq!(tokens("aéb", std::slice::from_ref(&(1..3))).iter().filter(|t| t.1).count(), 2);
    }

    /// The end of a turn was once not learned, so that drafters could not draft it.
    #[test]
    fn the_token_that_ends_an_answer_belongs_to_it() {
        let dir = tempfile::tempdir().unwrap();
        testing::write(dir.path());
        std::fs::write(dir.path().join("config.json"), r#"{"eos_token_id": 0}"#).unwrap();
        let tokenizer = Tokenizer::open(dir.path()).unwrap();
        let (ids, within) = encoded(&tokenizer, "xab<end>y<end>", 1..3);
        assert_eq!((ids.len(), within), (6, vec![false, true, true, true, false, false]));
        let (_, within) = encoded(&tokenizer, "xab\n<end>", 1..3);
        assert_eq!(within, [false, true, true, false, false]);
    }

    proptest! {
        /// Counting the tokens of the text before an answer once gave a mask that was off by one where a token
        /// reaches across the border. Where none does, both ways agree; where one does, it is not supervised and
        /// all that lie inside are.
        #[test]
        fn masks_by_offsets_equal_masks_by_prefixes_unless_a_token_crosses(
            before in "[the on]{0,6}", answer in "[the onä]{1,6}", after in "[the on]{0,4}",
        ) {
            let tokenizer = testing::tokenizer();
            let text = format!("{before}{answer}{after}");
            let (from, to) = (before.len(), before.len() + answer.len());
            let (ids, within) = encoded(&tokenizer, &text, from..to);
            let parts = [&before, &answer, &after].map(|part| tokenizer.encode(part).unwrap());
            let crosses = parts.concat() != ids;
            let first = within.iter().position(|w| *w).unwrap_or(within.len());
            let count = within.iter().filter(|w| **w).count();
            prop_assert!(within[first..first + count].iter().all(|w| *w), "one run");
            if crosses {
                prop_assert!(count <= parts[1].len() + 2);
                let text_within = tokenizer.decode(&ids[first..first + count], false).unwrap();
                prop_assert!(answer.contains(&text_within), "{:?} in {:?}", text_within, answer);
            } else {
                prop_assert_eq!((first, count), (parts[0].len(), parts[1].len()));
            }
        }
    }

    /// With the real tokenizer and template, where the model is there.
    #[test]
    fn smollm2_masks_are_the_answers_and_the_tokens_that_end_them() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/smollm2-135m-instruct");
        let Ok(Some(template)) = ChatTemplate::open(&model) else { return };
        let tokenizer = Tokenizer::open(&model).unwrap();
        let messages = talk(&["Who are you?", "I'm a model,\n\nof course. ", "And  then?", "42 \u{1F600}"]);
        let Rendered { text, answers } = template.render_answers(&messages).unwrap();
        let (ids, within) = tokenizer.encode_within(&text, &answers).unwrap();
        let supervised: Vec<TokenId> =
            ids.iter().zip(&within).filter(|(_, w)| **w).map(|(id, _)| *id).collect();
        let text = tokenizer.decode(&supervised, false).unwrap();
        assert_eq!(text, "I'm a model,\n\nof course. <|im_end|>42 \u{1F600}<|im_end|>");
    }
}
