//! Configurations of targets and drafters, as their files state them.

mod hspec;
mod hspec_check;
mod rope;
mod target;

pub use hspec::{
    AttnRope, BlockPattern, HSpecConfig, LayerConfig, ProposalMethod, SeedMode, SpeculatorsConfig,
    SubLayerKind, Verifier,
};
pub use rope::RopeParameters;
pub use target::{Family, TargetConfig};
