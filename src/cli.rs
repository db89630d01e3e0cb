//! What the user may type. Every option is optional here, because it may stand in the TOML file
//! instead; `config` joins the two and resolves them once.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use serde::{Deserialize, Serialize};

#[derive(Parser, Debug)]
#[command(
    name = "kdscore",
    version,
    about = "Scores a token corpus with a teacher language model: top-k log-probs and tail mass for every position a student will train on.",
    after_help = "Exit status: 0 done, 1 damage found or work left, 2 error."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,

    /// Print one JSON object on stdout instead of a table.
    #[arg(long, global = true, display_order = 1000)]
    pub json: bool,

    /// No progress and no notes on stderr; errors still stand there.
    #[arg(long, global = true)]
    pub quiet: bool,

    /// Worker threads on the CPU [default: all cores]. Never changes a stored bit.
    #[arg(long, global = true, value_name = "N", display_order = 1000,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
}

#[derive(Subcommand, Debug)]
pub enum Command {
    /// The whole job from one file: prepare (if needed), score, verify.
    Run(RunArgs),
    /// Turn source rows into a token corpus.
    Prepare(Box<PrepareCommand>),
    /// What a job will cost, from config.json and the corpus's lengths; no weights needed.
    Plan(Box<PlanCommand>),
    /// Score a small part of a job, measure everything, and give the bill for the rest.
    Pilot(Box<PilotCommand>),
    /// Score a token corpus with a teacher; the same command again resumes.
    Score(ScoreCommand),
    /// Prove that every row is there, undamaged, aligned and from one teacher.
    Verify(VerifyCommand),
    /// How far a scored set is, without reading its arrays.
    Status(StatusArgs),
    /// How far apart two scored sets of one corpus are, row by row.
    Diff(DiffArgs),
    /// Look at rows: of a scored set, or of a text or chat scored on the spot.
    Show(ShowArgs),
}

#[derive(Args, Debug)]
pub struct RunArgs {
    /// TOML file with the tables `prepare`, `score` and `verify`; paths in it are relative to it.
    pub config: PathBuf,

    /// Override one option of the file, for example --set score.k=64.
    #[arg(long, value_name = "TABLE.KEY=VALUE")]
    pub set: Vec<String>,
}

/// A command's options, and the file that may hold the rest of them.
macro_rules! command_with_config {
    ($name:ident, $options:ident) => {
        #[derive(Args, Debug)]
        pub struct $name {
            #[command(flatten)]
            pub options: $options,

            /// TOML file whose table of this command's name holds options; the command line wins.
            #[arg(long, value_name = "FILE")]
            pub config: Option<PathBuf>,
        }
    };
}

/// The options of `score` beside a command's own.
macro_rules! command_beside_score {
    ($name:ident, $options:ident) => {
        #[derive(Args, Debug)]
        pub struct $name {
            #[command(flatten)]
            pub options: $options,

            #[command(flatten)]
            pub score: ScoreArgs,

            /// TOML file whose tables `score` and of this command's name hold options; the command
            /// line wins.
            #[arg(long, value_name = "FILE")]
            pub config: Option<PathBuf>,
        }
    };
}

command_beside_score!(PlanCommand, PlanArgs);
command_beside_score!(PilotCommand, PilotArgs);
command_with_config!(PrepareCommand, PrepareArgs);
command_with_config!(ScoreCommand, ScoreArgs);
command_with_config!(VerifyCommand, VerifyArgs);

#[derive(Args, Serialize, Deserialize, Debug, Default, Clone)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct PrepareArgs {
    /// Files, folders and patterns (JSON, JSON lines, .gz, .zst, Parquet, Arrow), or - for standard input;
    /// sorted by path.
    #[arg(long, num_args = 1.., value_name = "PATH")]
    pub data: Option<Vec<PathBuf>>,

    /// Which split of a folder that holds several: train, test, …
    #[arg(long, value_name = "NAME")]
    pub split: Option<String>,

    /// Folder with tokenizer.json and tokenizer_config.json; not needed for pre-tokenised rows.
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,

    /// Folder of the token corpus to be made, outside of --data.
    #[arg(long, value_name = "CORPUS")]
    pub out: Option<PathBuf>,

    /// auto, messages, sharegpt, alpaca, conversation, query-response, prompt-completion, text,
    /// segments or tokens [default: auto, by the first row's keys].
    #[arg(long)]
    pub format: Option<String>,

    /// Our names for the rows' keys: role=from,content=value.
    #[arg(long, value_name = "OURS=THEIRS", value_delimiter = ',')]
    pub map: Option<Vec<String>>,

    /// What the rows' roles mean: bot=assistant,customer=user.
    #[arg(long, value_name = "THEIRS=OURS", value_delimiter = ',')]
    pub roles: Option<Vec<String>>,

    /// Message keys to leave unread; any other unknown key is an error.
    #[arg(long, value_name = "KEY", value_delimiter = ',')]
    pub ignore_keys: Option<Vec<String>>,

    /// Tool arguments given as JSON text: object (parsed, as most templates expect) or as-given
    /// [default: object].
    #[arg(long)]
    pub tool_arguments: Option<String>,

    /// Nulls inside the arguments and schemas of Parquet and Arrow structs: error, drop or keep
    /// [default: error]. JSON says which keys are there; drop takes nulls out of it, too.
    #[arg(long)]
    pub null_fields: Option<String>,

    /// What the student learns: assistant, last-assistant, completion or all
    /// [default: assistant for chats, completion for prompt-completion, all for text].
    #[arg(long)]
    pub loss: Option<String>,

    /// Jinja file to use instead of the tokenizer's own chat template, or the name of one of its several.
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,

    /// Variable for the chat template; VALUE is JSON, or else a string.
    #[arg(long, value_name = "K=V")]
    pub template_arg: Option<Vec<String>>,

    /// The day that templates which print today's date print.
    #[arg(long, value_name = "YYYY-MM-DD")]
    pub template_date: Option<String>,

    /// Whose rendering to follow: transformers-5 or transformers-4 [default: transformers-5].
    #[arg(long)]
    pub template_rules: Option<String>,

    /// A copy of the chat template with generation blocks, which say what the assistant wrote.
    #[arg(long, value_name = "FILE")]
    pub mask_template: Option<PathBuf>,

    /// Tokens partly inside a trained span: exclude, or include as transformers 5 does [default: exclude].
    #[arg(long)]
    pub straddle: Option<String>,

    /// Take control tokens written out in content for what they say.
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub allow_control_tokens: Option<bool>,

    /// Longest sequence to keep, in tokens.
    #[arg(long, value_name = "N")]
    pub max_length: Option<usize>,

    /// What to do with a longer one: error or skip (counted) [default: error].
    #[arg(long)]
    pub on_overlong: Option<String>,

    /// What to do with a row that can't be used: error or skip (counted) [default: error].
    #[arg(long)]
    pub on_bad_row: Option<String>,

    /// Tokens per corpus shard, about: what a lost machine costs at most [default: 262144].
    #[arg(long, value_name = "N")]
    pub shard_tokens: Option<usize>,

    /// Vocabulary size, for pre-tokenised rows without a tokenizer.
    #[arg(long, value_name = "N")]
    pub vocab_size: Option<usize>,
}

#[derive(Args, Serialize, Deserialize, Debug, Default, Clone)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct ScoreArgs {
    /// Checkpoint folder in Hugging Face format.
    #[arg(long, value_name = "DIR")]
    pub teacher: Option<PathBuf>,

    /// Folder of the token corpus.
    #[arg(long, value_name = "CORPUS")]
    pub corpus: Option<PathBuf>,

    /// Folder of the scored set.
    #[arg(long, value_name = "OUT")]
    pub out: Option<PathBuf>,

    /// Ids kept per row [default: 32].
    #[arg(short, long, value_name = "K")]
    pub k: Option<usize>,

    /// auto, cpu, all, or CUDA devices by number: cuda:0,cuda:1 [default: auto, the first CUDA
    /// device or else the CPU].
    #[arg(long)]
    pub device: Option<String>,

    /// Compute dtype: auto, f32 or bf16 [default: auto, f32 on the CPU and bf16 on CUDA].
    #[arg(long)]
    pub dtype: Option<String>,

    /// Where NVRTC and cuBLASLt lie: a folder of libraries, a CUDA toolkit or a Python environment
    /// [default: searched for].
    #[arg(long, value_name = "DIR")]
    pub cuda_libs: Option<PathBuf>,

    /// Most tokens one packed batch may hold [default: chosen from the machine].
    #[arg(long, value_name = "N")]
    pub token_budget: Option<usize>,

    /// Most rows one logits slice may hold [default: chosen from the machine].
    #[arg(long, value_name = "N")]
    pub head_chunk: Option<usize>,

    /// Stored dtype of logp and tail: f16 or f32 [default: f16].
    #[arg(long)]
    pub logp_dtype: Option<String>,

    /// Further products: target_logp, target_rank, logsumexp, entropy.
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    pub emit: Option<Vec<String>>,

    /// Tokens per scored shard, about [default: the corpus shards as they are].
    #[arg(long, value_name = "N")]
    pub shard_tokens: Option<usize>,

    /// Leave head rows from N on out of the softmax.
    #[arg(long, value_name = "N")]
    pub vocab_limit: Option<usize>,

    /// Score although the corpus's tokenizer is not, or can't be shown to be, the teacher's; recorded.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", require_equals = true, hide_possible_values = true, value_name = "BOOL")]
    pub trust_tokens: Option<bool>,

    /// Score although config.json has keys, or the checkpoint tensors, that kdscore doesn't know
    /// and that could change the numbers.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", require_equals = true, hide_possible_values = true, value_name = "BOOL")]
    pub allow_unknown_config: Option<bool>,

    /// Refuse to add to shards made on another device model, libraries, kernels or build.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", require_equals = true, hide_possible_values = true, value_name = "BOOL")]
    pub same_device: Option<bool>,

    /// File to add events to while scoring, one JSON object a line.
    #[arg(long, value_name = "FILE")]
    pub events: Option<PathBuf>,

    /// File to keep the current figures in while scoring, in Prometheus' text form.
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
}

#[derive(Args, Serialize, Deserialize, Debug, Default, Clone)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct PlanArgs {
    /// Tokens to plan for, where there is no corpus yet; 1e9 will do.
    #[arg(long, value_name = "N", value_parser = whole_number)]
    pub tokens: Option<u64>,

    /// Rows among them [default: every token].
    #[arg(long, value_name = "N", value_parser = whole_number)]
    pub rows: Option<u64>,

    /// Tokens of a sequence, without a corpus [default: 2048].
    #[arg(long, value_name = "N")]
    pub length: Option<usize>,

    /// Device to plan for, by name, or cpu for this machine [default: a table of all known].
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<String>,

    /// Dense peak of the device, in TFLOP/s [default: its maker's figure for bf16].
    #[arg(long, value_name = "F")]
    pub peak_tflops: Option<f64>,

    /// Share of the peak that is reached [default: 0.4].
    #[arg(long, value_name = "F")]
    pub mfu: Option<f64>,

    /// Price of one device for an hour.
    #[arg(long, value_name = "P")]
    pub price: Option<f64>,

    /// Devices at work [default: 1].
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,

    /// How often a device is reclaimed, for the shard size [default: 0.05].
    #[arg(long, value_name = "F")]
    pub reclaim_per_hour: Option<f64>,

    /// What a commit costs, in seconds, for the shard size [default: 2].
    #[arg(long, value_name = "F")]
    pub commit_seconds: Option<f64>,

    /// Instead of the bill: what one batch of --length tokens a sequence [default: 512] takes on a
    /// CUDA device, by kernel, and how long that should be.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", require_equals = true, hide_possible_values = true, value_name = "BOOL")]
    pub kernels: Option<bool>,
}

#[derive(Args, Serialize, Deserialize, Debug, Default, Clone)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct PilotArgs {
    /// Share of the shards to score [default: 0.01, at least four shards].
    #[arg(long, value_name = "F")]
    pub fraction: Option<f64>,

    /// Which shards: the same number gives the same ones [default: 0].
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,

    /// Store this many ids a row, so that any smaller k is in the set already.
    #[arg(long, value_name = "N", conflicts_with = "k")]
    pub k_max: Option<usize>,

    /// Mean tail mass that the recommended k stays below [default: 0.01].
    #[arg(long, value_name = "F")]
    pub tail_below: Option<f64>,

    /// Time to spend on trying token budgets, in seconds; 0 leaves it out [default: a tenth of
    /// the pilot's own, at least 45].
    #[arg(long, value_name = "F")]
    pub sweep_seconds: Option<f64>,

    /// Price of this machine for an hour.
    #[arg(long, value_name = "P")]
    pub price: Option<f64>,

    /// HTML page to write.
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
}

#[derive(Args, Serialize, Deserialize, Debug, Default, Clone)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct VerifyArgs {
    /// Folder of the scored set.
    pub out: Option<PathBuf>,

    /// Folder of the token corpus [default: the one noted in job.json].
    #[arg(long, value_name = "CORPUS")]
    pub corpus: Option<PathBuf>,

    /// Checkpoint folder, to compare its fingerprint with the run's.
    #[arg(long, value_name = "DIR")]
    pub teacher: Option<PathBuf>,

    /// Remove what no manifest names, in shards that have a manifest.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", require_equals = true, hide_possible_values = true, value_name = "BOOL")]
    pub clean: Option<bool>,

    /// Move damaged shards aside, so that score makes them again.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", require_equals = true, hide_possible_values = true, value_name = "BOOL")]
    pub discard_damaged: Option<bool>,

    /// HTML page with the findings to write.
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Folder of the scored set.
    pub out: PathBuf,
}

#[derive(Args, Debug)]
pub struct DiffArgs {
    /// Folder of a scored set, a.
    pub a: PathBuf,

    /// Folder of another, b, of the same corpus.
    pub b: PathBuf,
}

#[derive(Args, Debug)]
pub struct ShowArgs {
    /// Folder of the scored set.
    #[arg(required_unless_present_any = ["teacher", "input", "corpus"], conflicts_with = "teacher")]
    pub out: Option<PathBuf>,

    /// Sequence to show, counted over the whole corpus.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        conflicts_with = "teacher"
    )]
    pub sequence: u64,

    /// First row of the sequence to show.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        conflicts_with = "teacher"
    )]
    pub from: usize,

    /// Most rows to show.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 20,
        conflicts_with = "teacher"
    )]
    pub rows: usize,

    /// Folder of the token corpus [default: the one noted in job.json]. Alone, it shows what the
    /// student learns of a sequence.
    #[arg(long, value_name = "CORPUS")]
    pub corpus: Option<PathBuf>,

    /// Checkpoint folder to score a text or chat with.
    #[arg(long, value_name = "DIR", requires = "input")]
    pub teacher: Option<PathBuf>,

    /// Text to score.
    #[arg(long, group = "input", requires = "teacher")]
    pub text: Option<String>,

    /// JSON file with one chat ({"messages": [...]} or the list itself) to score.
    #[arg(long, value_name = "FILE", group = "input", requires = "teacher")]
    pub messages: Option<PathBuf>,

    /// Score although config.json has keys, or the checkpoint tensors, that kdscore doesn't know
    /// and that could change the numbers.
    #[arg(long, requires = "teacher")]
    pub allow_unknown_config: bool,
}

/// 1000000, 1_000_000 or 1e6.
fn whole_number(text: &str) -> Result<u64, String> {
    let plain = text.replace(['_', ','], "");
    let expected = || format!("expected a whole number up to 1e18, found {text:?}");
    if let Ok(number) = plain.parse::<u64>() {
        return Ok(number);
    }
    let number: f64 = plain.parse().map_err(|_| expected())?;
    let is_whole = number.fract() == 0.0 && (0.0..=1e18).contains(&number);
    is_whole.then_some(number as u64).ok_or_else(expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_numbers_may_be_written_short() {
        let read = ["1000", "1_000", "1e3", "1.5e9"].map(|text| whole_number(text).unwrap());
        assert_eq!(read, [1000, 1000, 1000, 1_500_000_000]);
        for text in ["1.5", "-1", "1e19", "NaN", "ten"] {
            assert!(whole_number(text).is_err(), "{text}");
        }
    }
}
