//! From prompt files to the conversations of a run, as tokens.

use crate::{
    pack::shuffled,
    recipe::{Data, GivenAnswers},
    responses::{Finish, PromptTokens, Response},
};
use hspec_core::{
    Error, Result, TokenId,
    prompts::{Prompt, Prompts},
    text::{ChatTemplate, Message, Rendered, Tokenizer},
};
use std::path::Path;

/// The stream of the seed that picks prompts; documents use the epochs' numbers.
pub(crate) const SELECTION: u64 = u64::MAX;

/// The conversations that a run uses, and how many were left out for their length.
#[derive(Debug)]
pub struct Selection {
    /// First prompts, rendered and tokenised, in random order.
    pub prompts: Vec<PromptTokens>,
    /// The conversations that they begin.
    conversations: Vec<Conversation>,
    /// Conversations whose answers stood in the file, where those are supervised.
    pub given: Vec<Response>,
    /// Prompts longer than allowed.
    pub too_long: usize,
}

/// What the target answers, turn by turn.
#[derive(Debug)]
struct Conversation {
    messages: Vec<Message>,
    then: Vec<String>,
}

/// What a prompt comes to.
struct Usable {
    prompt: Option<(PromptTokens, Conversation)>,
    given: Option<Response>,
}

/// A target's text side, and how long its prompts may be.
#[derive(Clone, Copy)]
pub struct Renderer<'a> {
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// The chat template.
    pub template: &'a ChatTemplate,
    /// Most tokens of a prompt.
    pub max_prompt_tokens: usize,
}

impl Renderer<'_> {
    /// The tokens of a conversation up to where the model answers; none if there are too many.
    fn encode(&self, messages: &[Message]) -> Result<Option<Vec<TokenId>>> {
        let tokens = self.tokenizer.encode(&self.template.render(messages, true)?)?;
        Ok((tokens.len() <= self.max_prompt_tokens).then_some(tokens))
    }
}

/// Renders prompts with the target's chat template, drops long ones, and draws as many as wanted: from all
/// alike, or from each file its share.
///
/// # Errors
/// A prompt that cannot be rendered or encoded, two prompts with one id, a file with fewer prompts than its
/// share, or none left.
pub fn select(prompts: &Prompts, data: &Data, seed: u64, renderer: &Renderer<'_>) -> Result<Selection> {
    let Prompts { prompts, shares } = prompts;
    let mut ids = std::collections::HashSet::new();
    if let Some(twice) = prompts.iter().find(|p| !ids.insert(&p.id)) {
        return Err(Error::Mismatch(format!(
            "two prompts have the id {:?}; where a prompt has none, its line's number serves",
            twice.id
        )));
    }
    let share_of = |number: usize| shares.iter().position(|share| share.prompts.contains(&number));
    let parts: Vec<f64> = shares.iter().map(|share| share.part).collect();
    let wanted = if data.max_prompts == 0 { prompts.len() } else { data.max_prompts };
    // Without a total, all are looked at before it is known how many keep the shares.
    let mut left = match data.max_prompts {
        0 => vec![usize::MAX; shares.len()],
        total => apportion(total, &parts),
    };
    let mut used: Vec<(Option<usize>, Usable)> = Vec::new();
    let mut too_long = 0;
    for number in shuffled(prompts.len(), seed, SELECTION) {
        if used.len() == wanted {
            break;
        }
        let share = share_of(number);
        if share.is_some_and(|share| left[share] == 0) {
            continue;
        }
        match usable(&prompts[number], data, renderer)? {
            Some(one) => {
                used.push((share, one));
                share.into_iter().for_each(|share| left[share] -= 1);
            }
            None => too_long += 1,
        }
    }
    if used.is_empty() {
        return Err(Error::Mismatch(format!(
            "no prompt is left: {too_long} of {} are longer than {} tokens",
            prompts.len(),
            data.max_prompt_tokens
        )));
    }
    if !shares.is_empty() {
        let found: Vec<usize> =
            (0..shares.len()).map(|s| used.iter().filter(|(share, _)| *share == Some(s)).count()).collect();
        let total = match data.max_prompts {
            0 => largest(&found, &parts),
            total => total,
        };
        let mut quotas = apportion(total, &parts);
        for ((share, quota), found) in shares.iter().zip(&quotas).zip(found) {
            if found < *quota || *quota == 0 {
                let found = format!("{found} prompts that are not too long");
                let expected = format!("at least {quota}, {:.0} % of {total}", 100.0 * share.part);
                return Err(Error::invalid(&share.file, "prompts", found, expected));
            }
        }
        used.retain(|(share, _)| {
            share.is_some_and(|share| {
                let keep = quotas[share] > 0;
                quotas[share] -= usize::from(keep);
                keep
            })
        });
    }
    let mut selection =
        Selection { prompts: Vec::new(), conversations: Vec::new(), given: Vec::new(), too_long };
    for (_, Usable { prompt, given }) in used {
        selection.given.extend(given);
        if let Some((prompt, conversation)) = prompt {
            selection.prompts.push(prompt);
            selection.conversations.push(conversation);
        }
    }
    Ok(selection)
}

/// Splits a total by parts that add up to 1: rounded down, and the rest to the largest fractions.
fn apportion(total: usize, parts: &[f64]) -> Vec<usize> {
    let exact: Vec<f64> = parts.iter().map(|part| part * total as f64).collect();
    let mut whole: Vec<usize> = exact.iter().map(|x| x.floor() as usize).collect();
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()).then(a.cmp(&b)));
    let rest = total.saturating_sub(whole.iter().sum());
    for i in order.into_iter().take(rest) {
        whole[i] += 1;
    }
    whole
}

/// The largest total of which every file has its part.
fn largest(found: &[usize], parts: &[f64]) -> usize {
    let fits = |total: usize| apportion(total, parts).iter().zip(found).all(|(quota, found)| quota <= found);
    let bound = found.iter().zip(parts).map(|(&found, part)| (found as f64 / part).ceil() as usize).min();
    let bound = bound.unwrap_or(0).min(found.iter().sum());
    // Rounding makes the bound at most a few too high.
    (0..=bound).rev().find(|&total| fits(total)).unwrap_or(0)
}

/// What a prompt comes to; nothing if it is too long.
fn usable(prompt: &Prompt, data: &Data, renderer: &Renderer<'_>) -> Result<Option<Usable>> {
    let answers = prompt.messages.iter().rev().take_while(|m| m.is_assistant()).count();
    let supervise = data.given_answers == GivenAnswers::Supervised;
    let given = match supervise && prompt.messages.iter().any(Message::is_assistant) {
        true => Some(given(prompt, data, renderer)?),
        false => None,
    };
    if given.as_ref().is_some_and(Option::is_none) {
        return Ok(None);
    }
    let given = given.flatten();
    if answers > 0 && supervise {
        return Ok(Some(Usable { prompt: None, given }));
    }
    // Where the file ends with an answer, the target gives its own.
    let messages = prompt.messages[..prompt.messages.len() - answers].to_vec();
    Ok(renderer.encode(&messages)?.map(|ids| {
        let tokens = PromptTokens { id: prompt.id.clone(), ids };
        Usable { prompt: Some((tokens, Conversation { messages, then: prompt.then.clone() })), given }
    }))
}

/// A conversation as it stood in the file, with the assistant's tokens supervised; nothing if it is too long.
fn given(prompt: &Prompt, data: &Data, renderer: &Renderer<'_>) -> Result<Option<Response>> {
    let Rendered { text, answers } = renderer.template.render_answers(&prompt.messages)?;
    let (ids, within) = renderer.tokenizer.encode_within(&text, &answers)?;
    if ids.len() > data.max_prompt_tokens + data.max_new_tokens {
        return Ok(None);
    }
    let mut response = Response::supervised_by(format!("{}/given", prompt.id), &ids, &within);
    response.finish = Some(Finish::Given);
    response.check(Path::new("prompts"), &format!("prompt {:?}", prompt.id))?;
    Ok(Some(response))
}

impl Selection {
    /// The next prompt of conversation `number` after these answers: none if it is over, or longer than a
    /// prompt may be.
    ///
    /// # Errors
    /// Messages that cannot be rendered or encoded.
    pub fn follow(
        &self,
        number: usize,
        answers: &[Vec<TokenId>],
        renderer: &Renderer<'_>,
    ) -> Result<Option<Vec<TokenId>>> {
        let Conversation { messages, then } = &self.conversations[number];
        let mut messages = messages.clone();
        for (i, answer) in answers.iter().enumerate() {
            let Some(next) = then.get(i) else { return Ok(None) };
            messages.push(Message::assistant(renderer.tokenizer.decode(answer, true)?));
            messages.push(Message::user(next));
        }
        renderer.encode(&messages)
    }

    /// Turns that the target is asked for, if none gets too long.
    pub fn turns(&self) -> usize {
        self.conversations.iter().map(|c| 1 + c.then.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hspec_core::prompts::Share;
    use proptest::prelude::*;

    /// Tokens are words.
    fn scene() -> (Tokenizer, ChatTemplate) {
        let dir = tempfile::tempdir().unwrap();
        let words = ["?", "<u>", "<a>", "<e>", "a", "b", "c", "d"];
        let vocab: serde_json::Map<_, _> =
            words.iter().enumerate().map(|(i, w)| ((*w).to_owned(), i.into())).collect();
        let tokenizer = serde_json::json!({
            "version": "1.0", "added_tokens": [], "pre_tokenizer": { "type": "WhitespaceSplit" },
            "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "?" },
        });
        let template = "{% for m in messages %}<{{ m.role[0] }}> {{ m.content }} <e> {% endfor %}\
            {% if add_generation_prompt %}<a>{% endif %}";
        for (name, text) in [
            ("tokenizer.json", tokenizer.to_string()),
            ("chat_template.jinja", template.to_owned()),
            ("config.json", r#"{"eos_token_id": 3}"#.to_owned()),
        ] {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        (Tokenizer::open(dir.path()).unwrap(), ChatTemplate::open(dir.path()).unwrap().unwrap())
    }

    fn ids(ids: &[u32]) -> Vec<TokenId> {
        ids.iter().copied().map(TokenId).collect()
    }

    fn numbered(n: usize) -> Vec<Prompt> {
        (0..n).map(|i| Prompt::new(i.to_string(), vec![Message::user("a")])).collect()
    }

    #[test]
    fn later_turns_follow_the_targets_answers() {
        let (tokenizer, template) = scene();
        let renderer = Renderer { tokenizer: &tokenizer, template: &template, max_prompt_tokens: 12 };
        let prompt =
            Prompt { then: vec!["b".into(), "c c c".into()], ..Prompt::new("x", vec![Message::user("a")]) };
        let selection = select(&Prompts::new(vec![prompt]), &Data::default(), 0, &renderer).unwrap();
        assert_eq!((&selection.prompts[0].ids, selection.turns()), (&ids(&[1, 4, 3, 2]), 3));
        let follow = |answers: &[Vec<TokenId>]| selection.follow(0, answers, &renderer).unwrap();
        assert_eq!(follow(&[ids(&[7])]), Some(ids(&[1, 4, 3, 2, 7, 3, 1, 5, 3, 2])));
        // Then it would be longer than a prompt may be.
        assert_eq!(follow(&[ids(&[7]), ids(&[7])]), None);
    }

    /// The target answers in its own words what the file answers, unless the recipe wants those of the file.
    #[test]
    fn answers_of_the_file_are_context_or_supervised() {
        let (tokenizer, template) = scene();
        let renderer = Renderer { tokenizer: &tokenizer, template: &template, max_prompt_tokens: 20 };
        let (user, assistant) = (|| Message::user("a"), || Message::assistant("b"));
        let prompts = Prompts::new(vec![
            Prompt::new("ends with an answer", vec![user(), assistant()]),
            Prompt::new("ends with a question", vec![user(), assistant(), user()]),
        ]);
        let mut data = Data::default();
        let found = |data: &Data| {
            let mut selection = select(&prompts, data, 0, &renderer).unwrap();
            selection.prompts.sort_by(|a, b| a.id.cmp(&b.id));
            selection.given.sort_by(|a, b| a.id.cmp(&b.id));
            selection
        };
        let context = found(&data);
        assert!(context.given.is_empty());
        assert_eq!(context.prompts[0].ids, ids(&[1, 4, 3, 2, 5, 3, 1, 4, 3, 2]));
        assert_eq!(context.prompts[1].ids, ids(&[1, 4, 3, 2]));
        data.given_answers = GivenAnswers::Supervised;
        let supervised = found(&data);
        assert_eq!((supervised.prompts.len(), supervised.prompts[0].ids.len()), (1, 10));
        for given in &supervised.given {
            assert_eq!(given.ids().collect::<Vec<_>>(), ids(&[1, 4, 3, 2, 5, 3]));
            assert_eq!(given.loss_mask(), [false, false, false, false, true, true]);
        }
        // Nobody speaks whom the template writes.
        let silent = Prompts::new(vec![Prompt::new("silent", vec![user(), Message::assistant(" ")])]);
        let error = select(&silent, &data, 0, &renderer).unwrap_err().to_string();
        assert!(error.contains("\"silent\"") && error.contains("no supervised token"), "{error}");
        // What would have to be cut is left out and counted.
        let long = Prompts::new(vec![
            Prompt::new("long", vec![user(), Message::assistant("b ".repeat(800))]),
            Prompt::new("short", vec![user(), assistant()]),
        ]);
        let selection = select(&long, &data, 0, &renderer).unwrap();
        assert_eq!((selection.too_long, selection.given.len()), (1, 1));
    }

    #[test]
    fn every_file_gives_its_share() {
        let (tokenizer, template) = scene();
        let renderer = Renderer { tokenizer: &tokenizer, template: &template, max_prompt_tokens: 20 };
        let share = |file: &str, prompts, part| Share { file: file.into(), prompts, part };
        let prompts = |a: usize, b: usize| Prompts {
            prompts: numbered(a + b),
            shares: vec![share("a", 0..a, 0.6), share("b", a..a + b, 0.4)],
        };
        let counts = |prompts: &Prompts, max_prompts: usize| {
            let data = Data { max_prompts, ..Data::default() };
            let selection = select(prompts, &data, 3, &renderer).map_err(|e| e.to_string())?;
            let a = prompts.shares[0].prompts.end;
            let first = selection.prompts.iter().filter(|p| p.id.parse::<usize>().unwrap() < a).count();
            Ok::<_, String>((first, selection.prompts.len() - first))
        };
        assert_eq!(counts(&prompts(30, 30), 10), Ok((6, 4)));
        assert_eq!(counts(&prompts(30, 30), 0), Ok((30, 20)));
        assert_eq!(counts(&prompts(30, 8), 0), Ok((12, 8)));
        let error = counts(&prompts(5, 30), 10).unwrap_err();
        assert!(
            error.contains("a: prompts: found 5 prompts") && error.contains("at least 6, 60 % of 10"),
            "{error}"
        );
        let none = counts(&prompts(30, 30), 1).unwrap_err();
        assert!(none.contains("b: prompts"), "{none}");
    }

    proptest! {
        #[test]
        fn shares_add_up_and_are_near_their_parts(total in 0usize..500, weights in proptest::collection::vec(0.01f64..9.0, 1..5)) {
            let sum: f64 = weights.iter().sum();
            let parts: Vec<f64> = weights.iter().map(|w| w / sum).collect();
            let quotas = apportion(total, &parts);
            prop_assert_eq!(quotas.iter().sum::<usize>(), total);
            for (quota, part) in quotas.iter().zip(&parts) {
                prop_assert!((*quota as f64 - part * total as f64).abs() <= 1.0 + 1e-9);
            }
        }
    }
}
