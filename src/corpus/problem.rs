//! What can be wrong with a source row: reasons to leave it out, and remarks on one that stays.

/// Why a source row is not in the corpus. The name is the key in corpus.json.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Reason {
    BrokenLine,
    UnusableRow,
    TemplateRefusal,
    ControlTokenInContent,
    DroppedByTemplate,
    DoubleBos,
    IdOutsideVocabulary,
    TooLong,
    NoScoredPosition,
}

impl Reason {
    pub fn name(self) -> &'static str {
        match self {
            Reason::BrokenLine => "broken line",
            Reason::UnusableRow => "unusable row",
            Reason::TemplateRefusal => "refused by the chat template",
            Reason::ControlTokenInContent => "control token in content",
            Reason::DroppedByTemplate => "trained text dropped by the chat template",
            Reason::DoubleBos => "double BOS",
            Reason::IdOutsideVocabulary => "token id outside the vocabulary",
            Reason::TooLong => "too long",
            Reason::NoScoredPosition => "no scored position",
        }
    }
}

/// A row that can't be used, with what was expected and what was found. The place (`file:line`)
/// is put in front by whoever knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RowProblem {
    pub reason: Reason,
    pub message: String,
}

impl RowProblem {
    pub fn new(reason: Reason, message: impl Into<String>) -> RowProblem {
        RowProblem {
            reason,
            message: message.into(),
        }
    }

    /// The same problem, with the place inside the row in front.
    pub fn at(mut self, place: &str) -> RowProblem {
        self.message.insert_str(0, &format!("{place}."));
        self
    }

    /// A row that is JSON but not a row of its format.
    pub fn unusable(message: impl Into<String>) -> RowProblem {
        RowProblem::new(Reason::UnusableRow, message)
    }
}

/// The outcome of one step on a row.
pub type RowResult<T> = Result<T, RowProblem>;

/// Something worth knowing about a row that stays. The name is the key in corpus.json.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Lint {
    /// A token with one part inside a trained span and one outside.
    Straddler,
    MissingBos,
    /// A text that an EOS should end, where the tokenizer names none.
    MissingEos,
    /// A message that is not the assistant's inside a generation block.
    OthersTrained,
    /// A message that is not the assistant's in a completion.
    OthersInCompletion,
    /// Arguments of a tool call given as JSON text, which the template prints in another form.
    ArgumentsReprinted,
    /// A content of several parts that the template would print otherwise if it were handed them.
    PartsJoined,
    /// A control token written out in a plain text, prompt or completion.
    ControlTokenInText,
    /// A message whose text does not occur in what the template rendered.
    DroppedByTemplate,
    /// Tokens by a tokenizer that transformers makes in a way that is not followed here.
    RebuiltTokenizer,
    /// Tools that don't occur in what the template rendered.
    ToolsDropped,
    /// The last trained token is not one the model stops at.
    EndNotTrained,
    /// A trained answer without text: its end token alone is learnt.
    EmptyAnswer,
    /// A trained answer that ends in the middle of a sentence, as one cut at a length does.
    LooksTruncated,
    /// The same tokens and mask as an earlier sequence.
    Duplicate,
}

impl Lint {
    pub const ALL: [Lint; 15] = [
        Lint::Straddler,
        Lint::MissingBos,
        Lint::MissingEos,
        Lint::OthersTrained,
        Lint::OthersInCompletion,
        Lint::ArgumentsReprinted,
        Lint::PartsJoined,
        Lint::ControlTokenInText,
        Lint::DroppedByTemplate,
        Lint::RebuiltTokenizer,
        Lint::ToolsDropped,
        Lint::EndNotTrained,
        Lint::EmptyAnswer,
        Lint::LooksTruncated,
        Lint::Duplicate,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Lint::Straddler => "straddling_tokens",
            Lint::MissingBos => "missing_bos",
            Lint::MissingEos => "missing_eos",
            Lint::OthersTrained => "other_roles_trained",
            Lint::OthersInCompletion => "other_roles_in_completion",
            Lint::ArgumentsReprinted => "arguments_reprinted",
            Lint::PartsJoined => "text_parts_joined",
            Lint::ControlTokenInText => "control_tokens_in_text",
            Lint::DroppedByTemplate => "dropped_by_template",
            Lint::RebuiltTokenizer => "rebuilt_tokenizer",
            Lint::ToolsDropped => "tools_dropped_by_template",
            Lint::EndNotTrained => "end_not_trained",
            Lint::EmptyAnswer => "empty_answers",
            Lint::LooksTruncated => "truncated_looking",
            Lint::Duplicate => "duplicates",
        }
    }

    /// What it means, for people.
    pub fn meaning(self) -> &'static str {
        match self {
            Lint::Straddler => "tokens straddle the edge of a trained span",
            Lint::MissingBos => "sequences start without the tokenizer's BOS token",
            Lint::MissingEos => {
                "texts get no EOS behind them, for the tokenizer names none: name it as eos_token in its tokenizer_config.json"
            }
            Lint::OthersTrained => {
                "messages of other roles are trained, for the template's generation blocks hold them; \
                 give a template with blocks around answers alone"
            }
            Lint::OthersInCompletion => {
                "messages of completions are not the assistant's, and not trained; TRL trains all behind the prompt"
            }
            Lint::ArgumentsReprinted => {
                "arguments of tool calls are printed in another form than the JSON text they are given as; \
                 --tool-arguments as-given hands that text to the template"
            }
            Lint::PartsJoined => {
                "messages have their content as parts, which are joined to one text; handed the parts, \
                 as transformers does it, this chat template prints another"
            }
            Lint::ControlTokenInText => "texts hold a control token, written out",
            Lint::DroppedByTemplate => "rows hold text that the chat template leaves out",
            Lint::RebuiltTokenizer => {
                "sequences may have other tokens than transformers gives, for it makes the tokenizer in a way that is not followed here; \
                 save it again with its save_pretrained, and name the tokenizer_class PreTrainedTokenizerFast there"
            }
            Lint::ToolsDropped => "chats have tools that the chat template leaves out",
            Lint::EndNotTrained => {
                "sequences train a last token that the model does not stop at (eos_token_id)"
            }
            Lint::EmptyAnswer => "answers are empty: only their end is learnt",
            Lint::LooksTruncated => "answers end in the middle of a sentence, as if cut",
            Lint::Duplicate => "sequences repeat an earlier one",
        }
    }
}

/// How often one thing was noticed in a row, and the first example.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    pub lint: Lint,
    pub count: u64,
    pub example: String,
}

/// A text as it may stand in a one-line message: quoted, escaped, at most 60 characters.
pub fn quoted(text: &str) -> String {
    let mut short: String = text.chars().take(60).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}
