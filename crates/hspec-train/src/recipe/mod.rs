//! What to train and how, as a TOML file.

mod data;
mod shape;
mod train;

pub use data::{Data, GivenAnswers};
pub use shape::{
    DFlash2Shape, DFlashShape, DSparkShape, DominoShape, Eagle3Shape, HSpecShape, PEagleShape, Shape,
};
pub use train::{Loop, OptimizerKind, SlotWeights, WarmStart};

use hspec_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A training run. Unknown keys are refused; defaults are what the field comments say, and the
/// resolved copy beside a checkpoint shows every one of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Responses to learn from.
    #[serde(default)]
    pub data: Data,
    /// The drafter's shape.
    pub drafter: Shape,
    /// The loop.
    pub train: Loop,
}

impl Recipe {
    /// Reads and checks a recipe.
    ///
    /// # Errors
    /// A file that cannot be read, an unknown or missing key, a value out of range.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
        let recipe: Self = toml::from_str(&text).map_err(|e| {
            Error::invalid(path, "recipe", e.to_string().trim().to_owned(), "a training recipe")
        })?;
        recipe.validate(path)?;
        Ok(recipe)
    }

    fn validate(&self, path: &Path) -> Result<()> {
        self.train.validate(path)?;
        self.data.validate(path)?;
        // Its samples are no blocks, over which these weights are a product.
        match (&self.drafter, self.train.weighting) {
            (Shape::PEagle(_), SlotWeights::Dpace) => {
                Err(Error::invalid(path, "train.weighting", "dpace", "decay for this kind"))
            }
            _ => Ok(()),
        }
    }

    /// The recipe with every default spelled out.
    pub fn resolved(&self) -> String {
        toml::to_string_pretty(self).expect("a recipe holds only numbers, words and lists of them")
    }
}

/// Refuses zeros; `file` names the recipe, fields are `table.key`.
fn at_least_one(file: &Path, fields: &[(&str, usize)]) -> Result<()> {
    match fields.iter().find(|(_, n)| *n == 0) {
        Some((field, _)) => Err(Error::invalid(file, *field, "0", "at least 1")),
        None => Ok(()),
    }
}

/// Refuses numbers outside `low..=high`, and NaN.
fn between(file: &Path, fields: &[(&str, f64, f64, f64)]) -> Result<()> {
    match fields.iter().find(|(_, x, low, high)| !(low <= x && x <= high)) {
        Some((field, x, low, high)) => {
            Err(Error::invalid(file, *field, x.to_string(), format!("a number from {low} to {high}")))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = r#"
        [drafter]
        block_pattern = "mamba attention mlp"
        fusion_layers = [1]
        kv_layers = [1]
        intermediate_size = 8
        mamba_heads = 2
        mamba_groups = 1
        draft_vocab = 16
        markov_rank = 4
        mask_token = 3
        [train]
        steps = 4
        tokens_per_step = 64
        anchors_per_step = 4
        warm_start = "attention"
        optimizer = "adamw"
        lr = 1e-3
        ce = 0.1
        tv = 0.9
    "#;

    fn read(text: &str) -> Result<Recipe> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("recipe.toml");
        std::fs::write(&path, text).unwrap();
        Recipe::read(&path)
    }

    #[test]
    fn a_resolved_recipe_is_the_same_recipe() {
        let recipe = read(MINIMAL).unwrap();
        assert_eq!(recipe.train.gamma, 4.0);
        assert_eq!(read(&recipe.resolved()).unwrap(), recipe);
        let first = "compute = \"bf16\"\nfirst_phase = { share = 0.5, kl = 1.0 }\n";
        let recipe = read(&format!("{MINIMAL}{first}")).unwrap();
        assert!(recipe.train.first_phase.is_some());
        assert_eq!(read(&recipe.resolved()).unwrap(), recipe);
    }

    /// The paper mixes two sources 60 to 40.
    #[test]
    fn prompt_files_have_weights_or_not() {
        let data = |text: &str| read(&format!("[data]\n{text}\n{MINIMAL}"));
        for (text, weights) in [
            ("prompts = [\"a:1\", \"b\"]", [None, None]),
            (
                "prompts = [{ file = \"a:1\", weight = 0.6 }, { file = \"b\", weight = 0.4 }]",
                [Some(0.6), Some(0.4)],
            ),
        ] {
            let recipe = data(text).unwrap();
            let found: Vec<_> = recipe.data.prompts.iter().map(|p| p.weight).collect();
            assert_eq!(found, weights);
            assert_eq!(recipe.data.prompts[0].file.to_str(), Some("a:1"));
            assert_eq!(read(&recipe.resolved()).unwrap(), recipe);
        }
        assert!(data("prompts = [{ file = \"a\", wait = 1 }]").is_err());
        assert!(data("top_p = 1.5").unwrap_err().to_string().contains("data.top_p: found 1.5"));
        assert!(data("given_answers = \"some\"").unwrap_err().to_string().contains("given_answers"));
    }

    /// Runs resolved their recipe when there was one file at most; its hash names them still.
    #[test]
    fn one_file_of_answers_is_a_name_and_several_are_a_list() {
        let data = |text: &str| read(&format!("[data]\n{text}\n{MINIMAL}"));
        let one = data("responses = \"a.jsonl\"\ncache = \"features\"").unwrap();
        assert_eq!(one, data("responses = [\"a.jsonl\"]\ncache = [\"features\"]").unwrap());
        assert!(
            one.resolved().contains("responses = \"a.jsonl\"\ncache = \"features\""),
            "{}",
            one.resolved()
        );
        let two = data("responses = [\"a.jsonl\", \"b.jsonl\"]").unwrap();
        assert_eq!((two.data.responses.len(), two.data.cache.len()), (2, 0));
        assert_eq!(read(&two.resolved()).unwrap(), two);
        let error = data("cache = 3").unwrap_err().to_string();
        assert!(error.contains("expected a name, or a list of names"), "{error}");
    }

    #[test]
    fn every_kind_reads_what_it_writes() {
        let block = "layers = 1\nfeature_layers = [1]\nintermediate_size = 8\nmask_token = 3";
        let selector = "conv_kernel_size = 2\nconv_group_size = 2\nselector_rank = 2\nselector_top_k = 2";
        let eagle = "feature_layers = [1]\nintermediate_size = 8\ndraft_vocab = 16";
        let train = &MINIMAL[MINIMAL.find("[train]").unwrap()..];
        for (kind, keys) in [
            ("dspark", format!("{block}\ndraft_vocab = 16\nmarkov_rank = 2")),
            ("dflash", format!("{block}\ndraft_vocab = 16\nsliding_window = 4")),
            ("dflash2", format!("{block}\n{selector}")),
            ("domino", format!("{block}\nemb_dim = 2\ngru_hidden_dim = 2")),
            ("eagle3", eagle.to_owned()),
            ("peagle", format!("{eagle}\nmask_token = 3")),
        ] {
            let text = format!("[drafter]\nkind = \"{kind}\"\n{keys}\n{train}\ngamma = inf");
            let recipe = read(&text).unwrap();
            let resolved = recipe.resolved();
            assert!(resolved.contains(&format!("kind = \"{kind}\"")), "{resolved}");
            assert_eq!(read(&resolved).unwrap(), recipe, "{resolved}");
        }
        let domino = "markov_rank = 4\ndomino = { emb_dim = 2, gru_hidden_dim = 2 }";
        let recipe = read(&MINIMAL.replace("markov_rank = 4", domino)).unwrap();
        assert_eq!(read(&recipe.resolved()).unwrap(), recipe);
        let first = "compute = \"bf16\"\nfirst_phase = { share = 0.5, kl = 1.0 }\n";
        let recipe = read(&format!("{MINIMAL}{first}")).unwrap();
        assert!(recipe.train.first_phase.is_some());
        assert_eq!(read(&recipe.resolved()).unwrap(), recipe);
    }

    #[test]
    fn unknown_keys_and_bad_numbers_are_named() {
        for (from, to, part) in [
            ("steps = 4", "steps = 4\nsteppes = 5", "steppes"),
            ("steps = 4", "steps = 0", "train.steps: found 0"),
            ("lr = 1e-3", "lr = nan", "train.lr: found NaN"),
            ("\"adamw\"", "\"adam\"", "adam"),
            ("[drafter]", "[drafter]\nkind = \"medusa\"", "found \"medusa\", expected hspec, dspark"),
            ("[drafter]", "[drafter]\nlayers = 2", "kind hspec: unknown field `layers`"),
            ("[drafter]", "[drafter]\nkind = \"dflash\"", "kind dflash: unknown field `block_pattern`"),
            ("steps = 4", "steps = 4\nepochs = 2", "train.steps: found 4, expected none beside epochs"),
            ("steps = 4", "", "train.steps: found nothing, expected steps or epochs"),
            ("ce = 0.1\n        tv = 0.9", "", "train.ce: found 0"),
            ("lr = 1e-3", "lr = 1e-3\naccumulate = 0", "train.accumulate: found 0"),
            ("lr = 1e-3", "lr = 1e-3\ngamma = nan", "train.gamma: found NaN"),
        ] {
            let error = read(&MINIMAL.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
