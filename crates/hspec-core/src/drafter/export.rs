//! A drafter's checkpoint in another layout. Tensors have the same names in all of them and go over byte by
//! byte; layer ids and the encoding of a pruned vocabulary are converted here and nowhere else.

use super::{
    DraftVocab, Format, Inspection, files, folder, odd,
    parameters::{HEAD, Parameter},
    registry,
    stated::TargetFacts,
};
use crate::{
    Error, Result, TokenId,
    checkpoint::{Element, Stored, Weights, model_json, read_json},
    config::TargetConfig,
};
use serde_json::{Value, json};
use std::{borrow::Cow, collections::BTreeMap, path::Path};

/// What was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Exported {
    /// What the new checkpoint is.
    pub inspection: Inspection,
    /// Tensors of the old one that nothing reads, which are not in the new one.
    pub left_out: Vec<String>,
    /// Tensors that the target lent and stores quantised: their values are decoded, and not those of the model
    /// that was quantised.
    pub decoded: Vec<String>,
}

/// Writes the drafter in `dir` to the folder `out` in the layout `to`; `out` must be empty or absent and lie
/// outside of the folders that are read, and is whole or as before. The copies of the target's embedding and head go where the layout has them: DeepSpec
/// always, z-lab never, speculators where they are in the old files or a target is given. That target lends
/// what the old files leave out, and its name where they have none.
///
/// # Errors
/// As loading; a layout that cannot say what the drafter is, with the reason; a target that is missing, or
/// made for another drafter; a folder that cannot be written.
pub fn export(dir: &Path, to: Format, target: Option<&Path>, out: &Path) -> Result<Exported> {
    let out = &folder::free(out, [Some(dir), target])?;
    let file = dir.join("config.json");
    let source: Value = read_json(&file)?;
    let lender = target.map(Lender::open).transpose()?;
    let facts = lender.as_ref().map(|lender| &lender.facts);
    let stated = registry::state(&source, &file, facts.map(|facts| facts.layers))?;
    if let Some(lender) = &lender {
        stated.check_target(&lender.config)?;
    }
    let was = stated.describe();
    let refuse = |reason: String| {
        Error::Mismatch(format!("{}: {to} cannot hold this {} drafter: {reason}", dir.display(), was.kind))
    };
    let mut config = if was.format == to { source } else { stated.convert(to, facts).map_err(refuse)? };
    if let Some(facts) = facts {
        name_target(&mut config, facts);
    }

    let weights = Weights::open(dir)?;
    let vocab = files::vocabulary(&weights, was.vocabulary, was.draft_vocabulary)?;
    let parameters = stated.parameters();
    parameters.check(&weights)?;
    let floats = odd::float_types(&weights, &parameters)?;
    let most =
        floats.iter().max_by_key(|(_, (_, values))| values).map_or(Element::F32, |(element, _)| *element);
    if config.get("dtype").or(config.get("torch_dtype")).is_none() {
        config["dtype"] = odd::dtype_word(most).into();
    }

    let (mut tensors, mut decoded) = (BTreeMap::new(), Vec::new());
    for parameter in &parameters.0 {
        let name = &parameter.name;
        let own = weights.stored(name)?;
        let lent = |element| {
            let Some(lender) = &lender else { return Ok(None) };
            lender.lend(parameter, &vocab, element).map(Some)
        };
        let kept = match own {
            Some(own) if parameter.lent() && to == Format::ZLab => {
                let Some(lent) = lent(own.element)? else {
                    return Err(refuse(format!(
                        "it leaves {name} to the target, and this drafter has its own: the target is needed, \
                         to see that they are the same"
                    )));
                };
                if lent.bytes != own.bytes {
                    return Err(refuse(format!(
                        "it leaves {name} to the target, and this drafter's differs from it"
                    )));
                }
                None
            }
            None if to == Format::ZLab => None,
            None => match lent(most)? {
                None if to == Format::DeepSpec => {
                    return Err(refuse(format!(
                        "it has a copy of the target's {name}, which this drafter leaves out: the target is \
                         needed"
                    )));
                }
                lent => {
                    let decodes = lender.as_ref().is_some_and(|lender| lender.decodes(parameter));
                    decoded.extend(decodes.then(|| name.clone()));
                    lent
                }
            },
            own => own,
        };
        tensors.extend(kept.map(|kept| (name.clone(), kept)));
    }
    if vocab.len() < was.vocabulary {
        tensors.extend(maps(&vocab, was.vocabulary));
    }
    let read = |name: &String| name == "d2t" || name == "t2d" || parameters.0.iter().any(|p| p.name == *name);
    let left_out = weights.names().into_iter().filter(|name| !read(name)).collect();
    Ok(Exported { inspection: folder::write(out, &config, &tensors)?, left_out, decoded })
}

/// Fills in the target of a configuration in the layout of speculators that names none.
fn name_target(config: &mut Value, target: &TargetFacts) {
    let verifier = config.pointer_mut("/speculators_config/verifier").and_then(Value::as_object_mut);
    if let Some(verifier) = verifier
        && verifier.get("name_or_path").is_none_or(Value::is_null)
    {
        verifier.insert("name_or_path".into(), json!(target.name));
        verifier.insert("architectures".into(), json!(target.architectures));
    }
}

/// `d2t` and `t2d`.
fn maps(vocab: &DraftVocab, vocab_size: usize) -> [(String, Stored<'static>); 2] {
    let offsets = vocab.offsets().iter().flat_map(|offset| offset.to_le_bytes()).collect();
    let kept = vocab.kept(vocab_size).into_iter().map(u8::from).collect();
    let map = |name: &str, element, n, bytes| {
        (name.to_owned(), Stored { element, shape: vec![n], bytes: Cow::Owned(bytes) })
    };
    [map("d2t", Element::I64, vocab.len(), offsets), map("t2d", Element::Bool, vocab_size, kept)]
}

/// What a target is called: its folder, or its file without the ending.
fn name(path: &Path) -> Option<String> {
    // "." has no name of its own.
    let real = if path.file_name().is_none() { path.canonicalize().ok()? } else { path.to_owned() };
    let name = if path.is_dir() { real.file_name() } else { real.file_stem() };
    name.and_then(|name| name.to_str()).map(str::to_owned)
}

/// A target, of which only the embedding and the head are read.
struct Lender {
    weights: Weights,
    config: TargetConfig,
    facts: TargetFacts,
}

impl Lender {
    fn open(path: &Path) -> Result<Self> {
        let weights = Weights::open(path)?;
        let value = model_json(path, "config.json")?
            .ok_or_else(|| Error::invalid(path, "config.json", "nothing", "a model configuration"))?;
        let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        let config = TargetConfig::from_value(&value, &file)?;
        let words = value.get("architectures").and_then(Value::as_array).into_iter().flatten();
        let facts = TargetFacts {
            layers: config.num_hidden_layers,
            name: name(path),
            architectures: words.filter_map(Value::as_str).map(str::to_owned).collect(),
        };
        Ok(Self { weights, config, facts })
    }

    /// Its tensor that stands for a frozen one of a drafter.
    fn source(&self, parameter: &Parameter) -> &'static str {
        const EMBEDDING: &str = "model.embed_tokens.weight";
        let tied = self.config.tie_word_embeddings && !self.weights.contains(HEAD);
        if parameter.name == HEAD && !tied { HEAD } else { EMBEDDING }
    }

    /// Whether what it lends is decoded.
    fn decodes(&self, parameter: &Parameter) -> bool {
        parameter.lent() && self.weights.quantised(self.source(parameter))
    }

    /// What stands for a frozen tensor of a drafter.
    fn lend(&self, parameter: &Parameter, vocab: &DraftVocab, element: Element) -> Result<Stored<'_>> {
        let name = self.source(parameter);
        let shape = [self.config.vocab_size, self.config.hidden_size];
        let refuse =
            |found: String| Err(Error::invalid(self.weights.path(), name, found, format!("{shape:?}")));
        let stored = match self.weights.stored(name)? {
            None => return refuse("no such tensor".into()),
            Some(stored) if stored.shape != shape => return refuse(format!("shape {:?}", stored.shape)),
            Some(stored) => stored,
        };
        let pruned = parameter.name == HEAD && vocab.len() < shape[0];
        let rows = || stored.rows(vocab.targets().iter().map(|id: &TokenId| id.index()));
        Ok(if pruned { rows() } else { stored }.cast(element))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A target's folder once lost what stands behind the dot of its name, and the current folder had none.
    #[test]
    fn a_target_is_called_like_its_folder_or_file() {
        let parent = tempfile::tempdir().unwrap();
        let at = |name: &str| parent.path().join(name);
        std::fs::create_dir_all(at("Qwen3-0.6B/sub")).unwrap();
        for (path, expected) in [
            ("Qwen3-0.6B", "Qwen3-0.6B"),
            ("Qwen3-0.6B/", "Qwen3-0.6B"),
            ("Qwen3-0.6B/sub/..", "Qwen3-0.6B"),
            ("Qwen3-0.6B-Q8_0.gguf", "Qwen3-0.6B-Q8_0"),
        ] {
            assert_eq!(name(&at(path)).as_deref(), Some(expected));
        }
    }
}
