//! The parameters that a configuration asks for, by name and shape, without making them: a drafter of a
//! large target would fill the memory.

use crate::{Error, Result, checkpoint::Weights};
use hspec_heads::MarkovKind;
use hspec_nn::params::LoadError;

/// The copy of the target's embedding.
pub(super) const EMBEDDING: &str = "embed_tokens.weight";
/// The copy of rows of the target's output head.
pub(super) const HEAD: &str = "lm_head.weight";

/// One tensor of a drafter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Parameter {
    pub name: String,
    pub shape: Vec<usize>,
    /// Whether training changes it.
    pub trained: bool,
}

impl Parameter {
    /// Whether the target lends it where a file leaves it out.
    pub(super) fn lent(&self) -> bool {
        self.name == EMBEDDING || self.name == HEAD
    }

    pub(super) fn size(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Parameters in the order of a module's fields.
#[derive(Debug, Default)]
pub(super) struct Parameters(pub Vec<Parameter>);

/// Sizes of the projections of an attention.
pub(super) struct Attention {
    /// Width of the input.
    pub input: usize,
    /// Width of the output.
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub bias: bool,
    /// Whether queries and keys are normed per head.
    pub norms: bool,
}

impl Parameters {
    /// With the copies of the target's tensors, which every drafter has.
    pub(super) fn new(vocab: usize, kept: usize, hidden: usize, trains_embedding: bool) -> Self {
        let tensor =
            |name: &str, rows, trained| Parameter { name: name.into(), shape: vec![rows, hidden], trained };
        Self(vec![tensor(EMBEDDING, vocab, trains_embedding), tensor(HEAD, kept, false)])
    }

    pub(super) fn add(&mut self, name: impl Into<String>, shape: &[usize]) {
        self.0.push(Parameter { name: name.into(), shape: shape.to_vec(), trained: true });
    }

    pub(super) fn norm(&mut self, at: &str, n: usize) {
        self.add(format!("{at}.weight"), &[n]);
    }

    /// `[out, in]`.
    pub(super) fn linear(&mut self, at: &str, shape: [usize; 2], bias: bool) {
        self.add(format!("{at}.weight"), &shape);
        if bias {
            self.add(format!("{at}.bias"), &shape[..1]);
        }
    }

    pub(super) fn attention(&mut self, at: &str, a: &Attention) {
        let (q, kv) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        for (name, shape) in
            [("q", [q, a.input]), ("k", [kv, a.input]), ("v", [kv, a.input]), ("o", [a.hidden, q])]
        {
            self.linear(&format!("{at}.{name}_proj"), shape, a.bias);
        }
        for name in ["q_norm", "k_norm"].iter().filter(|_| a.norms) {
            self.norm(&format!("{at}.{name}"), a.head_dim);
        }
    }

    pub(super) fn feed_forward(&mut self, at: &str, hidden: usize, inner: usize) {
        for (name, shape) in [("gate", [inner, hidden]), ("up", [inner, hidden]), ("down", [hidden, inner])] {
            self.linear(&format!("{at}.{name}_proj"), shape, false);
        }
    }

    pub(super) fn markov(&mut self, kind: MarkovKind, vocab: usize, kept: usize, rank: usize, hidden: usize) {
        self.linear("markov_head.markov_w1", [vocab, rank], false);
        self.linear("markov_head.markov_w2", [kept, rank], false);
        match kind {
            MarkovKind::Vanilla => {}
            MarkovKind::Gated => self.linear("markov_head.gate_proj", [rank, hidden + rank], true),
            MarkovKind::Rnn => self.linear("markov_head.joint_proj", [3 * rank, 2 * rank + hidden], true),
        }
    }

    /// DFlash-2's convolution.
    pub(super) fn convolution(&mut self, at: &str, hidden: usize, taps: usize, group: usize) {
        self.add(format!("{at}.base_kernel"), &[2, taps, hidden]);
        self.linear(&format!("{at}.kernel_projection"), [2 * taps * (hidden / group), hidden], false);
    }

    /// DFlash-2's selector.
    pub(super) fn selector(&mut self, vocab: usize, kept: usize, rank: usize, hidden: usize) {
        self.add("candidate_selector.predecessor_codebook", &[vocab, rank]);
        self.add("candidate_selector.successor_codebook", &[kept, rank]);
        self.linear("candidate_selector.hidden_projection", [rank, hidden], false);
    }

    /// Domino's recurrence and projections; `at` is empty or ends in a dot.
    pub(super) fn domino(&mut self, at: &str, hidden: usize, gru: usize, inner: usize, kept: usize) {
        self.add(format!("{at}prefix_gru.weight_ih_l0"), &[3 * gru, hidden]);
        self.add(format!("{at}prefix_gru.weight_hh_l0"), &[3 * gru, gru]);
        self.linear(&format!("{at}embed_proj.0"), [inner, hidden + gru], false);
        self.linear(&format!("{at}embed_proj.2"), [kept, inner], false);
    }

    /// Refuses what loading refuses: tensors that are missing, unless the target lends them, or have another
    /// shape or an unreadable type.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the first.
    pub(super) fn check(&self, weights: &Weights) -> Result<()> {
        let refuse = |e: LoadError| {
            Err(Error::invalid(weights.path(), "tensors", e.to_string(), "the configuration's"))
        };
        for parameter in &self.0 {
            let (name, expected) = (parameter.name.clone(), parameter.shape.clone());
            match weights.stored(&name)? {
                None if parameter.lent() => {}
                None => return refuse(LoadError::Missing { name, expected }),
                Some(stored) if stored.shape != expected => {
                    return refuse(LoadError::Shape { name, found: stored.shape, expected });
                }
                Some(_) => {}
            }
        }
        Ok(())
    }
}

/// The same as a module itself says, for tests.
#[cfg(test)]
pub(super) fn of_module<B: burn::tensor::backend::Backend, M: burn::module::Module<B>>(
    module: &M,
    frozen: impl Fn(&str) -> bool,
) -> Vec<Parameter> {
    let parameter = |p: hspec_nn::params::ParamInfo| Parameter {
        trained: !frozen(&p.name),
        name: p.name,
        shape: p.shape,
    };
    hspec_nn::params::list(module).into_iter().map(parameter).collect()
}
