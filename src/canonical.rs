//! Canonical JSON, seals and sha256: the same value gives the same bytes, and so the same hash.
//!
//! Canonical means keys sorted by their bytes, no insignificant space, one trailing newline in a
//! sealed document. A sealed document carries `self_sha256`, the hash of the canonical bytes of
//! itself without that key.

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

const SEAL: &str = "self_sha256";

/// Lower-case hex of the sha256 of `bytes`.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// The same of `parts` laid end to end.
pub fn sha256_hex_of(parts: &[&[u8]]) -> String {
    let mut hasher = Sha256::new();
    parts.iter().for_each(|part| hasher.update(part));
    hex(&hasher.finalize())
}

/// Lower-case hex, two digits a byte.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// `value` with its keys sorted at every level and no insignificant space.
pub fn to_canonical(value: &Value) -> String {
    sorted(value).to_string()
}

/// The hash that stands for `value`, whatever the order of its keys.
pub fn fingerprint(value: &Value) -> String {
    sha256_hex(to_canonical(value).as_bytes())
}

/// The canonical bytes of `document` with its seal in it, ready to be written.
pub fn seal(document: &Value) -> Vec<u8> {
    let mut document = document.clone();
    let object = document
        .as_object_mut()
        .expect("only objects are sealed: every caller builds one");
    object.remove(SEAL);
    let hash = fingerprint(&Value::Object(object.clone()));
    object.insert(SEAL.into(), hash.into());
    let mut text = to_canonical(&document);
    text.push('\n');
    text.into_bytes()
}

/// Whether a document must carry a seal, or may have been made by hand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seal {
    Required,
    Optional,
}

/// Parses a document and checks its seal. The seal also covers the bytes themselves: a sealed
/// document must be exactly what [`seal`] writes, so any flipped bit is found.
///
/// # Errors
/// Not JSON, not an object, no seal where one is required, or a seal that does not match.
pub fn unseal(bytes: &[u8], seal_rule: Seal) -> Result<Map<String, Value>> {
    let value: Value = serde_json::from_slice(bytes).context("expected a JSON document")?;
    let Value::Object(object) = value else {
        bail!("expected a JSON object");
    };
    match object.get(SEAL) {
        None if seal_rule == Seal::Optional => return Ok(object),
        None => bail!("expected a {SEAL} key, found none: the document is incomplete"),
        Some(_) => {}
    }
    let expected = seal(&Value::Object(object.clone()));
    if expected != bytes {
        bail!(
            "expected {SEAL} to match the document, found another: it was edited or damaged after it was written"
        );
    }
    Ok(object)
}

fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(object) => {
            let mut entries: Vec<_> = object.iter().collect();
            entries.sort_by(|a, b| a.0.as_bytes().cmp(b.0.as_bytes()));
            Value::Object(
                entries
                    .into_iter()
                    .map(|(k, v)| (k.clone(), sorted(v)))
                    .collect(),
            )
        }
        Value::Array(items) => Value::Array(items.iter().map(sorted).collect()),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn key_order_does_not_change_the_bytes() {
        let a: Value = serde_json::from_str(r#"{"b":1,"a":{"d":2,"c":[3]}}"#).unwrap();
        let b: Value = serde_json::from_str(r#"{"a":{"c":[3],"d":2},"b":1}"#).unwrap();
        assert_eq!(to_canonical(&a), r#"{"a":{"c":[3],"d":2},"b":1}"#);
        assert_eq!(seal(&a), seal(&b));
    }

    #[test]
    fn every_flipped_bit_breaks_the_seal() {
        let sealed = seal(&json!({"rows": 12, "name": "é", "list": [1, 2.5, null]}));
        assert!(unseal(&sealed, Seal::Required).is_ok());
        for bit in 0..sealed.len() * 8 {
            let mut damaged = sealed.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(unseal(&damaged, Seal::Required).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_hand_made_document_needs_no_seal() {
        assert!(unseal(br#"{"a": 1}"#, Seal::Optional).is_ok());
        assert!(unseal(br#"{"a": 1}"#, Seal::Required).is_err());
        assert!(unseal(br#"{"a": 1, "self_sha256": "00"}"#, Seal::Optional).is_err());
    }

    proptest::proptest! {
        #[test]
        fn a_sealed_float_is_read_back_to_the_same_bytes(x in proptest::num::f64::ANY) {
            let sealed = seal(&json!({"mean": x, "list": [x, -x]}));
            assert!(unseal(&sealed, Seal::Required).is_ok(), "{x:e}");
        }
    }
}
