//! Numbers that the engine's `~` prints in another way than Python: `0.00001` for `1e-05`.

use minijinja::value::Value;
use serde_json::Value as Json;

use super::print::float_text;
use crate::corpus::problem::{Reason, RowProblem, RowResult};

/// Such a number of a chat.
#[derive(Debug)]
pub struct OddNumber {
    engine: String,
    python: String,
    /// Whether a text of the chat holds the engine's form.
    written: bool,
}

/// Those in the parts of a chat.
pub fn odd_numbers<'a>(parts: impl Iterator<Item = &'a Json> + Clone) -> Vec<OddNumber> {
    let mut found: Vec<OddNumber> = Vec::new();
    for part in parts.clone() {
        each(part, &mut |value| {
            let float = value.as_f64().filter(|_| value.is_f64());
            let Some(float) = float else { return };
            let (engine, python) = (Value::from(float).to_string(), float_text(float));
            if engine != python && !found.iter().any(|known| known.engine == engine) {
                found.push(OddNumber {
                    engine,
                    python,
                    written: false,
                });
            }
        });
    }
    if found.is_empty() {
        return found;
    }
    for part in parts {
        each(part, &mut |value| {
            let text = value.as_str().unwrap_or_default();
            for odd in &mut found {
                odd.written |= text.contains(&odd.engine);
            }
        });
    }
    found
}

/// # Errors
/// A number that was not printed as Python prints it, as far as the text tells.
pub fn check_printed(rendered: &str, odd: &[OddNumber]) -> RowResult<()> {
    let wrong = |odd: &&OddNumber| {
        rendered.contains(&odd.engine) && !(odd.written && rendered.contains(&odd.python))
    };
    match odd.iter().find(wrong) {
        None => Ok(()),
        Some(odd) => Err(RowProblem::new(
            Reason::TemplateRefusal,
            format!(
                "expected the number {} in the form of Python, found {}: the chat template joins it to a text by ~; \
                 write it as a string",
                odd.python, odd.engine
            ),
        )),
    }
}

fn each(value: &Json, look: &mut dyn FnMut(&Json)) {
    match value {
        Json::Array(items) => items.iter().for_each(|item| each(item, look)),
        Json::Object(object) => object.values().for_each(|item| each(item, look)),
        other => look(other),
    }
}
