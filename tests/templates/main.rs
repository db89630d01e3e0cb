//! Templates and tokenizers against transformers: every small expression of the goldens, and the
//! project's own templates and tokenizers. Real ones are a target of their own, `real.rs`.

mod cases;
mod checkpoints;

use std::path::{Path, PathBuf};

use kdscore::corpus::{Chat, TemplateRules, Until};
use serde_json::json;

use cases::*;
use checkpoints::{compare_checkpoints, expect_equal};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/templates");

/// Operators that answer here where Python raises a TypeError; no template that works in
/// transformers meets them.
fn is_known_leniency(case: &str) -> bool {
    const OPERATORS: [&str; 14] = [
        " < ",
        " >= ",
        " in ",
        " * ",
        " % ",
        " + ",
        "is even",
        "is odd",
        "is divisibleby",
        "is gt",
        "is lt",
        "is in",
        "unique",
        ".copy()",
    ];
    OPERATORS.iter().any(|operator| case.contains(operator))
}

/// A chat with keys that only these expressions look at; it is no row.
fn expression_chat() -> Chat {
    let mut chat = Chat::new(
        json!([{"role": "user", "content": "a b"}, {"role": "assistant", "content": "Hé's\n"}]),
    )
    .unwrap();
    chat.messages[0] = json!({"role": "user", "content": "a b", "items": 1, "n": 2});
    chat.template_kwargs = vec![("m".to_owned(), chat.messages[0].clone())];
    chat
}

#[test]
fn expressions_render_as_jinja_renders_them_or_are_refused() {
    let path = std::env::var_os("KDSCORE_EXPRESSIONS").map_or_else(
        || Path::new(FIXTURES).join("expressions.json"),
        PathBuf::from,
    );
    let mut compared = Compared::default();
    let plan = plan(TemplateRules::Transformers5);
    let chat = expression_chat();
    for case in read(&path).as_array().unwrap() {
        let source = case[0].as_str().unwrap();
        let ours = compiled(source, &plan).and_then(|template| {
            let values = template.values(&chat).map_err(|p| p.message)?;
            template
                .render(&values, Until::End)
                .map(|r| r.text)
                .map_err(|p| p.message)
        });
        compared.add(source, ours, case[1].as_str());
    }
    println!("expressions: {}", compared.counts());
    compared
        .only_they_refuse
        .retain(|case| !is_known_leniency(case));
    compared.show();
    println!(
        "beyond the operators that are more lenient here: {}",
        compared.counts()
    );
    assert!(
        compared.only_they_refuse.is_empty(),
        "{}",
        compared.counts()
    );
    assert!(compared.differ.is_empty(), "{}", compared.counts());
}

#[test]
fn own_templates_render_as_transformers_renders_them() {
    let document = read(&Path::new(FIXTURES).join("chats.json"));
    let cases = compare(&document);
    cases.print();
    assert!(cases.texts.equal >= 80, "{}", cases.texts.counts());
    for compared in [&cases.texts, &cases.spans] {
        assert!(compared.differ.is_empty(), "{}", compared.counts());
        assert!(
            compared.only_they_refuse.is_empty(),
            "{}",
            compared.counts()
        );
        // One chat asks for the title case of a ligature, which is refused in words.
        let mut refused = compared.only_we_refuse.iter();
        assert!(refused.all(|why| why.contains("title case of 'ﬁ'")));
    }
}

#[test]
fn tokenizers_are_those_that_each_transformers_makes_of_a_checkpoint() {
    let folder = Path::new(FIXTURES).join("../checkpoints");
    for rules in ["transformers-5", "transformers-4"] {
        let document = read(&folder.join(format!("{rules}.json")));
        expect_equal(&compare_checkpoints(&document));
    }
}
