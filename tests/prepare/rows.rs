//! Which tokens a row becomes, and which of them are trained.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::bench::{Bench, PLAIN_CHATML, TEACHER, chat, chats};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/golden");

// Ids of the fixture's tokenizer.
const BOS: i32 = 0;
const IM_START: i32 = 1;
const IM_END: i32 = 2;

#[test]
fn the_assistants_turns_are_trained_through_their_end_token() {
    let bench = Bench::new();
    let rows = [chat(&[
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", " Yo é\n"),
        ("user", "?"),
        ("assistant", "!"),
    ])];
    let facts = bench.prepared(&rows, &[]);
    assert_eq!(facts["format"], "messages");
    assert_eq!(facts["loss"], "assistant");
    assert_eq!(bench.trained(), [" Yo é↵<|im_end|>!<|im_end|>"]);
    let (tokens, _) = &bench.sequences()[0];
    assert_eq!(tokens[..2], [BOS, IM_START]);
}

#[test]
fn a_template_without_generation_blocks_trains_the_same_tokens() {
    let rows = chats(20);
    let marked = Bench::new();
    marked.prepared(&rows, &[]);
    let plain = Bench::new();
    plain.write("plain.jinja", PLAIN_CHATML);
    plain.prepared(&rows, &["--chat-template", "plain.jinja"]);
    assert_eq!(marked.sequences(), plain.sequences());
}

#[test]
fn a_template_that_is_not_prefix_preserving_is_refused() {
    let bench = Bench::new();
    bench.write_rows("rows.jsonl", &chats(1));
    // Only the last turn ends with the end token.
    bench.write("odd.jinja", "{% for m in messages %}{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}\n{% endfor %}");
    let ran = bench.prepare(&[
        "--data",
        "rows.jsonl",
        "--tokenizer",
        TEACHER,
        "--chat-template",
        "odd.jinja",
    ]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("rows.jsonl:1: "), "{}", ran.stderr);
    assert!(
        ran.stderr.contains("needs generation blocks"),
        "{}",
        ran.stderr
    );
    assert!(!bench.path("out").exists());
}

#[test]
fn transformers_renders_encodes_and_masks_the_same() {
    let golden = Path::new(GOLDEN);
    let expected =
        fs::read(golden.join("rendered.json")).expect("the golden files are in the repository");
    let expected: Vec<Value> = serde_json::from_slice(&expected).unwrap();
    let bench = Bench::new();
    let data = golden.join("chats.jsonl");
    let ran = bench.prepare(&["--data", data.to_str().unwrap(), "--tokenizer", TEACHER]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let found = bench.sequences();
    assert_eq!(found.len(), expected.len());
    for ((tokens, mask), expected) in found.iter().zip(&expected) {
        assert_eq!(json!(tokens), expected["ids"]);
        assert_eq!(json!(mask), expected["assistant_mask"]);
    }
}

#[test]
fn loss_rules_choose_the_trained_tokens() {
    let rows = [chat(&[
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
    ])];
    for (rule, trained) in [
        ("assistant", "b<|im_end|>d<|im_end|>"),
        ("last-assistant", "d<|im_end|>"),
        (
            "all",
            "<|bos|><|im_start|>user↵a<|im_end|>↵<|im_start|>assistant↵b<|im_end|>↵<|im_start|>user↵c<|im_end|>↵<|im_start|>assistant↵d<|im_end|>↵",
        ),
    ] {
        for template in [None, Some(PLAIN_CHATML)] {
            let bench = Bench::new();
            let mut args = vec!["--loss", rule];
            if let Some(source) = template {
                bench.write("t.jinja", source);
                args.extend(["--chat-template", "t.jinja"]);
            }
            bench.prepared(&rows, &args);
            assert_eq!(bench.trained(), [trained], "{rule}");
        }
    }
}

#[test]
fn completions_are_trained_and_end() {
    let bench = Bench::new();
    let facts = bench.prepared(
        &[
            json!({"prompt": "Q: why?", "completion": "   Because é 🙂."}),
            json!({"prompt": "Q:\n", "completion": "so<|im_end|>"}),
        ],
        &[],
    );
    assert_eq!(facts["loss"], "completion");
    assert_eq!(
        bench.trained(),
        ["   Because é 🙂.<|im_end|>", "so<|im_end|>"]
    );
    let (tokens, _) = &bench.sequences()[1];
    assert_eq!(tokens.iter().filter(|&&t| t == IM_END).count(), 1);
    assert_eq!(tokens.iter().filter(|&&t| t == BOS).count(), 1);
}

#[test]
fn completions_given_as_messages_train_their_own_turns_only() {
    for template in [None, Some(PLAIN_CHATML)] {
        let bench = Bench::new();
        let mut args = Vec::new();
        if let Some(source) = template {
            bench.write("t.jinja", source);
            args.extend(["--chat-template", "t.jinja"]);
        }
        let prompt = chat(&[("user", "a"), ("assistant", "b"), ("user", "c")])["messages"].clone();
        let completion = chat(&[("assistant", "d")])["messages"].clone();
        bench.prepared(
            &[json!({"prompt": prompt, "completion": completion})],
            &args,
        );
        assert_eq!(bench.trained(), ["d<|im_end|>"]);
    }
}

#[test]
fn a_token_across_the_edge_is_counted_and_not_trained() {
    let bench = Bench::new();
    let facts = bench.prepared(
        &[json!({"prompt": "the answer is th", "completion": "e one"})],
        &[],
    );
    assert_eq!(facts["lint"]["straddling_tokens"], 1);
    let example = facts["first_examples"]["straddling_tokens"]
        .as_str()
        .unwrap();
    assert!(example.starts_with("rows.jsonl:1: token "), "{example}");
    assert_eq!(bench.trained(), [" one<|im_end|>"]);
}

#[test]
fn texts_are_trained_whole_with_one_bos_and_an_end() {
    let bench = Bench::new();
    let facts = bench.prepared(
        &[
            json!({"text": "Once upon\na time"}),
            json!({"text": "x <|im_start|> y"}),
        ],
        &[],
    );
    assert_eq!(facts["loss"], "all");
    assert_eq!(facts["lint"]["control_tokens_in_text"], 1);
    assert_eq!(bench.trained()[0], "<|bos|>Once upon↵a time<|im_end|>");
}

#[test]
fn a_text_that_brings_its_bos_gets_no_second_one() {
    let rows = |bos: &str| {
        [
            json!({"text": format!("{bos}Once upon\na time<|im_end|>")}),
            json!({"prompt": format!("{bos}Q: why?"), "completion": " So."}),
        ]
    };
    for i in 0..2 {
        let (plain, rendered) = (Bench::new(), Bench::new());
        plain.prepared(&rows("")[i..=i], &[]);
        let facts = rendered.prepared(&rows("<|bos|>")[i..=i], &[]);
        assert_eq!(plain.sequences(), rendered.sequences());
        assert_eq!(facts["lint"]["control_tokens_in_text"], 0);
    }
}

#[test]
fn texts_without_an_end_are_counted_where_the_tokenizer_names_none() {
    let bench = Bench::new();
    let tokenizer = fs::read(Path::new(TEACHER).join("tokenizer.json")).unwrap();
    bench.write("endless/tokenizer.json", tokenizer);
    bench.write(
        "endless/tokenizer_config.json",
        r#"{"bos_token": "<|bos|>"}"#,
    );
    let args = ["--data", "rows.jsonl", "--tokenizer", "endless"];
    for row in [
        json!({"text": "a"}),
        json!({"prompt": "b", "completion": " a"}),
    ] {
        bench.write_rows("rows.jsonl", &[row.clone(), row.clone()]);
        let ran = bench.prepare(&args);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let says = "2 texts get no EOS behind them, for the tokenizer names none: name it as eos_token in its tokenizer_config.json; \
                    first: rows.jsonl:1: ends with ";
        assert!(ran.stdout.contains(says), "{}", ran.stdout);
        assert!(bench.trained()[0].ends_with('a'));
        fs::remove_dir_all(bench.path("out")).unwrap();
        let named = Bench::new();
        assert_eq!(named.prepared(&[row], &[])["lint"]["missing_eos"], 0);
    }
}

#[test]
fn tokens_are_taken_as_they_are() {
    let bench = Bench::new();
    let data = bench.write_rows(
        "rows.jsonl",
        &[
            json!({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}),
            json!({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}),
        ],
    );
    let ran = bench.prepare(&["--data", data.to_str().unwrap(), "--vocab-size", "8"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let expected = [
        (vec![5, 6, 7], vec![0, 1, 1]),
        (vec![5, 6, 7], vec![0, 0, 1]),
    ];
    assert_eq!(bench.sequences(), expected);
}

#[test]
fn tokens_that_swallow_spaces_are_trained_as_far_as_they_reach() {
    let text = fs::read_to_string(Path::new(TEACHER).join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    // <|im_end|> takes the spaces on both sides with it, as some checkpoints' tokens do.
    for side in ["lstrip", "rstrip"] {
        tokenizer["added_tokens"][2][side] = json!(true);
    }
    let bench = Bench::new();
    bench.write("swallows/tokenizer.json", tokenizer.to_string());
    let config = fs::read(Path::new(TEACHER).join("tokenizer_config.json")).unwrap();
    bench.write("swallows/tokenizer_config.json", config);
    bench.write_rows(
        "rows.jsonl",
        &[chat(&[("user", "Hi "), ("assistant", "Yo  ")])],
    );
    let run = |straddle: &str| {
        let ran = bench.prepare(&[
            "--data",
            "rows.jsonl",
            "--tokenizer",
            "swallows",
            "--straddle",
            straddle,
            "--json",
        ]);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let trained = bench.trained().concat();
        fs::remove_dir_all(bench.path("out")).unwrap();
        (
            serde_json::from_str::<Value>(&ran.stdout).unwrap()["lint"]["straddling_tokens"]
                .clone(),
            trained,
        )
    };
    // The end token reaches into the line end behind the block: a straddler, told and not hidden.
    assert_eq!(run("exclude"), (json!(1), "Yo".to_owned()));
    assert_eq!(run("include"), (json!(1), "Yo<|im_end|>".to_owned()));
}
