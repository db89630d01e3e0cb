//! One file per command. A command does its work and hands back an [`Outcome`]; `main` prints it.

mod devices;
mod diff;
mod machine;
mod pilot;
mod plan;
mod prepare;
mod run;
mod score;
mod show;
mod show_corpus;
pub mod status;
mod teacher;
mod text;
mod try_teacher;
pub mod verify;
mod verify_page;
mod written;

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use serde_json::Value;

use crate::cli::{Cli, Command};
use crate::config::{
    PilotSettings, PlanSettings, PrepareSettings, ScoreSettings, VerifySettings, join,
};

/// What a command found out: the same facts as text for people and as one JSON object.
#[derive(Debug)]
pub struct Outcome {
    pub text: String,
    pub json: Value,
    pub status: Status,
}

/// The exit status of a command that ran to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// Exit 0.
    Done,
    /// Exit 1: damage found, or work left.
    Unfinished,
}

/// Set by SIGINT and SIGTERM; long work looks at it between steps.
#[derive(Debug, Default)]
pub struct Interrupt(AtomicBool);

impl Interrupt {
    pub const fn new() -> Interrupt {
        Interrupt(AtomicBool::new(false))
    }

    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Runs the one command that was asked for.
///
/// # Errors
/// Whatever the command can't go on from; one message, made for a person.
pub fn execute(cli: Cli, interrupt: &Interrupt) -> Result<Outcome> {
    match cli.command {
        Command::Run(args) => run::run(&args, interrupt),
        Command::Prepare(command) => {
            let args = join(command.config.as_deref(), &command.options)?;
            prepare::prepare(PrepareSettings::resolve(args)?, interrupt)
        }
        Command::Plan(command) => {
            let config = command.config.as_deref();
            let score = join(config, &command.score)?;
            let args = join(config, &command.options)?;
            plan::plan(&PlanSettings::resolve(score, args)?)
        }
        Command::Pilot(command) => {
            let config = command.config.as_deref();
            let score = join(config, &command.score)?;
            let args = join(config, &command.options)?;
            pilot::pilot(&PilotSettings::resolve(score, args)?, interrupt)
        }
        Command::Score(command) => {
            let args = join(command.config.as_deref(), &command.options)?;
            score::score(&ScoreSettings::resolve(args)?, interrupt)
        }
        Command::Verify(command) => {
            let args = join(command.config.as_deref(), &command.options)?;
            let settings = VerifySettings::resolve(args)?;
            verify::verify(&settings, &teacher::fingerprint, interrupt)
        }
        Command::Status(args) => status::status(&args.out),
        Command::Diff(args) => diff::diff(&args, interrupt),
        Command::Show(args) => show::show(&args),
    }
}
