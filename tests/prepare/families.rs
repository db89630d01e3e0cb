//! Every row family as people write it: what is read of it, and what is learnt.

use serde_json::{Value, json};

use crate::bench::{Bench, PLAIN_CHATML, TEACHER, chat};

/// What is learnt of one row by the fixture's own template.
fn learnt(row: Value, args: &[&str]) -> String {
    let bench = Bench::new();
    bench.prepared(&[row], args);
    bench.trained().concat()
}

/// Every token of one row, as text.
fn whole(row: Value) -> String {
    learnt(row, &["--loss", "all"])
}

fn refused(row: Value, args: &[&str]) -> String {
    let bench = Bench::new();
    bench.write_rows("rows.jsonl", &[row]);
    let ran = bench.prepare(&[&["--data", "rows.jsonl", "--tokenizer", TEACHER], args].concat());
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    ran.stderr
}

const TWO_TURNS: &str = "b<|im_end|>d<|im_end|>";

#[test]
fn one_chat_in_every_family() {
    let rows = [
        chat(&[
            ("user", "a"),
            ("assistant", "b"),
            ("user", "c"),
            ("assistant", "d"),
        ]),
        json!({"conversations": [
            {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"},
        ]}),
        json!({"conversations": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
        ]}),
        json!({"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]]}),
        json!({"conversation": [{"human": "a", "assistant": "b"}, {"human": "c", "assistant": "d"}]}),
        json!({"query": "c", "response": "d", "history": [["a", "b"]]}),
    ];
    let expected = whole(rows[0].clone());
    for row in rows {
        assert_eq!(learnt(row.clone(), &[]), TWO_TURNS, "{row}");
        assert_eq!(
            learnt(row.clone(), &["--loss", "last-assistant"]),
            "d<|im_end|>",
            "{row}"
        );
        assert_eq!(whole(row), expected);
    }
}

#[test]
fn instruction_and_input_stand_on_two_lines_and_a_system_column_in_front() {
    let row = json!({"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief."});
    let same = chat(&[
        ("system", "Be brief."),
        ("user", "Add.\n1 2"),
        ("assistant", "3"),
    ]);
    assert_eq!(whole(row), whole(same));
    let sharegpt = json!({"system": "S", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]});
    assert!(whole(sharegpt).starts_with("<|bos|><|im_start|>system↵S<|im_end|>"));
    let two = json!({"system": "S", "messages": [{"role": "system", "content": "T"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
    assert!(refused(two, &[]).contains("expected one system message"));
}

#[test]
fn sharegpt_takes_turns() {
    for (from, says) in [
        (
            ["gpt", "human"],
            "expected human and gpt in turn, found assistant in place 0",
        ),
        (["human", "human"], "found user in place 1"),
    ] {
        let row = json!({"conversations": from.map(|f| json!({"from": f, "value": "a"}))});
        assert!(refused(row, &[]).contains(says));
    }
}

#[test]
fn messages_say_whether_they_are_trained() {
    for (flag, off, on) in [
        ("weight", json!(0), json!(1)),
        ("train", json!(false), json!(true)),
        ("loss", json!(false), json!(true)),
        ("loss_scale", json!(0.0), json!(1.0)),
    ] {
        let mut row = chat(&[
            ("user", "a"),
            ("assistant", "b"),
            ("user", "c"),
            ("assistant", "d"),
        ]);
        row["messages"][1][flag] = off;
        row["messages"][3][flag] = on;
        assert_eq!(learnt(row.clone(), &[]), "d<|im_end|>", "{flag}");
        assert!(refused(row, &["--loss", "all"]).contains("expected no flags against training"));
    }
    let mut row = chat(&[("user", "a"), ("assistant", "b")]);
    row["messages"][1]["weight"] = json!(0.5);
    assert!(refused(row.clone(), &[]).contains("messages[1].weight: expected 0 or 1"));
    row["messages"][1]["weight"] = json!(1);
    row["messages"][1]["train"] = json!(false);
    assert!(refused(row, &[]).contains("expected weight and train to say the same"));
}

#[test]
fn parts_of_an_answer_are_trained_apart() {
    let parts = |last: u8| {
        json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": [
            {"type": "text", "text": "no.", "weight": 0}, {"type": "text", "text": " yes!"}, {"type": "text", "text": " maybe?", "weight": last},
        ]}]})
    };
    assert_eq!(learnt(parts(1), &[]), " yes! maybe?<|im_end|>");
    assert_eq!(learnt(parts(0), &[]), " yes!");
    let detail = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "no. yes!", "train_detail": [
        {"begin_offset": 0, "end_offset": 2, "train": false}, {"begin_offset": 3, "end_offset": 7, "train": true},
    ]}]});
    assert_eq!(learnt(detail.clone(), &[]), " yes!<|im_end|>");
    // A template that doubles the content has no one place for a part of it.
    let bench = Bench::new();
    bench.write("t.jinja", "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}");
    bench.write_rows("rows.jsonl", &[detail]);
    let ran = bench.prepare(&[
        "--data",
        "rows.jsonl",
        "--tokenizer",
        TEACHER,
        "--chat-template",
        "t.jinja",
    ]);
    assert!(
        ran.stderr.contains("so parts of it can't be trained apart"),
        "{}",
        ran.stderr
    );
}

#[test]
fn details_train_their_ranges_and_the_end_of_the_turn() {
    let row = |content: &str, ranges: &[(u8, u8, bool)]| {
        let range = |&(begin, end, train): &(u8, u8, bool)| json!({"begin_offset": begin, "end_offset": end, "train": train});
        let detail: Vec<Value> = ranges.iter().map(range).collect();
        json!({"messages": [
            {"role": "user", "content": "q"}, {"role": "assistant", "content": "so"},
            {"role": "user", "content": "r"}, {"role": "assistant", "content": content, "train_detail": detail},
        ]})
    };
    let bare = PLAIN_CHATML.replace("m.content", "m.content.strip()");
    assert_ne!(bare, PLAIN_CHATML);
    let bench = Bench::new();
    bench.write("plain.jinja", PLAIN_CHATML);
    bench.write("bare.jinja", bare);
    let (plain, bare) = (bench.path("plain.jinja"), bench.path("bare.jinja"));
    for (content, ranges, kept, stripped) in [
        ("no. yes!", &[(3, 7, true)][..], " yes!", " yes!"),
        ("no. yes!", &[(0, 2, true)], "no.", "no."),
        ("no. yes!", &[(0, 2, true), (3, 7, false)], "no.", "no."),
        ("no. yes!", &[(0, 1, true), (2, 2, true)], "no.", "no."),
        ("no. yes!", &[(0, 2, false)], "", ""),
        (" no.\n", &[(0, 3, true)], " no.", "no."),
        (" no.\n", &[(3, 4, true)], ".↵", "."),
        (" no.\n", &[(0, 4, true)], " no.↵", "no."),
    ] {
        for (template, own) in [(None, kept), (Some(&plain), kept), (Some(&bare), stripped)] {
            let flag = template.map(|path| ["--chat-template", path.to_str().unwrap()]);
            let found = learnt(row(content, ranges), flag.as_ref().map_or(&[], |f| &f[..]));
            let expected = format!("so<|im_end|>{own}<|im_end|>");
            assert_eq!(found, expected, "{content} {ranges:?} {template:?}");
        }
    }
    assert_eq!(learnt(row("no. yes!", &[]), &[]), "so<|im_end|>");
    let mut all = row("no. yes!", &[]);
    all["messages"][3]["train"] = json!(true);
    assert_eq!(learnt(all, &[]), "so<|im_end|>no. yes!<|im_end|>");
}

#[test]
fn details_leave_what_stands_around_the_content_untrained() {
    let row = json!({"messages": [{"role": "user", "content": "q"}, {
        "role": "assistant", "content": "no. yes!", "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        "train_detail": [{"begin_offset": 0, "end_offset": 2, "train": true}],
    }]});
    let template = "tests/fixtures/templates/generation.jinja";
    let template = format!("{}/{template}", env!("CARGO_MANIFEST_DIR"));
    assert_eq!(learnt(row, &["--chat-template", &template]), "no.");
}

#[test]
fn flags_of_other_roles_are_refused_wherever_they_stand() {
    for message in [
        json!({"role": "user", "content": "q", "train_detail": [{"begin_offset": 0, "end_offset": 0, "train": true}]}),
        json!({"role": "user", "content": [{"type": "text", "text": "q", "weight": 1}]}),
    ] {
        let row = json!({"messages": [message, {"role": "assistant", "content": "a"}]});
        assert!(refused(row, &[]).contains("found a user message that asks for it"));
    }
    let off = json!({"role": "user", "content": [{"type": "text", "text": "q", "weight": 0}]});
    let row = json!({"messages": [off, {"role": "assistant", "content": "a"}]});
    assert_eq!(learnt(row, &[]), "a<|im_end|>");
}

#[test]
fn calls_in_messages_of_their_own_have_an_empty_content() {
    let bench = Bench::new();
    bench.write("t.jinja", "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content.lstrip() }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}|{% endgeneration %}{% else %}{{ m.content }}|{% endif %}{% endfor %}");
    let call = r#"{"name": "f", "arguments": {"x": 1}}"#;
    for row in [
        json!({"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": call}]}),
        json!({"messages": [{"role": "user", "content": "q"}, {"role": "tool_call", "content": call}]}),
    ] {
        let template = bench.path("t.jinja");
        let args = ["--chat-template", template.to_str().unwrap()];
        assert_eq!(learnt(row, &args), format!("{call}|"));
    }
}

#[test]
fn other_roles_in_a_completion_are_counted() {
    let prompt = json!([{"role": "user", "content": "q"}]);
    let completion =
        chat(&[("assistant", "a"), ("user", "r"), ("assistant", "b")])["messages"].clone();
    let row = |completion: Value| json!({"prompt": prompt, "completion": completion});
    let bench = Bench::new();
    let facts = bench.prepared(&[row(completion)], &[]);
    assert_eq!(bench.trained(), ["a<|im_end|>b<|im_end|>"]);
    assert_eq!(facts["lint"]["other_roles_in_completion"], 1);
    let example = facts["first_examples"]["other_roles_in_completion"].as_str();
    assert_eq!(example, Some("rows.jsonl:1: message 2 of role user"));
    let answer = chat(&[("assistant", "a")])["messages"].clone();
    let facts = Bench::new().prepared(&[row(answer)], &[]);
    assert_eq!(facts["lint"]["other_roles_in_completion"], 0);
}

#[test]
fn arguments_printed_in_another_form_are_counted() {
    let bench = Bench::new();
    bench.write("t.jinja", "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{% for c in m.tool_calls %}{% set a = c.function.arguments %}{{ c.function.name }}{{ a if a is string else a | tojson }}{% endfor %}|{% endgeneration %}{% else %}{{ m.content }}|{% endif %}{% endfor %}");
    let template = bench.path("t.jinja");
    let template = ["--chat-template", template.to_str().unwrap()];
    let found = |arguments: &str, more: &[&str]| {
        let row = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]});
        let facts = Bench::new().prepared(&[row], &[&template, more].concat());
        facts["lint"]["arguments_reprinted"].as_u64()
    };
    assert_eq!(found(r#"{"é":[1,2.50],"b":{}}"#, &[]), Some(1));
    assert_eq!(found(r#"{"é": [1, 2.5], "b": {}}"#, &[]), Some(0));
    assert_eq!(
        found(
            r#"{"é":[1,2.50],"b":{}}"#,
            &["--tool-arguments", "as-given"]
        ),
        Some(0)
    );
}

#[test]
fn segments_say_what_is_trained() {
    let row = json!({"segments": [
        {"label": false, "text": "<|bos|>Q: hi\n"}, {"label": true, "text": "A: yo<|im_end|>"}, {"label": false, "text": "\nQ: bye\n"}, {"label": true, "text": "A: ok"},
    ]});
    assert_eq!(learnt(row.clone(), &[]), "A: yo<|im_end|>A: ok");
    assert!(refused(row, &["--loss", "all"]).contains("loss: expected given"));
    assert!(
        refused(json!({"segments": [{"text": "a"}]}), &[])
            .contains("segments[0]: expected a text and a label")
    );
}

#[test]
fn segments_with_nothing_but_straddlers_say_the_flag_for_it() {
    let row = json!({"segments": [{"label": false, "text": "the answer is th"}, {"label": true, "text": "e"}]});
    let told = refused(row.clone(), &[]);
    assert!(
        told.contains("which --straddle include takes for all of it"),
        "{told}"
    );
    assert!(!learnt(row, &["--straddle", "include"]).is_empty());
    let none = json!({"segments": [{"label": false, "text": "a"}]});
    assert!(!refused(none, &[]).contains("--straddle"));
}

#[test]
fn keys_and_roles_of_other_names_are_mapped() {
    let row = json!({"dialog": [{"who": "client", "says": "a"}, {"who": "bot", "says": "b"}]});
    let args = [
        "--map",
        "messages=dialog,role=who,content=says",
        "--roles",
        "client=user,bot=assistant",
    ];
    assert_eq!(learnt(row.clone(), &args), "b<|im_end|>");
    assert!(refused(row, &[]).contains("--map messages=dialog"));
    let gsm = json!({"question": "1+1?", "answer": "2"});
    assert!(refused(gsm.clone(), &[]).contains("--map query=question,response=answer"));
    assert_eq!(
        learnt(gsm, &["--map", "query=question,response=answer"]),
        "2<|im_end|>"
    );
    let taken = json!({"messages": [], "dialog": []});
    assert!(refused(taken, &["--map", "messages=dialog"]).contains("found messages taken already"));
    let extra = json!({"messages": [{"role": "user", "content": "a", "id": 7}, {"role": "assistant", "content": "b", "id": 8}]});
    assert!(refused(extra.clone(), &[]).contains("found \"id\"; --map gives it another name"));
    assert_eq!(learnt(extra, &["--ignore-keys", "id"]), "b<|im_end|>");
}

#[test]
fn a_row_gives_its_template_variables() {
    let bench = Bench::new();
    bench.write("t.jinja", "{{ mood }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}");
    let mut row = chat(&[("user", "a"), ("assistant", "b")]);
    row["chat_template_kwargs"] = json!({"mood": "glad "});
    let args = [
        "--chat-template",
        "t.jinja",
        "--template-arg",
        "mood=sad ",
        "--loss",
        "all",
    ];
    bench.prepared(
        &[row.clone(), chat(&[("user", "a"), ("assistant", "b")])],
        &args,
    );
    assert_eq!(bench.trained(), ["glad ab", "sad ab"]);
    row["chat_template_kwargs"] = json!({"messages": []});
    assert!(
        refused(row, &[])
            .contains("chat_template_kwargs: expected variables of the template, found messages")
    );
}

#[test]
fn function_calls_and_observations_become_calls_and_results() {
    let row = json!({"tools": "[{\"name\": \"f\"}]", "conversations": [
        {"from": "human", "value": "q"}, {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": 2}}"},
        {"from": "observation", "value": "42"}, {"from": "gpt", "value": "It is 42."},
    ]});
    let bench = Bench::new();
    bench.write("t.jinja", "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content if m.content is defined }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}|{% endgeneration %}{% else %}{{ m.content }}|{% endif %}{% endfor %}");
    bench.prepared(&[row], &["--chat-template", "t.jinja"]);
    assert_eq!(
        bench.trained(),
        ["{\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": 2}}|It is 42.|"]
    );
}

#[test]
fn rows_without_an_answer_or_of_preferences_say_what_they_are() {
    assert!(
        refused(json!({"prompt": [], "reward_model": {}}), &[])
            .contains("which holds no answer to learn")
    );
    let messages = json!([{"role": "user", "content": "q"}]);
    for (row, says) in [
        (
            json!({"prompt": messages, "chosen": messages}),
            "--map completion=chosen",
        ),
        (
            json!({"prompt": "q", "chosen": messages}),
            "--map messages=chosen",
        ),
        (
            json!({"prompt": "q", "chosen": "a"}),
            "--map completion=chosen",
        ),
        (json!({"chosen": "a", "rejected": "b"}), "--map text=chosen"),
    ] {
        assert!(refused(row, &[]).contains(says), "{says}");
    }
}

#[test]
fn rows_of_no_family_say_how_to_read_them() {
    for (row, says) in [
        (
            json!({"instruction": "a", "context": "b", "response": "c"}),
            "--map input=context,output=response",
        ),
        (
            json!({"article": "a", "question": "b", "answer": "c"}),
            "--map instruction=question,input=article,output=answer",
        ),
        (
            json!({"system_prompt": "a", "question": "b", "response": "c"}),
            "--map system=system_prompt,query=question",
        ),
        (
            json!({"conversation": [{"input": "a", "output": "b"}]}),
            "--map gives them these names, as in human=input,assistant=output",
        ),
        (
            json!({"conversation": [{"role": "user", "content": "b"}]}),
            "--map messages=conversation",
        ),
        (json!({"prompt": "a"}), "a row without an answer to learn"),
        (
            json!({"preferred_output": [], "non_preferred_output": []}),
            "make messages of its input and preferred_output",
        ),
        (
            json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "function_call": {}}]}),
            "found \"function_call\"; write it as tool_calls",
        ),
    ] {
        let told = refused(row, &[]);
        assert!(told.contains(says), "{told}");
    }
    let dolly = json!({"instruction": "a", "context": "b", "response": "c"});
    let alpaca = json!({"instruction": "a", "input": "b", "output": "c"});
    let map = ["--map", "input=context,output=response", "--loss", "all"];
    assert_eq!(learnt(dolly, &map), whole(alpaca));
    let capybara = json!({"conversation": [{"input": "a", "output": "b"}]});
    let map = ["--map", "human=input,assistant=output"];
    assert_eq!(learnt(capybara, &map), "b<|im_end|>");
}

#[test]
fn columns_that_would_change_the_chat_are_refused_or_left_unread_by_name() {
    let mut row = chat(&[("user", "a"), ("assistant", "b")]);
    for (column, value) in [
        ("images", json!(["x.png"])),
        ("system_prompt", json!("Be brief.")),
        ("kto_tag", json!(false)),
        ("label", json!(false)),
    ] {
        row[column] = value;
        let told = refused(row.clone(), &[]);
        assert!(told.contains(&format!("--ignore-keys {column}")), "{told}");
        assert_eq!(
            learnt(row.clone(), &["--ignore-keys", column]),
            "b<|im_end|>"
        );
        row.as_object_mut().unwrap().remove(column);
    }
    let completion = json!({"prompt": "a", "completion": "b", "label": false});
    assert!(refused(completion, &[]).contains("found one marked false"));
    row["system_prompt"] = json!("Be brief.");
    let mapped = learnt(row, &["--map", "system=system_prompt", "--loss", "all"]);
    assert!(mapped.contains("system↵Be brief.<|im_end|>"), "{mapped}");
    let quiet = json!({"messages": chat(&[("user", "a"), ("assistant", "b")])["messages"], "images": [], "system_prompt": "", "label": true});
    assert_eq!(learnt(quiet, &[]), "b<|im_end|>");
}

#[test]
fn calls_and_results_in_messages_of_their_own_join_the_answer() {
    let swift = json!({"messages": [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "Let me see."},
        {"role": "tool_call", "content": "{\"name\": \"f\", \"arguments\": {\"a\": 1}}"},
        {"role": "tool_call", "content": "{\"name\": \"g\", \"arguments\": {}}"},
        {"role": "tool_response", "content": "42"}, {"role": "assistant", "content": "It is 42."},
    ]});
    let openai = json!({"messages": [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "Let me see.", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}, {"type": "function", "function": {"name": "g", "arguments": {}}},
        ]},
        {"role": "tool", "content": "42"}, {"role": "assistant", "content": "It is 42."},
    ]});
    let template = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/templates/generation.jinja"
    );
    let args = ["--chat-template", template];
    let found = learnt(swift, &args);
    assert!(found.contains("CALL f {\"a\": 1}↵CALL g {}"), "{found}");
    assert_eq!(found, learnt(openai, &args));
}

#[test]
fn spaces_that_a_template_sets_anew_are_no_loss() {
    let bench = Bench::new();
    // As templates of models that think do: the thoughts are taken out and put back.
    bench.write("t.jinja", "{% for m in messages %}<|im_start|>{{ m.role }}\n{% generation %}{% if '</think>' in m.content %}\
        {% set parts = m.content.split('</think>') %}{{ parts[0].strip() }}\n</think>\n\n{{ parts[1].strip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endgeneration %}{% endfor %}");
    let row = chat(&[("user", "a"), ("assistant", "<think>one  two</think>b")]);
    bench.prepared(&[row], &["--chat-template", "t.jinja", "--loss", "all"]);
    assert!(bench.trained()[0].contains("<think>one  two↵</think>↵↵b<|im_end|>"));
}

#[test]
fn a_template_that_fails_on_calls_without_content_says_what_to_write() {
    let bench = Bench::new();
    bench.write("t.jinja", "{% for m in messages %}{{ m.role + m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}");
    let row = json!({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    ]});
    bench.write_rows("rows.jsonl", &[row]);
    let args = [
        "--data",
        "rows.jsonl",
        "--tokenizer",
        TEACHER,
        "--chat-template",
        "t.jinja",
    ];
    let told = bench.prepare(&args).stderr;
    let says = "message 1 has tool calls and no content, which many templates can't print: write \"content\": \"\" beside them";
    assert!(told.contains(says), "{told}");
}

#[test]
fn a_mask_template_says_what_the_chat_template_does_not() {
    let bench = Bench::new();
    let body = |open: &str, close: &str| {
        format!(
            "{{{{ bos_token }}}}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{% if m.role == 'assistant' %}}{open}{{{{ '<think></think>' if loop.last }}}}{{{{ m.content }}}}{{{{ '<|im_end|>' if loop.last else '<|im_start|>' }}}}{close}{{% else %}}{{{{ m.content }}}}<|im_end|>{{% endif %}}\n{{% endfor %}}"
        )
    };
    bench.write("plain.jinja", body("", ""));
    bench.write(
        "marked.jinja",
        body("{% generation %}", "{% endgeneration %}"),
    );
    bench.write(
        "other.jinja",
        body("{% generation %}x", "{% endgeneration %}"),
    );
    let rows = [chat(&[
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
    ])];
    bench.write_rows("rows.jsonl", &rows);
    let args = [
        "--data",
        "rows.jsonl",
        "--tokenizer",
        TEACHER,
        "--chat-template",
        "plain.jinja",
    ];
    let ran = bench.prepare(&args);
    assert!(ran.stderr.contains("--mask-template"), "{}", ran.stderr);
    let ran = bench.prepare(&[&args[..], &["--mask-template", "other.jinja"]].concat());
    assert!(
        ran.stderr
            .contains("expected the mask template to render what the chat template does"),
        "{}",
        ran.stderr
    );
    let facts = bench.prepared(
        &rows,
        &[
            "--chat-template",
            "plain.jinja",
            "--mask-template",
            "marked.jinja",
        ],
    );
    assert_eq!(facts["mask_source"], "mask template");
    assert_eq!(bench.trained(), ["b<|im_start|><think></think>d<|im_end|>"]);
}

#[test]
fn an_earlier_answer_ends_at_its_end_token_although_the_last_is_rendered_otherwise() {
    let bench = Bench::new();
    bench.write("t.jinja", "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<think></think>' if loop.last and m.role == 'assistant' }}{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}");
    let rows = [chat(&[
        ("user", "a"),
        ("assistant", "b\n"),
        ("user", "c"),
        ("assistant", "d"),
    ])];
    bench.prepared(&rows, &["--chat-template", "t.jinja"]);
    assert_eq!(bench.trained(), ["b<|im_end|><think></think>d<|im_end|>"]);
}

#[test]
fn a_template_without_a_generation_prompt_never_trains_its_header() {
    let bench = Bench::new();
    bench.write(
        "t.jinja",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    );
    // An answer that begins like the header, none at all, and one that nobody asked for.
    let chats = [
        chat(&[("user", "a"), ("assistant", "b")]),
        chat(&[("user", "a"), ("assistant", "<|")]),
        chat(&[("user", "a"), ("assistant", " ")]),
        chat(&[("assistant", "b")]),
    ];
    for row in chats {
        bench.write_rows("rows.jsonl", &[row]);
        let ran = bench.prepare(&[
            "--data",
            "rows.jsonl",
            "--tokenizer",
            TEACHER,
            "--allow-control-tokens",
            "--chat-template",
            "t.jinja",
        ]);
        assert!(
            ran.stderr.contains("so the header would be trained"),
            "{}",
            ran.stderr
        );
    }
}

#[test]
fn a_template_without_headers_trains_short_answers() {
    let bench = Bench::new();
    bench.write(
        "t.jinja",
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + '<|im_end|>' }}{% endfor %}",
    );
    let rows = [chat(&[("user", "a"), ("assistant", "4")])];
    bench.prepared(&rows, &["--chat-template", "t.jinja"]);
    assert_eq!(bench.trained(), [" 4<|im_end|>"]);
}

#[test]
fn an_answer_is_known_by_what_pythons_strip_leaves_of_it() {
    let bench = Bench::new();
    bench.write(
        "t.jinja",
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content.strip() + '<|im_end|>' }}{% endfor %}",
    );
    let long = "This answer is longer than any header.";
    for answer in ["4", long] {
        let bare = Bench::new();
        bare.write("t.jinja", std::fs::read(bench.path("t.jinja")).unwrap());
        let row = chat(&[
            ("user", "a"),
            ("assistant", &format!("\u{1c} {answer}\u{1f}")),
        ]);
        bare.prepared(&[row], &["--chat-template", "t.jinja"]);
        assert_eq!(bare.trained(), [format!(" {answer}<|im_end|>")]);
    }
    bench.write(
        "t.jinja",
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content | upper + '<|im_end|>' }}{% endfor %}",
    );
    let row = chat(&[("user", "a"), ("assistant", "four")]);
    bench.write_rows("rows.jsonl", &[row]);
    let args = ["--data", "rows.jsonl", "--tokenizer", TEACHER];
    let told = bench.prepare(&[&args[..], &["--chat-template", "t.jinja"]].concat());
    let says = "found \"FOUR<|im_end|>\": either nothing is printed for it, so the header would be trained, or the template changes the answer";
    assert!(told.stderr.contains(says), "{}", told.stderr);
}

#[test]
fn generation_blocks_round_other_roles_are_told() {
    let row = || {
        chat(&[
            ("system", "Be brief."),
            ("user", " Hi "),
            ("assistant", "Hi there"),
        ])
    };
    let all = "{% for m in messages %}{% generation %}{{ m.role }}: {{ m.content | trim }}<|im_end|>{% endgeneration %}{% endfor %}";
    let users = "{% for m in messages %}{{ m.role }}: {% if m.role != 'system' %}{% generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}";
    let answers = "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}{% else %}{{ m.content | trim }}{% endif %}{% endfor %}";
    for (template, count) in [(all, 2), (users, 1), (answers, 0)] {
        let bench = Bench::new();
        bench.write("t.jinja", template);
        let facts = bench.prepared(&[row()], &["--chat-template", "t.jinja"]);
        assert_eq!(facts["lint"]["other_roles_trained"], count, "{template}");
        let example = facts["first_examples"]["other_roles_trained"].as_str();
        assert_eq!(
            example.is_some_and(|e| e.starts_with("rows.jsonl:1: \"")),
            count > 0
        );
    }
}

/// Which of the flags for old templates an error names.
fn flags_of_hints(told: &str) -> [bool; 2] {
    [
        "--template-rules transformers-4 keeps",
        "give --tool-arguments as-given",
    ]
    .map(|flag| told.contains(flag))
}

#[test]
fn a_template_of_transformers_4_that_asks_for_none_gets_it_by_its_flags() {
    let bench = Bench::new();
    // As DeepSeek-V3's: no content is none, and arguments are JSON text.
    bench.write("t.jinja", "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[U]' + m['content'] }}\
        {% elif m['content'] is none %}{% for c in m['tool_calls'] %}{{ '[A]' + c['function']['name'] + c['function']['arguments'] + '<|im_end|>' }}{% endfor %}\
        {% else %}{{ '[A]' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}");
    let row = json!({"messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
    ]});
    bench.write_rows("rows.jsonl", std::slice::from_ref(&row));
    let args = ["--chat-template", "t.jinja"];
    let flags = [
        "--template-rules",
        "transformers-4",
        "--tool-arguments",
        "as-given",
    ];
    let given = ["--data", "rows.jsonl", "--tokenizer", TEACHER];
    let told = |flags: &[&str]| {
        let ran = bench.prepare(&[&given[..], &args, flags].concat());
        flags_of_hints(&ran.stderr)
    };
    assert_eq!(told(&[]), [true, true]);
    assert_eq!(told(&flags[..2]), [false, true]);
    bench.prepared(&[row], &[&args[..], &flags].concat());
    assert_eq!(bench.trained(), ["f{\"x\": 1}<|im_end|>"]);
}

#[test]
fn a_flag_on_the_whole_row_is_not_passed_over() {
    let bench = Bench::new();
    let mut row = chat(&[("user", "a"), ("assistant", "b")]);
    for (key, value) in [("weight", 0.into()), ("train", false.into())] {
        row[key] = value;
        bench.write_rows("rows.jsonl", &[row.clone()]);
        let ran = bench.prepare(&["--data", "rows.jsonl", "--tokenizer", TEACHER]);
        let expected = format!("{key}: expected 1 or true");
        assert!(ran.stderr.contains(&expected), "{}", ran.stderr);
        row[key] = 1.into();
    }
}

#[test]
fn several_templates_are_chosen_from_by_the_rows_tools() {
    let bench = Bench::new();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        bench.write(
            &format!("several/{file}"),
            std::fs::read(std::path::Path::new(TEACHER).join(file)).unwrap(),
        );
    }
    let template = |name: &str| {
        format!(
            "{name}{{% for m in messages %}}{{% generation %}}{{{{ m.content }}}}{{% endgeneration %}}{{% endfor %}}"
        )
    };
    bench.write("several/chat_template.jinja", template("plain "));
    bench.write(
        "several/additional_chat_templates/tool_use.jinja",
        template("tools "),
    );
    bench.write(
        "several/additional_chat_templates/rag.jinja",
        template("rag "),
    );
    let plain = chat(&[("user", "a"), ("assistant", "b")]);
    let (mut with_tools, mut empty) = (plain.clone(), plain.clone());
    with_tools["tools"] = json!([{"name": "f"}]);
    empty["tools"] = json!([]);
    bench.write_rows("rows.jsonl", &[plain, with_tools, empty]);
    let args = [
        "--data",
        "rows.jsonl",
        "--tokenizer",
        "several",
        "--loss",
        "all",
    ];
    assert_eq!(bench.prepare(&args).code, 0);
    assert_eq!(bench.trained(), ["plain ab", "tools ab", "plain ab"]);
    std::fs::remove_dir_all(bench.path("out")).unwrap();
    assert_eq!(
        bench
            .prepare(&[&args[..], &["--chat-template", "rag"]].concat())
            .code,
        0
    );
    assert_eq!(bench.trained(), ["rag ab"; 3]);
}

/// A tokenizer's folder `named` with templates of these names, each in a file or all in a list.
fn write_named(bench: &Bench, names: &[&str], in_files: bool) {
    let template = |name: &str| {
        format!(
            "{name} {{% for m in messages %}}{{% generation %}}{{{{ m.content }}}}{{% endgeneration %}}{{% endfor %}}"
        )
    };
    let tokenizer = std::path::Path::new(TEACHER).join("tokenizer.json");
    bench.write("named/tokenizer.json", std::fs::read(tokenizer).unwrap());
    let mut config = json!({"eos_token": "<|im_end|>"});
    if in_files {
        for name in names {
            let file = format!("named/additional_chat_templates/{name}.jinja");
            bench.write(&file, template(name));
        }
    } else {
        let entry = |name: &&str| json!({"name": name, "template": template(name)});
        config["chat_template"] = names.iter().map(entry).collect();
    }
    bench.write("named/tokenizer_config.json", config.to_string());
}

#[test]
fn templates_with_names_alone_are_chosen_by_name() {
    let plain = chat(&[("user", "a"), ("assistant", "b")]);
    let mut with_tools = plain.clone();
    with_tools["tools"] = json!([{"name": "f"}]);
    let one = "named default, found rag; choose one with --chat-template NAME";
    let two = "named default, found a, rag; choose one with --chat-template NAME";
    let row_without = "for a chat without tools, found rag, tool_use; choose one with";
    // As transformers' get_chat_template chooses: tool_use for chats with tools, else default alone.
    for (names, row, expected) in [
        (&["rag"][..], &plain, Err(one)),
        (&["rag"], &with_tools, Err(one)),
        (&["a", "rag"], &plain, Err(two)),
        (&["rag", "tool_use"], &plain, Err(row_without)),
        (&["rag", "tool_use"], &with_tools, Ok("tool_use ab")),
        (&["default", "rag"], &with_tools, Ok("default ab")),
    ] {
        // The default's file has a name of its own.
        let ways: &[bool] = if names[0] == "default" {
            &[false]
        } else {
            &[false, true]
        };
        for &in_files in ways {
            let bench = Bench::new();
            write_named(&bench, names, in_files);
            bench.write_rows("rows.jsonl", std::slice::from_ref(row));
            let args = "--data rows.jsonl --tokenizer named --loss all";
            let args: Vec<&str> = args.split(' ').collect();
            let ran = bench.prepare(&args);
            match expected {
                Ok(text) => assert_eq!(bench.trained(), [text]),
                Err(says) => assert!(ran.stderr.contains(says), "{names:?}: {}", ran.stderr),
            }
            let chosen = ["--chat-template", "rag", "--out", "rag"];
            let ran = bench.prepare(&[&args[..], &chosen].concat());
            assert_eq!(ran.code, 0, "{}", ran.stderr);
        }
    }
}

#[test]
fn the_generation_of_transformers_decides_about_null_keys() {
    let bench = Bench::new();
    bench.write("t.jinja", "{% for m in messages %}{% generation %}{{ m.content }}{{ m.name }}{{ m.thinking }}{% endgeneration %}|{% endfor %}");
    let row = json!({"messages": [{"role": "user", "content": "a", "name": null}, {"role": "assistant", "content": "b", "reasoning_content": "r"}]});
    for (rules, expected) in [("transformers-5", "a|br|"), ("transformers-4", "aNone|b|")] {
        let bench = Bench::new();
        bench.write("t.jinja", "{% for m in messages %}{% generation %}{{ m.content }}{{ m.name }}{{ m.thinking }}{% endgeneration %}|{% endfor %}");
        let mut row = row.clone();
        if rules == "transformers-4" {
            row["messages"][1]
                .as_object_mut()
                .unwrap()
                .remove("reasoning_content");
        }
        let facts = bench.prepared(
            &[row],
            &[
                "--chat-template",
                "t.jinja",
                "--template-rules",
                rules,
                "--loss",
                "all",
            ],
        );
        assert_eq!(facts["template_rules"], rules);
        assert_eq!(bench.trained(), [expected]);
    }
}
