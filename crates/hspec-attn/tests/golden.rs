//! `PrefixAttention` against the reference implementation: outputs under both window rules, and the
//! gradients of every weight and of the input.

#![allow(clippy::unwrap_used)] // a test may panic

use burn::{
    backend::Autodiff,
    module::Module,
    tensor::{Tensor, backend::AutodiffBackend},
};
use hspec_attn::{
    Anchor, BlockRope, BlockRule, Position, Prefix, PrefixAttention, Rope, RopeScaling, WindowRule,
};
use hspec_goldens::{FORWARD, GRADIENT, Golden, assert_tensor};
use hspec_nn::{Linear, RmsNorm, params};
use serde_json::Value;

fn size(case: &Value, key: &str) -> usize {
    case[key].as_u64().unwrap_or_else(|| panic!("{key}")) as usize
}

fn check<B: AutodiffBackend>() {
    let golden = Golden::open("hspec/target_kv_attention");
    let device = Default::default();
    for (name, case) in golden.cases() {
        let at = |t: &str| format!("{name}/{t}");
        let (hidden, d) = (size(&case, "hidden"), size(&case, "head_dim"));
        let (heads, kv, k) =
            (size(&case, "num_q_heads"), size(&case, "num_kv_heads"), size(&case, "block_size"));
        let norm = case["use_qk_norm"]
            .as_bool()
            .unwrap()
            .then(|| RmsNorm::ones(d, case["rms_norm_eps"].as_f64().unwrap(), &device));
        let module = PrefixAttention::<B> {
            q_proj: Linear::random(hidden, heads * d, false, 1.0, &device),
            k_proj: Linear::random(hidden, kv * d, false, 1.0, &device),
            v_proj: Linear::random(hidden, kv * d, false, 1.0, &device),
            o_proj: Linear::random(heads * d, hidden, false, 1.0, &device),
            q_norm: norm.clone(),
            k_norm: norm,
            head_dim: d,
        };
        let source = |n: &str| {
            golden.has(&at(&format!("weights.{n}"))).then(|| golden.data(&at(&format!("weights.{n}"))))
        };
        let module = params::fill(module, &device, source, |_| true).unwrap();

        let anchors: Vec<Anchor> = case["anchors"]
            .as_array()
            .unwrap()
            .iter()
            .map(|a| Anchor::at(a.as_u64().unwrap() as usize))
            .collect();
        let n = anchors.len();
        let positions: Vec<Position> =
            golden.ints(&at("position_ids")).iter().map(|&p| Position(p as usize)).collect();
        let rope = Rope::new(case["rope_theta"].as_f64().unwrap(), d, RopeScaling::None);
        let rope =
            BlockRope { q: rope.tables(&positions, heads, &device), k: rope.tables(&positions, kv, &device) };
        let prefix = Prefix {
            keys: golden.float::<B, 4>(&at("target_k"), &device).squeeze_dim::<3>(0),
            values: golden.float::<B, 4>(&at("target_v"), &device).squeeze_dim::<3>(0),
        };
        let window = case["sliding_window"].as_u64().map(|w| w as usize);
        let rule = BlockRule { window, rule: WindowRule::Training, causal: case["intra_block"] == "causal" };
        let x = golden.float::<B, 3>(&at("hidden_states"), &device).reshape([n, k, hidden]).require_grad();

        let out = module.forward(x.clone(), &anchors, &rope, Some(&prefix), &rule);
        assert_tensor(&at("output"), out.clone(), &golden.f32s(&at("output")), FORWARD);
        if golden.has(&at("output_serving_window")) {
            let rule = BlockRule { rule: WindowRule::Serving, ..rule };
            let out = module.forward(x.clone(), &anchors, &rope, Some(&prefix), &rule);
            assert_tensor(&at("serving"), out, &golden.f32s(&at("output_serving_window")), FORWARD);
        }

        let cotangent = golden.float::<B, 3>(&at("grad_output"), &device).reshape([n, k, hidden]);
        let grads = (out * cotangent).sum().backward();
        let found = x.grad(&grads).unwrap();
        assert_tensor(&at("grad x"), found, &golden.f32s(&at("grad.hidden_states")), GRADIENT);
        let mut visitor =
            Gradients { golden: &golden, name: &name, grads: &grads, path: Vec::new(), seen: 0 };
        module.visit(&mut visitor);
        let expected = golden.names().filter(|t| t.starts_with(&at("grad."))).count() - 1;
        assert_eq!(visitor.seen, expected, "{name}: every gradient of the fixture was compared");
    }
}

struct Gradients<'a, B: AutodiffBackend> {
    golden: &'a Golden,
    name: &'a str,
    grads: &'a B::Gradients,
    path: Vec<String>,
    seen: usize,
}

impl<B: AutodiffBackend> burn::module::ModuleVisitor<B> for Gradients<'_, B> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<B, D>>) {
        let name = format!("{}/grad.{}", self.name, self.path.join("."));
        let grad = param.val().grad(self.grads).unwrap_or_else(|| panic!("no {name}"));
        assert_tensor(&name, grad, &self.golden.f32s(&name), GRADIENT);
        self.seen += 1;
    }
}

#[test]
fn golden_prefix_attention_ndarray() {
    check::<Autodiff<burn_ndarray::NdArray>>();
}

#[test]
fn golden_prefix_attention_flex() {
    check::<Autodiff<burn_flex::Flex>>();
}
