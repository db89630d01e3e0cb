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
            "expected an answer of the assistant, found none",
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

/// A run over one row with the tokenizer of pieces, whose folder has these other files.
fn with_pieces(row: &Value, files: &[(&str, Value)], args: &[&str]) -> (Value, Vec<i32>) {
    let pieces = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/checkpoints/pieces.json"
    );
    let bench = Bench::new();
    bench.write("pieces/tokenizer.json", std::fs::read(pieces).unwrap());
    for (name, content) in files {
        bench.write(&format!("pieces/{name}"), content.to_string());
    }
    bench.write_rows("rows.jsonl", std::slice::from_ref(row));
    let command = ["--data", "rows.jsonl", "--tokenizer", "pieces", "--json"];
    let ran = bench.prepare(&[&command, args].concat());
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let facts: Value = serde_json::from_str(&ran.stdout).unwrap();
    (facts, bench.sequences()[0].0.clone())
}

#[test]
fn a_tokenizer_that_transformers_5_builds_itself_is_built_so_and_told() {
    let prepared = |class: &str, args: &[&str]| {
        let config = json!({"tokenizer_class": class, "eos_token": "</s>", "bos_token": "<s>", "legacy": true});
        with_pieces(
            &json!({"text": " a"}),
            &[("tokenizer_config.json", config)],
            args,
        )
    };
    let (facts, by_class) = prepared("LlamaTokenizerFast", &[]);
    assert_eq!(facts["tokenizer_class"], "LlamaTokenizer");
    let (facts, by_file) = prepared(
        "LlamaTokenizerFast",
        &["--template-rules", "transformers-4"],
    );
    assert_eq!(facts["tokenizer_class"], Value::Null);
    assert_ne!(by_class, by_file);
    let (facts, generic) = prepared("PreTrainedTokenizerFast", &[]);
    assert_eq!(facts["tokenizer_class"], Value::Null);
    assert_eq!(facts["lint"]["rebuilt_tokenizer"], 0);
    assert_eq!(generic, by_file);
    let (facts, _) = prepared("T5Tokenizer", &[]);
    assert_eq!(facts["lint"]["rebuilt_tokenizer"], 1);
}

#[test]
fn older_files_of_a_tokenizer_are_read_where_transformers_reads_them() {
    let map = json!({"eos_token": "<s>", "bos_token": "<s>"});
    let listed = json!({"2": {"content": "</s>", "special": true}});
    for (config, end) in [
        (json!({"eos_token": "</s>"}), 1),
        (
            json!({"eos_token": "</s>", "added_tokens_decoder": listed}),
            2,
        ),
    ] {
        let files = [
            ("tokenizer_config.json", config),
            ("special_tokens_map.json", map.clone()),
        ];
        let (_, tokens) = with_pieces(&json!({"text": "a"}), &files, &[]);
        assert_eq!(tokens.last(), Some(&end));
    }
    let size = {
        let (facts, _) = with_pieces(&json!({"text": "a"}), &[], &[]);
        facts["vocab_size"].as_u64().unwrap()
    };
    let added = json!({"<|turn|>": size});
    let (facts, tokens) = with_pieces(
        &json!({"text": "<|turn|>"}),
        &[("added_tokens.json", added)],
        &[],
    );
    assert_eq!(tokens.last(), Some(&(size as i32)));
    assert_eq!(facts["vocab_size"], size + 1);
}

#[test]
fn a_corpus_of_another_tokenizer_setting_is_not_taken_for_the_same() {
    let bench = Bench::new();
    let tokenizer = std::fs::read(format!("{TEACHER}/tokenizer.json")).unwrap();
    bench.write("own/tokenizer.json", tokenizer);
    bench.write_rows("rows.jsonl", &[json!({"text": "a"})]);
    let run = |eos: &str| {
        bench.write(
            "own/tokenizer_config.json",
            json!({"eos_token": eos}).to_string(),
        );
        bench.prepare(&["--data", "rows.jsonl", "--tokenizer", "own"])
    };
    assert_eq!(run("<|im_end|>").code, 0);
    assert_eq!(run("<|im_end|>").code, 0);
    let ran = run("<|im_start|>");
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    says(&ran.stderr, "tokenizer_settings");
}

#[test]
fn a_chat_that_begins_with_the_assistant_is_learnt_whole_or_told() {
    let greeting = |content: &str| {
        chat(&[("assistant", content), ("user", "a"), ("assistant", "b")]).to_string()
    };
    // Fails without a message, as many templates do.
    let picky = "{% if messages[0].role == 'system' %}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let bench = Bench::new();
    let template = bench.write("t.jinja", picky);
    let template = ["--chat-template", template.to_str().unwrap()];
    for (content, first) in [
        ("Hi there", "Hi there<|im_end|>"),
        ("  Hi", "  Hi<|im_end|>"),
    ] {
        assert_eq!(
            learnt(&greeting(content), &template),
            [format!("{first}b<|im_end|>")]
        );
    }
    let alone = chat(&[("assistant", "Hi")]).to_string();
    says(
        &refused("rows.jsonl", &alone, &template),
        "put a system message in front",
    );
    says(
        &refused("rows.jsonl", greeting(" "), &template),
        "put a system message in front",
    );
}

#[test]
fn what_ends_an_answer_is_told_from_what_begins_a_turn() {
    let bench = Bench::new();
    let body = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}";
    let tail = bench.write("tail.jinja", format!("{body}<|im_end|>\n{{% endfor %}}{{% if not add_generation_prompt %}}<|pad|>{{% endif %}}"));
    let end = "{% if m.role == 'assistant' and loop.last %}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let body_of_two = body.replace(
        "<|im_start|>",
        "{{ '<|im_start|>' if m.role == 'assistant' else '<|pad|>' }}",
    );
    let two = bench.write("two.jinja", format!("{body_of_two}{end}"));
    let endless = bench.write("endless.jinja", format!("{body}{end}"));
    let row = chat(&[
        ("user", "a"),
        ("assistant", "Hello you."),
        ("user", "b"),
        ("assistant", "Yes, more."),
    ])
    .to_string();
    for (template, expected) in [
        (tail, "so the header would be trained"),
        (endless, "this template needs generation blocks"),
        (two, "this template needs generation blocks"),
    ] {
        says(
            &refused(
                "rows.jsonl",
                &row,
                &["--chat-template", template.to_str().unwrap()],
            ),
            expected,
        );
    }
}

#[test]
fn completions_end_in_an_eos_of_their_own() {
    for (prompt, completion, text) in [
        ("a b<|im_end|>", "", "<|im_end|>"),
        ("a b", "c<|im_end|>", "c<|im_end|>"),
        ("a b", "", "<|im_end|>"),
    ] {
        let bench = Bench::new();
        let row = json!({"prompt": prompt, "completion": completion});
        let facts = bench.prepared(&[row], &[]);
        assert_eq!(bench.trained(), [text]);
        assert_eq!(
            facts["lint"]["empty_answers"],
            u64::from(completion.is_empty())
        );
        let ends = bench.sequences()[0].0.iter().filter(|&&id| id == 2).count();
        assert_eq!(ends, 1 + usize::from(prompt.ends_with('>')));
    }
}

#[test]
fn columns_that_would_change_what_is_learnt_are_refused_beside_chats_and_prompts() {
    let question =
        json!([{"from": "human", "value": "<image> What?"}, {"from": "gpt", "value": "A cat."}]);
    for (row, expected) in [
        (
            json!({"image": "x.jpg", "conversations": question}),
            "expected no column image beside",
        ),
        (
            json!({"prompt": "q", "completion": "a", "system": "s"}),
            "--map query=prompt,response=completion makes a chat with it",
        ),
        (
            json!({"prompt": "q", "completion": "a", "images": ["x"]}),
            "expected no column images beside",
        ),
        (
            json!({"query": "q", "response": "a", "system_prompt": "s"}),
            "--map system=system_prompt makes it the system message",
        ),
    ] {
        says(&refused("rows.jsonl", row.to_string(), &[]), expected);
    }
    let row = json!({"query": "q", "response": "a", "system_prompt": "s"});
    let all = ["--map", "system=system_prompt", "--loss", "all"];
    assert!(learnt(&row.to_string(), &all)[0].contains("system\u{21b5}s<|im_end|>"));
}

#[test]
fn small_numbers_print_as_python_prints_them_or_are_refused() {
    let call = json!({"function": {"name": "f", "arguments": {"lr": 0.00001}}});
    let row = json!({"messages": [{"role": "user", "content": "lr 0.00001?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]});
    let template = |printed: &str| {
        format!(
            "{{% for m in messages %}}<|im_start|>{{% generation %}}{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}{{{{ c.function.name }}}} {{% for k, v in c.function.arguments.items() %}}{{{{ {printed} }}}}{{% endfor %}}{{% endfor %}}{{% endgeneration %}}{{% endfor %}}"
        )
    };
    let bench = Bench::new();
    let print = |printed: &str| bench.write("t.jinja", template(printed));
    for printed in ["v", "v | tojson", "v | string", "[v] | join(',')"] {
        let path = print(printed);
        let found = learnt(
            &row.to_string(),
            &["--chat-template", path.to_str().unwrap()],
        );
        assert_eq!(found, ["lr 0.00001?f 1e-05"], "{printed}");
    }
    let path = print("v ~ ''");
    let args = ["--chat-template", path.to_str().unwrap()];
    let told = refused("rows.jsonl", row.to_string(), &args);
    says(
        &told,
        "expected the number 1e-05 in the form of Python, found 0.00001",
    );
}
