//! What is said to people whose rows, files or templates are of another shape: what was found, and
//! what to do.

use serde_json::{Value, json};

use crate::bench::{Bench, TEACHER, chat};

/// The line on stderr of a run over one file that must be refused.
fn refused(name: &str, content: impl AsRef<[u8]>, args: &[&str]) -> String {
    let bench = Bench::new();
    bench.write(name, content);
    let ran = bench.prepare(&[&["--data", name, "--tokenizer", TEACHER], args].concat());
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
    assert!(ran.stderr.contains(name), "{}", ran.stderr);
    ran.stderr
}

fn says(told: &str, expected: &str) {
    assert!(told.contains(expected), "{told}\nexpected: {expected}");
}

/// What is learnt of rows given as they are written.
fn learnt(lines: &str, args: &[&str]) -> Vec<String> {
    let bench = Bench::new();
    bench.write("rows.jsonl", lines);
    let ran = bench.prepare(&[&["--data", "rows.jsonl", "--tokenizer", TEACHER], args].concat());
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    bench.trained()
}

#[test]
fn rows_of_known_shapes_are_named() {
    for (row, expected) in [
        (
            json!({"message_id": "1", "parent_id": null, "role": "prompter", "text": "a"}),
            "found one message of a tree (OASST)",
        ),
        (
            json!({"message_tree_id": "1", "prompt": {"role": "prompter", "text": "a", "replies": []}}),
            "a tree of messages (OASST)",
        ),
        (
            json!({"id": 0, "query": "a", "answers": "[]", "tools": "[]"}),
            "(xLAM); make messages of them",
        ),
        (
            json!({"system": "SYSTEM: a", "chat": "USER: a ASSISTANT: b"}),
            "a chat in one text (Glaive)",
        ),
        (
            json!({"contents": [{"role": "user", "parts": [{"text": "a"}]}]}),
            "a chat of Gemini's",
        ),
        (
            json!({"contents": [{"role": "user", "content": "a"}]}),
            "--map messages=contents",
        ),
        (json!({"data": [{"text": "a"}]}), "jq -c '.data[]'"),
        (
            json!({"role": "user", "content": "a", "id": 1}),
            "a message without its chat",
        ),
        (
            json!({"messages": null}),
            "messages: expected what a row of format messages holds there, found null",
        ),
        (
            json!({"prompt": "a", "completion": null}),
            "completion: expected what a row of format prompt-completion holds there, found null",
        ),
    ] {
        says(&refused("rows.jsonl", row.to_string(), &[]), expected);
    }
    let null = json!({"messages": null}).to_string();
    let told = refused("rows.jsonl", null, &["--format", "messages"]);
    says(&told, "holds there, found null");
    let tree = json!({"message_id": "1", "parent_id": null, "text": "a"}).to_string();
    let texts = learnt(&tree, &["--format", "text"]);
    assert_eq!(texts, ["<|bos|>a<|im_end|>"]);
}

#[test]
fn messages_with_keys_and_roles_of_others_say_the_flag_for_it() {
    let asked = |message: Value| {
        let mut row = chat(&[("user", "a")]);
        row["messages"].as_array_mut().unwrap().push(message);
        row.to_string()
    };
    let answer =
        |key: &str, value: Value| asked(json!({"role": "assistant", "content": "b", key: value}));
    for (row, expected) in [
        (answer("training", json!(true)), "--map train=training"),
        (answer("loss_weight", json!(1)), "--map weight=loss_weight"),
        (
            answer("masked", json!(true)),
            "write \"train\": false for that",
        ),
        (
            answer("train_on_eot", json!(false)),
            "the end of a turn is trained with its turn",
        ),
        (
            asked(json!({"role": "model", "content": "b"})),
            "--roles model=assistant says what it means",
        ),
        (
            asked(json!({"from": "gpt", "value": "b"})),
            "--map role=from,content=value --roles human=user,gpt=assistant",
        ),
        (
            asked(json!({"speaker": "gpt", "content": "b"})),
            "--map role=NAME,content=NAME",
        ),
        (
            asked(json!({"role": "user", "content": "c"})),
            "take the messages behind the last answer out of the row",
        ),
    ] {
        let told = refused("rows.jsonl", &row, &[]);
        says(&told, expected);
        assert!(!told.contains("--ignore-keys"), "{told}");
    }
    let off = answer("training", json!(false));
    let told = refused("rows.jsonl", off, &["--map", "train=training"]);
    says(&told, "expected a message to train");
    let theirs =
        json!({"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]});
    let map = [
        "--map",
        "role=from,content=value",
        "--roles",
        "human=user,gpt=assistant",
    ];
    assert_eq!(learnt(&theirs.to_string(), &map), ["b<|im_end|>"]);
}

#[test]
fn files_of_other_kinds_are_named() {
    let row = "{\"text\": \"a\"}\n";
    let wide: Vec<u8> = row.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let pretty = serde_json::to_string_pretty(&json!({"text": "a"})).unwrap();
    let list = serde_json::to_string_pretty(&json!([{"text": "a"}])).unwrap();
    for (name, content, expected) in [
        (
            "rows.csv",
            &b"text,label\na,b\n"[..],
            "found a table of text; in Python",
        ),
        (
            "rows.txt",
            b"text,label\na,b\n",
            "the line begins with \"text,label\"",
        ),
        ("rows.jsonl", &wide, "found text in UTF-16; iconv -f UTF-16"),
        (
            "rows.jsonl",
            &[b"\xff\xfe", &wide[..]].concat(),
            "found text in UTF-16",
        ),
        (
            "rows.jsonl",
            pretty.as_bytes(),
            "belongs on one line, as jq -c .",
        ),
        (
            "rows.json",
            pretty.as_bytes(),
            "belongs on one line, as jq -c .",
        ),
        (
            "rows.jsonl",
            list.as_bytes(),
            "into a list in a file ending in .json",
        ),
        (
            "rows.jsonl",
            b"[{\"text\": \"a\"}]",
            "one list of all rows belongs in a file ending in .json",
        ),
    ] {
        says(&refused(name, content, &[]), expected);
    }
}

#[test]
fn what_python_writes_and_json_lacks_is_refused_only_where_it_is_read() {
    let unread =
        r#"{"score": NaN, "of": [-Infinity, {"x": Infinity}], "id": "\ud83d", "text": "a"}"#;
    assert_eq!(learnt(unread, &[]), ["<|bos|>a<|im_end|>"]);
    let answer = r#"{"role": "assistant", "content": "b""#;
    let calls = |arguments: &str| {
        format!(
            r#"{answer}, "tool_calls": [{{"function": {{"name": "f", "arguments": {arguments}}}}}]}}"#
        )
    };
    let chat = |answer: &str, more: &str| {
        format!(r#"{{"messages": [{{"role": "user", "content": "a"}}, {answer}]{more}}}"#)
    };
    let plain = format!("{answer}}}");
    for (row, expected) in [
        (
            r#"{"text": NaN}"#.to_owned(),
            "text: expected a string, found NaN, which is no JSON",
        ),
        (
            r#"{"text": "a \udc00"}"#.to_owned(),
            "text: expected a string, found a string with half a character",
        ),
        (
            r#"{"messages": Infinity}"#.to_owned(),
            "messages: expected a list of messages, found an infinity",
        ),
        (
            chat(&calls(r#"{"x": NaN}"#), ""),
            "found NaN, which is no JSON",
        ),
        (
            chat(&plain, r#", "tools": [{"name": "\ud83d"}]"#),
            "found a string with half a character",
        ),
        (
            chat(&plain, r#", "chat_template_kwargs": {"x": -Infinity}"#),
            "found an infinity",
        ),
        (
            chat(&plain, r#", "chat_template_kwargs": NaN"#),
            "expected an object, found NaN",
        ),
        (
            chat(&plain, r#", "weight": NaN"#),
            "weight: expected 1 or true for a whole row, found NaN, which is no JSON;",
        ),
        (
            r#"{"input_ids": [1, NaN], "loss_mask": [0, 1]}"#.to_owned(),
            "input_ids: expected a token id, found NaN, which is no JSON at token 1",
        ),
        (
            r#"{"text": "a", "x": NaN, "x": 1}"#.to_owned(),
            "expected a JSON object on one line",
        ),
    ] {
        says(&refused("rows.jsonl", row, &[]), expected);
    }
}

#[test]
fn a_tokenizers_file_is_no_folder() {
    let file = format!("{TEACHER}/tokenizer.json");
    let bench = Bench::new();
    bench.write_rows("rows.jsonl", &[json!({"text": "a"})]);
    let ran = bench.prepare(&["--data", "rows.jsonl", "--tokenizer", &file]);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    says(&ran.stderr, "found a file; give the folder it stands in, ");
    says(&ran.stderr, TEACHER);
}

#[test]
fn a_corpus_is_not_made_among_its_own_sources() {
    let bench = Bench::new();
    bench.write_rows("in/rows.jsonl", &[json!({"text": "a"})]);
    let run = |data: &str, out: &str| {
        bench.prepare(&["--data", data, "--tokenizer", TEACHER, "--out", out])
    };
    for (data, out) in [
        (".", "corpus"),
        ("in", "in/corpus"),
        ("./in", "in/deep/corpus"),
        ("*", "corpus"),
        ("in/*", "./in/corpus"),
        ("in", "in"),
    ] {
        let ran = run(data, out);
        assert_eq!(ran.code, 2, "{data} {out}: {}", ran.stdout);
        says(
            &ran.stderr,
            "expected a folder outside of --data, found one inside of",
        );
    }
    for (data, out) in [("in", "in-corpus"), ("in/*.jsonl", "in/corpus")] {
        let ran = run(data, out);
        assert_eq!(ran.code, 0, "{data} {out}: {}", ran.stderr);
    }
}

#[test]
fn parts_that_the_template_would_print_otherwise_are_counted() {
    let part = |text: &str| json!({"type": "text", "text": text});
    let rows = |parts: &[&str]| {
        let parts: Vec<Value> = parts.iter().map(|text| part(text)).collect();
        json!({"system": "s", "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": [part("b")]}]})
    };
    let trims = "{% for m in messages %}<|im_start|>{% generation %}{% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endif %}{% endgeneration %}{% endfor %}";
    let counted = |template: &str, parts: &[&str]| {
        let bench = Bench::new();
        bench.write("t.jinja", template);
        let facts = bench.prepared(&[rows(parts)], &["--chat-template", "t.jinja"]);
        facts["lint"]["text_parts_joined"].clone()
    };
    assert_eq!(counted(trims, &[" a", "b "]), 0);
    assert_eq!(counted(trims, &["a ", "b"]), 2);
    let prints = trims.replace("m.content is string", "true");
    assert_eq!(counted(&prints, &["a"]), 2);
    let fails = trims.replace("{% else %}", "{% else %}{{ raise_exception('no') }}");
    assert_eq!(counted(&fails, &["a"]), 2);
}

#[test]
fn a_tokenizer_that_transformers_5_builds_itself_is_built_so_and_told() {
    let pieces = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/checkpoints/pieces.json"
    );
    let prepared = |class: &str, args: &[&str]| {
        let bench = Bench::new();
        let config = json!({"tokenizer_class": class, "eos_token": "</s>", "bos_token": "<s>", "legacy": true});
        bench.write("pieces/tokenizer_config.json", config.to_string());
        bench.write("pieces/tokenizer.json", std::fs::read(pieces).unwrap());
        bench.write_rows("rows.jsonl", &[json!({"text": " a"})]);
        let ran = bench.prepare(
            &[
                &["--data", "rows.jsonl", "--tokenizer", "pieces", "--json"],
                args,
            ]
            .concat(),
        );
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let facts: Value = serde_json::from_str(&ran.stdout).unwrap();
        (facts, bench.sequences()[0].0.clone())
    };
    let (facts, by_class) = prepared("LlamaTokenizerFast", &[]);
    assert_eq!(facts["tokenizer_class"], "LlamaTokenizer");
    assert_eq!(facts["lint"]["rebuilt_tokenizer"], 1);
    let (facts, by_file) = prepared(
        "LlamaTokenizerFast",
        &["--template-rules", "transformers-4"],
    );
    assert_eq!(
        (
            &facts["tokenizer_class"],
            &facts["lint"]["rebuilt_tokenizer"]
        ),
        (&Value::Null, &json!(0))
    );
    assert_ne!(by_class, by_file);
    let (facts, generic) = prepared("PreTrainedTokenizerFast", &[]);
    assert_eq!(
        (
            &facts["tokenizer_class"],
            &facts["lint"]["rebuilt_tokenizer"]
        ),
        (&Value::Null, &json!(0))
    );
    assert_eq!(generic, by_file);
    let (facts, _) = prepared("GPTNeoXTokenizer", &[]);
    assert_eq!(facts["tokenizer_class"], "GPTNeoXTokenizer");
    let (facts, _) = prepared("T5Tokenizer", &[]);
    assert_eq!(facts["lint"]["rebuilt_tokenizer"], 1);
}
