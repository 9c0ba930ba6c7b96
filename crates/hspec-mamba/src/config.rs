//! Sizes of a mixer.

/// Sizes of a [`Mamba2Mixer`](crate::Mamba2Mixer). The inner width is `num_heads · head_dim`; it need
/// not be a multiple of `hidden`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MambaConfig {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Size of the state of each channel.
    pub d_state: usize,
    /// Number of heads.
    pub num_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Number of B/C pairs; each serves `num_heads / n_groups` consecutive heads.
    pub n_groups: usize,
    /// Taps of the causal convolution.
    pub conv_kernel: usize,
}

/// Why a [`MambaConfig`] cannot be right.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A size is zero.
    #[error("mamba {field} is 0, expected at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// The groups do not share the heads evenly.
    #[error("mamba n_groups {n_groups} does not divide num_heads {num_heads}")]
    Groups {
        /// Number of groups.
        n_groups: usize,
        /// Number of heads.
        num_heads: usize,
    },
}

impl MambaConfig {
    /// Channels of all heads together.
    pub fn d_inner(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Channels that the convolution sees: x, B and C.
    pub fn conv_dim(&self) -> usize {
        self.d_inner() + 2 * self.n_groups * self.d_state
    }

    /// Outputs of the input projection: gate, convolution channels, one step size per head.
    pub fn in_proj_dim(&self) -> usize {
        self.d_inner() + self.conv_dim() + self.num_heads
    }

    /// Checks the sizes against each other.
    ///
    /// # Errors
    /// The first size that is zero, or a number of groups that does not divide the number of heads.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let Self { hidden, d_state, num_heads, head_dim, n_groups, conv_kernel } = *self;
        for (field, value) in [
            ("hidden", hidden),
            ("d_state", d_state),
            ("num_heads", num_heads),
            ("head_dim", head_dim),
            ("n_groups", n_groups),
            ("conv_kernel", conv_kernel),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero { field });
            }
        }
        if !num_heads.is_multiple_of(n_groups) {
            return Err(ConfigError::Groups { n_groups, num_heads });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The drafter for Qwen3-8B.
    const RELEASED: MambaConfig =
        MambaConfig { hidden: 4096, d_state: 4, num_heads: 48, head_dim: 64, n_groups: 4, conv_kernel: 4 };

    #[test]
    fn derived_sizes_are_those_of_the_released_drafter() {
        assert_eq!(RELEASED.validate(), Ok(()));
        assert_eq!((RELEASED.d_inner(), RELEASED.conv_dim(), RELEASED.in_proj_dim()), (3072, 3104, 6224));
    }

    #[test]
    fn impossible_sizes_are_named() {
        let error = MambaConfig { n_groups: 5, ..RELEASED }.validate().unwrap_err();
        assert_eq!(error.to_string(), "mamba n_groups 5 does not divide num_heads 48");
        let error = MambaConfig { n_groups: 0, ..RELEASED }.validate().unwrap_err();
        assert_eq!(error, ConfigError::Zero { field: "n_groups" });
    }
}
