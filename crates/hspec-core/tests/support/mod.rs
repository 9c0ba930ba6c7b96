//! Exact laws of programs that make random choices, by walking all their branches.

use hspec_core::{
    TokenId,
    decode::{Chance, Law, Purpose},
};
use std::collections::BTreeMap;

/// A [`Chance`] that takes every branch once and knows its weight.
#[derive(Default)]
pub struct Explorer {
    choices: Vec<Choice>,
    depth: usize,
    weight: f64,
}

struct Choice {
    taken: usize,
    options: Vec<f64>,
}

impl Explorer {
    /// The law of what `run` returns.
    pub fn law<T: Ord>(mut run: impl FnMut(&mut Explorer) -> T) -> BTreeMap<T, f64> {
        let mut law = BTreeMap::new();
        let mut explorer = Explorer::default();
        loop {
            (explorer.depth, explorer.weight) = (0, 1.0);
            let outcome = run(&mut explorer);
            *law.entry(outcome).or_insert(0.0) += explorer.weight;
            // The last choice with an option left takes it; those below it start anew.
            loop {
                match explorer.choices.last_mut() {
                    None => return law,
                    Some(last) if last.taken + 1 < last.options.len() => {
                        last.taken += 1;
                        break;
                    }
                    Some(_) => explorer.choices.pop(),
                };
            }
        }
    }

    /// Index of the option taken; all options have positive weight.
    fn choose(&mut self, options: Vec<f64>) -> usize {
        if self.depth == self.choices.len() {
            self.choices.push(Choice { taken: 0, options });
        }
        let choice = &self.choices[self.depth];
        self.depth += 1;
        self.weight *= choice.options[choice.taken];
        choice.taken
    }
}

impl Chance for Explorer {
    fn accept(&mut self, _: u64, probability: f64) -> bool {
        assert!((0.0..=1.0).contains(&probability), "{probability}");
        let outcomes =
            [(true, probability), (false, 1.0 - probability)].map(|(o, p)| (p > 0.0).then_some((o, p)));
        let outcomes: Vec<_> = outcomes.into_iter().flatten().collect();
        outcomes[self.choose(outcomes.iter().map(|o| o.1).collect())].0
    }

    fn pick(&mut self, _: u64, _: Purpose, law: &Law) -> TokenId {
        let (tokens, probabilities): (Vec<_>, Vec<_>) = law.iter().unzip();
        tokens[self.choose(probabilities)]
    }
}
