//! The choices a user makes about source rows.

/// What the rows of the source files hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// The first row decides, for the whole run.
    Auto,
    Messages,
    Sharegpt,
    Alpaca,
    Conversation,
    QueryResponse,
    PromptCompletion,
    Text,
    Segments,
    Tokens,
}

/// Which transformers hands the chat to the template: 5 drops null keys and gives reasoning its
/// other names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TemplateRules {
    #[default]
    Transformers5,
    Transformers4,
}

impl TemplateRules {
    /// The name on the command line and in corpus.json.
    pub fn name(self) -> &'static str {
        match self {
            TemplateRules::Transformers5 => "transformers-5",
            TemplateRules::Transformers4 => "transformers-4",
        }
    }
}

/// What becomes of a token partly inside a trained span and partly outside.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Straddle {
    /// It is not trained.
    #[default]
    Exclude,
    /// It is trained, as transformers 5 does.
    Include,
}

impl Straddle {
    /// The name on the command line and in corpus.json.
    pub fn name(self) -> &'static str {
        match self {
            Straddle::Exclude => "exclude",
            Straddle::Include => "include",
        }
    }
}

/// Which tokens the student learns to predict.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LossRule {
    Assistant,
    LastAssistant,
    Completion,
    All,
    /// Pre-tokenised rows: what the row's own labels or mask say.
    Given,
}

impl LossRule {
    /// The name on the command line and in corpus.json.
    pub fn name(self) -> &'static str {
        match self {
            LossRule::Assistant => "assistant",
            LossRule::LastAssistant => "last-assistant",
            LossRule::Completion => "completion",
            LossRule::All => "all",
            LossRule::Given => "given",
        }
    }
}

/// What to do with an input that can't be used as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnProblem {
    Error,
    Skip,
}

impl OnProblem {
    /// The name on the command line and in corpus.json.
    pub fn name(self) -> &'static str {
        match self {
            OnProblem::Error => "error",
            OnProblem::Skip => "skip",
        }
    }
}

/// How the keys, roles and nulls of source rows are read.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RowRules {
    /// Our name for a key, and the rows' name for it.
    pub map: Vec<(String, String)>,
    /// The rows' name for a role, and ours.
    pub roles: Vec<(String, String)>,
    /// Message keys that may be left unread.
    pub ignored_keys: Vec<String>,
    /// Keep a tool call's arguments as JSON text where they are given so.
    pub arguments_as_given: bool,
    /// Hand null keys of messages on to the template, as transformers 4 does.
    pub null_keys: bool,
}

/// What a null in a tool's arguments or schema means, in files whose structs have every field in
/// every row.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum NullFields {
    #[default]
    Error,
    /// The key was not there.
    Drop,
    /// The value is null.
    Keep,
}

impl NullFields {
    /// The name on the command line and in corpus.json.
    pub fn name(self) -> &'static str {
        match self {
            NullFields::Error => "error",
            NullFields::Drop => "drop",
            NullFields::Keep => "keep",
        }
    }
}
