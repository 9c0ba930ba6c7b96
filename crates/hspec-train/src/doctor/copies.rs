//! The drafter's copies of the target's tensors.

use super::{
    Drafter,
    check::{Compared, Told, Verdict},
    target::{Opened, finite, floats},
};
use burn::tensor::backend::Backend;
use hspec_core::{Result, TokenId, checkpoint::Weights, drafter};

/// Half of bf16's last place: copies may be rounded.
const ROUNDED: f32 = 1.0 / 256.0;

/// Relative error below which numbers may be those of a quantised model. Four bits in blocks of 32 leave about 0.09
/// of normally distributed numbers, 0.11 where a few are far larger than the rest.
const QUANTISED: f64 = 0.15;

/// A copy beside what it is one of.
struct Copy {
    /// Numbers that differ by more than rounding.
    others: usize,
    numbers: usize,
    /// Root mean square of the differences over that of the numbers.
    noise: f64,
    compared: Compared,
}

impl Copy {
    fn new(found: &[f32], expected: &[f32]) -> Self {
        let rounded = |a: f32, b: f32| (a - b).abs() <= ROUNDED * b.abs();
        let pairs = || found.iter().zip(expected);
        let squares =
            |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
        let noise = squares(&mut pairs().map(|(a, b)| a - b)) / squares(&mut expected.iter().copied());
        Self {
            others: pairs().filter(|(a, b)| !rounded(**a, **b)).count(),
            numbers: expected.len(),
            noise: noise.sqrt(),
            compared: Compared::of(found, expected),
        }
    }

    /// A fault changes few numbers, or many by a lot; where many differ by little, one of the two models was
    /// quantised.
    fn verdict(&self) -> Verdict {
        match self.others {
            0 => Verdict::Ok,
            n if 10 * n > self.numbers && self.noise < QUANTISED => Verdict::Warning,
            _ => Verdict::Differs,
        }
    }
}

/// Compares the copies that the files hold, and makes sure that all numbers are finite.
pub(super) fn check<B: Backend>(drafter: &Drafter<'_>, opened: &Opened<B>, told: &mut Told<'_>) {
    if told
        .attempt("drafter weights", "finite numbers", || Ok((finite(&Weights::open(drafter.dir)?)?, ())))
        .is_none()
    {
        return;
    }
    let own = |name: &str| drafter.outline.tensors.iter().any(|t| t.name == name && t.trained);
    for (name, tensor) in
        [("copy of the embedding", "embed_tokens.weight"), ("copy of the output head", "lm_head.weight")]
    {
        if own(tensor) {
            told.skip(name, "this kind trains it");
            continue;
        }
        match copy(drafter, opened, tensor) {
            Ok(Some(copy)) => {
                let Copy { others, numbers, noise, compared } = &copy;
                let mut found = format!("{others} of {numbers} numbers are others");
                if copy.verdict() == Verdict::Warning {
                    found += &format!(" ({:.1} % root mean square), as of a quantised model", 100.0 * noise);
                }
                let found = (found, "the target's, rounded at most");
                told.measured(name, copy.verdict(), found, compared.difference);
            }
            Ok(None) => told.skip(name, "the file leaves it to the target"),
            Err(error) => told.holds(name, false, error.to_string(), "the target's"),
        }
    }
}

fn copy<B: Backend>(drafter: &Drafter<'_>, opened: &Opened<B>, tensor: &str) -> Result<Option<Copy>> {
    let target = &opened.target;
    let Some(found) = Weights::open(drafter.dir)?.tensor(tensor)? else { return Ok(None) };
    let found: Vec<f32> = found.iter::<f32>().collect();
    let expected = if tensor == "embed_tokens.weight" {
        floats(target.embedding())
    } else {
        let loaded = drafter::load(drafter.dir, target, target.device())?;
        let all: Vec<TokenId> = (0..target.config().vocab_size as u32).map(TokenId).collect();
        let kept: Vec<usize> = loaded.vocabulary().unwrap_or(&all).iter().map(|id| id.index()).collect();
        floats(target.head().rows(&kept))
    };
    if found.len() != expected.len() {
        let sizes = (format!("{} numbers", found.len()), format!("{} numbers", expected.len()));
        return Err(hspec_core::Error::invalid(drafter.dir, tensor, sizes.0, sizes.1));
    }
    Ok(Some(Copy::new(&found, &expected)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_a_quantised_model_are_no_fault() {
        let numbers: Vec<f32> = (1..=1000).map(|i| (i as f32 * 0.37).sin()).collect();
        let verdict = |change: &dyn Fn(usize, f32) -> f32| {
            let found: Vec<f32> = numbers.iter().enumerate().map(|(i, &x)| change(i, x)).collect();
            Copy::new(&found, &numbers).verdict()
        };
        assert_eq!(verdict(&|_, x| x * 1.003), Verdict::Ok);
        // Eight and four bits in blocks of 32, one number of which is far larger than the rest.
        let numbers: Vec<f32> =
            numbers.iter().enumerate().map(|(i, &x)| if i % 32 == 5 { 3.0 * x } else { x }).collect();
        for (bits, noise) in [(127.0, 0.001..0.02), (7.0, 0.05..0.13)] {
            let block = |block: &[f32]| {
                let step = block.iter().fold(0.0f32, |most, x| most.max(x.abs())) / bits;
                block.iter().map(|x| (x / step).round() * step).collect::<Vec<_>>()
            };
            let found: Vec<f32> = numbers.chunks(32).flat_map(block).collect();
            let copy = Copy::new(&found, &numbers);
            assert!(noise.contains(&copy.noise), "{}", copy.noise);
            assert_eq!(copy.verdict(), Verdict::Warning);
        }
        assert_eq!(verdict(&|i, x| if i == 7 { x + 0.01 } else { x }), Verdict::Differs);
        assert_eq!(verdict(&|i, _| numbers[(i + 1) % 1000]), Verdict::Differs);
        assert_eq!(verdict(&|_, x| 1.2 * x), Verdict::Differs);
        assert_eq!(verdict(&|i, x| if i == 7 { f32::NAN } else { x * 1.02 }), Verdict::Differs);
    }
}
