//! Every kind learns on the tiny target, and what it leaves drafts without changing a text.

use super::{TokenId, prompts, recipe, responses, target, train};
use hspec_core::{
    decode::{Decoder, Request, SamplingParams},
    drafter,
};
use hspec_train::recipe::Recipe;
use std::ops::ControlFlow;

/// The drafter's table of each kind and of H-Spec's ablations and extensions, with what its loop needs.
pub(crate) const KINDS: [(&str, &str, &str); 12] = [
    (
        "dspark",
        "kind = \"dspark\"\nlayers = 2\nfeature_layers = [1, 3]\nintermediate_size = 112\nblock_size = 5\n\
         draft_vocab = 160\nmarkov_rank = 8\nmask_token = 500",
        "warm_start = \"layers\"\nstart_layers = [1, 3]\nce = 0.5\ntv = 0.5",
    ),
    (
        "dflash",
        "kind = \"dflash\"\nlayers = 1\nfeature_layers = [1, 3]\nintermediate_size = 64\nblock_size = 6\n\
         sliding_window = 12\ndraft_vocab = 160\nmask_token = 500",
        "warm_start = \"attention\"\nstart_layers = [3]\nce = 1.0\nweighting = \"dpace\"",
    ),
    (
        "dflash2",
        "kind = \"dflash2\"\nlayers = 1\nfeature_layers = [1, 3]\nintermediate_size = 64\nblock_size = 6\n\
         mask_token = 500\nconv_kernel_size = 2\nconv_group_size = 16\nselector_rank = 8\nselector_top_k = 8",
        "warm_start = \"none\"\nce = 1.0",
    ),
    (
        "domino",
        "kind = \"domino\"\nlayers = 1\nfeature_layers = [1, 3]\nintermediate_size = 64\nblock_size = 6\n\
         mask_token = 500\nemb_dim = 16\ngru_hidden_dim = 16",
        "warm_start = \"none\"\nce = 1.0",
    ),
    (
        "eagle3",
        "kind = \"eagle3\"\nfeature_layers = [1, 2, 3]\nintermediate_size = 64\ndraft_vocab = 160\n\
         draft_tokens = 4",
        "warm_start = \"none\"\nkl = 1.0\ngamma = 4.48",
    ),
    (
        "peagle",
        "kind = \"peagle\"\nfeature_layers = [1, 2, 3]\nintermediate_size = 64\ndraft_vocab = 160\n\
         draft_tokens = 4\nmask_token = 500",
        "warm_start = \"none\"\nkl = 1.0\ngamma = inf",
    ),
    (
        "hspec",
        "kind = \"hspec\"\nblock_pattern = \"mamba mlp mamba attention mlp\"\nfusion_layers = [1, 3]\n\
         kv_layers = [3]\nintermediate_size = 112\nmamba_heads = 2\nmamba_head_dim = 8\ndraft_vocab = 160\n\
         markov_rank = 8\nmarkov_head_type = \"gated\"\nconfidence_head_with_markov = false\nmask_token = 500",
        "warm_start = \"layers\"\nmlp_layers = [1, 3]\nce = 0.5\ntv = 0.5\naccumulate = 2",
    ),
    (
        "no seed",
        "block_pattern = \"mamba attention mlp\"\nfusion_layers = [1]\nkv_layers = [3]\n\
         intermediate_size = 32\nmamba_heads = 2\nmamba_head_dim = 8\ndraft_vocab = 160\nmarkov_rank = 8\n\
         mask_token = 500\ndisable_mamba_init_state_injection = true",
        "warm_start = \"attention\"\nce = 0.5\ntv = 0.5",
    ),
    (
        "no target cache",
        "block_pattern = \"mamba attention mlp\"\nfusion_layers = [1]\nkv_layers = [3]\n\
         intermediate_size = 32\nmamba_heads = 2\nmamba_head_dim = 8\ndraft_vocab = 160\nmarkov_rank = 8\n\
         mask_token = 500\ndisable_target_kv_reuse = true",
        "warm_start = \"none\"\nce = 0.5\ntv = 0.5",
    ),
    (
        "naive reuse",
        "block_pattern = \"attention mlp\"\nfusion_layers = [1]\nkv_layers = [3]\nintermediate_size = 112\n\
         draft_vocab = 160\nmarkov_rank = 8\nmask_token = 500\ndisable_mamba_init_state_injection = true\n\
         attn_kv_head_ids = [[0]]",
        "warm_start = \"layers\"\nmlp_layers = [3]\nce = 0.5\ntv = 0.5",
    ),
    (
        "mamba alone, with Domino",
        "block_pattern = \"mamba mlp\"\nfusion_layers = [1]\nintermediate_size = 32\nmamba_heads = 2\n\
         mamba_head_dim = 8\ndraft_vocab = 160\nmarkov_rank = 0\nmask_token = 500\n\
         disable_target_kv_reuse = true\ndomino = { emb_dim = 8, gru_hidden_dim = 8 }",
        "warm_start = \"none\"\nce = 0.5\ntv = 0.5",
    ),
    (
        "convolutions and a selector",
        "block_pattern = \"mamba attention mlp\"\nfusion_layers = [1]\nkv_layers = [3]\n\
         intermediate_size = 32\nmamba_heads = 2\nmamba_head_dim = 8\ndraft_vocab = 160\nmarkov_rank = 0\n\
         mask_token = 500\nconfidence_head = false\n\
         block_conv = { conv_kernel_size = 2, conv_group_size = 16 }\n\
         candidate_selector = { selector_rank = 8, selector_top_k = 8 }",
        "warm_start = \"attention\"\nce = 0.5\ntv = 0.5",
    ),
];

/// A recipe of one of [`KINDS`].
pub(crate) fn recipe_of(drafter: &str, train: &str, steps: usize) -> Recipe {
    recipe(|_| {
        format!(
            "[data]\nmax_new_tokens = 24\nbatch = 5\nvalidation = 2\n[drafter]\n{drafter}\n[train]\n\
             steps = {steps}\ntokens_per_step = 100\nanchors_per_step = 24\noptimizer = \"muon\"\nlr = 5e-3\n\
             muon_lr = 2e-2\ncheckpoint_every = {steps}\nevaluate_every = {steps}\nevaluate_tokens = 16\n\
             {train}\n"
        )
    })
}

#[test]
fn every_kind_learns_and_drafts_without_changing_the_text() {
    let _alone = crate::alone();
    let target = target();
    let mut responses = responses(&target, &recipe(|r| r));
    // A random target says nothing that generalises: what is measured has been learned from.
    let learned = responses[5..7].to_vec();
    responses.splice(0..0, learned);
    for (name, drafter, loop_of) in KINDS {
        let steps = 24;
        let recipe = recipe_of(drafter, loop_of, steps);
        let dir = tempfile::tempdir().unwrap();
        let losses = train(&target, &recipe, &responses, dir.path(), false);
        assert_eq!(losses.len(), steps, "{name}");
        let mean = |l: &[f64]| l.iter().sum::<f64>() / l.len() as f64;
        let (first, last) = (mean(&losses[..4]), mean(&losses[steps - 4..]));
        assert!(last < 0.97 * first, "{name}: loss went from {first} to {last}");

        // The checkpoint is read as any other drafter is.
        let checkpoint = dir.path().join(format!("step-{steps:06}"));
        let loaded = drafter::load(&checkpoint, &target, target.device()).unwrap();
        let kind = recipe.resolved();
        assert!(kind.contains(&format!("kind = \"{}\"", loaded.kind())), "{name}: {}", loaded.kind());
        for prompt in &prompts()[..2] {
            let request = Request {
                prompt: &prompt.ids,
                sampling: SamplingParams::greedy(),
                seed: 1,
                id: 0,
                max_new_tokens: 24,
                k: loaded.max_draft(),
                stop_tokens: &[TokenId(2)],
            };
            let text = |drafter| {
                Decoder::new(&target, drafter)
                    .generate(&request, &mut |_| ControlFlow::Continue(()))
                    .unwrap()
                    .tokens
            };
            assert_eq!(text(Some(&*loaded)), text(None), "{name}");
        }
    }
}

/// A warm start from a target whose norms per head are its own, and from a subset of its heads.
#[test]
fn warm_starts_copy_the_layers_they_name() {
    let _alone = crate::alone();
    let target = target();
    let responses = responses(&target, &recipe(|r| r));
    let (_, drafter, loop_of) = KINDS[0];
    // A rate of zero leaves what the drafter started from.
    let recipe = recipe_of(drafter, loop_of, 1);
    let still =
        Recipe { train: hspec_train::recipe::Loop { lr: 0.0, muon_lr: 0.0, ..recipe.train }, ..recipe };
    let dir = tempfile::tempdir().unwrap();
    train(&target, &still, &responses, dir.path(), false);
    let weights = super::weights(&dir.path().join("step-000001"));
    for (i, id) in [1, 3].into_iter().enumerate() {
        let layer = target.layer(id).unwrap();
        let values = |linear: &hspec_nn::Linear<super::B>| -> Vec<f32> {
            linear.weight.val().into_data().iter::<f32>().collect()
        };
        for (name, expected) in [
            ("self_attn.q_proj", values(&layer.q_proj)),
            ("self_attn.o_proj", values(&layer.o_proj)),
            ("mlp.down_proj", values(&layer.mlp.down_proj)),
        ] {
            assert_eq!(weights[&format!("layers.{i}.{name}.weight")], expected, "{name} of layer {i}");
        }
    }
}
