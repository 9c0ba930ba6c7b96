//! The scan and the mixer against outputs and gradients of the reference implementation.

use burn::{
    backend::Autodiff,
    tensor::{Tensor, backend::AutodiffBackend},
};
use hspec_goldens::{FORWARD, GRADIENT, Golden, assert_tensor};
use hspec_mamba::{Mamba2Mixer, MambaConfig, SsdInputs, softplus, ssd_recurrent, ssd_scan};
use hspec_nn::params;

type Flex = Autodiff<burn_flex::Flex>;
type NdArray = Autodiff<burn_ndarray::NdArray>;

fn scan<B: AutodiffBackend>() {
    let device = Default::default();
    let golden = Golden::open("hspec/ssd_scan");
    let cases = golden.cases();
    assert!(!cases.is_empty());
    for (case, _) in cases {
        let name = |field: &str| format!("{case}/{field}");
        let dt = golden.float::<B, 3>(&name("dt"), &device)
            + golden.float::<B, 1>(&name("dt_bias"), &device).unsqueeze();
        let inputs = SsdInputs::<B> {
            x: golden.float(&name("x"), &device),
            dt: softplus(dt),
            a: golden.float(&name("A"), &device),
            b: golden.float(&name("B"), &device),
            c: golden.float(&name("C"), &device),
            d: golden.float(&name("D"), &device),
        };
        let initial = golden.float::<B, 4>(&name("initial_state"), &device);
        for (method, f) in [("recurrent", ssd_recurrent as fn(_, _) -> _), ("scan", ssd_scan)] {
            for (prefix, initial) in [("", Some(initial.clone())), ("zero_", None)] {
                let (y, state) = f(inputs.clone(), initial);
                for (field, found) in [("y", y), ("final_state", state)] {
                    let field = name(&format!("{prefix}{field}"));
                    assert_tensor(&format!("{method} {field}"), found, &golden.f32s(&field), FORWARD);
                }
            }
        }
    }
}

fn mixer<B: AutodiffBackend>() {
    let device = Default::default();
    let golden = Golden::open("hspec/mamba_mixer");
    let cases = golden.cases();
    assert!(!cases.is_empty());
    for (case, notes) in cases {
        let size = |field: &str| notes[field].as_u64().expect("a size") as usize;
        let config = MambaConfig {
            hidden: size("hidden"),
            d_state: size("d_state"),
            num_heads: size("num_heads"),
            head_dim: size("head_dim"),
            n_groups: size("n_groups"),
            conv_kernel: size("conv_kernel"),
        };
        config.validate().expect("sizes that fit");
        let name = |field: &str| format!("{case}/{field}");
        let weight = |path: &str| {
            let path = name(&format!("weights.{path}"));
            golden.has(&path).then(|| golden.data(&path))
        };
        let mixer = Mamba2Mixer::<B>::init(&config, &device);
        let mixer = params::fill(mixer, &device, weight, |_| true).expect("the fixture has every weight");
        let x = golden.float::<B, 3>(&name("hidden_states"), &device).require_grad();
        let initial = golden.float::<B, 4>(&name("initial_state"), &device).require_grad();

        let forward = |field: &str, found: Vec<f32>| {
            let field = name(field);
            hspec_goldens::assert_close(&field, &found, &golden.f32s(&field), FORWARD);
        };
        let (zero, _) = mixer.forward(x.clone(), None);
        forward("output_zero_state", zero.into_data().iter::<f32>().collect());
        let (output, state) = mixer.forward(x.clone(), Some(initial.clone()));
        forward("output", output.clone().into_data().iter::<f32>().collect());
        forward("final_state", state.into_data().iter::<f32>().collect());

        let gradients = (output * golden.float(&name("grad_output"), &device)).sum().backward();
        fn check<B: AutodiffBackend, const D: usize>(
            golden: &Golden,
            field: &str,
            tensor: &Tensor<B, D>,
            gradients: &B::Gradients,
        ) {
            let found = tensor.grad(gradients).unwrap_or_else(|| panic!("{field} got no gradient"));
            assert_tensor(field, found, &golden.f32s(field), GRADIENT);
        }
        check(&golden, &name("grad.hidden_states"), &x, &gradients);
        check(&golden, &name("grad.initial_state"), &initial, &gradients);
        check(&golden, &name("grad.in_proj.weight"), &mixer.in_proj.weight.val(), &gradients);
        check(&golden, &name("grad.conv1d.weight"), &mixer.conv1d.weight.val(), &gradients);
        check(&golden, &name("grad.conv1d.bias"), &mixer.conv1d.bias.val(), &gradients);
        check(&golden, &name("grad.A_log"), &mixer.A_log.val(), &gradients);
        check(&golden, &name("grad.D"), &mixer.D.val(), &gradients);
        check(&golden, &name("grad.dt_bias"), &mixer.dt_bias.val(), &gradients);
        check(&golden, &name("grad.norm.weight"), &mixer.norm.weight.val(), &gradients);
        check(&golden, &name("grad.out_proj.weight"), &mixer.out_proj.weight.val(), &gradients);
    }
}

#[test]
fn golden_scan_on_flex() {
    scan::<Flex>();
}

#[test]
fn golden_scan_on_ndarray() {
    scan::<NdArray>();
}

#[test]
fn golden_mixer_with_gradients_on_flex() {
    mixer::<Flex>();
}

#[test]
fn golden_mixer_with_gradients_on_ndarray() {
    mixer::<NdArray>();
}
