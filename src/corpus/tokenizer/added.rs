//! Special and added tokens: what tokenizer_config.json and special_tokens_map.json say beside
//! tokenizer.json, read as transformers reads it.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Map, Value};
use tokenizers::{AddedToken, Tokenizer};

use super::built::{Stripped, token_text};
use super::read_object;
use crate::corpus::rules::TemplateRules;

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
/// The key of tokenizer_config.json with all added tokens by id.
const LISTED: &str = "added_tokens_decoder";
/// The file that held ids by token before.
const OLDER: &str = "added_tokens.json";
/// Lists of more special tokens.
const MORE: [&str; 2] = ["extra_special_tokens", "additional_special_tokens"];

/// tokenizer_config.json as transformers takes it: without a list of added tokens of its own, the
/// older files beside it count.
///
/// # Errors
/// Files that are no JSON objects.
pub fn read_config(folder: &Path) -> Result<Map<String, Value>> {
    let mut config = read_object(&folder.join("tokenizer_config.json"))?;
    if !config.contains_key(LISTED) {
        config.extend(read_object(&folder.join("special_tokens_map.json"))?);
        let older = read_object(&folder.join(OLDER))?;
        if !older.is_empty() {
            config.insert(OLDER.into(), older.into());
        }
    }
    Ok(config)
}

/// The special tokens by name, with their text: those that every tokenizer may have, and those
/// that a checkpoint gives names of its own.
///
/// # Errors
/// A token that is neither text nor an object with `content`.
pub fn special_tokens(
    config: &Map<String, Value>,
    rules: TemplateRules,
) -> Result<Vec<(String, String)>> {
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
    let own = config.iter().filter(|(key, _)| {
        let known = SPECIAL_NAMES.contains(&key.as_str());
        rules == TemplateRules::Transformers5 && key.ends_with("_token") && !known
    });
    let extra = config.get(MORE[0]).and_then(Value::as_object);
    for (name, token) in own.chain(extra.into_iter().flatten()) {
        if let Some(text) = token_text(token) {
            found.push((name.clone(), text.to_owned()));
        }
    }
    Ok(found)
}

/// Special tokens that a class has where the checkpoint names none.
pub fn with_class(
    special: &mut Vec<(String, String)>,
    named: &[(&str, &str)],
    config: &Map<String, Value>,
    file: &Tokenizer,
) {
    for &(name, text) in named {
        let said = config.contains_key(name) || special.iter().any(|(known, _)| known == name);
        // An end that is no token would be one that no model knows.
        let ends = name == "bos_token" || name == "eos_token";
        if !said && (!ends || file.token_to_id(text).is_some()) {
            special.push((name.to_owned(), text.to_owned()));
        }
    }
    let has_pad = config.contains_key("pad_token") || special.iter().any(|(n, _)| n == "pad_token");
    if let Some(padding) = file.get_padding().filter(|_| !has_pad) {
        special.push(("pad_token".to_owned(), padding.pad_token.clone()));
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
    rules: TemplateRules,
) -> Result<()> {
    // The tokenizers crate of transformers 4 looks for a special token as it was first added.
    let keeps_normalized = rules == TemplateRules::Transformers4;
    let listed = match config.get(LISTED) {
        Some(Value::Object(tokens)) => listed(tokens)?,
        _ => older(config, file, special)?,
    };
    let present: Vec<AddedToken> = tokenizer.get_added_tokens_decoder().into_values().collect();
    let mut tokens: Vec<AddedToken> = listed.values().cloned().collect();
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
        let before = present.iter().find(|t| t.content == token.content);
        if let Some(before) = before.filter(|before| before.special && keeps_normalized) {
            token.normalized = before.normalized;
        }
    }
    tokenizer.add_tokens(tokens).map_err(|e| anyhow!("{e}"))?;
    for (id, token) in &listed {
        let found = tokenizer.token_to_id(&token.content);
        ensure!(
            file.token_to_id(&token.content).is_some() || found == Some(*id),
            "added tokens: expected {:?} at id {id}, as its files say, found {}, for tokenizer.json doesn't have it; \
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

/// The tokens of `added_tokens_decoder`, by id.
fn listed(tokens: &Map<String, Value>) -> Result<BTreeMap<u32, AddedToken>> {
    let listed = tokens.iter().map(|(key, token)| {
        let id = key.parse();
        let id = id.with_context(|| format!("{LISTED}: expected ids, found the key {key:?}"))?;
        Ok((id, token_of(token)?))
    });
    listed.collect()
}

/// The tokens of added_tokens.json and of tokenizer.json, which wins, by id.
fn older(
    config: &Map<String, Value>,
    file: &Tokenizer,
    special: &[(String, String)],
) -> Result<BTreeMap<u32, AddedToken>> {
    let mut tokens = BTreeMap::new();
    let older = config.get(OLDER).and_then(Value::as_object);
    for (text, id) in older.into_iter().flatten() {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let id =
            id.with_context(|| format!("{OLDER}: expected an id for {text:?}, found another"))?;
        let is_special = special.iter().any(|(_, known)| known == text)
            || extra(config).any(|(known, _)| known == text);
        tokens.insert(id, AddedToken::from(text.as_str(), is_special));
    }
    tokens.extend(file.get_added_tokens_decoder());
    Ok(tokens)
}

/// More special tokens of tokenizer_config.json, with flags where they have some.
fn extra(config: &Map<String, Value>) -> impl Iterator<Item = (&str, Option<&Value>)> {
    let lists = MORE.iter().filter_map(|key| config.get(*key)?.as_array());
    let list = lists.filter(|list| !list.is_empty()).take(1);
    list.flatten()
        .filter_map(|token| Some((token_text(token)?, Some(token).filter(|t| t.is_object()))))
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
