//! The choices a user makes about source rows.

/// What the rows of the source files hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// The first row decides, for the whole run.
    Auto,
    Messages,
    PromptCompletion,
    Text,
    Tokens,
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
