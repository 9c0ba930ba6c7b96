//! The target's own answers, written in batches to a file that a killed run continues.

use burn::tensor::backend::Backend;
use hspec_core::{
    Error, Result, TokenId,
    decode::{Chance, CounterRng, Purpose, SamplingParams},
    target::{Rows, Target, Want},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Seek, Write},
    path::Path,
};

/// A prompt and the target's answer to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Response {
    /// The prompt's id.
    pub id: String,
    /// Tokens of the rendered prompt.
    pub prompt_ids: Vec<TokenId>,
    /// Tokens of the answer, a stop token included.
    pub response_ids: Vec<TokenId>,
}

/// A prompt as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptTokens {
    /// The prompt's id.
    pub id: String,
    /// Its tokens.
    pub ids: Vec<TokenId>,
}

/// How responses are sampled.
#[derive(Debug, Clone)]
pub struct Sampling<'a> {
    /// Temperature and truncation.
    pub params: SamplingParams,
    /// Seed; each prompt has its own stream, whatever the batch.
    pub seed: u64,
    /// Longest answer.
    pub max_new_tokens: usize,
    /// Tokens that end it.
    pub stop_tokens: &'a [TokenId],
    /// Prompts answered at once.
    pub batch: usize,
}

/// Reads a file of responses. A last line cut off by a kill is dropped.
///
/// # Errors
/// A file that cannot be read, or a damaged line before the last.
pub fn read(path: &Path) -> Result<Vec<Response>> {
    Ok(scan(path)?.0)
}

/// All whole lines and the byte length they take.
fn scan(path: &Path) -> Result<(Vec<Response>, u64)> {
    let mut reader = BufReader::new(File::open(path).map_err(Error::io(path))?);
    let (mut responses, mut whole) = (Vec::new(), 0);
    let mut line = String::new();
    loop {
        line.clear();
        let n = reader.read_line(&mut line).map_err(Error::io(path))?;
        if !line.ends_with('\n') {
            return Ok((responses, whole));
        }
        let at = format!("line {}", responses.len() + 1);
        let response: Response = serde_json::from_str(&line)
            .map_err(|e| Error::invalid(path, at, e.to_string(), "a response with its token ids"))?;
        responses.push(response);
        whole += n as u64;
    }
}

/// Answers the prompts that `path` lacks and appends them; returns all answers in the order of the
/// prompts. Prompts of similar length are answered together. `progress` is told how many of how many
/// prompts are answered.
///
/// # Errors
/// When the file cannot be read or written, or holds answers to other prompts.
pub fn answer<B: Backend>(
    target: &Target<B>,
    prompts: &[PromptTokens],
    sampling: &Sampling<'_>,
    path: &Path,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<Response>> {
    let mut done: HashMap<String, Response> = HashMap::new();
    let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(Error::io(path))?;
    let (known, whole) = scan(path)?;
    file.set_len(whole).map_err(Error::io(path))?;
    file.seek(std::io::SeekFrom::End(0)).map_err(Error::io(path))?;
    let wanted: HashMap<&str, &PromptTokens> = prompts.iter().map(|p| (p.id.as_str(), p)).collect();
    for response in known {
        if wanted.get(response.id.as_str()).is_some_and(|p| p.ids != response.prompt_ids) {
            let found = "a response to another prompt or another chat template";
            return Err(Error::invalid(path, response.id, found, "responses to the prompts given"));
        }
        done.insert(response.id.clone(), response);
    }
    let mut open: Vec<(usize, &PromptTokens)> =
        prompts.iter().enumerate().filter(|(_, p)| !done.contains_key(&p.id)).collect();
    open.sort_by_key(|(i, p)| (p.ids.len(), *i));
    progress(prompts.len() - open.len(), prompts.len());
    for batch in open.chunks(sampling.batch) {
        for response in answer_batch(target, batch, sampling)? {
            let line = serde_json::to_string(&response).expect("ids and strings always serialise");
            writeln!(file, "{line}").map_err(Error::io(path))?;
            done.insert(response.id.clone(), response);
        }
        file.sync_data().map_err(Error::io(path))?;
        progress(prompts.iter().filter(|p| done.contains_key(&p.id)).count(), prompts.len());
    }
    Ok(prompts.iter().filter_map(|p| done.remove(&p.id)).collect())
}

struct Row<'a> {
    prompt: &'a PromptTokens,
    chance: CounterRng,
    response: Vec<TokenId>,
}

fn answer_batch<B: Backend>(
    target: &Target<B>,
    batch: &[(usize, &PromptTokens)],
    sampling: &Sampling<'_>,
) -> Result<Vec<Response>> {
    let longest = batch.iter().map(|(_, p)| p.ids.len()).max().unwrap_or(0);
    let mut cache = target.cache(batch.len(), longest + sampling.max_new_tokens);
    cache.set_starts(batch.iter().map(|(_, p)| longest - p.ids.len()).collect());
    let mut active: Vec<Row<'_>> = batch
        .iter()
        .map(|&(number, prompt)| Row {
            prompt,
            chance: CounterRng::new(sampling.seed, number as u64),
            response: Vec::new(),
        })
        .collect();
    let mut input: Vec<TokenId> = Vec::with_capacity(batch.len() * longest);
    for row in &active {
        input.extend(std::iter::repeat_n(TokenId(0), longest - row.prompt.ids.len()));
        input.extend(&row.prompt.ids);
    }
    let mut finished = Vec::with_capacity(batch.len());
    loop {
        let want = Want { logits: Rows::Last, hidden: &[] };
        let logits = target.forward(&input, &mut cache, &want)?.logits.expect("asked for");
        let logits: Vec<f32> = logits.into_data().iter::<f32>().collect();
        let width = logits.len() / active.len();
        for (row, logits) in active.iter_mut().zip(logits.chunks_exact(width)) {
            let position = (row.prompt.ids.len() + row.response.len()) as u64;
            let law = sampling.params.distribution(logits, position)?;
            row.response.push(row.chance.pick(position, Purpose::Bonus, &law));
        }
        let is_done = |row: &Row<'_>| {
            row.response.len() == sampling.max_new_tokens
                || row.response.last().is_some_and(|t| sampling.stop_tokens.contains(t))
        };
        let keep: Vec<usize> = (0..active.len()).filter(|&r| !is_done(&active[r])).collect();
        if keep.len() < active.len() {
            cache.select_rows(&keep, target.device());
            let (done, open): (Vec<_>, Vec<_>) = active.into_iter().partition(is_done);
            finished.extend(done);
            active = open;
        }
        if active.is_empty() {
            break;
        }
        input = active.iter().filter_map(|row| row.response.last().copied()).collect();
    }
    let finished = finished.into_iter().map(|row| Response {
        id: row.prompt.id.clone(),
        prompt_ids: row.prompt.ids.clone(),
        response_ids: row.response,
    });
    Ok(finished.collect())
}
