//! Where a checkpoint keeps its chat templates.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value as Json;

use super::{DEFAULT, WITH_TOOLS};
use crate::corpus::tokenizer::TextTokenizer;

/// A template's text, by the name a checkpoint gives it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamedSource {
    pub name: String,
    /// Where it was read, for messages.
    pub place: String,
    pub text: String,
}

impl NamedSource {
    /// The only template of a checkpoint.
    pub fn single(place: &str, text: &str) -> NamedSource {
        NamedSource {
            name: DEFAULT.to_owned(),
            place: place.to_owned(),
            text: text.to_owned(),
        }
    }
}

/// The templates to choose from, row by row. `asked` is a file, or the name of one of several.
///
/// # Errors
/// No template, or one that can't be read.
pub fn sources(tokenizer: &TextTokenizer, asked: Option<&Path>) -> Result<Vec<NamedSource>> {
    let Some(asked) = asked else {
        return of_checkpoint(tokenizer);
    };
    if !asked.exists()
        && let Ok(found) = all_of_checkpoint(tokenizer)
        && let Some(named) = found.iter().find(|s| Path::new(&s.name) == asked)
    {
        return Ok(vec![NamedSource {
            name: DEFAULT.to_owned(),
            ..named.clone()
        }]);
    }
    let text = read(asked)?;
    Ok(vec![NamedSource::single(
        &asked.display().to_string(),
        &text,
    )])
}

fn of_checkpoint(tokenizer: &TextTokenizer) -> Result<Vec<NamedSource>> {
    let found = all_of_checkpoint(tokenizer)?;
    let names: Vec<_> = found.iter().map(|s| s.name.as_str()).collect();
    // transformers takes none of several for the one that is meant, and no lone one by its name.
    ensure!(
        names.contains(&DEFAULT) || names.contains(&WITH_TOOLS),
        "{}: expected a chat template named {DEFAULT}, found {}; choose one with --chat-template NAME",
        tokenizer.folder().display(),
        names.join(", ")
    );
    Ok(found)
}

fn all_of_checkpoint(tokenizer: &TextTokenizer) -> Result<Vec<NamedSource>> {
    let folder = tokenizer.folder();
    let mut found = Vec::new();
    let beside = folder.join("chat_template.jinja");
    if beside.exists() {
        found.push(NamedSource::single(
            &beside.display().to_string(),
            &read(&beside)?,
        ));
    }
    found.extend(additional(&folder.join("additional_chat_templates"))?);
    if !found.is_empty() {
        return Ok(found);
    }
    let config = folder.join("tokenizer_config.json");
    let place = format!("{}: chat_template", config.display());
    match tokenizer.config_template() {
        Some(Json::String(text)) => Ok(vec![NamedSource::single(&place, text)]),
        Some(Json::Array(list)) => list.iter().map(|entry| listed(&place, entry)).collect(),
        _ => bail!(
            "{}: expected a chat_template, found none, and no chat_template.jinja beside it; \
             give one with --chat-template",
            config.display()
        ),
    }
}

/// One of several in tokenizer_config.json: `{"name": …, "template": …}`.
fn listed(place: &str, entry: &Json) -> Result<NamedSource> {
    match (entry["name"].as_str(), entry["template"].as_str()) {
        (Some(name), Some(text)) => Ok(NamedSource {
            name: name.to_owned(),
            place: format!("{place} {name}"),
            text: text.to_owned(),
        }),
        _ => bail!("{place}: expected a list of objects with name and template, found another"),
    }
}

fn additional(folder: &Path) -> Result<Vec<NamedSource>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    let listed =
        std::fs::read_dir(folder).with_context(|| format!("{}: can't list", folder.display()))?;
    for entry in listed {
        let path = entry
            .with_context(|| format!("{}: can't list", folder.display()))?
            .path();
        if path.extension().is_none_or(|e| e != "jinja") {
            continue;
        }
        let name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        ensure!(
            name != DEFAULT,
            "{}: expected a name other than {DEFAULT}, which is chat_template.jinja's",
            path.display()
        );
        let text = read(&path)?;
        found.push(NamedSource {
            name,
            place: path.display().to_string(),
            text,
        });
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path)
        .with_context(|| format!("{}: can't read the chat template", path.display()))
}
