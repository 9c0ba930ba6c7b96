//! The findings in words.

use crate::comparison::{DrafterResult, Gain, Results, Rival, Setting, tables::percent};

/// What is compared, what it gains, what it costs, how sure: headings and sentences.
pub(crate) fn words(results: &Results) -> Vec<(&'static str, Vec<String>)> {
    // The first setting is the one that headlines speak of.
    let setting = &results.settings[0];
    vec![
        ("What is compared.", compared(results, setting)),
        ("What it gains.", gained(setting)),
        ("What it costs.", cost(results, setting)),
        ("How sure.", sure(results, setting)),
    ]
}

fn compared(results: &Results, setting: &Setting) -> Vec<String> {
    let manifest = &results.manifest;
    let target = manifest.target.path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let number = setting.drafters.len();
    let what = if number == 1 { "One drafter".to_owned() } else { format!("{number} drafters") };
    let tasks: Vec<&str> = setting.drafters[0].tasks.iter().map(|t| t.task.as_str()).collect();
    let prompts = setting.drafters[0].all.prompts;
    let mut list = vec![
        format!("{what} for the model {target} (the target)."),
        "A drafter is a small model that guesses the next tokens; the target checks all guesses in one pass \
         and keeps those it would have written itself, so that the text stays the target's own."
            .to_owned(),
        format!(
            "Each of {prompts} prompts ({}) was answered plainly and with every drafter in turn, on the same \
             machine, with at most {} tokens per answer.",
            tasks.join(", "),
            manifest.max_new_tokens
        ),
    ];
    let how = if setting.temperature == 0.0 {
        "always the most probable token".to_owned()
    } else {
        format!("sampling at temperature {}", setting.temperature)
    };
    let context =
        setting.context.map_or_else(String::new, |n| format!(", texts made for contexts of {n} tokens"));
    list.push(format!("The figures in this summary: up to {} guesses per pass, {how}{context}.", setting.k));
    list
}

fn gained(setting: &Setting) -> Vec<String> {
    let best = |value: &dyn Fn(&DrafterResult) -> Option<f64>| {
        let found = setting.drafters.iter().filter_map(|d| Some((d, value(d)?)));
        found.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(d, _)| d)
    };
    let mut list = Vec::new();
    if let Some(drafter) = best(&|d| Some(d.all.mean_tau?.value))
        && let Some(tau) = drafter.all.mean_tau
    {
        let ends = tau.ci.map_or_else(String::new, |[a, b]| format!(" (95 % interval {a:.2} to {b:.2})"));
        list.push(format!(
            "With “{}”, each pass of the target yields {:.2} tokens{ends} instead of 1.",
            drafter.drafter, tau.value
        ));
        if let Some(gain) = drafter.all.tau_gains.iter().find(|gain| gain.rival == Rival::Best) {
            list.push(format!(
                "Against the next best, “{}”: {}, {}.",
                gain.against,
                percent(gain),
                clear(gain)
            ));
        }
    }
    if let Some(drafter) = best(&|d| Some(d.all.time.as_ref()?.mean_speedup?.value))
        && let Some(speed) = drafter.all.time.as_ref().and_then(|time| time.mean_speedup)
    {
        let verdict = match speed.ci {
            Some([low, _]) if low > 1.0 => "faster than plain decoding",
            Some([_, high]) if high < 1.0 => "slower than plain decoding",
            _ => "no clear difference to plain decoding",
        };
        let ends = speed.ci.map_or_else(String::new, |[a, b]| format!(" ({a:.2} to {b:.2})"));
        list.push(format!(
            "In time, the best is “{}” with {:.2} times the speed of plain decoding{ends}: {verdict} on this \
             machine.",
            drafter.drafter, speed.value
        ));
        if let Some(free) = drafter.all.time.as_ref().and_then(|time| time.predicted_if_verifying_were_free)
            && speed.value < free - 0.05
        {
            list.push(format!(
                "Where checking {} tokens takes as long as writing one, as it nearly does for large models on \
                 fast processors, the same acceptance and drafting would give {free:.2}.",
                setting.k + 1
            ));
        }
    }
    list
}

fn cost(results: &Results, setting: &Setting) -> Vec<String> {
    let target = results.manifest.target.kv_bytes_per_token as f64 / 1024.0;
    let mut list = vec![format!(
        "The target keeps {target:.1} KiB of cache per token of context; a drafter may keep more beside it."
    )];
    for drafter in &setting.drafters {
        let rows = results.manifest.rows();
        let Some(row) = rows.iter().find(|row| row.name == drafter.drafter) else { continue };
        let entry = &results.manifest.drafters[row.drafters[0]];
        let bytes = drafter.all.memory.drafter_bytes_per_token;
        let keeps = if bytes == 0 {
            "keeps nothing per token".to_owned()
        } else {
            let kib = bytes as f64 / 1024.0;
            format!("keeps {kib:.1} KiB per token (+{:.1} %)", 100.0 * kib / target)
        };
        let drafting = drafter.all.time.as_ref().map_or_else(String::new, |time| {
            format!(", and drafting takes {:.1} ms per token", time.draft_ms)
        });
        let millions = entry.facts.params_trainable as f64 / 1e6;
        list.push(format!(
            "“{}” ({millions:.1} million trained parameters) {keeps}{drafting}.",
            drafter.drafter
        ));
    }
    list
}

fn sure(results: &Results, setting: &Setting) -> Vec<String> {
    let all = &setting.drafters[0].all;
    let mut list = vec![format!(
        "{} prompts, {} seed{} each. Intervals say how far a figure could move with other prompts of the same \
         kind (10,000 paired resamples of the prompts); they say nothing of other models, machines or kinds of \
         prompts.",
        all.prompts,
        results.manifest.seeds.len(),
        if results.manifest.seeds.len() == 1 { "" } else { "s" },
    )];
    if setting.drafters.iter().any(|drafter| !drafter.trainings.is_empty()) {
        list.push(
            "Drafters that were trained several times have the counts of all trainings pooled, and the trainings \
             are resampled as well; of two trainings that tells little more than whether they agree."
                .to_owned(),
        );
    }
    if setting.temperature == 0.0 {
        let same: usize = setting.drafters.iter().map(|d| d.all.same_text).sum();
        let answers: usize = setting.drafters.iter().map(|d| d.all.answers).sum();
        list.push(format!("{same} of {answers} answers are token by token those of plain decoding."));
    }
    if all.prompts < 20 {
        list.push(
            "These are few prompts, and intervals from few are too narrow: take the figures for a trial run."
                .to_owned(),
        );
    }
    for gap in &results.manifest.missing {
        list.push(format!("Not measured: {} ({}).", gap.set, gap.why));
    }
    if results.unmeasured > 0 {
        list.push(format!("The run is not complete: {} answers are missing.", results.unmeasured));
    }
    list
}

fn clear(gain: &Gain) -> &'static str {
    if gain.is_clear() { "a clear difference" } else { "not a clear difference" }
}
