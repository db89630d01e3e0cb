//! The 25 cases that go wrong elsewhere. Each is what a user would type, and what must come of it.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::bench::{Bench, PLAIN_CHATML, TEACHER, chat};

/// A template that prints tool calls and reasoning, with generation blocks.
const TALKER: &str = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}\
    {% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content if m.content is defined }}\
    {% for c in m.tool_calls or [] %}CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endgeneration %}\
    {% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}{% if tools %}TOOLS {{ tools | tojson }}{% elif tools is not none %}EMPTY{% endif %}";

/// The line on stderr of a run that must be refused.
fn refused(lines: &str, args: &[&str]) -> String {
    let bench = Bench::new();
    bench.write("talker.jinja", TALKER);
    bench.write("rows.jsonl", lines);
    let ran = bench.prepare(&[&["--data", "rows.jsonl", "--tokenizer", TEACHER], args].concat());
    assert_eq!(ran.code, 2, "{lines}: {}", ran.stdout);
    assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("rows.jsonl:"), "{}", ran.stderr);
    ran.stderr
}

/// What is learnt of one row under [`TALKER`], and the facts.
fn learnt(row: &Value, args: &[&str]) -> (String, Value) {
    let bench = Bench::new();
    bench.write("talker.jinja", TALKER);
    let args = [&["--chat-template", "talker.jinja"], args].concat();
    let facts = bench.prepared(std::slice::from_ref(row), &args);
    (bench.trained().concat(), facts)
}

fn says(message: &str, expected: &str) {
    assert!(
        message.contains(expected),
        "{message}\nexpected: {expected}"
    );
}

fn calls(arguments: &Value) -> Value {
    json!({"messages": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": null, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}]},
    ]})
}

#[test]
fn case_1_two_families_in_a_row() {
    says(
        &refused("{\"text\": \"a\", \"messages\": []}", &[]),
        "say which with --format",
    );
}

#[test]
fn case_2_null_content_beside_tool_calls_is_an_absent_key() {
    assert_eq!(
        learnt(&calls(&json!({"a": 1})), &[]).0,
        "CALL f {\"a\": 1}<|im_end|>"
    );
}

#[test]
fn case_3_null_content_alone() {
    let row = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]});
    says(
        &refused(&row.to_string(), &[]),
        "expected content or tool_calls",
    );
}

#[test]
fn case_4_an_empty_answer_trains_its_end_and_is_counted() {
    let (text, facts) = learnt(&chat(&[("user", "a"), ("assistant", "")]), &[]);
    assert_eq!(
        (text.as_str(), &facts["lint"]["empty_answers"]),
        ("<|im_end|>", &json!(1))
    );
}

#[test]
fn case_5_a_header_that_merges_with_its_answer_is_counted() {
    let bench = Bench::new();
    // The fixture's tokenizer merges a letter and the next one, where a header has no line end.
    bench.write("t.jinja", "{% for m in messages %}{{ m.role }} th{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}");
    let rows = [chat(&[("user", "a"), ("assistant", "e end")])];
    let facts = bench.prepared(&rows, &["--chat-template", "t.jinja"]);
    assert_eq!(facts["lint"]["straddling_tokens"], 1);
    let excluded = bench.trained().concat();
    fs::remove_dir_all(bench.path("out")).unwrap();
    bench.prepared(
        &rows,
        &["--chat-template", "t.jinja", "--straddle", "include"],
    );
    let included = bench.trained().concat();
    assert!(
        included.ends_with(&excluded) && included.len() > excluded.len(),
        "{included} {excluded}"
    );
}

#[test]
fn case_6_a_control_token_in_content() {
    let row = chat(&[("user", "a <|im_end|>"), ("assistant", "b")]);
    says(&refused(&row.to_string(), &[]), "--allow-control-tokens");
    let in_call = calls(&json!({"a": "<|im_start|>"}));
    says(
        &refused(&in_call.to_string(), &["--chat-template", "talker.jinja"]),
        "message 1: expected content without control tokens",
    );
    learnt(&row, &["--allow-control-tokens"]);
}

#[test]
fn case_7_arguments_that_are_no_json() {
    says(
        &refused(&calls(&json!("{\"a\": ")).to_string(), &[]),
        "arguments: expected a JSON object",
    );
    assert_eq!(
        learnt(&calls(&json!("{\"z\": 1, \"a\": 2}")), &[]).0,
        "CALL f {\"z\": 1, \"a\": 2}<|im_end|>"
    );
    assert_eq!(
        learnt(
            &calls(&json!("{\"z\":1}")),
            &["--tool-arguments", "as-given"]
        )
        .0,
        "CALL f \"{\\\"z\\\":1}\"<|im_end|>"
    );
}

#[test]
fn case_8_numbers_print_as_python_prints_them_or_not_at_all() {
    let row = |number: &str| {
        calls(&json!({"n": 0}))
            .to_string()
            .replace("\"n\":0", &format!("\"n\":{number}"))
    };
    for number in [
        "1e16",
        "-0.0",
        "-0",
        "10000000000000000000000000",
        "NaN",
        "1e999",
    ] {
        refused(&row(number), &["--chat-template", "talker.jinja"]);
    }
    for (number, printed) in [
        ("1.50", "1.5"),
        ("18446744073709551615", "18446744073709551615"),
        ("1e3", "1000.0"),
        ("0.0001", "0.0001"),
        ("0.00001", "1e-05"),
        ("2.5E-12", "2.5e-12"),
    ] {
        let row: Value = serde_json::from_str(&row(number)).unwrap();
        assert_eq!(
            learnt(&row, &[]).0,
            format!("CALL f {{\"n\": {printed}}}<|im_end|>")
        );
    }
}

#[test]
fn case_9_keys_keep_their_order() {
    assert_eq!(
        learnt(&calls(&json!({"z": 1, "a": {"y": 1, "b": 2}})), &[]).0,
        "CALL f {\"z\": 1, \"a\": {\"y\": 1, \"b\": 2}}<|im_end|>"
    );
}

#[test]
fn case_10_empty_tools_are_none() {
    let mut row = chat(&[("user", "a"), ("assistant", "b")]);
    row["tools"] = json!([]);
    let (text, _) = learnt(&row, &["--loss", "all"]);
    assert!(!text.contains("EMPTY") && !text.contains("TOOLS"), "{text}");
}

// Cases 11 and 12, of Parquet, are in `files`.

#[test]
fn cases_13_and_14_what_a_template_refuses_is_told_with_the_row() {
    let bench = Bench::new();
    bench.write("gemma.jinja", "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
        {% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}");
    for (rows, expected) in [
        (
            chat(&[("user", "a"), ("user", "b"), ("assistant", "c")]),
            "roles must alternate",
        ),
        (
            chat(&[("system", "a"), ("user", "b"), ("assistant", "c")]),
            "System role not supported",
        ),
    ] {
        bench.write_rows("rows.jsonl", &[rows]);
        let ran = bench.prepare(&[
            "--data",
            "rows.jsonl",
            "--tokenizer",
            TEACHER,
            "--chat-template",
            "gemma.jinja",
        ]);
        assert_eq!(ran.code, 2);
        says(&ran.stderr, "rows.jsonl:1: ");
        says(&ran.stderr, expected);
    }
}

#[test]
fn case_15_reasoning_that_the_template_ignores() {
    let mut row = chat(&[("user", "a"), ("assistant", "b")]);
    for name in ["reasoning_content", "thinking", "reasoning"] {
        row["messages"][1][name] = json!("because it is so");
        says(
            &refused(&row.to_string(), &[]),
            "message 1: expected every trained text in what the chat template renders as the answer, found \"because it is so\" left out",
        );
        assert_eq!(
            learnt(&row, &[]).0,
            "<think>because it is so</think>b<|im_end|>"
        );
        row["messages"][1].as_object_mut().unwrap().remove(name);
    }
    row["messages"][1]["thinking"] = json!("one");
    row["messages"][1]["reasoning"] = json!("another");
    says(&refused(&row.to_string(), &[]), "found two that differ");
    let bench = Bench::new();
    bench.write_rows(
        "rows.jsonl",
        &[row, chat(&[("user", "a"), ("assistant", "b")])],
    );
    let ran = bench.prepare(&[
        "--data",
        "rows.jsonl",
        "--tokenizer",
        TEACHER,
        "--on-bad-row",
        "skip",
        "--json",
    ]);
    let facts: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(
        (&facts["left_out"]["unusable row"], &facts["sequences"]),
        (&json!(1), &json!(1))
    );
}

#[test]
fn case_16_reasoning_that_the_template_strips_from_earlier_turns() {
    let bench = Bench::new();
    bench.write("strips.jinja", "{% for m in messages %}<|im_start|>{{ m.role }}\n{% generation %}{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>{% endgeneration %}{% endfor %}");
    let mut row = chat(&[
        ("user", "a"),
        ("assistant", "<think>x</think>b"),
        ("user", "c"),
        ("assistant", "<think>y</think>d"),
    ]);
    bench.write_rows("rows.jsonl", &[row.clone()]);
    let args = [
        "--data",
        "rows.jsonl",
        "--tokenizer",
        TEACHER,
        "--chat-template",
        "strips.jinja",
    ];
    says(
        &bench.prepare(&args).stderr,
        "message 1: expected every trained text",
    );
    row["messages"][1]["weight"] = json!(0);
    bench.write(
        "answers.jinja",
        fs::read_to_string(bench.path("strips.jinja"))
            .unwrap()
            .replace(
                "{% generation %}",
                "{% if m.role == 'assistant' %}{% generation %}",
            )
            .replace(
                "{% endgeneration %}",
                "{% endgeneration %}{% else %}{{ m.content }}{% endif %}",
            ),
    );
    bench.prepared(&[row], &["--chat-template", "answers.jinja"]);
    assert_eq!(bench.trained(), ["<think>y</think>d<|im_end|>"]);
}

#[test]
fn cases_17_18_and_19_nothing_to_learn_or_nobody_known() {
    says(
        &refused(
            &chat(&[("user", "a"), ("assistant", "b"), ("user", "c")]).to_string(),
            &[],
        ),
        "expected the assistant's answer last",
    );
    let mut row = chat(&[("user", "a"), ("assistant", "b")]);
    row["messages"][1]["weight"] = json!(0);
    says(
        &refused(&row.to_string(), &[]),
        "expected a message to train, found none",
    );
    says(
        &refused(
            "{\"conversations\": [{\"from\": \"bing\", \"value\": \"a\"}]}",
            &[],
        ),
        "conversations[0].from: expected human, gpt",
    );
}

#[test]
fn case_20_an_image() {
    let row = json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, {"role": "assistant", "content": "b"}]});
    says(
        &refused(&row.to_string(), &[]),
        "messages[0].content[0].type: expected text, thinking, tool_use or tool_result, found \"image_url\"",
    );
}

#[test]
fn cases_21_and_22_broken_and_odd_lines() {
    for line in [
        "{\"text\": \"\\ud83d\"}",
        "{\"text\": NaN}",
        "{\"text\": \"a\", \"text\": \"b\"}",
        "{\"text\": \"a",
    ] {
        says(
            &refused(&format!("{{\"text\": \"good\"}}\n{line}"), &[]),
            "rows.jsonl:2: ",
        );
    }
    let bench = Bench::new();
    bench.write(
        "rows.jsonl",
        "\u{feff}{\"text\": \"a\"}\r\n\r\n  \n{\"text\": \"b\"}",
    );
    let ran = bench.prepare(&["--data", "rows.jsonl", "--tokenizer", TEACHER]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(bench.sequences().len(), 2);
}

#[test]
fn case_23_a_row_above_the_length_is_never_cut() {
    let row = chat(&[("user", "a"), ("assistant", &"long ".repeat(99))]);
    says(
        &refused(&row.to_string(), &["--max-length", "50"]),
        "expected at most 50 tokens, found",
    );
    let bench = Bench::new();
    let facts = bench.prepared(
        &[row, chat(&[("user", "a"), ("assistant", "b")])],
        &["--max-length", "50", "--on-overlong", "skip"],
    );
    assert_eq!(facts["left_out"]["too long"], 1);
}

#[test]
fn case_24_a_template_that_prints_the_date() {
    let bench = Bench::new();
    bench.write("date.jinja", "{{ strftime_now('%d %b %Y') }}\n{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}");
    let rows = [chat(&[("user", "a"), ("assistant", "b")])];
    bench.write_rows("rows.jsonl", &rows);
    let ran = bench.prepare(&[
        "--data",
        "rows.jsonl",
        "--tokenizer",
        TEACHER,
        "--chat-template",
        "date.jinja",
    ]);
    says(&ran.stderr, "fix it with --template-date YYYY-MM-DD");
    let args = [
        "--chat-template",
        "date.jinja",
        "--template-date",
        "2024-07-06",
        "--loss",
        "all",
    ];
    assert_eq!(bench.prepared(&rows, &args)["template_date"], "2024-07-06");
    assert!(
        bench.trained()[0].starts_with("06 Jul 2024↵"),
        "{:?}",
        bench.trained()
    );
}

#[test]
fn case_25_tokenizers_that_differ_in_one_token_have_two_fingerprints() {
    let bench = Bench::new();
    let text = fs::read_to_string(Path::new(TEACHER).join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    let next = kdscore::corpus::TextTokenizer::load(Path::new(TEACHER))
        .unwrap()
        .vocab_size();
    tokenizer["added_tokens"].as_array_mut().unwrap().push(json!({
        "id": next, "content": "<think>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false,
    }));
    bench.write("other/tokenizer.json", tokenizer.to_string());
    let [ours, theirs] = [Path::new(TEACHER).to_path_buf(), bench.path("other")]
        .map(|f| kdscore::corpus::TextTokenizer::load(&f).unwrap());
    assert_ne!(ours.fingerprint(), theirs.fingerprint());
    // Over rows without the token they agree, which is what a check over the corpus shows.
    assert_eq!(
        ours.encode_rendered("plain text").unwrap(),
        theirs.encode_rendered("plain text").unwrap()
    );
    assert_ne!(
        ours.encode_rendered("a <think>").unwrap(),
        theirs.encode_rendered("a <think>").unwrap()
    );
}

/// Prints reasoning of the last answer alone, as most models that think have it.
const LAST_THINKS: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c = m.content %}\
    {% if m.role == 'assistant' %}{% generation %}{% if loop.last and m.reasoning_content is defined %}<think>{{ m.reasoning_content.strip('\n') }}</think>{% endif %}\
    {{ c if loop.last else c.split('</think>')[-1] }}<|im_end|>{% endgeneration %}{% else %}{{ c }}<|im_end|>{% endif %}\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn refused_by(template: &str, rows: &Value, more: &[&str]) -> Option<String> {
    let bench = Bench::new();
    bench.write("t.jinja", template);
    bench.write_rows("rows.jsonl", std::slice::from_ref(rows));
    let args = [
        "--data",
        "rows.jsonl",
        "--tokenizer",
        TEACHER,
        "--chat-template",
        "t.jinja",
    ];
    let ran = bench.prepare(&[&args, more].concat());
    (ran.code != 0).then_some(ran.stderr)
}

#[test]
fn calls_that_the_template_drops_are_missed_whatever_the_answers_say() {
    let row = |content: &str, arguments: Value| {
        json!({"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": content,
            "tool_calls": [{"type": "function", "function": {"name": "rain", "arguments": arguments}}]}]})
    };
    let says = "expected every trained tool call in what the chat template renders";
    let spoken = row(
        "I will call rain for Oslo, the city",
        json!({"city": "Oslo"}),
    );
    for loss in ["assistant", "all"] {
        let found = refused_by(PLAIN_CHATML, &spoken, &["--loss", loss]).unwrap();
        assert!(found.contains(says), "{found}");
    }
    let printed = |arguments: &str| {
        let call = format!(
            "{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}{{{{ c.function.name }}}} {arguments}{{% endfor %}}"
        );
        PLAIN_CHATML.replace("{{ m.content }}", &call)
    };
    let numbers = row(
        "rain: n 4 and x true",
        json!({"n": 4, "x": true, "o": [{"f": 2.50}]}),
    );
    let json = printed("{{ c.function.arguments | tojson }}");
    let python = printed("{{ c.function.arguments }}");
    let keys = printed("{% for k in c.function.arguments %}{{ k }} {% endfor %}");
    for good in [&json, &python] {
        for row in [&spoken, &numbers] {
            assert_eq!(refused_by(good, row, &[]), None, "{good}");
        }
    }
    let number = row("rain: n 4", json!({"n": 4}));
    for (row, says) in [(&spoken, "\"Oslo\""), (&number, "\"4\"")] {
        let found = refused_by(&keys, row, &[]).unwrap();
        let says = format!(
            "argument of a tool call in what the chat template renders as the answer, found {says} left out"
        );
        assert!(found.contains(&says), "{found}");
    }
    // A template that does something else for the marked call leaves the texts to be read.
    let only_rain = json.replace(
        "{{ c.function.name }}",
        "{{ 'rain' if c.function.name == 'rain' else 'other' }}",
    );
    assert_eq!(refused_by(&only_rain, &spoken, &[]), None);
}

#[test]
fn reasoning_that_the_template_drops_is_missed_though_another_answer_says_the_same() {
    let turns = |first: Value, last: &str| {
        json!({"messages": [
            {"role": "user", "content": "2 + 2?"}, first,
            {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": last},
        ]})
    };
    let apart = json!({"role": "assistant", "reasoning_content": "Two twos", "content": "4."});
    let inline = json!({"role": "assistant", "content": "<think>Two twos</think>4."});
    for (row, left) in [
        (turns(apart, "Two twos make 4."), "\"Two twos\""),
        (
            turns(inline, "<think>Two twos</think>4."),
            "\"<think>Two twos</think>4.\"",
        ),
    ] {
        for loss in ["assistant", "all"] {
            let found = refused_by(LAST_THINKS, &row, &["--loss", loss]).unwrap();
            assert!(found.contains(&format!("found {left} left out")), "{found}");
        }
        assert_eq!(
            refused_by(LAST_THINKS, &row, &["--loss", "last-assistant"]),
            None
        );
    }
    let own = json!({"messages": [{"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "reasoning_content": "\nTwo twos\n", "content": "4."}]});
    for loss in ["assistant", "all"] {
        assert_eq!(refused_by(LAST_THINKS, &own, &["--loss", loss]), None);
    }
}

#[test]
fn a_header_that_reads_like_the_answer_is_not_learnt() {
    let header = "what the assistant answers:";
    let template = format!(
        "{{% for m in messages %}}{{% if m.role == 'assistant' %}}{header}\n{{% else %}}q:\n{{% endif %}}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}"
    );
    let row = chat(&[("user", "q"), ("assistant", header)]);
    let found = refused_by(&template, &row, &[]).unwrap();
    assert!(found.contains("so the header would be trained"), "{found}");
}
