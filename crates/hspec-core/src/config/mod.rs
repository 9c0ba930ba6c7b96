//! Configurations of targets and drafters, as their files state them.

mod hspec;
mod hspec_check;
mod hspec_extensions;
mod layer;
mod rope;
mod target;

pub use hspec::{
    AttnRope, BlockPattern, HSpecConfig, LayerConfig, ProposalMethod, SPECULATORS_VERSION, SeedMode,
    SpeculatorsConfig, SubLayerKind, Verifier,
};
pub use hspec_extensions::{BlockConvOptions, DominoOptions, HSpecExtensions, SelectorOptions};
pub(crate) use layer::{MOST_ELEMENTS, MOST_SLOTS};
pub use rope::RopeParameters;
pub use target::{Family, TargetConfig};
