//! Reads a teacher's config.json. Every value that is taken is checked; what is absent takes the
//! default that transformers gives the family.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Map, Value};

/// The keys of config.json, or of an object inside it.
#[derive(Clone, Debug)]
pub struct Config {
    path: PathBuf,
    /// Keys that lead to this object, with a trailing dot; empty at the top.
    place: String,
    keys: Map<String, Value>,
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
                path: self.path.clone(),
                place: format!("{}{key}.", self.place),
                keys: keys.clone(),
            })),
            Some(other) => Err(self.wrong(key, "an object", other)),
        }
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

    /// A number of layers: small enough that each may be described.
    pub fn layers(&self, key: &str, default: usize) -> Result<usize> {
        const LAYERS_MAX: usize = 4096;
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

    /// The strings of a list; empty where it is absent.
    pub fn strings(&self, key: &str) -> Result<Vec<&str>> {
        let Some(value) = self.value(key) else {
            return Ok(Vec::new());
        };
        let texts = value
            .as_array()
            .and_then(|list| list.iter().map(Value::as_str).collect());
        texts.ok_or_else(|| self.wrong(key, "a list of strings", value))
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
        self.keys.get(key).filter(|v| !v.is_null())
    }

    fn wrong(&self, key: &str, expected: &str, found: &Value) -> anyhow::Error {
        self.error(key, &format!("expected {expected}, found {found}"))
    }
}
