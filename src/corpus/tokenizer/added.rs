//! Special and added tokens: what tokenizer_config.json and special_tokens_map.json say beside
//! tokenizer.json, read as transformers reads it.

use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Map, Value};
use tokenizers::{AddedToken, Tokenizer};

use super::built::{self, Stripped, token_text};
use super::read_object;

/// The special tokens a chat template knows by name.
const SPECIAL_NAMES: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];
/// Lists of more special tokens.
const MORE: [&str; 2] = ["extra_special_tokens", "additional_special_tokens"];

/// The special tokens by name, with their text: of tokenizer_config.json, and, where it leaves
/// names out, of special_tokens_map.json.
///
/// # Errors
/// A token that is neither text nor an object with `content`.
pub fn special_tokens(config: &Map<String, Value>, folder: &Path) -> Result<Vec<(String, String)>> {
    let path = folder.join("tokenizer_config.json");
    let mut special = named(config).with_context(|| path.display().to_string())?;
    let path = folder.join("special_tokens_map.json");
    let more = named(&read_object(&path)?).with_context(|| path.display().to_string())?;
    for (name, text) in more {
        let known = |(known, _): &(String, String)| *known == name;
        if !special.iter().any(known) && !config.contains_key(&name) {
            special.push((name, text));
        }
    }
    Ok(special)
}

fn named(config: &Map<String, Value>) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for name in SPECIAL_NAMES {
        let token = match config.get(name) {
            None | Some(Value::Null) => continue,
            Some(token) => token,
        };
        let text = token_text(token).with_context(|| {
            format!("{name}: expected a string or a token with content, found {token}")
        })?;
        found.push((name.to_owned(), text.to_owned()));
    }
    Ok(found)
}

/// Special tokens that a class has where the checkpoint names none.
pub fn with_class(
    special: &mut Vec<(String, String)>,
    class: &str,
    config: &Map<String, Value>,
    file: &Tokenizer,
) {
    for &(name, text) in built::named(class) {
        let said = config.contains_key(name) || special.iter().any(|(known, _)| known == name);
        if !said && file.token_to_id(text).is_some() {
            special.push((name.to_owned(), text.to_owned()));
        }
    }
}

/// Gives `tokenizer` the added tokens and flags of tokenizer_config.json, else of `file`, and its
/// special tokens.
///
/// # Errors
/// Tokens that are none, or that get another id than the one they are said to have.
pub fn add_tokens(
    tokenizer: &mut Tokenizer,
    file: &Tokenizer,
    config: &Map<String, Value>,
    special: &[(String, String)],
) -> Result<()> {
    let listed = listed(config)?;
    let known = listed.is_some();
    let listed = listed.unwrap_or_else(|| {
        let tokens = file.get_added_tokens_decoder();
        let mut tokens: Vec<_> = tokens.into_iter().collect();
        tokens.sort_by_key(|(id, _)| *id);
        tokens
    });
    let present: Vec<AddedToken> = tokenizer.get_added_tokens_decoder().into_values().collect();
    let mut tokens: Vec<AddedToken> = listed.iter().map(|(_, token)| token.clone()).collect();
    tokens.retain(|token| !present.contains(token));
    let has = |tokens: &[AddedToken], text: &str| tokens.iter().any(|t| t.content == text);
    let more = special.iter().map(|(_, text)| (text.as_str(), None));
    let more = more.chain(extra(config)).collect::<Vec<_>>();
    for (text, flags) in more {
        let known = has(&present, text) || has(&tokens, text);
        if !known && file.token_to_id(text).is_some() {
            tokens.push(match flags {
                Some(token) => token_of(token)?,
                None => AddedToken::from(text, true),
            });
        }
    }
    for token in &mut tokens {
        token.special |= special.iter().any(|(_, text)| *text == token.content);
    }
    tokenizer.add_tokens(tokens).map_err(|e| anyhow!("{e}"))?;
    for (id, token) in listed.iter().filter(|_| known) {
        let found = tokenizer.token_to_id(&token.content);
        ensure!(
            file.token_to_id(&token.content).is_some() || found == Some(*id),
            "added_tokens_decoder: expected {:?} at id {id}, as it says, found {}, for tokenizer.json doesn't have it; \
             save the tokenizer again with transformers' save_pretrained",
            token.content,
            found.map_or("none".to_owned(), |id| format!("id {id}"))
        );
    }
    for (name, text) in special {
        let ends = name == "bos_token" || name == "eos_token";
        ensure!(
            !ends || tokenizer.token_to_id(text).is_some(),
            "{name}: expected a token of tokenizer.json, found {text:?}, which it doesn't have; \
             save the tokenizer again with transformers' save_pretrained"
        );
    }
    Ok(())
}

/// Takes the flags of special tokens that the class strips of them.
///
/// # Errors
/// A tokenizer that can't take them.
pub fn strip_flags(
    tokenizer: &mut Tokenizer,
    config: &Map<String, Value>,
    special: &[(String, String)],
    stripped: Stripped,
) -> Result<()> {
    let mut texts = Vec::new();
    if stripped == Stripped::Special {
        texts.extend(special.iter().map(|(_, text)| text.as_str()));
    }
    if stripped != Stripped::None {
        texts.extend(extra(config).map(|(text, _)| text));
    }
    texts.retain(|text| tokenizer.token_to_id(text).is_some());
    let tokens = texts.into_iter().map(|text| AddedToken::from(text, true));
    let tokens: Vec<_> = tokens.collect();
    tokenizer.add_tokens(tokens).map_err(|e| anyhow!("{e}"))?;
    Ok(())
}

/// `added_tokens_decoder`, by id; nothing where there is none.
fn listed(config: &Map<String, Value>) -> Result<Option<Vec<(u32, AddedToken)>>> {
    let Some(Value::Object(tokens)) = config.get("added_tokens_decoder") else {
        return Ok(None);
    };
    let mut listed = Vec::new();
    for (id, token) in tokens {
        let number = id
            .parse()
            .with_context(|| format!("added_tokens_decoder: expected ids, found the key {id:?}"))?;
        listed.push((number, token_of(token)?));
    }
    listed.sort_by_key(|(id, _)| *id);
    Ok(Some(listed))
}

/// More special tokens of tokenizer_config.json, with flags where they have some.
fn extra(config: &Map<String, Value>) -> impl Iterator<Item = (&str, Option<&Value>)> {
    let list = MORE.iter().find_map(|key| config.get(*key)?.as_array());
    let list = list.into_iter().flatten();
    list.filter_map(|token| Some((token_text(token)?, Some(token).filter(|t| t.is_object()))))
}

fn token_of(token: &Value) -> Result<AddedToken> {
    let says = |key: &str| token.get(key).and_then(Value::as_bool);
    let text = token["content"]
        .as_str()
        .with_context(|| format!("added tokens: expected an object with content, found {token}"))?;
    let special = says("special").unwrap_or(false);
    Ok(AddedToken::from(text, special)
        .single_word(says("single_word").unwrap_or(false))
        .lstrip(says("lstrip").unwrap_or(false))
        .rstrip(says("rstrip").unwrap_or(false))
        .normalized(says("normalized").unwrap_or(!special)))
}
