//! A target with its text side, the drafters for it, and the arguments that say how to decode.

use crate::backend::Common;
use anyhow::Context;
use burn::tensor::backend::Backend;
use hspec_core::{
    TokenId,
    checkpoint::is_gguf,
    decode::SamplingParams,
    drafter::{self, Drafter},
    target::Target,
    text::{ChatTemplate, Message, Tokenizer},
};
use std::path::{Path, PathBuf};

/// The folder of the model that commands use unless told otherwise.
pub(crate) fn default_target() -> PathBuf {
    crate::models().join("smollm2-135m-instruct")
}

/// How to decode.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SamplingArgs {
    /// Drafts per round [default: 7, or fewer where a drafter allows no more].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    k: Option<u16>,
    #[command(flatten)]
    pub(crate) law: LawArgs,
}

/// What tokens are drawn from.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct LawArgs {
    /// Temperature of sampling; 0 takes the most probable token.
    #[arg(long, value_name = "T", default_value = "0", value_parser = temperature, allow_negative_numbers = true)]
    pub(crate) temperature: f64,
    /// Sample from the fewest tokens whose probabilities make up P.
    #[arg(long, value_name = "P", value_parser = top_p)]
    pub(crate) top_p: Option<f64>,
    /// Sample from the K most probable tokens.
    #[arg(long, value_name = "K", value_parser = top_k)]
    pub(crate) top_k: Option<usize>,
    /// Seed of all that is random: the same seed gives the same text.
    #[arg(long, value_name = "S", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) seed: u64,
}

impl SamplingArgs {
    /// The sampling parameters; each has been checked on the command line.
    pub(crate) fn params(&self) -> hspec_core::Result<SamplingParams> {
        SamplingParams::new(self.law.temperature, self.law.top_k, self.law.top_p)
    }

    /// Drafts per round with these drafters.
    pub(crate) fn k<'a, B: Backend>(
        &self,
        drafters: impl IntoIterator<Item = &'a Box<dyn Drafter<B>>>,
    ) -> anyhow::Result<usize> {
        let most = drafters.into_iter().map(|drafter| drafter.max_draft()).min();
        match (self.k.map(usize::from), most) {
            (Some(k), Some(most)) if k > most => {
                anyhow::bail!("--k {k}: the drafter proposes at most {most} tokens at once")
            }
            (Some(k), _) => Ok(k),
            (None, most) => Ok(most.unwrap_or(7).min(7)),
        }
    }
}

fn number<T: Copy + std::str::FromStr<Err: ToString>>(
    text: &str,
    check: impl FnOnce(T) -> hspec_core::Result<SamplingParams>,
) -> Result<T, String> {
    let number = text.parse().map_err(|e: T::Err| e.to_string())?;
    check(number).map(|_| number).map_err(|e| e.to_string())
}

pub(crate) fn temperature(text: &str) -> Result<f64, String> {
    number(text, |t| SamplingParams::new(t, None, None))
}

pub(crate) fn top_p(text: &str) -> Result<f64, String> {
    number(text, |p| SamplingParams::new(1.0, None, Some(p)))
}

fn top_k(text: &str) -> Result<usize, String> {
    number(text, |k| SamplingParams::new(1.0, Some(k), None))
}

/// A target, its tokenizer and its chat template.
pub(crate) struct Model<B: Backend> {
    pub(crate) path: PathBuf,
    pub(crate) target: Target<B>,
    pub(crate) tokenizer: Tokenizer,
    /// Tokens that end an answer.
    pub(crate) eos: Vec<TokenId>,
    /// None for base models.
    pub(crate) chat: Option<ChatTemplate>,
}

impl<B: Backend> Model<B> {
    /// Loads a target from a folder or GGUF file, or the default one.
    pub(crate) fn load(path: Option<&Path>, common: &Common, device: &B::Device) -> anyhow::Result<Self> {
        let path = match path {
            Some(path) => path.to_owned(),
            None => {
                let path = default_target();
                let hint = || format!("{}: fetch it with `cargo xtask fetch smollm2-135m`", path.display());
                std::fs::metadata(&path).with_context(hint)?;
                path
            }
        };
        if path.is_file() && !is_gguf(&path) {
            anyhow::bail!("--target {}: found a file, expected a folder or a .gguf file", path.display());
        }
        let tokenizer = Tokenizer::open(&path)?;
        let chat = ChatTemplate::open(&path)?;
        let target = Target::load_as(&path, common.weights, device)?;
        Ok(Self { eos: tokenizer.eos_ids(), path, target, tokenizer, chat })
    }

    /// Its chat template, which prompts for training need.
    pub(crate) fn template(&self) -> anyhow::Result<&ChatTemplate> {
        self.chat.as_ref().context("the model has no chat template, so prompts cannot be rendered")
    }

    /// Loads a drafter for it.
    pub(crate) fn drafter(&self, dir: &Path) -> anyhow::Result<Box<dyn Drafter<B>>> {
        let drafter = drafter::load(dir, &self.target, self.target.device());
        drafter.with_context(|| format!("drafter {}", dir.display()))
    }

    /// The tokens of a conversation up to where the model answers. Models without a chat template, and
    /// all when `raw`, get the messages' text as it is.
    pub(crate) fn encode(&self, messages: &[Message], raw: bool) -> anyhow::Result<Vec<TokenId>> {
        let text = match &self.chat {
            Some(chat) if !raw => chat.render(messages, true)?,
            _ => messages.iter().map(|message| message.content.as_str()).collect::<Vec<_>>().join("\n"),
        };
        Ok(self.tokenizer.encode(&text)?)
    }
}
