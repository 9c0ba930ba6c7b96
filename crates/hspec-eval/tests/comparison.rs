//! A comparison of crafted records, its figures worked out by hand.

#![allow(clippy::unwrap_used)] // a test: a panic is how it fails

use hspec_eval::{
    DrafterFacts, Machine,
    comparison::{
        Cell, DrafterEntry, Estimate, Manifest, Missing, PromptEntry, Record, Results, Rival, TargetFacts,
        TaskEntry, Timing,
    },
};

fn drafter(name: &str, kv_bytes_per_token: u64) -> DrafterEntry {
    let facts = DrafterFacts {
        path: format!("drafters/{name}"),
        kind: "hspec".into(),
        params_trainable: 12_000_000,
        params_frozen: 0,
        kv_bytes_per_token,
        state_bytes: 64,
    };
    DrafterEntry { name: name.into(), fingerprint: name.into(), facts }
}

fn task(name: &str, context: Option<usize>, prompts: usize) -> TaskEntry {
    let prompt = |i: usize| PromptEntry { id: format!("p{i}"), tokens: 100, fingerprint: format!("{i}") };
    TaskEntry { task: name.into(), context, prompts: (0..prompts).map(prompt).collect() }
}

fn manifest(drafters: &[&str], tasks: Vec<TaskEntry>, seeds: &[u64]) -> Manifest {
    Manifest {
        schema: 1,
        command: "cargo xtask compare".into(),
        date: "2026-11-30".into(),
        commit: "abc1234".into(),
        machine: Machine { cpu: "some".into(), threads: 2 },
        target: TargetFacts { path: "models/t".into(), fingerprint: "t".into(), kv_bytes_per_token: 1 << 10 },
        max_new_tokens: 64,
        ks: vec![3],
        temperatures: vec![0.0],
        seeds: seeds.to_vec(),
        drafters: drafters.iter().enumerate().map(|(i, name)| drafter(name, 512 * i as u64)).collect(),
        tasks,
        missing: Vec::new(),
    }
}

/// Half a second of plain decoding per ten tokens; with a drafter, a tenth of a second per round.
fn record(drafter: &str, task: &str, prompt: usize, seed: u64, rounds: &[(usize, usize)]) -> Record {
    let tokens: usize = rounds.iter().map(|(_, accepted)| accepted + 1).sum();
    let (seconds, plain) = (0.1 * rounds.len() as f64, 0.05 * tokens as f64);
    Record {
        cell: Cell { drafter: drafter.into(), task: task.into(), k: 3, temperature: 0.0, context: None },
        prompt: format!("p{prompt}"),
        seed,
        prompt_tokens: 100,
        rounds: rounds.to_vec(),
        stopped: false,
        confidence: Vec::new(),
        same_text: true,
        plain_tokens: tokens as u64,
        plain: Timing { total: plain, draft: 0.0, target: 0.8 * plain, sampling: 0.2 * plain },
        drafted: Timing {
            total: seconds,
            draft: 0.2 * seconds,
            target: 0.6 * seconds,
            sampling: 0.1 * seconds,
        },
        peak_bytes: Some([1000, 1000 + prompt as u64]),
    }
}

fn close(found: Estimate, value: f64, ci: Option<[f64; 2]>) {
    approx::assert_relative_eq!(found.value, value, max_relative = 1e-12);
    assert_eq!(found.ci.is_some(), ci.is_some(), "{found:?}");
    for (found, expected) in found.ci.into_iter().flatten().zip(ci.into_iter().flatten()) {
        approx::assert_relative_eq!(found, expected, max_relative = 1e-12);
    }
}

/// One task, three prompts, two drafters. Of three prompts one resample in 27 is the same prompt three times,
/// more than a fortieth, so that both ends of an interval are the extremes of the prompts.
fn crafted() -> Results {
    let mut records = vec![
        // tau 4, 2, 1.
        record("a", "t", 0, 0, &[(3, 3), (3, 3)]),
        record("a", "t", 1, 0, &[(3, 1), (3, 1)]),
        record("a", "t", 2, 0, &[(3, 0), (3, 0)]),
        // tau 2, 2, 1.
        record("b", "t", 0, 0, &[(3, 1), (3, 1), (3, 1), (3, 1)]),
        record("b", "t", 1, 0, &[(3, 1), (3, 1)]),
        record("b", "t", 2, 0, &[(3, 0), (3, 0)]),
    ];
    records[0].confidence = vec![(0.9, true), (0.9, true), (0.8, true)];
    records[1].confidence = vec![(0.9, true), (0.2, false)];
    records[4].same_text = false;
    Results::new(manifest(&["a", "b"], vec![task("t", None, 3)], &[0]), &records).unwrap()
}

#[test]
fn figures_and_intervals_by_hand() {
    let results = crafted();
    assert_eq!((results.settings.len(), results.unmeasured), (1, 0));
    let [a, b] = &results.settings[0].drafters[..] else { panic!("two drafters") };
    let all = &a.all;
    assert_eq!((all.prompts, all.answers, all.rounds, all.tokens), (3, 3, 6, 14));
    close(all.tau.unwrap(), 14.0 / 6.0, Some([1.0, 4.0]));
    close(all.mean_tau.unwrap(), 14.0 / 6.0, Some([1.0, 4.0]));
    close(b.all.tau.unwrap(), 14.0 / 8.0, Some([1.0, 2.0]));
    assert_eq!((&all.reached[..], &all.accepted[..]), (&[6, 4, 2][..], &[4, 2, 2][..]));
    close(all.conditional[0].unwrap(), 4.0 / 6.0, Some([0.0, 1.0]));
    // Resamples of the last prompt alone reach no second slot.
    close(all.conditional[1].unwrap(), 0.5, None);
    close(all.survival[1].unwrap(), 2.0 / 6.0, Some([0.0, 1.0]));
    close(b.all.survival[2].unwrap(), 0.0, Some([0.0, 0.0]));
    assert!(b.all.conditional[2].is_none(), "no round of b reached the third slot");
    assert_eq!((a.all.same_text, b.all.same_text), (3, 2));

    // Tokens per second: 20 plainly, with a 14 in 0.6 s.
    let time = all.time.as_ref().unwrap();
    close(time.speedup, 14.0 / 0.6 / 20.0, Some([0.5, 2.0]));
    close(time.ms_per_token, 600.0 / 14.0, Some([25.0, 100.0]));
    approx::assert_relative_eq!(time.draft_ms, 120.0 / 14.0, max_relative = 1e-12);
    approx::assert_relative_eq!(time.verify_ms, 360.0 / 14.0, max_relative = 1e-12);
    approx::assert_relative_eq!(time.sampling_ms, 60.0 / 14.0, max_relative = 1e-12);
    approx::assert_relative_eq!(time.plain.target_ms, 40.0, max_relative = 1e-12);
    // A round drafts for 0.02 s and verifies for 0.06 s; a plain pass takes 0.04 s.
    let tau = 14.0 / 6.0;
    approx::assert_relative_eq!(time.predicted_speedup.unwrap(), tau * 0.04 / 0.08, max_relative = 1e-12);
    let free = time.predicted_if_verifying_were_free.unwrap();
    approx::assert_relative_eq!(free, tau * 0.04 / 0.06, max_relative = 1e-12);

    // Differences: of prompts 2, 0 and 0 where resampled alone.
    let [gain] = &all.tau_gains[..] else { panic!("{:?}", all.tau_gains) };
    assert_eq!((gain.against.as_str(), gain.rival, gain.is_clear()), ("b", Rival::Best, false));
    close(gain.difference, 14.0 / 6.0 - 14.0 / 8.0, Some([0.0, 2.0]));
    close(gain.relative, 8.0 / 6.0 - 1.0, Some([0.0, 1.0]));
    let [loss] = &b.all.tau_gains[..] else { panic!("{:?}", b.all.tau_gains) };
    close(loss.relative, 6.0 / 8.0 - 1.0, Some([-0.5, 0.0]));

    let confidence = all.confidence.as_ref().unwrap();
    assert_eq!(confidence.predictions, 5);
    // By bins: three of 0.9, one of 0.8, one of 0.2.
    approx::assert_relative_eq!(confidence.ece, (3.0 * 0.1 + 0.2 + 0.2) / 5.0, max_relative = 1e-6);
    assert_eq!(confidence.auroc, Some(1.0));
    assert!(b.all.confidence.is_none());

    // Longest: 100 + 1 + 8 tokens with a and b.
    assert_eq!(
        (all.memory.longest_context, all.memory.drafter_bytes, all.memory.target_bytes),
        (109, 64, 109 << 10)
    );
    assert_eq!((b.all.memory.drafter_bytes, b.all.memory.peak_bytes), (109 * 512 + 64, Some(1002)));
    let contexts: Vec<_> = all.contexts.iter().map(|c| (c.from, c.below, c.rounds)).collect();
    assert_eq!(contexts, [(0, Some(128), 6)]);
}

#[test]
fn seeds_of_a_prompt_stay_together() {
    // Seeds differ wildly within a prompt and not at all between prompts: nothing varies by prompt.
    let mut records = Vec::new();
    for prompt in 0..4 {
        records.push(record("a", "t", prompt, 1, &[(3, 3)]));
        records.push(record("a", "t", prompt, 2, &[(3, 0)]));
    }
    let results = Results::new(manifest(&["a"], vec![task("t", None, 4)], &[1, 2]), &records).unwrap();
    let all = &results.settings[0].drafters[0].all;
    assert_eq!((all.prompts, all.answers), (4, 8));
    close(all.tau.unwrap(), 2.5, Some([2.5, 2.5]));
    assert!(all.tau_gains.is_empty());
}

#[test]
fn trainings_of_a_drafter_are_pooled_and_resampled() {
    // Trainings differ wildly and prompts not at all: 4 or 1 in a quarter of the resamples each.
    let mut records = Vec::new();
    for prompt in 0..4 {
        records.push(record("a#0", "t", prompt, 0, &[(3, 3)]));
        records.push(record("b", "t", prompt, 0, &[(3, 1)]));
        records.push(record("a#1", "t", prompt, 0, &[(3, 0)]));
    }
    let plan = manifest(&["a#0", "b", "a#1"], vec![task("t", None, 4)], &[0]);
    let results = Results::new(plan, &records).unwrap();
    let [a, b] = &results.settings[0].drafters[..] else { panic!("two rows") };
    assert_eq!((a.drafter.as_str(), b.drafter.as_str()), ("a", "b"));
    assert_eq!((a.all.prompts, a.all.answers, b.all.answers), (4, 8, 4));
    close(a.all.mean_tau.unwrap(), 2.5, Some([1.0, 4.0]));
    close(b.all.mean_tau.unwrap(), 2.0, Some([2.0, 2.0]));
    close(a.all.tau_gains[0].difference, 0.5, Some([-1.0, 2.0]));
    let [first, second] = &a.trainings[..] else { panic!("two trainings") };
    assert_eq!((first.name.as_str(), second.name.as_str()), ("a#0", "a#1"));
    close(first.mean_tau.unwrap(), 4.0, Some([4.0, 4.0]));
    close(second.mean_tau.unwrap(), 1.0, Some([1.0, 1.0]));
    assert!(b.trainings.is_empty());
    assert!(results.to_markdown().contains("| a | a#1 | 1.00 [1.00, 1.00] |"));
    assert!(results.to_html().unwrap().contains("Each training"));
    // Trainings alike and prompts not: the same prompts are drawn for both, so that nothing differs.
    let mut records = Vec::new();
    for prompt in 0..3 {
        let rounds: &[(usize, usize)] = [&[(3, 3)], &[(3, 1)], &[(3, 0)]][prompt];
        for name in ["a#0", "a#1", "b"] {
            records.push(record(name, "t", prompt, 0, rounds));
        }
    }
    let plan = manifest(&["a#0", "a#1", "b"], vec![task("t", None, 3)], &[0]);
    let results = Results::new(plan, &records).unwrap();
    let [a, b] = &results.settings[0].drafters[..] else { panic!("two rows") };
    assert_eq!((a.all.tau.unwrap().ci, a.all.rounds), (b.all.tau.unwrap().ci, 2 * b.all.rounds));
    close(a.all.tau_gains[0].difference, 0.0, Some([0.0, 0.0]));
}

#[test]
fn means_over_tasks_are_unweighted_and_ratios_are_not() {
    let records = [
        record("a", "t", 0, 0, &[(3, 3)]),
        record("a", "t", 1, 0, &[(3, 3)]),
        record("a", "u", 0, 0, &[(3, 0), (3, 0), (3, 0)]),
        record("a", "u", 1, 0, &[(3, 0), (3, 0), (3, 0)]),
    ];
    let tasks = vec![task("t", None, 2), task("u", None, 2)];
    let results = Results::new(manifest(&["a"], tasks, &[0]), &records).unwrap();
    let drafter = &results.settings[0].drafters[0];
    close(drafter.all.mean_tau.unwrap(), 2.5, Some([2.5, 2.5]));
    close(drafter.all.tau.unwrap(), 14.0 / 8.0, Some([14.0 / 8.0, 14.0 / 8.0]));
    let taus: Vec<f64> = drafter.tasks.iter().map(|t| t.figures.tau.unwrap().value).collect();
    assert_eq!(taus, [4.0, 1.0]);
    // tau 4 at half the rounds per second: speed-ups 2 and 0.5.
    close(drafter.all.time.as_ref().unwrap().mean_speedup.unwrap(), 1.25, Some([1.25, 1.25]));
}

#[test]
fn an_accepted_stop_yields_no_bonus_token() {
    let mut stopped = record("a", "t", 0, 0, &[(3, 3), (2, 2)]);
    stopped.stopped = true;
    let results = Results::new(manifest(&["a"], vec![task("t", None, 1)], &[0]), &[stopped]).unwrap();
    let all = &results.settings[0].drafters[0].all;
    close(all.tau.unwrap(), 3.0, None);
    assert_eq!((&all.proposed[..], &all.reached[..]), (&[2, 2, 1][..], &[2, 2, 1][..]));
}

#[test]
fn what_is_not_complete_is_left_out_and_counted() {
    let mut records = vec![
        record("a", "t", 0, 0, &[(3, 3)]),
        record("b", "t", 0, 0, &[(3, 1)]),
        record("a", "t", 1, 0, &[(3, 0)]),
    ];
    let plan = || manifest(&["a", "b"], vec![task("t", None, 2)], &[0]);
    let results = Results::new(plan(), &records).unwrap();
    assert_eq!(results.unmeasured, 1);
    assert_eq!(results.settings[0].drafters[0].all.prompts, 1);
    assert!(results.to_markdown().contains("1 answers are not measured yet"));
    let error = Results::new(plan(), &records[2..]).unwrap_err().to_string();
    assert!(error.contains("no prompt has been measured"), "{error}");
    records[0].rounds = vec![(3, 4)];
    let error = Results::new(plan(), &records).unwrap_err().to_string();
    assert!(error.starts_with("task t, prompt p0: ") && error.contains("impossible"), "{error}");
}

#[test]
fn plans_that_contradict_each_other_are_told_apart() {
    let plan = |tasks| manifest(&["a"], tasks, &[0]);
    let (short, long) = (plan(vec![task("t", None, 2)]), plan(vec![task("t", None, 4), task("u", None, 1)]));
    assert_eq!((long.conflict(&short), short.conflict(&long)), (None, None));
    let conflict = |change: &dyn Fn(&mut Manifest)| {
        let mut other = plan(vec![task("t", None, 2)]);
        change(&mut other);
        other.conflict(&short).unwrap_or_default()
    };
    assert!(conflict(&|m| m.target.fingerprint = "x".into()).starts_with("target: "));
    assert_eq!(conflict(&|m| m.max_new_tokens = 9), "max_new_tokens: found 9, expected 64");
    assert_eq!(conflict(&|m| m.drafters[0].fingerprint = "x".into()), "drafter a: its files have changed");
    assert_eq!(conflict(&|m| m.tasks[0].prompts[1].tokens = 7), "task t: its prompts have changed");
    assert_eq!(conflict(&|m| m.seeds = vec![5]), "");
}

#[test]
fn pages_say_what_was_measured_and_what_was_not() {
    let mut results = crafted();
    results.manifest.drafters[0].name = "<a> & b".into();
    results.manifest.missing = vec![Missing { set: "gsm8k".into(), why: "no network".into() }];
    results.settings[0].drafters[0].drafter = "<a> & b".into();
    let (html, markdown) = (results.to_html().unwrap(), results.to_markdown());
    for page in [&html, &markdown] {
        for part in ["gsm8k", "no network", "How sure", "2.33", "[1.00, 4.00]", "Acceptance by position"] {
            assert!(page.contains(part), "no {part}");
        }
    }
    let svg = results.to_svg().unwrap();
    assert!(svg.starts_with("<svg xmlns=") && svg.contains("&lt;a&gt; &amp; b: 2.33 [1.00, 4.00]</title>"));
    // Both halves in one drawing, with the page's colours.
    assert_eq!((svg.matches("<svg").count(), svg.matches("<g transform").count()), (1, 2));
    assert!(svg.contains("--c0:") && html.contains("--c0:") && svg.contains(">2.33</text>"));
    assert!(!html.contains("<a>") && html.contains("&lt;a&gt; &amp; b"), "a name is escaped");
    // Self-contained: nothing to load, nothing to run.
    for part in ["<script", "http://", "https://", "src=", "url(", "@import", "<link"] {
        assert!(!html.contains(part), "{part}");
    }
    assert_eq!(html.matches("<svg viewBox=\"0 0 380").count(), 4);
    assert!(!html.contains("NaN") && !html.contains("inf"), "numbers that are none");
    let bold = "| <a> & b | **2.33** | **1.17** | **2.33** | **1.17** |";
    assert!(markdown.contains(bold), "{markdown}");
    // The JSON is the source: what is read back makes the same pages.
    let read: Results = serde_json::from_str(&crafted().to_json()).unwrap();
    assert_eq!(read.to_html().unwrap(), crafted().to_html().unwrap());
    assert_eq!((read.manifest, read.settings.len()), (crafted().manifest, 1));
}

#[test]
fn made_lengths_have_their_own_settings_and_plots() {
    let mut records = Vec::new();
    for (context, rounds) in [(512, &[(3, 3)][..]), (1024, &[(3, 1)][..])] {
        for prompt in 0..2 {
            let mut record = record("a", "cite", prompt, 0, rounds);
            record.cell.context = Some(context);
            record.prompt_tokens = context - 64;
            records.push(record);
        }
    }
    let tasks = vec![task("cite", Some(1024), 2), task("cite", Some(512), 2)];
    let results = Results::new(manifest(&["a"], tasks, &[0]), &records).unwrap();
    let settings: Vec<_> =
        results.settings.iter().map(|s| (s.context, s.drafters[0].all.tau.unwrap().value)).collect();
    assert_eq!(settings, [(Some(512), 4.0), (Some(1024), 2.0)]);
    let html = results.to_html().unwrap();
    assert!(html.contains("Speed against plain decoding, by context (k = 3, temperature 0)"));
    assert!(html.contains("What the drafter keeps of a request"));
}
