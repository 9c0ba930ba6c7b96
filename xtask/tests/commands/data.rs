//! From prompts to a drafter by the commands that a user chains.

use crate::scene::Scene;
use serde_json::Value;

const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'user' %}w5 {% else %}w6 {% endif %}{{ m.content }} w7 \
    {% endfor %}{% if add_generation_prompt %}w6 {% endif %}";

const RECIPE: &str = r#"
    [data]
    validation = 2
    [drafter]
    block_pattern = "mamba mlp mamba attention mlp"
    fusion_layers = [1, 2, 3]
    kv_layers = [3]
    intermediate_size = 32
    mamba_heads = 2
    mamba_head_dim = 8
    mamba_groups = 1
    draft_vocab = 160
    markov_rank = 16
    mask_token = 500
    [train]
    steps = 3
    tokens_per_step = 60
    anchors_per_step = 12
    warm_start = "attention"
    optimizer = "adamw"
    lr = 1e-3
    ce = 0.5
    tv = 0.5
    evaluate_tokens = 4
"#;

fn scene() -> Scene {
    let scene = Scene::new();
    scene.write("target/chat_template.jinja", TEMPLATE);
    let prompt =
        |i: usize| format!("{{\"id\":\"p{i}\",\"turns\":[\"w{} w{}\",\"w9\"]}}\n", 20 + i, 40 + 3 * i);
    scene.write("talk.jsonl", &(0..6).map(prompt).collect::<String>());
    scene.write("recipe.toml", RECIPE);
    scene
}

const DISTILL: &[&str] = &[
    "distill",
    "--target",
    "target",
    "--prompts",
    "talk.jsonl",
    "--out",
    "r.jsonl",
    "--max-new-tokens",
    "12",
    "--temperature",
    "0.8",
    "--seed",
    "3",
];

fn lines(scene: &Scene) -> Vec<Value> {
    let text = std::fs::read_to_string(scene.path("r.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn distill_cache_and_train_are_a_chain() {
    let scene = scene();
    let told = scene.run(&[DISTILL, &["--json"]].concat()).json();
    assert_eq!((&told["prompts"], &told["too_long"], &told["given"]), (&6.into(), &0.into(), &0.into()));
    let lines = lines(&scene);
    assert_eq!(lines.len(), 1 + 12);
    assert_eq!((&lines[0]["template"], &lines[0]["temperature"]), (&told["template"], &0.8.into()));
    let finish = |name: &str| lines[1..].iter().filter(|line| line["finish"] == name).count();
    assert_eq!((finish("stop"), finish("length")), (count(&told, "stopped"), count(&told, "cut")));
    let tokens: usize = lines[1..].iter().map(|line| line["response_ids"].as_array().unwrap().len()).sum();
    assert_eq!((count(&told, "new_tokens"), count(&told, "supervised_tokens")), (tokens, tokens));

    // What is there is not answered again, and is shown.
    let again = scene.run(&[DISTILL, &["--show-mask", "2"]].concat());
    assert_eq!((again.code, again.stdout.as_str()), (Some(0), "r.jsonl\n"), "{}", again.stderr);
    let sample: Vec<&str> = again.stderr.split("--- ").collect();
    assert_eq!(sample.len(), 3, "{}", again.stderr);
    assert!(
        sample[1].contains("tokens are supervised\nw5 ") && sample[1].matches('⟦').count() == 2,
        "{}",
        sample[1]
    );
    assert_eq!(self::lines(&scene), lines);

    let cache = [
        "cache",
        "--target",
        "target",
        "--responses",
        "r.jsonl",
        "--layers",
        "1",
        "2",
        "3",
        "--out",
        "features",
    ];
    let cached = scene.run(&[&cache[..], &["--kv-layers", "3", "--json"]].concat()).json();
    // Word-level tokens survive the way through text, so that both turns are one document.
    assert_eq!(cached["documents"], 6);
    let width = (3 + 1) * 64 + 2 * count(&lines_config(&scene), "kv");
    assert_eq!(cached["bytes_per_token"], 4 * width);
    // The layers of a recipe are those that were listed: nothing is left to do.
    let of_recipe = ["cache", "--target", "target", "--responses", "r.jsonl", "--recipe", "recipe.toml"];
    let manifest = || std::fs::read(scene.path("features/manifest.json")).unwrap();
    let before = manifest();
    let again = scene.run(&[&of_recipe[..], &["--out", "features", "--json"]].concat()).json();
    assert_eq!((&again["bytes"], manifest()), (&cached["bytes"], before));
    let both = scene.run(&[&of_recipe[..], &["--layers", "1", "--out", "other"]].concat());
    assert_eq!(both.code, Some(2), "{}", both.stderr);

    let train = |out: &str, more: &[&str]| {
        let args = [
            "train",
            "--target",
            "target",
            "--recipe",
            "recipe.toml",
            "--responses",
            "r.jsonl",
            "--out",
            out,
        ];
        scene.run(&[&args[..], more].concat())
    };
    for (out, more) in [("online", &["--show-mask", "1"][..]), ("offline", &["--cache", "features"])] {
        let ended = train(out, more);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert_eq!(ended.stderr.contains('⟦'), out == "online");
    }
    let weights = |out: &str| std::fs::read(scene.path(out).join("best/model.safetensors")).unwrap();
    assert!(weights("online") == weights("offline"), "the same drafter");

    // Answers that came in two files, each with features of its own.
    let (mut files, ids) = ([String::new(), String::new()], ["p1", "p2"]);
    for (i, line) in lines.iter().enumerate() {
        for (file, text) in files.iter_mut().enumerate() {
            let of_second = ids.iter().any(|id| line["id"].as_str().is_some_and(|found| found.ends_with(id)));
            if i == 0 || of_second == (file == 1) {
                text.push_str(&format!("{line}\n"));
            }
        }
    }
    for (name, text) in ["a", "b"].iter().zip(&files) {
        scene.write(&format!("{name}.jsonl"), text);
        let (file, folder) = (format!("{name}.jsonl"), format!("features-{name}"));
        let args = [
            "cache",
            "--target",
            "target",
            "--responses",
            &file,
            "--recipe",
            "recipe.toml",
            "--out",
            &folder,
        ];
        assert!(count(&scene.run(&[&args[..], &["--json"]].concat()).json(), "documents") >= 2);
    }
    let grown = |caches: &[&str]| {
        let args = ["train", "--target", "target", "--recipe", "recipe.toml", "--out", "grown"];
        scene.run(&[&args[..], &["--responses", "a.jsonl", "b.jsonl", "--cache"], caches].concat())
    };
    let ended = grown(&["features-a"]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("features-a/manifest.json: document"), "{}", ended.stderr);
    let ended = grown(&["features-a", "features-b"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("4 answers"), "{}", ended.stderr);

    // Without answers: a folder of DeepSpec's holds them (this one of another target), one of ours does not.
    let deepspec = hspec_goldens::root().canonicalize().unwrap().join("dspark/target_cache");
    for (folder, part) in [
        (
            deepspec.to_str().unwrap(),
            "document \"0\": found token 637, expected ids below 512, the target's vocabulary",
        ),
        ("features", "features/manifest.json: format: found"),
    ] {
        let args =
            ["train", "--target", "target", "--recipe", "recipe.toml", "--cache", folder, "--out", "alone"];
        let ended = scene.run(&args);
        assert_eq!(ended.code, Some(1));
        assert!(ended.stderr.contains(part), "{}", ended.stderr);
    }

    // What was refused has not claimed the folder, and a folder of something else is left alone.
    let ended = train("alone", &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let ended = train("target", &[]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("expected an empty folder, or that of a run"), "{}", ended.stderr);
    assert!(!scene.path("target/best").exists() && !scene.path("target/recipe.toml").exists());

    // Another template than the one that the answers were made with.
    scene.write("target/chat_template.jinja", &TEMPLATE.replace("w7", "w8"));
    let ended = train("other", &[]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("r.jsonl: line 1, template: found "), "{}", ended.stderr);
    let ended = scene.run(DISTILL);
    assert!(ended.stderr.contains("r.jsonl: line 1, template: found "), "{}", ended.stderr);
}

fn count(value: &Value, key: &str) -> usize {
    value[key].as_u64().unwrap() as usize
}

fn lines_config(scene: &Scene) -> Value {
    let config: Value =
        serde_json::from_slice(&std::fs::read(scene.path("target/config.json")).unwrap()).unwrap();
    let heads = count(&config, "num_attention_heads");
    let head_dim = config["head_dim"].as_u64().map_or(64 / heads, |d| d as usize);
    serde_json::json!({ "kv": count(&config, "num_key_value_heads") * head_dim })
}

#[test]
fn distill_refuses_what_cannot_be_right() {
    let scene = scene();
    let prompts = DISTILL.iter().position(|a| *a == "talk.jsonl").unwrap();
    let with = |more: &[&'static str]| [DISTILL, more].concat();
    // Behind the file that the command names anyway.
    let beside = |more: &[&'static str]| [&DISTILL[..=prompts], more, &DISTILL[prompts + 1..]].concat();
    let instead = |old: &str, new: &'static str| -> Vec<&str> {
        DISTILL.iter().map(|&a| if a == old { new } else { a }).collect()
    };
    for (args, code, part) in [
        (beside(&["prompts.jsonl:0"]), 2, "finite weight above 0"),
        (beside(&["prompts.jsonl:1"]), 1, "all have a weight, or none"),
        (instead("12", "4000000000"), 1, "the target's context has"),
        (instead("r.jsonl", "r.jsonl.gz"), 1, "found the name of a gzipped file"),
        (with(&["--max-prompt-tokens", "2"]), 1, "no prompt is left: 6 of 6 are longer than 2 tokens"),
        (with(&["--given-answers", "some"]), 2, "context and supervised"),
        (instead("target", "other"), 1, "no chat template"),
    ] {
        let ended = scene.run(&args);
        assert_eq!(ended.code, Some(code), "{args:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(part), "{args:?}: {}", ended.stderr);
        assert!(!scene.path("r.jsonl.gz").exists());
    }
}

/// A turn ends with the token that ends texts.
const CLOSED: &str =
    "{% for m in messages %}w5 {{ m.content }} w2 {% endfor %}{% if add_generation_prompt %}w6 {% endif %}";

/// A target's own prompts are what it says where its template lets a user speak.
#[test]
fn a_target_writes_prompts() {
    let scene = scene();
    scene.write("target/chat_template.jinja", CLOSED);
    let prompts = |out: &str, more: &[&str]| {
        let args = ["prompts", "--target", "target", "--out", out, "--count", "60"];
        let ended = scene.run(&[&args, more].concat());
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended.stderr
    };
    let read = |name: &str| -> Vec<Value> {
        let text = std::fs::read_to_string(scene.path(name)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let texts = |name: &str| -> Vec<String> {
        read(name).iter().map(|prompt| prompt["prompt"].as_str().unwrap().to_owned()).collect()
    };
    let told = prompts("p.jsonl", &["--seed", "3"]);
    let found = texts("p.jsonl");
    assert!((10..60).contains(&found.len()), "{} prompts end by themselves", found.len());
    assert!(told.contains(&format!("{} prompts of 60 samples", found.len())), "{told}");
    assert_eq!(found.iter().collect::<std::collections::HashSet<_>>().len(), found.len());
    assert!(found.iter().all(|text| !text.is_empty() && text.trim() == text && !text.contains("w2 ")));
    assert!(read("p.jsonl").iter().all(|prompt| prompt["id"].as_str().unwrap().starts_with("p-")));
    // The same whatever the batch; others with another seed.
    prompts("same.jsonl", &["--seed", "3", "--batch", "7"]);
    assert_eq!(texts("same.jsonl"), found);
    prompts("other.jsonl", &["--seed", "4"]);
    assert_ne!(texts("other.jsonl"), found);
    // Words to begin with take turns; alone, where the target adds nothing, they are no prompt. Hot sampling ends texts
    // anywhere, at once too.
    for seed in ["3", "4", "5", "6", "7"] {
        let out = format!("kinds{seed}.jsonl");
        prompts(&out, &["--seed", seed, "--temperature", "9", "--begin", "w7", "--begin", "w8 w9"]);
        let kinds = read(&out);
        assert!(kinds.len() > 10, "{kinds:?}");
        for prompt in &kinds {
            let (id, text) = (prompt["id"].as_str().unwrap(), prompt["prompt"].as_str().unwrap());
            let number: usize = id.rsplit_once('-').unwrap().1.parse().unwrap();
            let begin = ["w7", "w8 w9"][number % 2];
            assert!(text.starts_with(begin) && text != begin, "{id}: {text}");
        }
    }
    // A run that was stopped goes on, and nothing but prompts stays.
    let samples = "{\"id\":\"p-0\",\"prompt_ids\":[";
    scene.remove("p.jsonl");
    scene.write("p.jsonl.samples", samples);
    prompts("p.jsonl", &["--seed", "3"]);
    assert_eq!(texts("p.jsonl"), found);
    assert!(!scene.path("p.jsonl.samples").exists());
    // They serve as prompts.
    let distill = [
        "distill",
        "--target",
        "target",
        "--prompts",
        "p.jsonl",
        "--out",
        "own.jsonl",
        "--max-new-tokens",
        "3",
    ];
    assert_eq!(scene.run(&distill).code, Some(0));
}

#[test]
fn prompts_that_cannot_be_written_are_refused() {
    let scene = scene();
    scene.write("target/chat_template.jinja", CLOSED);
    let refused = |out: &str, more: &[&str], part: &str| {
        let args = ["prompts", "--target", "target", "--out", out, "--count", "5"];
        let ended = scene.run(&[&args, more].concat());
        assert!(ended.code == Some(1) && ended.stderr.contains(part), "{part}: {}", ended.stderr);
        assert!(!scene.path(&format!("{out}.samples")).exists());
    };
    refused("p.jsonl", &["--temperature", "0"], "expected a temperature above 0");
    refused("talk.jsonl", &[], "talk.jsonl: found a file, expected none yet");
    refused("target", &[], "found a folder, expected a file");
    refused("p.jsonl.gz", &[], "found a name of packed files");
    refused("p.jsonl", &["--max-tokens", "10000000"], "the target's context has");
    refused("p.jsonl", &["--max-tokens", "1"], "found no prompt among 5 samples");
    refused("p.jsonl", &["--begin", " "], "--begin: found nothing in \" \", expected words");
    refused("p.jsonl", &["--begin", "w7 w2"], "--begin: found a token that ends texts in \"w7 w2\"");
    scene.write("target/chat_template.jinja", TEMPLATE);
    refused("p.jsonl", &[], "expected a token that ends texts");
    scene.write("target/chat_template.jinja", "{% for m in messages %}{{ m.content }} w2 {% endfor %}");
    refused("p.jsonl", &[], "found nothing before a user's message");
}
