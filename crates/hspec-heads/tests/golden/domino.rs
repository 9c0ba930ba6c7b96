//! Domino's correction under both label conventions.

use crate::{FORWARD, assert_gradient, fixtures, values};
use burn::{
    backend::Autodiff,
    tensor::{Int, Tensor, TensorData, backend::AutodiffBackend},
};
use hspec_goldens::{Golden, assert_close};
use hspec_heads::{CausalCorrection, DominoConfig, DominoHead};
use hspec_nn::params;

fn heads<B: AutodiffBackend>() {
    let device = Default::default();
    for shift in fixtures("domino_head_") {
        let golden = Golden::open(&format!("dspark/domino_head_{shift}"));
        let size = |field: &str| golden.notes["config"][field].as_u64().expect("a size") as usize;
        let shift_label = golden.notes["config"]["shift_label"].as_bool().expect("a flag");
        let [b, blocks, k, h] = golden.float::<B, 4>("hidden_states", &device).dims();
        let [.., e] = golden.float::<B, 4>("prev_token_embeddings", &device).dims();
        let [.., v] = golden.float::<B, 4>("base_logits", &device).dims();
        let n = b * blocks;
        let head = DominoHead::<B>::init(
            &DominoConfig {
                draft_vocab: v,
                hidden: h,
                embedding: e,
                gru_hidden_dim: size("gru_hidden_dim"),
                emb_dim: size("emb_dim"),
                pure_draft_prefix_len: size("pure_draft_prefix_len"),
                shift_label,
            },
            &device,
        );
        let weight = |name: &str| Some(golden.data(&format!("weight/{name}")));
        let head = params::fill(head, &device, weight, |_| true).expect("the fixture has every weight");

        // The fixture gives the embeddings of the block's tokens: here every place is its own token.
        let table = golden.float::<B, 4>("prev_token_embeddings", &device).reshape([n * k, e]);
        let token = |block: usize, slot: usize| (block * k + slot) as i64;
        let before = |slot: usize| if shift_label { slot } else { slot.saturating_sub(1) };
        let prev: Vec<i64> = (0..n).flat_map(|i| (0..k).map(move |t| token(i, before(t)))).collect();
        let prev = Tensor::<B, 2, Int>::from_data(TensorData::new(prev, [n, k]), &device);

        let hidden = golden.float::<B, 4>("hidden_states", &device).reshape([n, k, h]).require_grad();
        let base = golden.float::<B, 4>("base_logits", &device).reshape([n, k, v]);
        let domino = head.over(table);
        let logits = base.clone() + domino.block(prev.clone(), hidden.clone());
        assert_close("logits", &values(logits.clone()), &golden.f32s("logits"), FORWARD);
        let projection = golden.float::<B, 4>("loss_projection", &device).reshape([n, k, v]);
        let gradients = (logits * projection).sum().backward();
        let gru = &head.prefix_gru;
        assert_gradient(&golden, "grad/prefix_gru.weight_ih_l0", &gru.weight_ih_l0.val(), &gradients);
        assert_gradient(&golden, "grad/prefix_gru.weight_hh_l0", &gru.weight_hh_l0.val(), &gradients);
        let (first, second) = (&head.embed_proj.0.weight, &head.embed_proj.2.weight);
        assert_gradient(&golden, "grad/embed_proj.0.weight", &first.val(), &gradients);
        assert_gradient(&golden, "grad/embed_proj.2.weight", &second.val(), &gradients);
        assert_gradient(&golden, "grad/hidden_states", &hidden, &gradients);

        // Slot by slot.
        let mut state = domino.start(n, &device);
        let expected = golden.float::<B, 4>("logits", &device).reshape([n, k, v]);
        for slot in 0..k {
            let token = prev.clone().narrow(1, slot, 1).reshape([n]);
            let (bias, next) = domino.step(state, token, hidden.clone().narrow(1, slot, 1).reshape([n, h]));
            let logits = bias + base.clone().narrow(1, slot, 1).reshape([n, v]);
            let expected = values(expected.clone().narrow(1, slot, 1));
            assert_close(&format!("logits, slot {slot}"), &values(logits), &expected, FORWARD);
            state = next;
        }
    }
}

#[test]
fn golden_domino_on_flex() {
    heads::<Autodiff<burn_flex::Flex>>();
}

#[test]
fn golden_domino_on_ndarray() {
    heads::<Autodiff<burn_ndarray::NdArray>>();
}
