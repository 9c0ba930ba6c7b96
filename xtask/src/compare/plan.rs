//! What a comparison is to measure, from the command line.

use super::{Args, public::Table, suites::Asked};
use crate::model::Model;
use anyhow::{Context, bail};
use burn::tensor::backend::Backend;
use hspec_core::{TokenId, drafter::Drafter};
use hspec_eval::{
    DrafterFacts, Machine, TaskPrompt,
    comparison::{DrafterEntry, Manifest, Missing, PromptEntry, TargetFacts, TaskEntry},
    kv::KvShape,
    utc_date,
};
use sha2::{Digest, Sha256};
use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    time::SystemTime,
};

/// Draft lengths, temperatures, context lengths and the like.
pub(super) struct Plan {
    pub(super) ks: Vec<usize>,
    pub(super) temperatures: Vec<f64>,
    pub(super) contexts: Vec<usize>,
    /// Whether the contexts come from a paper, not from the command line.
    from_protocol: bool,
    pub(super) max_new_tokens: usize,
    seeds: Vec<u64>,
}

/// A drafter of the command line.
pub(super) struct Chosen {
    pub(super) name: String,
    pub(super) dir: PathBuf,
}

/// One value of `--context`.
pub(super) type Contexts = std::sync::Arc<[usize]>;

/// Parses N, or A..B.
pub(super) fn contexts(text: &str) -> Result<Contexts, String> {
    let number = |text: &str| match text.parse::<usize>() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(format!("found {text}, expected a number of tokens, or two as in 512..8192")),
    };
    let Some((from, to)) = text.split_once("..") else { return Ok([number(text)?].into()) };
    let (from, to) = (number(from)?, number(to)?);
    if from > to {
        return Err(format!("found {from}..{to}, expected the shorter length first"));
    }
    Ok(std::iter::successors(Some(from), |n| n.checked_mul(2)).take_while(|n| *n <= to).collect())
}

impl Plan {
    pub(super) fn new(args: &Args, table: &Table) -> anyhow::Result<Self> {
        let protocol = match &args.protocol {
            None => None,
            Some(name) => Some(table.protocols.get(name).with_context(|| {
                let known: Vec<&str> = table.protocols.keys().map(String::as_str).collect();
                format!("--protocol {name}: known are {}", known.join(", "))
            })?),
        };
        fn given<T: Clone + PartialEq>(given: Vec<T>, protocol: Option<&Vec<T>>, default: &[T]) -> Vec<T> {
            let list = match (given.is_empty(), protocol) {
                (false, _) => given,
                (true, Some(list)) => list.clone(),
                (true, None) => default.to_vec(),
            };
            let mut once: Vec<T> = Vec::new();
            list.into_iter().for_each(|item| {
                if !once.contains(&item) {
                    once.push(item)
                }
            });
            once
        }
        let ks = args.k.iter().map(|&k| k.into()).collect();
        let contexts: Vec<usize> = args.context.iter().flat_map(|list| list.iter().copied()).collect();
        Ok(Self {
            from_protocol: contexts.is_empty(),
            ks: given(ks, protocol.map(|p| &p.k), &[7]),
            temperatures: given(args.temperature.clone(), protocol.map(|p| &p.temperature), &[0.0]),
            contexts: given(contexts, protocol.map(|p| &p.context), &[]),
            max_new_tokens: match (args.max_new_tokens, protocol) {
                (Some(most), _) => most as usize,
                (None, Some(protocol)) => protocol.max_new_tokens,
                (None, None) => 128,
            },
            seeds: (0..u64::from(args.seeds)).collect(),
        })
    }

    /// Drops the context lengths of a paper that are too long for this target and says so.
    ///
    /// # Errors
    /// A length that was asked for and is too long.
    pub(super) fn leave_out_contexts(&mut self, longest: usize) -> anyhow::Result<Vec<Missing>> {
        let (kept, dropped): (Vec<usize>, Vec<usize>) = self.contexts.iter().partition(|&&n| n <= longest);
        if let (Some(n), false) = (dropped.first(), self.from_protocol) {
            bail!("--context {n}: the target's context ends at {longest} tokens");
        }
        self.contexts = kept;
        let missing = |n| Missing {
            set: format!("context {n}"),
            why: format!("the target's context ends at {longest} tokens"),
        };
        Ok(dropped.into_iter().map(missing).collect())
    }

    pub(super) fn manifest<B: Backend>(
        &self,
        model: &Model<B>,
        drafters: &[(Chosen, Box<dyn Drafter<B>>)],
        asked: &[Asked],
        missing: Vec<Missing>,
        threads: usize,
    ) -> anyhow::Result<Manifest> {
        let c = model.target.config();
        let shape = KvShape {
            layers: c.num_hidden_layers,
            window_layers: 0,
            window: 0,
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
        };
        let mut entries = Vec::new();
        for (chosen, drafter) in drafters {
            entries.push(DrafterEntry {
                name: chosen.name.clone(),
                fingerprint: fingerprint(&chosen.dir)?,
                facts: DrafterFacts::new(&chosen.dir, &**drafter),
            });
        }
        let configs = drafters.iter().map(|(chosen, _)| {
            let file = chosen.dir.join("config.json");
            std::fs::read(&file).with_context(|| file.display().to_string())
        });
        let configs: Vec<Vec<u8>> = configs.collect::<anyhow::Result<_>>()?;
        trainings_of_one(&entries.iter().zip(configs).collect::<Vec<_>>())?;
        let prompt = |prompt: &TaskPrompt| PromptEntry {
            id: prompt.id.clone(),
            tokens: prompt.tokens.len(),
            fingerprint: of_tokens(&prompt.tokens),
        };
        let task = |asked: &Asked| TaskEntry {
            task: asked.task.clone(),
            context: asked.context,
            prompts: asked.prompts.iter().map(prompt).collect(),
        };
        for asked in asked {
            let mut ids: Vec<&str> = asked.prompts.iter().map(|prompt| prompt.id.as_str()).collect();
            ids.sort_unstable();
            if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
                bail!("task {}: two prompts have the id {}", asked.task, pair[0]);
            }
        }
        Ok(Manifest {
            schema: 1,
            command: crate::eval::command(std::env::args()),
            date: utc_date(SystemTime::now()),
            commit: hspec_eval::commit(&crate::workspace()),
            machine: Machine::this(threads),
            target: TargetFacts {
                path: model.path.display().to_string(),
                fingerprint: fingerprint(&model.path)?,
                kv_bytes_per_token: shape.bytes_per_token(size_of::<f32>()) as u64,
            },
            max_new_tokens: self.max_new_tokens,
            ks: self.ks.clone(),
            temperatures: self.temperatures.clone(),
            seeds: self.seeds.clone(),
            drafters: entries,
            tasks: asked.iter().map(task).collect(),
            missing,
        })
    }
}

/// Names and folders; a folder without a name is called after itself, with its parent where that says more.
pub(super) fn drafters(texts: &[String]) -> anyhow::Result<Vec<Chosen>> {
    let last = |dir: &Path, parts: usize| {
        let mut names: Vec<_> = dir.iter().rev().take(parts).map(|part| part.to_string_lossy()).collect();
        names.reverse();
        names.join("/")
    };
    let unnamed = |dir: &Path| {
        texts.iter().filter(|t| !t.contains('=') && last(Path::new(t), 1) == last(dir, 1)).count()
    };
    let mut list: Vec<Chosen> = Vec::new();
    for text in texts {
        let (name, dir) = match text.split_once('=') {
            Some((name, dir)) => (name.to_owned(), PathBuf::from(dir)),
            None => {
                let dir = PathBuf::from(text);
                let short = last(&dir, 1);
                let parts = if unnamed(&dir) > 1 || short == "best" { 2 } else { 1 };
                (last(&dir, parts), dir)
            }
        };
        if !text.contains('=') && name.contains('#') {
            bail!(
                "--drafters {text}: what stands before a # names trainings of one drafter; name it, as in NAME=DIR"
            );
        }
        if name.split('#').next().is_some_and(|name| name.trim().is_empty())
            || list.iter().any(|other| other.name == name)
        {
            bail!("--drafters {text}: each needs a name of its own, as in NAME=DIR; found {name:?}");
        }
        list.push(Chosen { name, dir });
    }
    Ok(list)
}

/// Refuses to pool drafters that are not trainings of one. Trainings differ in their tensors alone.
fn trainings_of_one(drafters: &[(&DrafterEntry, Vec<u8>)]) -> anyhow::Result<()> {
    for (i, (drafter, config)) in drafters.iter().enumerate() {
        let Some((first, expected)) = drafters[..i].iter().find(|(d, _)| d.family() == drafter.family())
        else {
            continue;
        };
        let refuse = |why: &str| bail!("--drafters {}: {why} {}", drafter.name, first.name);
        if drafters[..i]
            .iter()
            .any(|(d, _)| d.family() == drafter.family() && d.fingerprint == drafter.fingerprint)
        {
            return refuse("its files are those of another training, as");
        }
        if config != expected {
            return refuse(
                "names alike before a # are trainings of one drafter; its config.json differs from that of",
            );
        }
    }
    Ok(())
}

/// Of the names, lengths and samples of the contents of a model's files: enough to notice another model.
fn fingerprint(path: &Path) -> anyhow::Result<String> {
    let named = || path.display().to_string();
    let mut files: Vec<PathBuf> = match path.is_dir() {
        true => std::fs::read_dir(path)
            .with_context(named)?
            .map(|e| Ok(e?.path()))
            .collect::<std::io::Result<_>>()?,
        false => vec![path.to_owned()],
    };
    files.retain(|file| {
        let ending = file.extension().and_then(|e| e.to_str()).unwrap_or_default();
        file.is_file() && ["json", "safetensors", "gguf", "jinja"].contains(&ending)
    });
    files.sort();
    let mut hash = Sha256::new();
    for path in files {
        let named = || path.display().to_string();
        let mut file = File::open(&path).with_context(named)?;
        let length = file.metadata().with_context(named)?.len();
        hash.update(path.file_name().unwrap_or_default().as_encoded_bytes());
        hash.update(length.to_le_bytes());
        let mut buffer = Vec::new();
        for sample in 0..SAMPLES {
            let at = length.saturating_sub(SAMPLE) * sample / (SAMPLES - 1);
            buffer.clear();
            file.seek(SeekFrom::Start(at)).with_context(named)?;
            (&mut file).take(SAMPLE).read_to_end(&mut buffer).with_context(named)?;
            hash.update(&buffer);
        }
    }
    Ok(hex(hash))
}

const SAMPLES: u64 = 64;
const SAMPLE: u64 = 4096;

fn of_tokens(tokens: &[TokenId]) -> String {
    let mut hash = Sha256::new();
    tokens.iter().for_each(|token| hash.update(token.0.to_le_bytes()));
    hex(hash)
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_are_numbers_or_doubled_ranges() {
        assert_eq!(contexts("512..8192").unwrap()[..], [512, 1024, 2048, 4096, 8192]);
        assert_eq!(contexts("600..2000").unwrap()[..], [600, 1200]);
        assert_eq!(contexts("7").unwrap()[..], [7]);
        for wrong in ["0", "x", "8..4", "..", "4.."] {
            assert!(contexts(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn drafters_have_names_that_tell_them_apart() {
        let names = |texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(|&text| text.to_owned()).collect();
            drafters(&texts).map(|list| list.into_iter().map(|c| c.name).collect::<Vec<_>>())
        };
        assert_eq!(names(&["a/x", "runs/b/best", "old=c/x"]).unwrap(), ["x", "b/best", "old"]);
        assert_eq!(names(&["a/x", "b/x"]).unwrap(), ["a/x", "b/x"]);
        let message = names(&["a/x", "x=b"]).unwrap_err().to_string();
        assert!(message.contains("--drafters x=b: each needs a name of its own"), "{message}");
        assert_eq!(names(&["x#0=a", "x#1=b"]).unwrap(), ["x#0", "x#1"]);
        for wrong in [&["=b"][..], &["#0=b"], &["runs/lr#1e-3"], &["x#0=a", "x#0=b"]] {
            assert!(names(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn rows_pool_trainings_of_one_drafter_only() {
        let entry = |name: &str, fingerprint: &str| DrafterEntry {
            name: name.into(),
            fingerprint: fingerprint.into(),
            facts: DrafterFacts {
                path: String::new(),
                kind: "hspec".into(),
                params_trainable: 7,
                params_frozen: 0,
                kv_bytes_per_token: 0,
                state_bytes: 0,
            },
        };
        let pooled = |list: &[(&str, &str, &str)]| {
            let entries: Vec<_> = list
                .iter()
                .map(|(name, print, config)| (entry(name, print), config.as_bytes().to_vec()))
                .collect();
            let list: Vec<_> = entries.iter().map(|(entry, config)| (entry, config.clone())).collect();
            trainings_of_one(&list).map_err(|e| e.to_string())
        };
        pooled(&[("a#0", "x", "{}"), ("b", "y", "[]"), ("a#1", "z", "{}")]).unwrap();
        let message = pooled(&[("a#0", "x", "{}"), ("a#1", "y", "[]")]).unwrap_err();
        assert!(
            message.contains("--drafters a#1: ") && message.ends_with("differs from that of a#0"),
            "{message}"
        );
        let message = pooled(&[("a#0", "x", "{}"), ("a#1", "y", "{}"), ("a#2", "y", "{}")]).unwrap_err();
        assert!(message.contains("--drafters a#2: its files are those of another"), "{message}");
    }

    #[test]
    fn fingerprints_notice_changed_files() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
        write("model.safetensors", &[1; 100]);
        let first = fingerprint(dir.path()).unwrap();
        write("notes.txt", b"not part of a model");
        assert_eq!(fingerprint(dir.path()).unwrap(), first);
        let mut changed = [1; 100];
        changed[50] = 2;
        write("model.safetensors", &changed);
        assert_ne!(fingerprint(dir.path()).unwrap(), first);
        write("model.safetensors", &[1; 100]);
        assert_eq!(fingerprint(dir.path()).unwrap(), first);
        write("config.json", b"{}");
        assert_ne!(fingerprint(dir.path()).unwrap(), first);
    }
}
