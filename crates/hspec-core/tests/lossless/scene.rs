//! Toy targets and drafters, and rounds of drafting and verifying over them.

use hspec_core::{
    TokenId,
    decode::{Chance, Draft, Law, Purpose, SamplingParams, Verdict, verify},
};

/// A target and a drafter whose logits depend on the whole context, and how a request samples.
#[derive(Debug, Clone)]
pub struct Scene {
    pub vocabulary: u32,
    pub k: usize,
    pub seed: u64,
    pub temperature: f64,
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
    /// The tokens that the target can emit; all if none.
    pub possible: Option<Vec<u32>>,
    /// The drafter's vocabulary, if it is pruned.
    pub pruned: Option<Vec<u32>>,
    /// The drafter takes its maximum at any temperature.
    pub greedy_drafts: bool,
    /// The drafter knows the target's logits.
    pub same: bool,
}

impl Scene {
    pub fn new(vocabulary: u32, k: usize) -> Self {
        Self {
            vocabulary,
            k,
            seed: 1,
            temperature: 1.0,
            top_k: None,
            top_p: None,
            possible: None,
            pruned: None,
            greedy_drafts: false,
            same: false,
        }
    }

    pub fn params(&self) -> SamplingParams {
        SamplingParams::new(self.temperature, self.top_k, self.top_p).expect("the scene's are valid")
    }

    /// Numbers between -2 and 2 that look random: a hash of (seed, model, context, token).
    fn logits(&self, model: u64, context: &[u32]) -> Vec<f32> {
        let mix = |h: u64, x: u64| {
            let h = (h ^ x).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            h ^ (h >> 29)
        };
        let state = context.iter().fold(mix(self.seed, model), |h, &t| mix(h, u64::from(t) + 1));
        let number = |t| (mix(mix(state, 77), t) >> 40) as f32 / (1 << 22) as f32 - 2.0;
        (0..u64::from(self.vocabulary)).map(number).collect()
    }

    pub fn target_logits(&self, context: &[u32]) -> Vec<f32> {
        let mut logits = self.logits(0, context);
        for (t, logit) in (0..).zip(&mut logits) {
            if self.possible.as_ref().is_some_and(|possible| !possible.contains(&t)) {
                *logit = f32::NEG_INFINITY;
            }
        }
        logits
    }

    fn target(&self, context: &[u32]) -> Law {
        self.params().distribution(&self.target_logits(context), context.len() as u64).expect("finite logits")
    }

    pub fn drafter(&self, context: &[u32]) -> Law {
        let params = if self.greedy_drafts { SamplingParams::greedy() } else { self.params() };
        self.drafter_with(&params, context)
    }

    pub fn drafter_with(&self, params: &SamplingParams, context: &[u32]) -> Law {
        let logits = if self.same { self.target_logits(context) } else { self.logits(1, context) };
        let kept: Vec<_> = match &self.pruned {
            Some(kept) => kept.iter().map(|&t| TokenId(t)).collect(),
            None => (0..self.vocabulary).map(TokenId).collect(),
        };
        let logits: Vec<_> = kept.iter().map(|t| logits[t.index()]).collect();
        params.draft_distribution(&logits, Some(&kept), context.len() as u64).expect("finite logits")
    }

    /// The target's law by the definitions, written without the library.
    pub fn reference(&self, context: &[u32]) -> Vec<f64> {
        let logits = self.target_logits(context);
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        if self.temperature == 0.0 {
            order.truncate(1);
        }
        order.truncate(self.top_k.unwrap_or(usize::MAX));
        let weight = |&i: &usize| match self.temperature {
            0.0 => 1.0,
            t => (f64::from(logits[i]) / t).exp(),
        };
        let total: f64 = order.iter().map(weight).sum();
        let mut reached = 0.0;
        order.retain(|i| {
            let keep = reached < self.top_p.unwrap_or(2.0);
            reached += weight(i) / total;
            keep
        });
        let total: f64 = order.iter().map(weight).sum();
        let mut law = vec![0.0; logits.len()];
        order.iter().for_each(|i| law[*i] = weight(i) / total);
        law
    }
}

/// One drafted block and everything that a verifier, right or wrong, might look at.
pub struct Round<'a> {
    pub scene: &'a Scene,
    pub context: &'a [u32],
    pub drafts: Vec<Draft>,
}

impl<'a> Round<'a> {
    pub fn draft(scene: &'a Scene, context: &'a [u32], chance: &mut dyn Chance) -> Self {
        let mut round = Round { scene, context, drafts: vec![] };
        for i in 0..scene.k {
            let law = scene.drafter(&round.context_of(i));
            let token = chance.pick(round.start() + i as u64, Purpose::Draft, &law);
            round.drafts.push(Draft { token, law });
        }
        round
    }

    pub fn start(&self) -> u64 {
        self.context.len() as u64
    }

    pub fn context_of(&self, row: usize) -> Vec<u32> {
        self.context.iter().copied().chain(self.drafts[..row].iter().map(|d| d.token.0)).collect()
    }

    pub fn target(&self, row: usize) -> Law {
        self.scene.target(&self.context_of(row))
    }
}

/// Decides about a round.
pub type Verifier = fn(&Round<'_>, &mut dyn Chance) -> Verdict;

/// The library's own.
pub fn right(round: &Round<'_>, chance: &mut dyn Chance) -> Verdict {
    verify(&round.drafts, |row| Ok(round.target(row)), round.start(), chance).expect("laws exist")
}

/// The context after one round.
pub fn step(scene: &Scene, verifier: Verifier, context: &[u32], chance: &mut dyn Chance) -> Vec<u32> {
    let round = Round::draft(scene, context, chance);
    let verdict = verifier(&round, chance);
    let mut context = round.context_of(verdict.accepted);
    context.push(verdict.next.0);
    context
}

/// Scenes by name: every kind of law of target and drafter.
pub fn scenes() -> Vec<(&'static str, Scene)> {
    let base = Scene::new(4, 2);
    vec![
        ("k = 1", Scene::new(5, 1)),
        ("k = 2", Scene::new(5, 2)),
        ("k = 3", Scene::new(4, 3)),
        ("no drafts", Scene::new(4, 0)),
        ("temperature", Scene { temperature: 0.6, ..base.clone() }),
        ("high temperature", Scene { temperature: 1.7, ..Scene::new(3, 3) }),
        ("greedy", Scene { temperature: 0.0, ..Scene::new(4, 3) }),
        ("top-k", Scene { top_k: Some(2), ..base.clone() }),
        ("top-p", Scene { top_p: Some(0.7), ..base.clone() }),
        ("both", Scene { temperature: 0.8, top_k: Some(3), top_p: Some(0.8), ..Scene::new(5, 2) }),
        ("pruned", Scene { pruned: Some(vec![0, 3]), ..base.clone() }),
        ("pruned, 3 drafts", Scene { pruned: Some(vec![1, 2, 4]), temperature: 0.7, ..Scene::new(5, 3) }),
        ("pruned and truncated", Scene { pruned: Some(vec![1, 2, 3]), top_p: Some(0.8), ..Scene::new(5, 2) }),
        ("one-hot drafts", Scene { greedy_drafts: true, ..Scene::new(4, 3) }),
        ("one-hot pruned", Scene { greedy_drafts: true, pruned: Some(vec![1, 2]), ..base.clone() }),
        ("disjoint", Scene { possible: Some(vec![0, 2]), pruned: Some(vec![1, 3]), ..base.clone() }),
        ("identical", Scene { same: true, ..Scene::new(4, 3) }),
    ]
}
