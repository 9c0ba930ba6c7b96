//! What a run leaves for who watches it: `metrics.jsonl`, TensorBoard's event files, `curves.svg`.

use crate::{curves::Curves, event_file::EventFile, run_dir::RunDir};
use hspec_core::{Result, checkpoint::write_atomic};
use serde::Serialize;
use serde_json::Value;

/// Writes all of them.
pub(crate) struct Journal<'a> {
    dir: &'a RunDir,
    events: EventFile,
    curves: Curves,
}

impl<'a> Journal<'a> {
    /// Goes on behind `step`: what was written of later steps is void, and everything where that is 0.
    ///
    /// # Errors
    /// When the folder cannot be read or written.
    pub(crate) fn open(dir: &'a RunDir, step: usize) -> Result<Self> {
        let mut curves = Curves::default();
        dir.rewind_metrics(step)?.iter().for_each(|line| curves.take(line));
        let first = if step == 0 { 0 } else { step + 1 };
        Ok(Self { dir, events: EventFile::begin(dir.path(), first)?, curves })
    }

    /// Writes what a step or a measurement came to.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub(crate) fn write(&mut self, metrics: &impl Serialize) -> Result<()> {
        let line = serde_json::to_value(metrics).expect("metrics are numbers");
        self.dir.log(&line)?;
        let step = line["step"].as_u64().unwrap_or_default() as usize;
        self.events.scalars(step, &scalars(&line))?;
        self.curves.take(&line);
        Ok(())
    }

    /// Draws the curves anew.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub(crate) fn draw(&self) -> Result<()> {
        let drawing = self.curves.draw();
        write_atomic(&self.dir.file("curves.svg"), |out| out.write_all(drawing.as_bytes()))
    }
}

/// The numbers of a line of metrics under the names that TensorBoard groups them by.
fn scalars(line: &Value) -> Vec<(String, f64)> {
    let mut scalars = Vec::new();
    for (key, value) in line.as_object().into_iter().flatten() {
        let tag = match key.as_str() {
            "step" => continue,
            "loss" => "loss/total".to_owned(),
            "ce" | "tv" | "kl" | "confidence" => format!("loss/{key}"),
            "tau" | "passes" => format!("simulated/{key}"),
            "accuracy" | "expected_length" => format!("agreement/{key}"),
            "grad_norm" | "lr_scale" => format!("optimiser/{key}"),
            _ => format!("step/{key}"),
        };
        match value {
            Value::Array(slots) => scalars
                .extend((1..).zip(slots).filter_map(|(i, v)| Some((format!("{tag}_slot_{i}"), v.as_f64()?)))),
            number => scalars.extend(number.as_f64().map(|number| (tag, number))),
        }
    }
    scalars
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{event_file::testing, recipe::Recipe, run_dir::Identity};
    use serde_json::json;

    const RECIPE: &str = "[drafter]\nblock_pattern = \"mamba mlp\"\nfusion_layers = [1]\nkv_layers = []\n\
        intermediate_size = 8\nmamba_heads = 1\nmamba_head_dim = 8\ndraft_vocab = 8\nmarkov_rank = 0\n\
        mask_token = 1\n[train]\nsteps = 8\ntokens_per_step = 100\nanchors_per_step = 24\n\
        warm_start = \"none\"\noptimizer = \"adamw\"\nlr = 1e-3\nce = 1.0\n";

    /// A run that is killed behind step 5 and continued from step 3 leaves every step once, in all files.
    #[test]
    fn steps_that_are_done_again_are_told_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("given.toml");
        std::fs::write(&file, RECIPE).unwrap();
        let recipe = Recipe::read(&file).unwrap();
        let identity = Identity { target: "t".into(), prompts: "p".into() };
        let run = dir.path().join("run");
        let dir = RunDir::open(&run, &recipe, &identity, false).unwrap();
        let step = |i: usize, loss: f64| json!({ "step": i, "loss": loss, "accuracy": [0.5, 0.25] });
        let mut journal = Journal::open(&dir, 0).unwrap();
        journal.write(&json!({ "step": 0, "tau": 1.0, "passes": 3 })).unwrap();
        (1..=5).for_each(|i| journal.write(&step(i, 9.0)).unwrap());
        let mut journal = Journal::open(&dir, 3).unwrap();
        (4..=6).for_each(|i| journal.write(&step(i, 7.0)).unwrap());
        journal.write(&json!({ "step": 6, "tau": 2.0, "passes": 3 })).unwrap();
        journal.draw().unwrap();
        let losses = [(1, 9.0), (2, 9.0), (3, 9.0), (4, 7.0), (5, 7.0), (6, 7.0)];
        let events = testing::run(&run);
        assert_eq!(events["loss/total"], losses);
        assert_eq!(events["simulated/tau"], [(0, 1.0), (6, 2.0)]);
        assert_eq!(events["agreement/accuracy_slot_2"].len(), 6);
        let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let found: Vec<(usize, f32)> = lines
            .filter_map(|line| Some((line["step"].as_u64()? as usize, line["loss"].as_f64()? as f32)))
            .collect();
        assert_eq!(found, losses);
        let drawn = std::fs::read_to_string(run.join("curves.svg")).unwrap();
        assert!(drawn.contains("step 6: 2.000") && drawn.contains("step 2: 9.000"), "{drawn}");
        assert!(!drawn.contains("step 5: 9.000"));

        // One that begins anew has nothing of before.
        drop(Journal::open(&dir, 0).unwrap());
        assert!(testing::run(&run).values().all(Vec::is_empty));
    }
}
