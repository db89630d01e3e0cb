//! Joins what was typed with the TOML file and resolves it once. Below this module nothing knows
//! that flags exist.

mod device;
mod plan;

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use toml::{Table, Value};

use crate::cli::{PilotArgs, PlanArgs, PrepareArgs, ScoreArgs, VerifyArgs};
use crate::corpus::{
    Format, LossRule, NullFields, OnProblem, RowRules, Straddle, TemplateDate, TemplatePlan,
    TemplateRules,
};
use crate::model::Unknown;
use crate::products::{Dtype, Product, ProductPlan};

pub use self::device::{BF16_NEEDS_CUDA, ComputeDtype, DeviceChoice};
pub use self::plan::{GpuChoice, PlanSettings};

/// Tokens of a corpus shard when nothing else is said. A shard is what a lost machine costs: this
/// is seconds on a GPU and minutes on a CPU for a small teacher, and a billion tokens are 3,815.
pub const SHARD_TOKENS: usize = 1 << 18;

/// A choice given by name.
pub trait Named: Sized + Copy + 'static {
    const OPTION: &'static str;
    const CHOICES: &'static [(&'static str, Self)];

    fn parse(name: &str) -> Result<Self> {
        let found = Self::CHOICES.iter().find(|(n, _)| *n == name);
        found.map(|(_, choice)| *choice).ok_or_else(|| {
            let names: Vec<_> = Self::CHOICES.iter().map(|(n, _)| *n).collect();
            anyhow!(
                "{}: expected {}, found {name:?}",
                Self::OPTION,
                names.join(", ")
            )
        })
    }
}

impl Named for Format {
    const OPTION: &'static str = "format";
    const CHOICES: &'static [(&'static str, Self)] = &[
        ("auto", Format::Auto),
        ("messages", Format::Messages),
        ("sharegpt", Format::Sharegpt),
        ("alpaca", Format::Alpaca),
        ("conversation", Format::Conversation),
        ("query-response", Format::QueryResponse),
        ("prompt-completion", Format::PromptCompletion),
        ("text", Format::Text),
        ("segments", Format::Segments),
        ("tokens", Format::Tokens),
    ];
}

impl Named for LossRule {
    const OPTION: &'static str = "loss";
    const CHOICES: &'static [(&'static str, Self)] = &[
        ("assistant", LossRule::Assistant),
        ("last-assistant", LossRule::LastAssistant),
        ("completion", LossRule::Completion),
        ("all", LossRule::All),
    ];
}

impl Named for OnProblem {
    const OPTION: &'static str = "on-overlong, on-bad-row";
    const CHOICES: &'static [(&'static str, Self)] =
        &[("error", OnProblem::Error), ("skip", OnProblem::Skip)];
}

impl Named for TemplateRules {
    const OPTION: &'static str = "template-rules";
    const CHOICES: &'static [(&'static str, Self)] = &[
        ("transformers-5", TemplateRules::Transformers5),
        ("transformers-4", TemplateRules::Transformers4),
    ];
}

impl Named for Straddle {
    const OPTION: &'static str = "straddle";
    const CHOICES: &'static [(&'static str, Self)] = &[
        ("exclude", Straddle::Exclude),
        ("include", Straddle::Include),
    ];
}

impl Named for NullFields {
    const OPTION: &'static str = "null-fields";
    const CHOICES: &'static [(&'static str, Self)] = &[
        ("error", NullFields::Error),
        ("drop", NullFields::Drop),
        ("keep", NullFields::Keep),
    ];
}

/// Everything `prepare` needs, resolved.
#[derive(Clone, Debug)]
pub struct PrepareSettings {
    /// Files, folders and patterns, sorted.
    pub data: Vec<PathBuf>,
    pub split: Option<String>,
    pub tokenizer: Option<PathBuf>,
    pub out: PathBuf,
    pub format: Format,
    /// `None`: the format's own rule.
    pub loss: Option<LossRule>,
    pub template: TemplatePlan,
    pub mask_template: Option<PathBuf>,
    pub straddle: Straddle,
    pub allow_control_tokens: bool,
    pub row_rules: RowRules,
    pub null_fields: NullFields,
    pub max_length: Option<usize>,
    pub on_overlong: OnProblem,
    pub on_bad_row: OnProblem,
    pub shard_tokens: usize,
    pub vocab_size: Option<usize>,
}

/// Files that tell machines how a pass goes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Listeners {
    /// JSON lines, added to.
    pub events: Option<PathBuf>,
    /// Prometheus' text form, replaced.
    pub metrics: Option<PathBuf>,
}

/// Everything `score` needs, resolved, but for what only the machine can tell.
#[derive(Clone, Debug)]
pub struct ScoreSettings {
    pub teacher: PathBuf,
    pub corpus: PathBuf,
    pub out: PathBuf,
    pub device: DeviceChoice,
    /// `None`: f32 on the CPU, bf16 on CUDA.
    pub dtype: Option<ComputeDtype>,
    pub cuda_libs: Option<PathBuf>,
    pub products: ProductPlan,
    /// `None`: chosen from the machine.
    pub token_budget: Option<usize>,
    /// `None`: chosen from the machine.
    pub head_chunk: Option<usize>,
    /// `None`: one scored shard per corpus shard.
    pub shard_tokens: Option<usize>,
    pub vocab_limit: Option<usize>,
    pub trust_tokens: bool,
    /// What to do with config keys and tensors that kdscore doesn't know.
    pub unknown: Unknown,
    pub same_device: bool,
    pub listeners: Listeners,
}

/// Everything `verify` needs, resolved.
#[derive(Clone, Debug)]
pub struct VerifySettings {
    pub out: PathBuf,
    /// `None`: the one noted in job.json.
    pub corpus: Option<PathBuf>,
    pub teacher: Option<PathBuf>,
    pub clean: bool,
    pub discard_damaged: bool,
    /// HTML page to write.
    pub report: Option<PathBuf>,
}

/// Everything `pilot` needs, resolved.
#[derive(Clone, Debug)]
pub struct PilotSettings {
    pub score: ScoreSettings,
    pub fraction: f64,
    pub seed: u64,
    /// Whether the set stores more ids than are needed, for any smaller k.
    pub is_wide: bool,
    pub tail_below: f64,
    /// `None`: a tenth of the pilot's own time.
    pub sweep_seconds: Option<f64>,
    pub price: Option<f64>,
    pub report: Option<PathBuf>,
}

impl PilotSettings {
    pub fn resolve(mut score: ScoreArgs, args: PilotArgs) -> Result<PilotSettings> {
        let is_wide = args.k_max.is_some();
        score.k = at_least_one(args.k_max, "k-max")?.or(score.k);
        let seconds = args.sweep_seconds;
        ensure!(
            seconds.is_none_or(|seconds| (0.0..=3600.0).contains(&seconds)),
            "sweep-seconds: expected 0 to 3600, found {}",
            seconds.unwrap_or_default()
        );
        Ok(PilotSettings {
            score: ScoreSettings::resolve(score)?,
            fraction: within(args.fraction, "fraction", 1.0)?.unwrap_or(0.01),
            seed: args.seed.unwrap_or(0),
            is_wide,
            tail_below: within(args.tail_below, "tail-below", 1.0)?.unwrap_or(0.01),
            sweep_seconds: seconds,
            price: within(args.price, "price", f64::MAX)?,
            report: args.report,
        })
    }
}

/// A number above 0 and at most `most`.
fn within(value: Option<f64>, option: &str, most: f64) -> Result<Option<f64>> {
    if let Some(v) = value {
        let bound = if most < f64::MAX {
            format!(" and at most {most}")
        } else {
            String::new()
        };
        ensure!(
            v > 0.0 && v <= most,
            "{option}: expected a number above 0{bound}, found {v}"
        );
    }
    Ok(value)
}

impl PrepareSettings {
    pub fn resolve(args: PrepareArgs) -> Result<PrepareSettings> {
        let template = template_plan(&args)?;
        let row_rules = row_rules(&args)?;
        let mut data = args.data.unwrap_or_default();
        ensure!(
            !data.is_empty(),
            "data: expected at least one source file, found none"
        );
        data.sort();
        Ok(PrepareSettings {
            data,
            split: args.split,
            tokenizer: args.tokenizer,
            out: needed(args.out, "out", "the corpus folder to make")?,
            format: named(args.format)?.unwrap_or(Format::Auto),
            loss: named(args.loss)?,
            template,
            mask_template: args.mask_template,
            straddle: named(args.straddle)?.unwrap_or_default(),
            allow_control_tokens: args.allow_control_tokens.unwrap_or(false),
            row_rules,
            null_fields: named(args.null_fields)?.unwrap_or_default(),
            max_length: args.max_length,
            on_overlong: named(args.on_overlong)?.unwrap_or(OnProblem::Error),
            on_bad_row: named(args.on_bad_row)?.unwrap_or(OnProblem::Error),
            shard_tokens: at_least_one(args.shard_tokens, "shard-tokens")?.unwrap_or(SHARD_TOKENS),
            vocab_size: at_least_one(args.vocab_size, "vocab-size")?,
        })
    }
}

impl ScoreSettings {
    pub fn resolve(args: ScoreArgs) -> Result<ScoreSettings> {
        let (device, dtype) = device::resolve(args.device.as_deref(), args.dtype.as_deref())?;
        let logp_dtype = match args.logp_dtype.as_deref() {
            None | Some("f16") => Dtype::F16,
            Some("f32") => Dtype::F32,
            Some(other) => bail!("logp-dtype: expected f16 or f32, found {other:?}"),
        };
        Ok(ScoreSettings {
            teacher: needed(args.teacher, "teacher", "a checkpoint folder")?,
            corpus: needed(args.corpus, "corpus", "the folder that prepare made")?,
            out: needed(args.out, "out", "the folder of the scored set")?,
            device,
            dtype,
            cuda_libs: args.cuda_libs,
            products: ProductPlan {
                k: at_least_one(args.k, "k")?.unwrap_or(32),
                logp_dtype,
                extra: extra_products(&args.emit.unwrap_or_default())?,
            },
            token_budget: at_least_one(args.token_budget, "token-budget")?,
            head_chunk: at_least_one(args.head_chunk, "head-chunk")?,
            shard_tokens: at_least_one(args.shard_tokens, "shard-tokens")?,
            vocab_limit: at_least_one(args.vocab_limit, "vocab-limit")?,
            trust_tokens: args.trust_tokens.unwrap_or(false),
            unknown: match args.allow_unknown_config {
                Some(true) => Unknown::Allow,
                _ => Unknown::Refuse,
            },
            same_device: args.same_device.unwrap_or(false),
            listeners: Listeners {
                events: args.events,
                metrics: args.metrics,
            },
        })
    }
}

impl VerifySettings {
    pub fn resolve(args: VerifyArgs) -> Result<VerifySettings> {
        Ok(VerifySettings {
            out: args.out.ok_or_else(|| anyhow!("expected the folder of the scored set, found none; give it after verify, or in the job file"))?,
            corpus: args.corpus,
            teacher: args.teacher,
            clean: args.clean.unwrap_or(false),
            discard_damaged: args.discard_damaged.unwrap_or(false),
            report: args.report,
        })
    }
}

/// The options of one command: those of the file, overlaid by the command line.
pub fn join<A>(config: Option<&Path>, typed: &A) -> Result<A>
where
    A: Serialize + DeserializeOwned + FromJob,
{
    let from_file = match config {
        None => A::from_table(Table::new(), A::TABLE)?,
        Some(path) => A::of_job(&JobFile::read(path, &[])?)?,
    };
    let mut joined = Table::try_from(&from_file)?;
    joined.extend(Table::try_from(typed)?);
    A::from_table(joined, A::TABLE)
}

/// The options of a command as a whole job has them: what one table says need not be said again
/// in the next.
pub trait FromJob: Rebase {
    const TABLE: &'static str;

    fn of_job(job: &JobFile) -> Result<Self>;
}

impl FromJob for PrepareArgs {
    const TABLE: &'static str = "prepare";

    /// The tokenizer is the teacher's where nothing else is said.
    fn of_job(job: &JobFile) -> Result<PrepareArgs> {
        let mut args: PrepareArgs = job.args("prepare")?;
        let score: ScoreArgs = job.args("score")?;
        args.tokenizer = args.tokenizer.or(score.teacher);
        Ok(args)
    }
}

impl FromJob for ScoreArgs {
    const TABLE: &'static str = "score";

    /// The corpus is the prepared one where nothing else is said.
    fn of_job(job: &JobFile) -> Result<ScoreArgs> {
        let mut args: ScoreArgs = job.args("score")?;
        let prepare: PrepareArgs = job.args("prepare")?;
        args.corpus = args.corpus.or(prepare.out);
        Ok(args)
    }
}

impl FromJob for PlanArgs {
    const TABLE: &'static str = "plan";

    fn of_job(job: &JobFile) -> Result<PlanArgs> {
        job.args("plan")
    }
}

impl FromJob for PilotArgs {
    const TABLE: &'static str = "pilot";

    fn of_job(job: &JobFile) -> Result<PilotArgs> {
        job.args("pilot")
    }
}

impl FromJob for VerifyArgs {
    const TABLE: &'static str = "verify";

    /// The scored set, and the corpus it was scored from.
    fn of_job(job: &JobFile) -> Result<VerifyArgs> {
        let mut args: VerifyArgs = job.args("verify")?;
        let score = ScoreArgs::of_job(job)?;
        args.out = args.out.or(score.out);
        args.corpus = args.corpus.or(score.corpus);
        Ok(args)
    }
}

/// Paths in a TOML file are relative to it.
pub trait Rebase: DeserializeOwned {
    fn rebase(&mut self, folder: &Path);

    fn from_table(table: Table, name: &str) -> Result<Self> {
        Value::Table(table)
            .try_into()
            .map_err(|e: toml::de::Error| anyhow!("[{name}]: {}", e.message().trim()))
    }
}

impl Rebase for PrepareArgs {
    fn rebase(&mut self, folder: &Path) {
        let paths = [
            &mut self.tokenizer,
            &mut self.out,
            &mut self.chat_template,
            &mut self.mask_template,
        ];
        paths
            .into_iter()
            .flatten()
            .for_each(|p| *p = folder.join(&*p));
        let files = self.data.iter_mut().flatten();
        let files = files.filter(|p| p.as_path() != Path::new("-"));
        files.for_each(|p| *p = folder.join(&*p));
    }
}

impl Rebase for ScoreArgs {
    fn rebase(&mut self, folder: &Path) {
        let paths = [
            &mut self.teacher,
            &mut self.corpus,
            &mut self.out,
            &mut self.cuda_libs,
            &mut self.events,
            &mut self.metrics,
        ];
        paths
            .into_iter()
            .flatten()
            .for_each(|p| *p = folder.join(&*p));
    }
}

impl Rebase for PlanArgs {
    fn rebase(&mut self, _folder: &Path) {}
}

impl Rebase for PilotArgs {
    fn rebase(&mut self, folder: &Path) {
        self.report.iter_mut().for_each(|p| *p = folder.join(&*p));
    }
}

impl Rebase for VerifyArgs {
    fn rebase(&mut self, folder: &Path) {
        let paths = [
            &mut self.teacher,
            &mut self.corpus,
            &mut self.out,
            &mut self.report,
        ];
        paths
            .into_iter()
            .flatten()
            .for_each(|p| *p = folder.join(&*p));
    }
}

/// A job's TOML file: the tables `prepare`, `plan`, `pilot`, `score` and `verify`.
#[derive(Debug)]
pub struct JobFile {
    path: PathBuf,
    tables: Table,
}

impl JobFile {
    const TABLES: [&'static str; 5] = ["prepare", "plan", "pilot", "score", "verify"];

    /// Reads the file and lays the overrides (`table.key=value`) over it.
    pub fn read(path: &Path, overrides: &[String]) -> Result<JobFile> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("{}: can't read the job file", path.display()))?;
        let mut tables = Table::from_str(&text)
            .map_err(|e| anyhow!("{}: {}", path.display(), e.to_string().trim()))?;
        for (name, value) in &tables {
            ensure!(
                Self::TABLES.contains(&name.as_str()) && value.is_table(),
                "{}: expected only the tables [prepare], [plan], [pilot], [score] and [verify], found {name:?}",
                path.display()
            );
        }
        overrides
            .iter()
            .try_for_each(|o| override_one(&mut tables, o))?;
        Ok(JobFile {
            path: path.to_path_buf(),
            tables,
        })
    }

    /// One command's options; paths are made relative to the file's folder. An absent table is
    /// an empty one.
    pub fn args<A: Rebase>(&self, table: &str) -> Result<A> {
        let found = match self.tables.get(table) {
            Some(Value::Table(found)) => found.clone(),
            _ => Table::new(),
        };
        let mut args =
            A::from_table(found, table).with_context(|| format!("{}", self.path.display()))?;
        args.rebase(self.path.parent().unwrap_or(Path::new("")));
        Ok(args)
    }

    pub fn has(&self, table: &str) -> bool {
        self.tables.contains_key(table)
    }
}

fn override_one(tables: &mut Table, text: &str) -> Result<()> {
    let parts = text
        .split_once('=')
        .and_then(|(place, value)| Some((place.split_once('.')?, value)));
    let Some(((table, key), value)) = parts else {
        bail!("set: expected TABLE.KEY=VALUE, found {text:?}");
    };
    ensure!(
        JobFile::TABLES.contains(&table),
        "set: expected a key of prepare, plan, pilot, score or verify, found {text:?}"
    );
    let value = Table::from_str(&format!("v = {value}"))
        .ok()
        .and_then(|mut t| t.remove("v"))
        .unwrap_or_else(|| Value::String(value.to_owned()));
    tables
        .entry(table)
        .or_insert_with(|| Value::Table(Table::new()))
        .as_table_mut()
        .expect("read() let only tables in")
        .insert(key.to_owned(), value);
    Ok(())
}

fn needed<T>(value: Option<T>, option: &str, what: &str) -> Result<T> {
    value.ok_or_else(|| {
        anyhow!("{option}: expected {what}, found none; give --{option} or set it in the job file")
    })
}

fn named<T: Named>(name: Option<String>) -> Result<Option<T>> {
    name.map(|n| T::parse(&n)).transpose()
}

fn one_of(value: Option<&str>, option: &str, choices: &[&str]) -> Result<()> {
    match value {
        Some(v) if !choices.contains(&v) => {
            bail!("{option}: expected {}, found {v:?}", choices.join(" or "))
        }
        _ => Ok(()),
    }
}

/// More than any of these options can use, and little enough that sizes never overflow.
const MOST: usize = 1 << 31;

fn at_least_one(value: Option<usize>, option: &str) -> Result<Option<usize>> {
    if let Some(value) = value.filter(|&v| v > MOST) {
        bail!("{option}: expected at most {MOST}, found {value}");
    }
    ensure!(value != Some(0), "{option}: expected at least 1, found 0");
    Ok(value)
}

fn template_plan(args: &PrepareArgs) -> Result<TemplatePlan> {
    let date = args.template_date.as_deref().map(|text| {
        TemplateDate::parse(text)
            .with_context(|| format!("template-date: expected YYYY-MM-DD, found {text:?}"))
    });
    let template_args = args.template_arg.iter().flatten();
    Ok(TemplatePlan {
        template: args.chat_template.clone(),
        args: template_args
            .map(|a| template_arg(a))
            .collect::<Result<_>>()?,
        date: date.transpose()?,
        rules: named(args.template_rules.clone())?.unwrap_or_default(),
    })
}

fn row_rules(args: &PrepareArgs) -> Result<RowRules> {
    let arguments = args.tool_arguments.as_deref();
    one_of(arguments, "tool-arguments", &["object", "as-given"])?;
    Ok(RowRules {
        map: pairs("map", args.map.as_deref().unwrap_or_default())?,
        roles: pairs("roles", args.roles.as_deref().unwrap_or_default())?,
        ignored_keys: args.ignore_keys.clone().unwrap_or_default(),
        arguments_as_given: arguments == Some("as-given"),
        null_keys: false,
    })
}

/// `A=B`, each left side and each right side once.
fn pairs(option: &str, texts: &[String]) -> Result<Vec<(String, String)>> {
    let mut found: Vec<(String, String)> = Vec::new();
    for text in texts {
        let Some((left, right)) = text
            .split_once('=')
            .filter(|(l, r)| !l.is_empty() && !r.is_empty())
        else {
            bail!("{option}: expected NAME=NAME, found {text:?}");
        };
        ensure!(
            found.iter().all(|(l, _)| l != left),
            "{option}: expected each name once, found {left:?} twice"
        );
        found.push((left.to_owned(), right.to_owned()));
    }
    Ok(found)
}

fn template_arg(text: &str) -> Result<(String, Json)> {
    let (key, value) = text
        .split_once('=')
        .ok_or_else(|| anyhow!("template-arg: expected K=V, found {text:?}"))?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| Json::String(value.to_owned()));
    Ok((key.to_owned(), value))
}

fn extra_products(names: &[String]) -> Result<Vec<Product>> {
    let choices: Vec<_> = Product::EXTRA.iter().map(|p| p.name()).collect();
    if let Some(unknown) = names.iter().find(|n| !choices.contains(&n.as_str())) {
        bail!("emit: expected {}, found {unknown:?}", choices.join(", "));
    }
    let asked = |p: &Product| names.iter().any(|n| n == p.name());
    Ok(Product::EXTRA.into_iter().filter(asked).collect())
}
