//! The layouts that drafters' files have.

use crate::{Error, Result};
use serde::Serialize;
use std::{fmt, str::FromStr};

/// A layout of `config.json` and its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// A layer configuration inside one of drafting; vocabularies may be pruned. Layer ids count the
    /// residual streams that *enter* layers.
    Speculators,
    /// A flat configuration and the target's frozen tensors. Layer ids count the *outputs* of layers.
    DeepSpec,
    /// A flat configuration with a `dflash_config` inside, and the drafter's own tensors only. Layer ids as
    /// in DeepSpec.
    ZLab,
}

impl Format {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Speculators, Self::DeepSpec, Self::ZLab];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Speculators => "speculators",
            Self::DeepSpec => "deepspec",
            Self::ZLab => "zlab",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|format| format.name() == text).ok_or_else(|| Error::Request {
            what: "format",
            found: text.into(),
            expected: Self::ALL.map(Self::name).join(", "),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for format in Format::ALL {
            assert_eq!(format.name().parse::<Format>().unwrap(), format);
            assert_eq!(serde_json::to_value(format).unwrap(), format.name());
        }
        let message = "hf".parse::<Format>().unwrap_err().to_string();
        assert_eq!(message, "format: found hf, expected speculators, deepspec, zlab");
    }
}
