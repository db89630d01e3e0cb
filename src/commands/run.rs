//! `run`: the whole job from one file. Each step finds out by itself whether it is done.

use anyhow::Result;
use serde_json::json;

use super::show::Viewer;
use super::{Interrupt, Outcome, Status, prepare, score, teacher, verify};
use crate::cli::{PrepareArgs, RunArgs, ScoreArgs, VerifyArgs};
use crate::config::{FromJob, JobFile, PrepareSettings, ScoreSettings, VerifySettings};

/// Decoded positions at the end of the run.
const HIGHLIGHTS: usize = 3;

/// Prepares (if the file has a `prepare` table and the corpus is not there), scores what is not
/// committed, verifies, and shows a few rows.
///
/// # Errors
/// Those of the steps; the first one ends the run.
pub fn run(args: &RunArgs, interrupt: &Interrupt) -> Result<Outcome> {
    let job = JobFile::read(&args.config, &args.set)?;
    let settings = ScoreSettings::resolve(ScoreArgs::of_job(&job)?)?;
    let verify_settings = VerifySettings::resolve(VerifyArgs::of_job(&job)?)?;

    let mut steps = Vec::new();
    if job.has("prepare") {
        let prepared = {
            let settings = PrepareSettings::resolve(PrepareArgs::of_job(&job)?)?;
            prepare::prepare(settings, interrupt)?
        };
        let stop = prepared.status != Status::Done;
        steps.push(("prepare", prepared));
        if stop {
            return Ok(joined(steps, None));
        }
    }
    let scored = score::score(&settings, interrupt)?;
    let stop = scored.status != Status::Done;
    steps.push(("score", scored));
    if stop {
        return Ok(joined(steps, None));
    }
    let verified = verify::verify(&verify_settings, &teacher::fingerprint, interrupt)?;
    let sound = verified.status == Status::Done;
    steps.push(("verify", verified));
    if !sound {
        return Ok(joined(steps, None));
    }
    let viewer = Viewer::open(&settings.out, Some(&settings.corpus))?;
    let (table, rows) = viewer.highlights(HIGHLIGHTS)?;
    Ok(joined(steps, Some((table, rows))))
}

/// The steps' results under one another, the rows that are shown last.
fn joined(steps: Vec<(&str, Outcome)>, shown: Option<(String, serde_json::Value)>) -> Outcome {
    let mut text = String::new();
    let mut json = serde_json::Map::new();
    let mut status = Status::Done;
    for (name, outcome) in steps {
        text += &format!("── {name}\n{}\n\n", outcome.text.trim_end());
        if outcome.status != Status::Done {
            status = outcome.status;
        }
        json.insert(name.to_owned(), outcome.json);
    }
    if let Some((table, rows)) = shown {
        text += &format!("── a look at three positions\n{table}");
        json.insert("rows".to_owned(), json!(rows));
    }
    Outcome {
        text,
        json: json.into(),
        status,
    }
}
