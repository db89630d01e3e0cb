//! How values print: as Python's `str` and `repr` write them.

use std::fmt::Write;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, Output, State};

use super::held::charge_bytes;
use super::range::Range;

/// Deepest nesting that is printed.
const DEPTH_MAX: usize = 128;
/// Bytes that an item is taken for before it is printed: a runaway value ends with its steps.
pub const BYTES_OF_ITEM: usize = 64;

/// The engine's hook for `{{ value }}`.
pub fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let plain = match value.kind() {
        // A generator prints its place in memory, which is different each time.
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => false,
        ValueKind::Number => value.is_integer(),
        _ => true,
    };
    if plain {
        return minijinja::escape_formatter(out, state, value);
    }
    let text = text(state, value)?;
    out.write_str(&text)
        .map_err(|_| Error::new(ErrorKind::WriteFailure, "can't print"))
}

/// `str(value)`
///
/// # Errors
/// A value that Python prints by its address in memory, or one nested too deep.
pub fn text(state: &State, value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            charge_bytes(state, text.len())?;
            Ok(text.to_owned())
        }
        ValueKind::Undefined => Ok(String::new()),
        _ => {
            let mut out = String::new();
            repr(state, value, &mut out, 0)?;
            Ok(out)
        }
    }
}

/// `repr(number)`
pub fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => float_text(float),
        _ => value.to_string(),
    }
}

/// Shortest digits, in Python's choice of notation.
pub fn float_text(float: f64) -> String {
    let size = float.abs();
    if !float.is_finite() {
        let name = if float.is_nan() { "nan" } else { "inf" };
        return if float < 0.0 {
            format!("-{name}")
        } else {
            name.to_owned()
        };
    }
    if size == 0.0 || (1e-4..1e16).contains(&size) {
        return format!("{float:?}");
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{exponent:0>2}")
}

fn repr(state: &State, value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
    let refused = |found: String| Err(Error::new(ErrorKind::InvalidOperation, found));
    if depth > DEPTH_MAX {
        return refused("expected values to print, found one nested too deep".to_owned());
    }
    charge_bytes(state, BYTES_OF_ITEM + value.as_str().map_or(0, str::len))?;
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => string(value.as_str().unwrap_or_default(), out),
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::Seq if value.downcast_object_ref::<Range>().is_some() => {
            out.push_str(&value.to_string());
        }
        ValueKind::Seq => {
            let tuple = value.downcast_object_ref::<minijinja::value::Tuple>();
            let (open, close) = if tuple.is_some() {
                ('(', ')')
            } else {
                ('[', ']')
            };
            out.push(open);
            for (i, item) in value.try_iter()?.enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                repr(state, &item, out, depth + 1)?;
            }
            if tuple.is_some() && value.len() == Some(1) {
                out.push(',');
            }
            out.push(close);
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                repr(state, &key, out, depth + 1)?;
                out.push_str(": ");
                repr(state, &value.get_item(&key)?, out, depth + 1)?;
            }
            out.push('}');
        }
        other => {
            return refused(format!(
                "expected values to print, found a value that is {other}"
            ));
        }
    }
    Ok(())
}

fn string(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if is_printable(c) => out.push(c),
            c => {
                let code = c as u32;
                let written = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
                written.expect("a String takes every write");
            }
        }
    }
    out.push(quote);
}

/// Separators other than the space, controls, formats, private use and what is unassigned print
/// as escapes.
fn is_printable(c: char) -> bool {
    match c {
        ' '..='~' => true,
        '\u{a0}' | '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' => false,
        '\u{1680}' | '\u{180e}' | '\u{2000}'..='\u{200f}' | '\u{2028}'..='\u{202f}' => false,
        '\u{205f}'..='\u{206f}' | '\u{3000}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' => false,
        '\u{e000}'..='\u{f8ff}' | '\u{e0000}'..='\u{e007f}' | '\u{f0000}'.. => false,
        c if c.is_control() => false,
        // A letter in front keeps a combining mark from being escaped for standing first.
        c => c.is_alphanumeric() || format!("a{c}").escape_debug().count() == 2,
    }
}
