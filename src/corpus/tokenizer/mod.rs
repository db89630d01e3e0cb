//! The tokenizer of a checkpoint folder: text to ids with byte offsets, special tokens, and the
//! fingerprint that says whether two folders hold the same tokenizer.

mod added;
mod built;
mod version4;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Map, Value, json};
use tokenizers::{ModelWrapper, PostProcessorWrapper, Tokenizer};

use super::guard::guarded;
use super::pieces::Pieces;
use super::problem::{RowProblem, RowResult};
use super::rules::TemplateRules;
use crate::canonical;
use built::Make;

/// A checkpoint's tokenizer, made to lose nothing: no truncation, no padding, no random merges,
/// offsets that include whitespace.
#[derive(Debug)]
pub struct TextTokenizer {
    tokenizer: Tokenizer,
    folder: PathBuf,
    fingerprint: String,
    settings: String,
    vocab_size: usize,
    special: Vec<(String, String)>,
    config_template: Option<Value>,
    bos: Option<i32>,
    eos: Option<i32>,
    stops: Vec<i32>,
    added: HashSet<i32>,
    class: Option<String>,
    rebuilt: Option<String>,
    control: ControlTokens,
    pieces: Pieces,
}

/// A text as tokens.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Encoded {
    pub ids: Vec<i32>, // (T)
    /// Bytes of the text each token stands for, (T). Tokens that share a character share its
    /// range; a token that stands for no text has an empty one.
    pub offsets: Vec<(usize, usize)>,
}

impl TextTokenizer {
    /// Reads `tokenizer.json` and, where they exist, `tokenizer_config.json`, `config.json` and
    /// `generation_config.json`.
    ///
    /// # Errors
    /// A missing or broken file, or a tokenizer whose ids are random.
    pub fn load(folder: &Path) -> Result<TextTokenizer> {
        TextTokenizer::load_as(folder, TemplateRules::default())
    }

    /// The same, as one generation of transformers makes it.
    ///
    /// # Errors
    /// As for [`TextTokenizer::load`].
    pub fn load_as(folder: &Path, rules: TemplateRules) -> Result<TextTokenizer> {
        ensure!(
            !folder.is_file(),
            "{}: expected a folder with a tokenizer.json, found a file; give the folder it stands in, {}",
            folder.display(),
            parent_of(folder).display()
        );
        let path = folder.join("tokenizer.json");
        let file = read_tokenizer(&path)?;
        let fingerprint = fingerprint(&file)?;
        refuse_dropout(&file).with_context(|| path.display().to_string())?;
        let mut config = added::read_config(folder)?;
        let made = Made::new(file, &config, folder, rules)
            .with_context(|| folder.join("tokenizer_config.json").display().to_string())?;
        let settings = canonical::fingerprint(&made.settings()?);
        let Made {
            mut tokenizer,
            special,
            class,
            rebuilt,
        } = made;
        keep_everything(&mut tokenizer).with_context(|| path.display().to_string())?;
        let id_of = |name: &str| {
            let (_, text) = special.iter().find(|(n, _)| n == name)?;
            i32::try_from(tokenizer.token_to_id(text)?).ok()
        };
        let (bos, eos) = (id_of("bos_token"), id_of("eos_token"));
        let vocab = tokenizer.get_vocab(true);
        let vocab_size = vocab.values().max().map_or(0, |&id| id as usize + 1);
        ensure!(
            vocab_size > 0 && i32::try_from(vocab_size).is_ok(),
            "{}: expected 1 to 2^31 tokens, found {vocab_size}",
            path.display()
        );
        let added = tokenizer.get_added_tokens_decoder();
        Ok(TextTokenizer {
            control: ControlTokens::new(added.values()),
            pieces: Pieces::new(added.values()),
            added: added.keys().map(|&id| id as i32).collect(),
            class,
            rebuilt,
            stops: match stop_ids(folder)? {
                stops if stops.is_empty() => eos.into_iter().collect(),
                stops => stops,
            },
            config_template: config.remove("chat_template"),
            folder: folder.to_path_buf(),
            tokenizer,
            fingerprint,
            settings,
            vocab_size,
            special,
            bos,
            eos,
        })
    }

    /// Highest token id + 1.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// See [`tokenizer_fingerprint`].
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The hash of everything else that ids depend on, as it is used here: steps, special and added
    /// tokens, and what is put around a text.
    pub fn settings(&self) -> &str {
        &self.settings
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn bos(&self) -> Option<i32> {
        self.bos
    }

    /// Whether the tokenizer itself puts a BOS before a plain text.
    pub fn adds_bos(&self) -> bool {
        let encoded = self.encode_plain("").unwrap_or_default();
        self.bos.is_some() && encoded.ids.first().copied() == self.bos
    }

    /// The BOS token's text.
    pub fn bos_text(&self) -> Option<&str> {
        let found = self.special.iter().find(|(name, _)| name == "bos_token");
        found.map(|(_, text)| text.as_str())
    }

    pub fn eos(&self) -> Option<i32> {
        self.eos
    }

    /// Ids at which the model stops, by config.json and generation_config.json, else the EOS token.
    pub fn stops(&self) -> &[i32] {
        &self.stops
    }

    /// Whether `id` is an added token, special or not.
    pub fn is_added(&self, id: i32) -> bool {
        self.added.contains(&id)
    }

    /// The class of transformers 5 whose steps these are, where they are not tokenizer.json's.
    pub fn class(&self) -> Option<&str> {
        self.class.as_deref()
    }

    /// What transformers does to the tokenizer and this tool does not.
    pub fn rebuilt(&self) -> Option<&str> {
        self.rebuilt.as_deref()
    }

    /// Special tokens by the name a template knows them by.
    pub fn special_tokens(&self) -> &[(String, String)] {
        &self.special
    }

    /// `chat_template` of tokenizer_config.json, as it stands there.
    pub fn config_template(&self) -> Option<&Value> {
        self.config_template.as_ref()
    }

    /// The token's text in the vocabulary.
    pub fn token(&self, id: i32) -> Option<String> {
        self.tokenizer.id_to_token(u32::try_from(id).ok()?)
    }

    /// The id of a token of the vocabulary.
    pub fn id(&self, token: &str) -> Option<i32> {
        i32::try_from(self.tokenizer.token_to_id(token)?).ok()
    }

    /// A special token written out in `text`, if there is one.
    pub fn control_token_in(&self, text: &str) -> Option<&str> {
        self.control.find(text)
    }

    /// Tokens of a text that already holds its special tokens, as a rendered chat does.
    ///
    /// # Errors
    /// The tokenizer fails on the text.
    pub fn encode_rendered(&self, text: &str) -> RowResult<Encoded> {
        self.pieces.encoded(text, |piece| self.encode(piece, false))
    }

    /// The same without the help of pieces, to compare.
    ///
    /// # Errors
    /// The tokenizer fails on the text.
    pub fn encode_rendered_whole(&self, text: &str) -> RowResult<Encoded> {
        self.encode(text, false)
    }

    /// Tokens of a plain text, with the special tokens that the tokenizer puts around one.
    ///
    /// # Errors
    /// The tokenizer fails on the text.
    pub fn encode_plain(&self, text: &str) -> RowResult<Encoded> {
        self.encode(text, true)
    }

    fn encode(&self, text: &str, add_special_tokens: bool) -> RowResult<Encoded> {
        let failed = |found: String| {
            RowProblem::unusable(format!("expected text the tokenizer takes, found {found}"))
        };
        // The tokenizers crate panics on some texts and settings instead of failing.
        let encoding = guarded(|| self.tokenizer.encode(text, add_special_tokens))
            .map_err(failed)?
            .map_err(|e| failed(e.to_string()))?;
        Ok(Encoded {
            ids: encoding.get_ids().iter().map(|&id| id as i32).collect(),
            offsets: encoding.get_offsets().to_vec(),
        })
    }
}

/// The tokenizer that transformers makes of a checkpoint's files, with its special tokens, by name
/// and text.
struct Made {
    tokenizer: Tokenizer,
    special: Vec<(String, String)>,
    class: Option<String>,
    rebuilt: Option<String>,
}

impl Made {
    /// `config` is what [`added::read_config`] says.
    fn new(
        file: Tokenizer,
        config: &Map<String, Value>,
        folder: &Path,
        rules: TemplateRules,
    ) -> Result<Made> {
        let splits = config.get("split_special_tokens");
        ensure!(
            splits != Some(&Value::Bool(true)),
            "split_special_tokens: expected false, found true, which takes control tokens apart; set it to false"
        );
        let model = read_object(&folder.join("config.json"))?;
        let mut made = match rules {
            TemplateRules::Transformers5 => Made::by_5(file, config, &model)?,
            TemplateRules::Transformers4 => Made::by_4(file, config, &model, folder)?,
        };
        if config.get("fix_mistral_regex") == Some(&Value::Bool(true)) {
            made.rebuilt = Some("fix_mistral_regex is set, which is not followed here".to_owned());
        }
        Ok(made)
    }

    fn by_5(
        file: Tokenizer,
        config: &Map<String, Value>,
        model: &Map<String, Value>,
    ) -> Result<Made> {
        let rules = TemplateRules::Transformers5;
        let make = built::make(&file, config, model);
        let class = match &make {
            Make::Built(class) => Some(class),
            _ => None,
        };
        let names = class.map_or(&[][..], |class| built::named(&class.name));
        let mut special = added::special_tokens(config, rules)?;
        added::with_class(&mut special, names, config, &file);
        let mut tokenizer = class.map_or_else(|| Ok(file.clone()), |class| class.build(&file))?;
        added::add_tokens(&mut tokenizer, &file, config, &special, rules)?;
        let mut steps = None;
        if let Some(class) = class {
            added::strip_flags(&mut tokenizer, config, &special, class.stripped)?;
            let bos = special.iter().find(|(name, _)| name == "bos_token");
            class.finish(&mut tokenizer, bos.map(|(_, text)| text.as_str()))?;
            steps = class.differs(&file)?.then(|| class.name.clone());
        }
        Ok(Made {
            tokenizer,
            special,
            class: steps,
            rebuilt: match make {
                Make::Unknown(name) => Some(format!("the class {name} is not built here")),
                _ => None,
            },
        })
    }

    fn by_4(
        file: Tokenizer,
        config: &Map<String, Value>,
        model: &Map<String, Value>,
        folder: &Path,
    ) -> Result<Made> {
        let rules = TemplateRules::Transformers4;
        let class = version4::class(config, model);
        let mut special = added::special_tokens(config, rules)?;
        added::with_class(&mut special, version4::named(&class), config, &file);
        let mut tokenizer = file.clone();
        added::add_tokens(&mut tokenizer, &file, config, &special, rules)?;
        version4::set(&mut tokenizer, &class, config, &special)?;
        let is_pieces = matches!(&class[..], "LlamaTokenizer" | "CodeLlamaTokenizer");
        let anew = is_pieces
            && config
                .get("add_prefix_space")
                .is_some_and(Value::is_boolean)
            && folder.join("tokenizer.model").exists();
        Ok(Made {
            tokenizer,
            special,
            class: None,
            rebuilt: anew.then(|| {
                format!("the class {class} makes it anew of tokenizer.model where add_prefix_space is set")
            }),
        })
    }

    /// Everything but vocabulary and merges that ids depend on.
    fn settings(&self) -> Result<Value> {
        let tokenizer = &self.tokenizer;
        let mut added: Vec<_> = tokenizer.get_added_tokens_decoder().into_iter().collect();
        added.sort_by_key(|(id, _)| *id);
        let added = added.into_iter().map(|(id, token)| json!([id, token]));
        let units = match tokenizer.get_model() {
            ModelWrapper::BPE(model) => {
                json!([
                    model.unk_token,
                    model.fuse_unk,
                    model.byte_fallback,
                    model.ignore_merges
                ])
            }
            _ => Value::Null,
        };
        Ok(json!({
            "normalizer": serde_json::to_value(tokenizer.get_normalizer())?,
            "pre_tokenizer": serde_json::to_value(tokenizer.get_pre_tokenizer())?,
            "post_processor": serde_json::to_value(tokenizer.get_post_processor())?,
            "added_tokens": added.collect::<Value>(),
            "special_tokens": self.special,
            "units": units,
        }))
    }
}

/// The hash of a tokenizer's content: vocabulary, merges, added tokens, normaliser and
/// pre-tokeniser. Not of the file's bytes, so a re-saved tokenizer keeps it; what only changes
/// decoding, offsets or the tokens put around a text is left out.
///
/// # Errors
/// A missing or broken tokenizer.json.
pub fn tokenizer_fingerprint(folder: &Path) -> Result<String> {
    fingerprint(&read_tokenizer(&folder.join("tokenizer.json"))?)
}

fn fingerprint(tokenizer: &Tokenizer) -> Result<String> {
    let mut value = serde_json::to_value(tokenizer)?;
    for key in [
        "version",
        "truncation",
        "padding",
        "decoder",
        "post_processor",
    ] {
        value.as_object_mut().map(|o| o.remove(key));
    }
    value["model"].as_object_mut().map(|m| m.remove("dropout"));
    for token in value["added_tokens"].as_array_mut().into_iter().flatten() {
        token.as_object_mut().map(|t| t.remove("special"));
    }
    drop_key(&mut value["pre_tokenizer"], "trim_offsets");
    Ok(canonical::fingerprint(&value))
}

fn drop_key(value: &mut Value, key: &str) {
    match value {
        Value::Object(object) => {
            object.remove(key);
            object.values_mut().for_each(|v| drop_key(v, key));
        }
        Value::Array(items) => items.iter_mut().for_each(|v| drop_key(v, key)),
        _ => {}
    }
}

fn parent_of(path: &Path) -> &Path {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

fn read_tokenizer(path: &Path) -> Result<Tokenizer> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let pieces = [
        "tokenizer.model",
        "spiece.model",
        "tekken.json",
        "vocab.json",
    ];
    let pieces = pieces.iter().find(|p| folder.join(p).exists());
    if let (false, Some(pieces)) = (path.exists(), pieces) {
        bail!(
            "{}: expected a tokenizer.json, found {pieces} alone; convert it once with transformers: \
             AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
            folder.display()
        );
    }
    let bytes = std::fs::read(path).with_context(|| {
        format!(
            "{}: can't read; expected a folder with the tokenizer of a checkpoint",
            path.display()
        )
    })?;
    let broken = |found: String| {
        anyhow!(
            "{}: expected a Hugging Face tokenizer, found {found}",
            path.display()
        )
    };
    guarded(|| Tokenizer::from_bytes(&bytes))
        .map_err(broken)?
        .map_err(|e| broken(e.to_string()))
}

fn refuse_dropout(tokenizer: &Tokenizer) -> Result<()> {
    let ModelWrapper::BPE(model) = tokenizer.get_model() else {
        return Ok(());
    };
    match model.dropout.filter(|&d| d > 0.0) {
        None => Ok(()),
        Some(dropout) => bail!(
            "expected a BPE without dropout, found dropout {dropout}, which makes ids random; set model.dropout to null"
        ),
    }
}

fn keep_everything(tokenizer: &mut Tokenizer) -> Result<()> {
    tokenizer
        .with_truncation(None)
        .map_err(|e| anyhow!("{e}"))?;
    tokenizer.with_padding(None);
    let Some(post_processor) = tokenizer.get_post_processor() else {
        return Ok(());
    };
    let mut value = serde_json::to_value(post_processor)?;
    // With trim_offsets, tokens that begin with a space would not cover it, and tokens of
    // whitespace alone would stand nowhere: a mask from offsets would miss them.
    if set_false(&mut value, "trim_offsets") {
        let whole: PostProcessorWrapper = serde_json::from_value(value)?;
        tokenizer.with_post_processor(Some(whole));
    }
    Ok(())
}

/// Whether anything changed.
fn set_false(value: &mut Value, key: &str) -> bool {
    match value {
        Value::Object(object) => {
            let mut changed = false;
            for (k, v) in object {
                if k == key && *v == Value::Bool(true) {
                    *v = Value::Bool(false);
                    changed = true;
                } else {
                    changed |= set_false(v, key);
                }
            }
            changed
        }
        Value::Array(items) => items.iter_mut().fold(false, |c, v| set_false(v, key) | c),
        _ => false,
    }
}

/// An optional JSON file; empty when absent.
fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Map::new()),
        Err(e) => return Err(e).with_context(|| format!("{}: can't read", path.display())),
    };
    serde_json::from_slice(&bytes)
        .with_context(|| format!("{}: expected a JSON object", path.display()))
}

fn stop_ids(folder: &Path) -> Result<Vec<i32>> {
    let mut stops = Vec::new();
    for file in ["config.json", "generation_config.json"] {
        let config = read_object(&folder.join(file))?;
        let ids = match config.get("eos_token_id") {
            Some(Value::Array(ids)) => ids.clone(),
            Some(id) => vec![id.clone()],
            None => continue,
        };
        let ids = ids.iter().filter_map(Value::as_i64);
        stops.extend(ids.filter_map(|id| i32::try_from(id).ok()));
    }
    stops.sort_unstable();
    stops.dedup();
    Ok(stops)
}

/// Finds special tokens written out in a text.
#[derive(Debug)]
struct ControlTokens {
    /// Text, and whether a normaliser may change its case on the way.
    tokens: Vec<(String, bool)>,
    first: [bool; 256],
}

impl ControlTokens {
    fn new<'a>(added: impl Iterator<Item = &'a tokenizers::AddedToken>) -> ControlTokens {
        let special = added.filter(|t| t.special && !t.content.is_empty());
        let mut tokens: Vec<_> = special.map(|t| (t.content.clone(), t.normalized)).collect();
        tokens.sort();
        let mut first = [false; 256];
        for (text, any_case) in &tokens {
            let byte = text.as_bytes()[0];
            first[byte as usize] = true;
            if *any_case {
                first[byte.to_ascii_lowercase() as usize] = true;
                first[byte.to_ascii_uppercase() as usize] = true;
            }
        }
        ControlTokens { tokens, first }
    }

    fn find(&self, text: &str) -> Option<&str> {
        let bytes = text.as_bytes();
        let starts = (0..bytes.len()).filter(|&i| self.first[bytes[i] as usize]);
        for start in starts {
            let rest = &bytes[start..];
            let stands_here = |(token, any_case): &&(String, bool)| {
                let token = token.as_bytes();
                rest.starts_with(token)
                    || (*any_case
                        && rest.len() >= token.len()
                        && rest[..token.len()].eq_ignore_ascii_case(token))
            };
            if let Some((token, _)) = self.tokens.iter().find(stands_here) {
                return Some(token);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEACHER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/teacher");

    /// The fixture's tokenizer, changed, in a folder of its own.
    fn changed(change: impl Fn(&mut Value)) -> Result<TextTokenizer> {
        let text = std::fs::read_to_string(Path::new(TEACHER).join("tokenizer.json"))?;
        let mut tokenizer: Value = serde_json::from_str(&text)?;
        change(&mut tokenizer);
        let folder = tempfile::tempdir()?;
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string())?;
        TextTokenizer::load(folder.path())
    }

    #[test]
    fn nothing_is_cut_padded_or_trimmed() {
        let plain = TextTokenizer::load(Path::new(TEACHER)).unwrap();
        let byte_level = json!({
            "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true,
        });
        let changed = changed(|t| {
            t["post_processor"] =
                json!({"type": "Sequence", "processors": [byte_level, t["post_processor"]]});
            t["truncation"] = json!({
                "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
            });
            t["padding"] = json!({
                "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
                "pad_id": 3, "pad_type_id": 0, "pad_token": "<|pad|>",
            });
        });
        let changed = changed.unwrap();
        let text = "  the answer \n\n  is   4 2 ";
        assert_eq!(
            changed.encode_plain(text).unwrap(),
            plain.encode_plain(text).unwrap()
        );
        let encoded = changed.encode_rendered(text).unwrap();
        let mut end = 0;
        for (start, next) in encoded.offsets {
            assert_eq!(start, end, "whitespace belongs to a token");
            end = next;
        }
        assert_eq!(end, text.len());
        assert_eq!(changed.fingerprint(), plain.fingerprint());
    }

    /// Long enough to be looked up when it comes again.
    const LONG: &str = "The prompt that stands in front of every chat, naïve as it is,\n\n and long: 1234567890 1234567890 1234567890 1234567890 1234567890 1234567890.";

    /// The fixtures' tokenizer of pieces, as LlamaTokenizer makes it.
    fn llama(legacy: bool) -> TextTokenizer {
        let pieces = Path::new(TEACHER).join("../checkpoints/pieces.json");
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(pieces, folder.path().join("tokenizer.json")).unwrap();
        let config = json!({"tokenizer_class": "LlamaTokenizer", "legacy": legacy});
        std::fs::write(
            folder.path().join("tokenizer_config.json"),
            config.to_string(),
        )
        .unwrap();
        TextTokenizer::load(folder.path()).unwrap()
    }

    proptest! {
        #[test]
        fn pieces_become_the_tokens_of_the_whole_where_spaces_are_put_in_front(
            parts in prop::collection::vec(
                prop::sample::select(vec!["<s>", "</s>", " ", "  ", "\n", "user", "é", "🙂", LONG]),
                0..24,
            ),
            legacy in any::<bool>(),
        ) {
            let (tokenizer, text) = (llama(legacy), parts.concat());
            for _ in 0..3 {
                prop_assert_eq!(
                    tokenizer.encode_rendered(&text).unwrap(),
                    tokenizer.encode_rendered_whole(&text).unwrap()
                );
            }
        }

        #[test]
        fn pieces_become_the_tokens_of_the_whole(
            parts in prop::collection::vec(
                prop::sample::select(vec![
                    "<|im_start|>", "<|im_end|>", "<|bos|>", "<|im_", "|>", "user\n", " the", "th", "e", "  ", "\n\n", "é", "🙂", "\u{301}", "<", LONG,
                ]),
                0..24,
            ),
            changes in prop::collection::vec((0_usize..4, 0_usize..5), 0..3),
        ) {
            // The fixture's own added tokens, and with flags that change where they are found.
            let tokenizer = changed(|t| {
                for &(token, flag) in &changes {
                    let flag = ["lstrip", "rstrip", "normalized", "single_word", "special"][flag];
                    let value = &mut t["added_tokens"][token][flag];
                    *value = json!(!value.as_bool().unwrap());
                }
            });
            let (tokenizer, text) = (tokenizer.unwrap(), parts.concat());
            for _ in 0..3 {
                prop_assert_eq!(
                    tokenizer.encode_rendered(&text).unwrap(),
                    tokenizer.encode_rendered_whole(&text).unwrap()
                );
            }
        }
    }

    #[test]
    fn control_tokens_are_found_in_any_case_where_a_normaliser_may_change_it() {
        let exact = changed(|_| {}).unwrap();
        assert_eq!(exact.control_token_in("a <|im_end|> b"), Some("<|im_end|>"));
        assert_eq!(exact.control_token_in("a <|IM_END|> <|im_end"), None);
        let any_case = changed(|t| t["added_tokens"][2]["normalized"] = json!(true)).unwrap();
        assert_eq!(
            any_case.control_token_in("é <|IM_end|>"),
            Some("<|im_end|>")
        );
        let not_special = changed(|t| t["added_tokens"][2]["special"] = json!(false)).unwrap();
        assert_eq!(not_special.control_token_in("<|im_end|>"), None);
    }
}
