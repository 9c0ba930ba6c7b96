//! Training forwards.

use crate::{VARIANTS, config, drafter, target};
use burn::{
    backend::Autodiff,
    module::{Module, ModuleVisitor, Param},
    tensor::{Distribution, Int, Tensor, TensorData, backend::AutodiffBackend},
};
use hspec_attn::{Anchor, Position, Prefix};
use hspec_core::{
    TokenId,
    config::TargetConfig,
    drafter::{Blocks, HSpec, HSpecModel},
};
use serde_json::json;

type A = Autodiff<burn_flex::Flex>;

/// Two documents of 20 and 25 tokens in one row, with three anchors.
struct Packed {
    anchors: Vec<Anchor>,
    tokens: Vec<TokenId>,
    seeds: Tensor<A, 2>,
    prefixes: Vec<Prefix<A>>,
}

impl Packed {
    fn random(target: &TargetConfig) -> Self {
        let device = Default::default();
        let random = |shape| Tensor::random(shape, Distribution::Normal(0.0, 1.0), &device);
        let keys = [target.num_key_value_heads, 45, target.head_dim];
        Self {
            anchors: vec![
                Anchor::at(18),
                Anchor { index: 24, document: 20, position: Position(4) },
                Anchor { index: 41, document: 20, position: Position(21) },
            ],
            tokens: [7, 300, 11].map(TokenId).to_vec(),
            seeds: Tensor::random([3, 2 * target.hidden_size], Distribution::Normal(0.0, 1.0), &device),
            prefixes: (0..2).map(|_| Prefix { keys: random(keys), values: random(keys) }).collect(),
        }
    }

    fn forward(&self, drafter: &HSpec<A>) -> Tensor<A, 3> {
        drafter.forward(&Blocks {
            anchors: &self.anchors,
            tokens: &self.tokens,
            seeds: self.seeds.clone(),
            prefixes: &self.prefixes,
            slots: drafter.config.block_size,
        })
    }

    /// Only what lies at `from..to`, with the anchors in it.
    fn cut(&self, from: usize, to: usize) -> Self {
        let inside: Vec<usize> = (0..3).filter(|&i| (from..to).contains(&self.anchors[i].index)).collect();
        let rows: Vec<i64> = inside.iter().map(|&i| i as i64).collect();
        let rows = Tensor::from_data(TensorData::new(rows, [inside.len()]), &Default::default());
        let part = |x: &Tensor<A, 3>| x.clone().narrow(1, from, to - from);
        let moved = |a: Anchor| Anchor { index: a.index - from, document: a.document - from, ..a };
        Self {
            anchors: inside.iter().map(|&i| moved(self.anchors[i])).collect(),
            tokens: inside.iter().map(|&i| self.tokens[i]).collect(),
            seeds: self.seeds.clone().select(0, rows),
            prefixes: (self.prefixes.iter())
                .map(|p| Prefix { keys: part(&p.keys), values: part(&p.values) })
                .collect(),
        }
    }
}

/// Documents packed into one row do not see each other (vllm-project/speculators#901).
#[test]
fn packed_documents_do_not_see_each_other() {
    let target = target();
    let packed = Packed::random(target.config());
    for (name, edit) in VARIANTS {
        let drafter = drafter::<A>(config(target.config(), edit), false);
        let together: Vec<f32> = packed.forward(&drafter).into_data().to_vec().unwrap();
        let apart: Vec<f32> = [packed.cut(0, 20), packed.cut(20, 45)]
            .into_iter()
            .flat_map(|document| document.forward(&drafter).into_data().to_vec::<f32>().unwrap())
            .collect();
        hspec_goldens::assert_close(name, &together, &apart, hspec_goldens::Tolerance::Scaled(1e-5));
    }
}

/// Heads that are not asked for might as well not be there, and asking for all is asking for none.
#[test]
fn some_heads_of_the_cache_are_read_as_if_there_were_no_others() {
    let target = target();
    let mut packed = Packed::random(target.config());
    let run = |packed: &Packed, edit| -> Vec<f32> {
        packed.forward(&drafter::<A>(config(target.config(), edit), false)).into_data().to_vec().unwrap()
    };
    let all = run(&packed, |_| {});
    assert_eq!(run(&packed, |c| c["attn_kv_head_ids"] = json!([[0, 1], [0, 1]])), all);
    let some = run(&packed, |c| {
        c["attn_kv_head_ids"] = json!([[1], [0]]);
        c["transformer_layer_config"]["num_key_value_heads"] = 1.into();
    });
    for (prefix, head) in packed.prefixes.iter_mut().zip([1, 0]) {
        let only = |x: &Tensor<A, 3>| x.clone().narrow(0, head, 1);
        *prefix = Prefix { keys: only(&prefix.keys), values: only(&prefix.values) };
    }
    // A target with one head.
    let mut one = target.config().clone();
    one.num_key_value_heads = 1;
    let drafter = drafter::<A>(config(&one, |_| {}), false);
    assert_eq!(packed.forward(&drafter).into_data().to_vec::<f32>().unwrap(), some);
}

/// Every parameter that is not the target's learns.
#[test]
fn gradients_reach_every_trained_parameter() {
    let target = target();
    let packed = Packed::random(target.config());
    for (name, edit) in VARIANTS {
        let drafter = drafter::<A>(config(target.config(), edit), true);
        let hidden = packed.forward(&drafter);
        let [n, k, _] = hidden.dims();
        let previous: Vec<i64> = (0..n * k).map(|i| (i as i64 * 37) % 512).collect();
        let previous: Tensor<A, 2, Int> =
            Tensor::from_data(TensorData::new(previous, [n, k]), &Default::default());
        let logits = drafter.corrected_logits(hidden.clone(), previous.clone());
        let weights = Tensor::random(logits.dims(), Distribution::Normal(0.0, 1.0), &Default::default());
        let mut loss = (logits * weights).sum();
        if let Some(confidence) = drafter.confidence_logits(hidden, previous) {
            loss = loss + confidence.sum();
        }
        let mut visitor = Gradients::<A> { name, grads: &loss.backward(), path: Vec::new(), seen: 0 };
        drafter.model.visit(&mut visitor);
        assert!(visitor.seen > 0);
    }
}

struct Gradients<'a, B: AutodiffBackend> {
    name: &'a str,
    grads: &'a B::Gradients,
    path: Vec<String>,
    seen: usize,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Gradients<'_, B> {
    fn enter_module(&mut self, name: &str, container: &str) {
        if !container.starts_with("Enum") {
            self.path.push(name.to_owned());
        }
    }
    fn exit_module(&mut self, _: &str, container: &str) {
        if !container.starts_with("Enum") {
            self.path.pop();
        }
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let name = self.path.join(".");
        let grad = param.val().grad(self.grads);
        if HSpecModel::<B>::frozen(&name) {
            assert!(grad.is_none(), "{}: {name} is frozen", self.name);
            return;
        }
        let grad = grad.unwrap_or_else(|| panic!("{}: no gradient of {name}", self.name));
        let values: Vec<f32> = grad.into_data().iter::<f32>().collect();
        assert!(values.iter().all(|g| g.is_finite()), "{}: {name}", self.name);
        assert!(values.iter().any(|g| *g != 0.0), "{}: {name} learns nothing", self.name);
        self.seen += 1;
    }
}
