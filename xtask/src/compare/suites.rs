//! Which prompts are asked: local files, the project's own, made ones of any length, and public sets.

use super::public::{Rows, Table};
use crate::model::Model;
use anyhow::{Context, bail};
use burn::tensor::backend::Backend;
use hspec_core::{
    TokenId,
    prompts::{Prompt, read_prompts},
    text::Message,
};
use hspec_eval::{
    TaskPrompt,
    comparison::Missing,
    synthetic::{self, Kind},
};
use std::path::Path;

/// The project's own sets, in assets/suites.
const OWN: [&str; 6] = ["chat", "code", "reasoning", "translation", "summary", "retrieval"];

/// Made prompts of a length, unless `--max-prompts` says another number.
const MADE: usize = 8;

/// A set whose prompts have been read.
pub(crate) struct Suite {
    pub(crate) task: String,
    source: Source,
}

enum Source {
    Prompts(Vec<Prompt>),
    Rows(Rows),
    Made(Kind),
}

/// Reads the sets of these names. With `skip_missing`, those that cannot be had are named in the second part.
pub(crate) fn load(
    names: &[String],
    table: &Table,
    skip_missing: bool,
) -> anyhow::Result<(Vec<Suite>, Vec<Missing>)> {
    let (mut suites, mut missing) = (Vec::<Suite>::new(), Vec::new());
    for name in names {
        for (task, found) in resolve(name, table)? {
            match found {
                Ok(source) => suites.push(Suite { task, source }),
                Err(error) if skip_missing => {
                    let why = crate::with_causes(&error);
                    eprintln!("--suite {task}: left out: {why}");
                    missing.push(Missing { set: task, why });
                }
                Err(error) => {
                    let hint = "; --skip-missing goes on without it and says so in the report";
                    return Err(error.context(format!("--suite {task} cannot be had{hint}")));
                }
            }
        }
    }
    for (i, suite) in suites.iter().enumerate() {
        if suites[..i].iter().any(|other| other.task == suite.task) {
            bail!("--suite {}: named twice, and tasks are told by name", suite.task);
        }
    }
    Ok((suites, missing))
}

type Found = Vec<(String, anyhow::Result<Source>)>;

fn resolve(name: &str, table: &Table) -> anyhow::Result<Found> {
    let (collection, chosen) = name.split_once(':').map_or((name, None), |(c, s)| (c, Some(s)));
    let wanted = |set: &str| chosen.is_none_or(|chosen| chosen == set);
    let found: Found = match collection {
        "own" => {
            let read = |set: &&str| {
                let file = crate::workspace().join(format!("assets/suites/{set}.jsonl"));
                ((*set).to_owned(), read_prompts(&file).map(Source::Prompts).map_err(Into::into))
            };
            OWN.iter().filter(|set| wanted(set)).map(read).collect()
        }
        "synthetic" => {
            let sets = Kind::ALL.into_iter().filter(|(set, _)| wanted(set));
            sets.map(|(set, kind)| (set.to_owned(), Ok(Source::Made(kind)))).collect()
        }
        _ if table.protocols.contains_key(collection) => {
            let sets = table.sets.iter().filter(|set| set.collection == collection && wanted(&set.name));
            sets.map(|set| (set.name.clone(), set.load(table).map(Source::Rows))).collect()
        }
        _ => {
            let path = Path::new(name);
            let is_file = [".jsonl", ".jsonl.gz", ".json"].iter().any(|ending| name.ends_with(ending));
            if !is_file && !path.is_file() {
                let known: Vec<&str> = table.protocols.keys().map(String::as_str).collect();
                bail!(
                    "--suite {name}: known are own, synthetic, {}, one set of them as in own:chat, and files \
                     of JSON lines",
                    known.join(", ")
                );
            }
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let task = file.trim_end_matches(".gz").trim_end_matches(".jsonl").to_owned();
            vec![(task, read_prompts(path).map(Source::Prompts).map_err(Into::into))]
        }
    };
    if found.is_empty() {
        bail!("--suite {name}: {collection} has no set of this name");
    }
    Ok(found)
}

/// A task at one context length, ready to be asked.
pub(crate) struct Asked {
    pub(crate) task: String,
    pub(crate) context: Option<usize>,
    pub(crate) prompts: Vec<TaskPrompt>,
}

/// How prompts are taken and how long they are made.
pub(crate) struct Limits<'a> {
    pub(crate) max_prompts: Option<usize>,
    pub(crate) contexts: &'a [usize],
    /// Prompts are made so short that an answer of this length still fits.
    pub(crate) max_new_tokens: usize,
}

impl Suite {
    /// The set's prompts as the target reads them: once, or once for each context length.
    pub(crate) fn ask<B: Backend>(
        &self,
        model: &Model<B>,
        limits: &Limits<'_>,
    ) -> anyhow::Result<Vec<Asked>> {
        let named = || format!("task {}", self.task);
        let encode = |text: &str| model.encode(&[Message::user(text)], false);
        let most = |all: usize| limits.max_prompts.map_or(all, |most| most.min(all));
        match &self.source {
            Source::Prompts(prompts) => {
                let tokens = |prompt: &Prompt| {
                    let tokens = model.encode(&prompt.messages, false).with_context(named)?;
                    anyhow::Ok(TaskPrompt { id: prompt.id.clone(), tokens })
                };
                let prompts = prompts[..most(prompts.len())].iter().map(tokens).collect::<Result<_, _>>()?;
                Ok(vec![Asked { task: self.task.clone(), context: None, prompts }])
            }
            Source::Rows(rows) if rows.shortens() => {
                let mut longest = 0;
                for row in 0..most(rows.len()) {
                    longest = longest.max(rows.parts(row)?);
                }
                let ids = (0..most(rows.len())).map(|row| rows.id(row).to_owned()).collect();
                self.make(limits, ids, longest, &|row, parts| encode(&rows.prompt(row, parts)?))
            }
            Source::Rows(rows) => {
                let tokens = |row| {
                    let tokens = encode(&rows.prompt(row, 0)?)?;
                    anyhow::Ok(TaskPrompt { id: rows.id(row).to_owned(), tokens })
                };
                let prompts =
                    (0..most(rows.len())).map(tokens).collect::<Result<_, _>>().with_context(named)?;
                Ok(vec![Asked { task: self.task.clone(), context: None, prompts }])
            }
            Source::Made(kind) => {
                let count = limits.max_prompts.unwrap_or(MADE);
                // No passage is shorter than eight tokens.
                let longest = limits.contexts.iter().max().map_or(0, |context| context / 8);
                let ids = (1..=count).map(|number| number.to_string()).collect();
                self.make(limits, ids, longest, &|number, parts| {
                    encode(&synthetic::prompt(*kind, number as u64, parts))
                })
            }
        }
    }

    /// The longest prompts that fit each context length; `tokens` gets a prompt's number and the number of
    /// parts to make it of.
    fn make(
        &self,
        limits: &Limits<'_>,
        ids: Vec<String>,
        longest: usize,
        tokens: &dyn Fn(usize, usize) -> anyhow::Result<Vec<TokenId>>,
    ) -> anyhow::Result<Vec<Asked>> {
        if limits.contexts.is_empty() {
            bail!("--suite {}: say how long its prompts are to be, as in --context 512 2048", self.task);
        }
        let mut asked = Vec::new();
        for &context in limits.contexts {
            let named = |id: &str| format!("task {}, prompt {id}, --context {context}", self.task);
            let room = context.saturating_sub(limits.max_new_tokens);
            let mut prompts = Vec::new();
            for (number, id) in ids.iter().enumerate() {
                let tokens = fit(room, longest, &|parts| tokens(number, parts)).with_context(|| named(id))?;
                if tokens.len() < room - room / 4 {
                    eprintln!("{}: its text gives no more than {} tokens", named(id), tokens.len());
                }
                prompts.push(TaskPrompt { id: id.clone(), tokens });
            }
            asked.push(Asked { task: self.task.clone(), context: Some(context), prompts });
        }
        Ok(asked)
    }
}

/// The tokens of the longest prompt, of at most `longest` parts, that has at most `room` of them.
fn fit(
    room: usize,
    longest: usize,
    tokens: &dyn Fn(usize) -> anyhow::Result<Vec<TokenId>>,
) -> anyhow::Result<Vec<TokenId>> {
    let mut best = tokens(0)?;
    if best.len() > room {
        bail!("the shortest prompt has {} tokens, and there is room for {room}", best.len());
    }
    let (mut fits, mut too_many) = (0, longest + 1);
    // First by doubling: a text of a million characters need not be read for a prompt of a thousand tokens.
    let mut step = 1;
    while fits + 1 < too_many {
        let middle = if step > 0 { (fits + step).min(longest) } else { fits.midpoint(too_many) };
        let found = tokens(middle)?;
        if found.len() <= room {
            (fits, best) = (middle, found);
            step *= 2;
            if middle == longest {
                break;
            }
        } else {
            (too_many, step) = (middle, 0);
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_prompt_that_fits_is_found() {
        for (room, longest, expected) in
            [(100, 1000, 99), (100, 50, 53), (100, 0, 3), (3, 10, 3), (5, 10, 5), (1000, 100_000, 999)]
        {
            let tokens = |parts: usize| Ok(vec![TokenId(0); 3 + parts / 2 * 2]);
            assert_eq!(fit(room, longest, &tokens).unwrap().len(), expected, "{room} {longest}");
        }
        let error = fit(2, 10, &|_| Ok(vec![TokenId(0); 3])).unwrap_err().to_string();
        assert!(error.contains("has 3 tokens, and there is room for 2"), "{error}");
    }

    #[test]
    fn the_own_sets_are_whole_and_small() {
        let table = Table::read().unwrap();
        for (task, found) in resolve("own", &table).unwrap() {
            let Ok(Source::Prompts(prompts)) = found else { panic!("{task} cannot be read") };
            assert!((8..=12).contains(&prompts.len()), "{task}: {}", prompts.len());
        }
        assert_eq!(resolve("own:code", &table).unwrap().len(), 1);
        assert_eq!(resolve("synthetic", &table).unwrap().len(), 2);
        let error = |name: &str| resolve(name, &table).map(|_| ()).unwrap_err().to_string();
        assert!(error("own:poems").contains("own has no set of this name"));
        assert!(
            error("poems").contains("known are own, synthetic, deepspec, helmet, hspec"),
            "{}",
            error("poems")
        );
    }
}
