//! Broken teachers, settings and surroundings: exit 2, one clear error that names the place, no
//! panic, and nothing half-written.

use std::path::Path;

use serde_json::{Value, json};

use super::checkpoint::{copy_folder, safetensors};
use super::program::{Tokens, fixture, golden_corpus, kdscore, refuse, run, succeed, write_corpus};

/// What is done to a good teacher, and what the error must say.
type Case = (&'static str, fn(&Path), &'static [&'static str]);

fn edit_config(folder: &Path, edit: impl Fn(&mut Value)) {
    let path = folder.join("config.json");
    let mut config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    std::fs::write(path, config.to_string()).unwrap();
}

fn edit_weights(folder: &Path, edit: impl Fn(&mut Vec<u8>)) {
    let path = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    edit(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

/// The header of the weights, changed; offsets stay right.
fn edit_header(folder: &Path, edit: impl Fn(&mut serde_json::Map<String, Value>)) {
    edit_weights(folder, |bytes| {
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        edit(&mut header);
        let header = Value::Object(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(&bytes[8 + length..]);
        *bytes = file;
    });
}

fn set(key: &'static str, value: Value) -> impl Fn(&mut Value) {
    move |config| config[key] = value.clone()
}

/// The weights under another name, with this index beside them.
fn shard_with_index(folder: &Path, index: &str) {
    std::fs::rename(
        folder.join("model.safetensors"),
        folder.join("weights.safetensors"),
    )
    .unwrap();
    std::fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
}

const CASES: &[Case] = &[
    (
        "no config",
        |t| std::fs::remove_file(t.join("config.json")).unwrap(),
        &["config.json"],
    ),
    (
        "config is not JSON",
        |t| std::fs::write(t.join("config.json"), "{").unwrap(),
        &["config.json", "JSON"],
    ),
    (
        "config is a list",
        |t| std::fs::write(t.join("config.json"), "[]").unwrap(),
        &["expected a JSON object"],
    ),
    (
        "unknown architecture",
        |t| edit_config(t, set("model_type", json!("mamba"))),
        &["mamba", "supported: ", "llama"],
    ),
    (
        "not a language model",
        |t| {
            edit_config(
                t,
                set("architectures", json!(["LlamaForSequenceClassification"])),
            )
        },
        &["LlamaForSequenceClassification", "LlamaForCausalLM"],
    ),
    (
        "unknown rope",
        |t| {
            edit_config(
                t,
                set("rope_scaling", json!({"type": "spiral", "factor": 2.0})),
            )
        },
        &["spiral", "yarn"],
    ),
    (
        "rope without factor",
        |t| edit_config(t, set("rope_scaling", json!({"type": "linear"}))),
        &["rope_scaling.factor"],
    ),
    (
        "hidden size of a wrong kind",
        |t| edit_config(t, set("hidden_size", json!("192"))),
        &["hidden_size", "\"192\""],
    ),
    (
        "hidden size of another teacher",
        |t| edit_config(t, set("hidden_size", json!(128))),
        &["embed_tokens", "128", "192", "38 problems", "and 18 more"],
    ),
    (
        "a base that yarn can't take the logarithm of",
        |t| {
            let yarn = json!({"type": "yarn", "factor": 2.0, "rope_theta": 1.0});
            edit_config(t, set("rope_scaling", yarn));
        },
        &["rope_scaling.rope_theta"],
    ),
    (
        "weights that were not fetched",
        |t| {
            let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
            std::fs::write(t.join("model.safetensors"), pointer).unwrap();
        },
        &["model.safetensors", "Git LFS pointer", "git lfs pull"],
    ),
    (
        "absurd layers",
        |t| edit_config(t, set("num_hidden_layers", json!(1_000_000))),
        &["num_hidden_layers"],
    ),
    (
        "too many layers",
        |t| edit_config(t, set("num_hidden_layers", json!(5))),
        &["model.layers.4.", "9 problems"],
    ),
    (
        "too few layers",
        |t| edit_config(t, set("num_hidden_layers", json!(3))),
        &["model.layers.3.", "number of layers"],
    ),
    (
        "bias promised",
        |t| edit_config(t, set("attention_bias", json!(true))),
        &["q_proj.bias", "found none"],
    ),
    (
        "heads that don't divide",
        |t| edit_config(t, set("num_key_value_heads", json!(4))),
        &["num_key_value_heads"],
    ),
    (
        "other activation",
        |t| edit_config(t, set("hidden_act", json!("quick_gelu"))),
        &["hidden_act", "quick_gelu"],
    ),
    (
        "quantised",
        |t| {
            edit_config(
                t,
                set("quantization_config", json!({"quant_method": "gptq"})),
            )
        },
        &["quantization_config", "gptq", "not supported"],
    ),
    (
        "unknown key",
        |t| edit_config(t, set("logit_bias_per_layer", json!(0.5))),
        &["logit_bias_per_layer", "--allow-unknown-config"],
    ),
    (
        "unknown tensor",
        |t| {
            edit_header(t, |h| {
                let end = h
                    .values()
                    .filter_map(|t| t["data_offsets"][1].as_u64())
                    .max();
                let empty = json!({"dtype": "BF16", "shape": [0], "data_offsets": [end, end]});
                h.insert("model.layers.0.self_attn.q_norm.weight".into(), empty);
            })
        },
        &["model.layers.0.self_attn.q_norm.weight"],
    ),
    (
        "no weights",
        |t| std::fs::remove_file(t.join("model.safetensors")).unwrap(),
        &["model.safetensors", "found neither"],
    ),
    (
        "empty weights",
        |t| edit_weights(t, Vec::clear),
        &["model.safetensors"],
    ),
    (
        "truncated weights",
        |t| edit_weights(t, |b| b.truncate(b.len() - 1000)),
        &["model.safetensors"],
    ),
    (
        "header longer than the file",
        |t| edit_weights(t, |b| b[..8].copy_from_slice(&(1u64 << 40).to_le_bytes())),
        &["model.safetensors"],
    ),
    (
        "header is not JSON",
        |t| edit_weights(t, |b| b[9] = b'!'),
        &["model.safetensors"],
    ),
    (
        "a tensor is missing",
        |t| {
            edit_header(t, |h| {
                let x = h.remove("model.norm.weight").unwrap();
                h.insert("other".into(), x);
            })
        },
        &["model.norm.weight", "found none"],
    ),
    (
        "a tensor of another shape",
        |t| {
            edit_header(t, |h| {
                h["model.layers.0.mlp.up_proj.weight"]["shape"] = json!([192, 384])
            })
        },
        &["up_proj", "[384, 192]", "[192, 384]"],
    ),
    (
        "a tensor of integers",
        |t| edit_header(t, |h| h["model.norm.weight"]["dtype"] = json!("I16")),
        &["model.norm.weight", "I16"],
    ),
    (
        "index to nowhere",
        |t| {
            shard_with_index(
                t,
                r#"{"weight_map": {"model.norm.weight": "gone.safetensors"}}"#,
            )
        },
        &["gone.safetensors"],
    ),
    (
        "index out of the folder",
        |t| {
            shard_with_index(
                t,
                r#"{"weight_map": {"model.norm.weight": "../x.safetensors"}}"#,
            )
        },
        &["weight_map", "../x.safetensors"],
    ),
    (
        "index without a map",
        |t| shard_with_index(t, "{}"),
        &["weight_map"],
    ),
    (
        "index that lies",
        |t| shard_with_index(t, r#"{"weight_map": {"no.such": "weights.safetensors"}}"#),
        &["no.such", "nowhere"],
    ),
    (
        "two files with one tensor",
        |t| {
            let extra = [("model.norm.weight".to_owned(), (vec![192], vec![0.0; 192]))].into();
            std::fs::write(t.join("extra.safetensors"), safetensors(&extra)).unwrap();
            let map = json!({"weight_map": {"a": "weights.safetensors", "b": "extra.safetensors"}});
            shard_with_index(t, &map.to_string());
        },
        &["model.norm.weight", "once"],
    ),
];

#[test]
fn every_broken_teacher_is_refused_before_scoring() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_corpus(&at.join("corpus"), &golden_corpus(), 2048);
    for (name, damage, expected) in CASES {
        let teacher = at.join("teacher");
        let _ = std::fs::remove_dir_all(&teacher);
        copy_folder(&fixture("teacher"), &teacher);
        damage(&teacher);
        let error = refuse(
            at,
            &[
                "score",
                "--teacher",
                "teacher",
                "--corpus",
                "corpus",
                "--out",
                "out",
            ],
        );
        for text in *expected {
            assert!(error.contains(text), "{name}: expected {text:?} in {error}");
        }
        assert!(!at.join("out").exists(), "{name}: something was written");
    }
}

fn score_args<'a>(extra: &[&'a str], teacher: &'a str) -> Vec<&'a str> {
    let mut args = vec![
        "score",
        "--teacher",
        teacher,
        "--corpus",
        "corpus",
        "--out",
        "out",
    ];
    args.extend(extra);
    args
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_corpus(&at.join("corpus"), &golden_corpus(), 2048);
    let teacher = fixture("teacher");
    let teacher = teacher.to_str().unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["-k", "0"], "k: expected at least 1"),
        (&["-k", "2049"], "k: expected at most 2048"),
        (
            &["--vocab-limit", "5000"],
            "vocab-limit: expected at most 2048",
        ),
        (&["--vocab-limit", "40"], "below vocab-limit 40"),
        (&["--dtype", "bf16"], "bf16 compute needs a CUDA device"),
        (&["--device", "cuda:0"], "device"),
        (&["--logp-dtype", "f8"], "logp-dtype"),
        (&["--emit", "perplexity"], "emit: expected"),
        (&["--token-budget", "0"], "token-budget"),
    ];
    for (extra, expected) in cases {
        let error = refuse(at, &score_args(extra, teacher));
        assert!(error.contains(expected), "{extra:?}: {error}");
        assert!(!at.join("out").exists(), "{extra:?}: something was written");
    }
    let error = refuse(at, &score_args(&[], "nowhere"));
    assert!(error.contains("nowhere/config.json"), "{error}");
}

#[test]
fn broken_job_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let cases: &[(&str, &str)] = &[
        ("[score", "job.toml"),
        ("k = 3", "\"k\""),
        ("[score]\nkay = 3", "kay"),
        ("[score]\nk = \"many\"", "[score]"),
        ("[score]\nk = 3", "teacher"),
        ("[train]\n", "train"),
        ("[score]\nteacher = \"t\"\nout = \"o\"", "corpus"),
    ];
    for (text, expected) in cases {
        std::fs::write(at.join("job.toml"), text).unwrap();
        let error = refuse(at, &["run", "job.toml"]);
        assert!(error.contains(expected), "{text:?}: {error}");
    }
    assert!(refuse(at, &["run", "gone.toml"]).contains("gone.toml"));
    assert!(refuse(at, &["run", "job.toml", "--set", "k=3"]).contains("TABLE.KEY=VALUE"));
}

#[test]
fn ids_and_lengths_the_teacher_does_not_have_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let teacher = fixture("teacher");
    let teacher = teacher.to_str().unwrap();
    let cases: [(Tokens, &str); 3] = [
        (
            (vec![1, 2, 2048], vec![1; 3]),
            "below 2048, found 2048 at token 2",
        ),
        ((vec![1, -1], vec![1; 2]), "found -1 at token 1"),
        (
            (vec![5; 1025], vec![1; 1025]),
            "expected at most 1024 tokens",
        ),
    ];
    for (sequence, expected) in cases {
        write_corpus(&at.join("corpus"), &[sequence], 2048);
        let error = refuse(at, &score_args(&[], teacher));
        assert!(error.contains(expected), "{error}");
    }
    write_corpus(&at.join("corpus"), &golden_corpus(), 3000);
    assert!(refuse(at, &score_args(&[], teacher)).contains("expected at most 2048"));
    write_corpus(&at.join("corpus"), &[(vec![1, 2, 2999], vec![1; 3])], 3000);
    let error = refuse(at, &score_args(&["--trust-tokens"], teacher));
    assert!(
        error.contains("sequence 0: expected token ids below 2048"),
        "{error}"
    );
}

#[test]
fn another_tokenizer_is_refused_unless_trusted() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let teacher = at.join("teacher");
    copy_folder(&fixture("teacher"), &teacher);
    std::fs::write(
        at.join("rows.jsonl"),
        r#"{"text": "Two and two make four."}"#,
    )
    .unwrap();
    succeed(
        at,
        &[
            "prepare",
            "--data",
            "rows.jsonl",
            "--tokenizer",
            "teacher",
            "--out",
            "corpus",
        ],
    );
    let path = teacher.join("tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replacen("<|im_end|>", "<|im_over|>", 2)).unwrap();
    let error = refuse(at, &score_args(&[], "teacher"));
    assert!(error.contains("--trust-tokens"), "{error}");
    succeed(at, &score_args(&["--trust-tokens"], "teacher"));
    let job = std::fs::read_to_string(at.join("out/job.json")).unwrap();
    assert!(job.contains("\"trust_tokens\":true"), "{job}");
}

#[test]
fn logits_that_are_not_finite_name_their_position() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let teacher = at.join("teacher");
    copy_folder(&fixture("teacher"), &teacher);
    // The embedding of token 77 (bf16, 2048 x 192) becomes NaN.
    edit_weights(&teacher, |bytes| {
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let start = header["model.embed_tokens.weight"]["data_offsets"][0]
            .as_u64()
            .unwrap();
        let at = 8 + length + start as usize + 77 * 192 * 2;
        bytes[at..at + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    });
    // Tied: the NaN is in every logits row. The first scored position is named.
    write_corpus(&at.join("corpus"), &[(vec![5, 6, 7], vec![0, 0, 1])], 2048);
    let error = refuse(at, &score_args(&[], "teacher"));
    assert!(error.contains("sequence 0, position 1"), "{error}");
    assert!(!at.join("out/shard-000000.manifest.json").exists());
}

/// Weights far larger than memory, in a file that takes no room on disk.
#[test]
fn a_teacher_that_does_not_fit_is_refused_with_figures() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let teacher = at.join("teacher");
    std::fs::create_dir(&teacher).unwrap();
    let (hidden, inner, vocab, layers) = (16_384usize, 65_536usize, 256_000usize, 400usize);
    let config = json!({
        "model_type": "llama", "hidden_size": hidden, "vocab_size": vocab,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 128,
        "tie_word_embeddings": true,
    });
    std::fs::write(teacher.join("config.json"), config.to_string()).unwrap();
    let mut shapes = vec![
        ("model.embed_tokens".to_owned(), vec![vocab, hidden]),
        ("model.norm".to_owned(), vec![hidden]),
    ];
    for i in 0..layers {
        let name = |n: &str| format!("model.layers.{i}.{n}");
        for n in ["q", "k", "v", "o"] {
            shapes.push((name(&format!("self_attn.{n}_proj")), vec![hidden, hidden]));
        }
        for n in ["gate", "up"] {
            shapes.push((name(&format!("mlp.{n}_proj")), vec![inner, hidden]));
        }
        shapes.push((name("mlp.down_proj"), vec![hidden, inner]));
        shapes.push((name("input_layernorm"), vec![hidden]));
        shapes.push((name("post_attention_layernorm"), vec![hidden]));
    }
    let (mut header, mut end) = (serde_json::Map::new(), 0u64);
    for (name, shape) in shapes {
        let start = end;
        end += shape.iter().product::<usize>() as u64 * 2;
        header.insert(
            format!("{name}.weight"),
            json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}),
        );
    }
    let header = Value::Object(header).to_string();
    let mut prefix = (header.len() as u64).to_le_bytes().to_vec();
    prefix.extend(header.as_bytes());
    let path = teacher.join("model.safetensors");
    std::fs::write(&path, &prefix).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(prefix.len() as u64 + end).unwrap();
    write_corpus(&at.join("corpus"), &[(vec![1, 2], vec![1, 1])], vocab);
    let error = refuse(at, &score_args(&[], "teacher"));
    assert!(
        error.contains("doesn't fit") && error.contains("TiB") && error.contains("GiB"),
        "{error}"
    );
    assert!(!at.join("out").exists());
}

/// A disk that is full: no damage, one error, and the same command goes on once there is room.
#[test]
fn a_full_disk_is_an_error_and_no_damage() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_corpus(&at.join("corpus"), &golden_corpus(), 2048);
    let teacher = fixture("teacher");
    let teacher = teacher.to_str().unwrap();
    let args = score_args(&["--shard-tokens", "400", "--logp-dtype", "f32"], teacher);
    // The largest file a shell's child may write: what the kernel says then is EFBIG instead of
    // ENOSPC, from the same calls.
    let mut limited = std::process::Command::new("sh");
    limited
        .current_dir(at)
        .env("XDG_CACHE_HOME", at.join("cache"));
    let line = "trap '' XFSZ; ulimit -f 16; exec \"$@\"";
    limited
        .args(["-c", line, "sh", env!("CARGO_BIN_EXE_kdscore")])
        .args(&args);
    let output = limited.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("error: ") && stderr.contains(".npy"),
        "{stderr}"
    );
    let output = run(at, &args);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let verified = kdscore(at).args(["verify", "out"]).output().unwrap();
    assert!(verified.status.success());
}

/// A set folder inside its corpus, or around it, is refused: cleaning one would harm the other.
#[test]
fn folders_inside_one_another_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_corpus(&at.join("all/corpus"), &golden_corpus(), 2048);
    let teacher = fixture("teacher");
    let teacher = teacher.to_str().unwrap();
    for out in ["all", "all/corpus/out", "all/corpus"] {
        let args = [
            "score",
            "--teacher",
            teacher,
            "--corpus",
            "all/corpus",
            "--out",
            out,
        ];
        let error = refuse(at, &args);
        assert!(error.contains("a folder apart from the corpus"), "{error}");
    }
}

/// The fingerprint in job.json must stay true: weights that change under a run end it before the
/// next commit.
#[test]
fn a_teacher_that_changes_during_the_run_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    copy_folder(&fixture("teacher"), &at.join("teacher"));
    let sequences: Vec<Tokens> = golden_corpus().into_iter().cycle().take(2000).collect();
    write_corpus(&at.join("corpus"), &sequences, 2048);
    let mut command = kdscore(at);
    command.args(score_args(&["--shard-tokens", "400"], "teacher"));
    command
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped());
    let child = command.spawn().unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !at.join("out/shard-000000.manifest.json").exists() {
        assert!(
            std::time::Instant::now() < deadline,
            "no shard was committed in a minute"
        );
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let weights = at.join("teacher/model.safetensors");
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .open(weights)
        .unwrap();
    std::io::Seek::seek(&mut file, std::io::SeekFrom::End(-8)).unwrap();
    std::io::Write::write_all(&mut file, &[0; 8]).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("changed during the run"), "{stderr}");
}

/// Targets of a damaged corpus would be committed as they are.
#[test]
fn a_corpus_that_is_not_what_its_manifest_says_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let teacher = fixture("teacher");
    let teacher = teacher.to_str().unwrap();
    std::fs::write(
        at.join("rows.jsonl"),
        r#"{"text": "Two and two make four."}"#,
    )
    .unwrap();
    succeed(
        at,
        &[
            "prepare",
            "--data",
            "rows.jsonl",
            "--tokenizer",
            teacher,
            "--out",
            "corpus",
        ],
    );
    let tokens = at.join("corpus/shard-000000/tokens.npy");
    let mut bytes = std::fs::read(&tokens).unwrap();
    let last = bytes.len() - 4;
    bytes[last] ^= 1;
    std::fs::write(&tokens, bytes).unwrap();
    let error = refuse(at, &score_args(&[], teacher));
    assert!(
        error.contains("tokens.npy") && error.contains("restore the corpus"),
        "{error}"
    );
    assert!(!at.join("out/shard-000000.manifest.json").exists());
}

/// With job.json gone, shards of another job are not taken for this one's.
#[test]
fn a_new_job_does_not_take_over_another_ones_shards() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_corpus(&at.join("corpus"), &golden_corpus(), 2048);
    let teacher = fixture("teacher");
    let teacher = teacher.to_str().unwrap();
    succeed(at, &score_args(&[], teacher));
    let job = std::fs::read(at.join("out/job.json")).unwrap();
    std::fs::remove_file(at.join("out/job.json")).unwrap();
    let error = refuse(at, &score_args(&["-k", "5"], teacher));
    assert!(error.contains("found one of another"), "{error}");
    assert!(!at.join("out/job.json").exists());
    succeed(at, &score_args(&[], teacher));
    assert_eq!(std::fs::read(at.join("out/job.json")).unwrap(), job);
    std::fs::create_dir(at.join("mine")).unwrap();
    std::fs::write(at.join("mine/thesis.txt"), "years of work").unwrap();
    let args = [
        "score",
        "--teacher",
        teacher,
        "--corpus",
        "corpus",
        "--out",
        "mine",
    ];
    assert!(refuse(at, &args).contains("thesis.txt"));
}
