//! Reads a teacher's config.json. Every value that is taken is checked; what is absent takes the
//! default that transformers gives the family. Which keys were taken is kept, so that one that
//! nothing asked for can be reported.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Map, Value};

/// The keys of config.json, or of an object inside it.
#[derive(Clone, Debug)]
pub struct Config {
    path: PathBuf,
    /// Keys that lead to this object, with a trailing dot; empty at the top.
    place: String,
    keys: Map<String, Value>,
    /// Places of all keys that were asked for, of this object and of those around it.
    asked: Arc<Mutex<BTreeSet<String>>>,
}

impl Config {
    /// # Errors
    /// Missing, not JSON, or not an object.
    pub fn read(path: &Path) -> Result<Config> {
        let bytes = std::fs::read(path).with_context(|| {
            format!(
                "{}: can't read the teacher's config; expected a checkpoint folder in Hugging Face format",
                path.display()
            )
        })?;
        let value: Value = serde_json::from_slice(&bytes)
            .with_context(|| format!("{}: expected JSON", path.display()))?;
        let Value::Object(keys) = value else {
            bail!("{}: expected a JSON object", path.display());
        };
        Ok(Config {
            path: path.to_path_buf(),
            place: String::new(),
            keys,
            asked: Arc::default(),
        })
    }

    pub fn as_value(&self) -> Value {
        Value::Object(self.keys.clone())
    }

    /// The object under `key`; `None` where it is absent or null.
    pub fn object(&self, key: &str) -> Result<Option<Config>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(keys)) => Ok(Some(Config {
                keys: keys.clone(),
                ..self.empty_object(key)
            })),
            Some(other) => Err(self.wrong(key, "an object", other)),
        }
    }

    /// What `object` would give if there were an object without keys.
    pub fn empty_object(&self, key: &str) -> Config {
        Config {
            path: self.path.clone(),
            place: format!("{}{key}.", self.place),
            keys: Map::new(),
            asked: self.asked.clone(),
        }
    }

    /// As if `value` stood under `key`; no keys where it is not an object.
    pub fn object_of(&self, key: &str, value: Value) -> Config {
        let keys = match value {
            Value::Object(keys) => keys,
            _ => Map::new(),
        };
        Config {
            keys,
            ..self.empty_object(key)
        }
    }

    /// Keys that are there, not null, and that nothing asked for; those of an object only where
    /// something asked for the object.
    pub fn unasked(&self) -> Vec<String> {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = Vec::new();
        unasked_in(&self.keys, &self.place, &asked, &mut out);
        out
    }

    /// Keys that were asked for, of this object and of those inside it, and are not there.
    pub fn absent(&self) -> Vec<String> {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let is_there = |place: &&String| {
            let mut keys = Some(&self.keys);
            let mut parts = place.split('.').peekable();
            while let (Some(part), Some(object)) = (parts.next(), keys) {
                match object.get(part) {
                    None | Some(Value::Null) => return false,
                    Some(value) if parts.peek().is_some() => keys = value.as_object(),
                    Some(_) => return true,
                }
            }
            false
        };
        asked
            .iter()
            .filter(|place| !place.ends_with('.') && !is_there(place))
            .cloned()
            .collect()
    }

    /// Says that these keys are known and change nothing here, nor does anything inside them.
    pub fn ignore(&self, keys: &[&str]) {
        for key in keys.iter().filter(|key| self.keys.contains_key(**key)) {
            self.ask(key);
            self.ask(&format!("{key}."));
        }
    }

    fn ask(&self, key: &str) {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.insert(format!("{}{key}", self.place));
    }

    pub fn usize(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        match value.as_u64().and_then(|v| usize::try_from(v).ok()) {
            // No dimension of a model comes near this, and products of a few can't overflow.
            Some(v) if v > 0 && v < 1 << 31 => Ok(Some(v)),
            _ => Err(self.wrong(key, "a whole number from 1 to 2^31", value)),
        }
    }

    pub fn usize_or(&self, key: &str, default: usize) -> Result<usize> {
        Ok(self.usize(key)?.unwrap_or(default))
    }

    /// A whole number that may be 0.
    pub fn count_or(&self, key: &str, default: usize) -> Result<usize> {
        match self.value(key) {
            None => Ok(default),
            Some(value) if value.as_u64() == Some(0) => Ok(0),
            Some(_) => self.usize_or(key, default),
        }
    }

    /// A number of layers: small enough that each may be described.
    pub fn layers(&self, key: &str, default: usize) -> Result<usize> {
        const LAYERS_MAX: usize = 1024;
        let layers = self.usize_or(key, default)?;
        ensure!(
            layers <= LAYERS_MAX,
            self.error(
                key,
                &format!("expected at most {LAYERS_MAX} layers, found {layers}")
            )
        );
        Ok(layers)
    }

    /// Absent takes the default; null is none.
    pub fn usize_or_none(&self, key: &str, default: Option<usize>) -> Result<Option<usize>> {
        self.ask(key);
        match self.keys.contains_key(key) {
            true => self.usize(key),
            false => Ok(default),
        }
    }

    /// Absent takes the default; null is none.
    pub fn positive_or_none(&self, key: &str, default: Option<f64>) -> Result<Option<f64>> {
        self.ask(key);
        match self.keys.contains_key(key) {
            true => self.positive(key),
            false => Ok(default),
        }
    }

    /// A finite number of at least 0; 0 is none.
    pub fn weight(&self, key: &str) -> Result<Option<f64>> {
        match self.value(key).and_then(Value::as_f64) {
            Some(0.0) => Ok(None),
            _ => self.positive(key),
        }
    }

    /// The finite numbers of a list.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let finite = |v: &Value| v.as_f64().filter(|v| v.is_finite());
        let numbers: Option<Vec<f64>> = value
            .as_array()
            .and_then(|list| list.iter().map(finite).collect());
        match numbers {
            Some(numbers) => Ok(Some(numbers)),
            None => Err(self.wrong(key, "a list of numbers", value)),
        }
    }

    /// The layer numbers of a list.
    pub fn layer_numbers(&self, key: &str, layers: usize) -> Result<Option<Vec<usize>>> {
        let Some(numbers) = self.numbers(key)? else {
            return Ok(None);
        };
        let fits = |v: f64| v.fract() == 0.0 && (0.0..layers as f64).contains(&v);
        let layer = |&v: &f64| fits(v).then_some(v as usize);
        match numbers.iter().map(layer).collect() {
            Some(list) => Ok(Some(list)),
            None => {
                let expected = format!("layer numbers below {layers}");
                Err(self.wrong(key, &expected, &self.keys[key]))
            }
        }
    }

    /// One flag a layer, as true and false or as 1 and 0; an empty list says nothing.
    pub fn layer_flags(&self, key: &str, layers: usize) -> Result<Option<Vec<bool>>> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let flag = |v: &Value| match v {
            Value::Bool(flag) => Some(*flag),
            other => match other.as_u64() {
                Some(0) => Some(false),
                Some(1) => Some(true),
                _ => None,
            },
        };
        let flags: Option<Vec<bool>> = value
            .as_array()
            .and_then(|list| list.iter().map(flag).collect());
        match flags {
            Some(flags) if flags.is_empty() => Ok(None),
            Some(flags) if flags.len() == layers => Ok(Some(flags)),
            _ => Err(self.wrong(
                key,
                &format!("a list of {layers} flags, one a layer"),
                value,
            )),
        }
    }

    /// A finite number above 0.
    pub fn positive(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(v) if v > 0.0 && v.is_finite() => Ok(Some(v)),
            _ => Err(self.wrong(key, "a number above 0", value)),
        }
    }

    pub fn positive_or(&self, key: &str, default: f64) -> Result<f64> {
        Ok(self.positive(key)?.unwrap_or(default))
    }

    pub fn bool_or(&self, key: &str, default: bool) -> Result<bool> {
        match self.value(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong(key, "true or false", other)),
        }
    }

    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, "a string", other)),
        }
    }

    /// The strings of a list.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let texts: Option<Vec<&str>> = value
            .as_array()
            .and_then(|list| list.iter().map(Value::as_str).collect());
        match texts {
            Some(texts) => Ok(Some(texts)),
            None => Err(self.wrong(key, "a list of strings", value)),
        }
    }

    /// Keys that published files carry, and that can only say what the family is anyway.
    pub fn must_be(&self, expected: &[(&str, Value)]) -> Result<()> {
        for (key, expected) in expected {
            if !self.keys.contains_key(*key) {
                continue;
            }
            let same = |found: &Value| match (found.as_f64(), expected.as_f64()) {
                (Some(found), Some(expected)) => found == expected,
                _ => found == expected,
            };
            match self.value(key) {
                Some(found) if !same(found) => {
                    return Err(self.wrong(key, &format!("{expected} in this family"), found));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// What `option` holds, or an error that says which key is missing.
    pub fn required<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.error(key, "expected a value, found none"))
    }

    /// The value must be one of `supported`.
    pub fn one_of(&self, key: &str, default: &str, supported: &[&str]) -> Result<String> {
        let found = self.str(key)?.unwrap_or(default);
        ensure!(
            supported.contains(&found),
            self.error(
                key,
                &format!("expected {}, found {found:?}", supported.join(" or "))
            )
        );
        Ok(found.to_owned())
    }

    /// An error about `key`, naming file and place.
    pub fn error(&self, key: &str, what: &str) -> anyhow::Error {
        anyhow!("{}: {}{key}: {what}", self.path.display(), self.place)
    }

    /// The value of `key`; null counts as absent, as in transformers.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.ask(key);
        self.keys.get(key).filter(|v| !v.is_null())
    }

    fn wrong(&self, key: &str, expected: &str, found: &Value) -> anyhow::Error {
        self.error(key, &format!("expected {expected}, found {found}"))
    }
}

fn unasked_in(
    keys: &Map<String, Value>,
    place: &str,
    asked: &BTreeSet<String>,
    out: &mut Vec<String>,
) {
    for (key, value) in keys {
        let full = format!("{place}{key}");
        match value {
            Value::Null => {}
            _ if !asked.contains(&full) => out.push(full),
            _ if asked.contains(&format!("{full}.")) => {}
            Value::Object(inner) => unasked_in(inner, &format!("{full}."), asked, out),
            _ => {}
        }
    }
}
