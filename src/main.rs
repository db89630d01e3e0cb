//! Parse, run one command, print its result or one error, exit.

use std::process::ExitCode;

use clap::Parser;
use kdscore::cli::Cli;
use kdscore::commands::{self, Interrupt, Outcome, Status};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

static INTERRUPT: Interrupt = Interrupt::new();

fn main() -> ExitCode {
    let cli = Cli::parse();
    let json = cli.json;
    match run(cli) {
        Ok(outcome) => {
            print(&outcome, json);
            match outcome.status {
                Status::Done => ExitCode::SUCCESS,
                Status::Unfinished => ExitCode::from(1),
            }
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<Outcome> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    std::thread::spawn(move || {
        for (count, _) in signals.forever().enumerate() {
            INTERRUPT.raise();
            if count > 0 {
                // Asked twice: stop now. Nothing is half-committed at any moment.
                std::process::exit(1);
            }
        }
    });
    if let Some(threads) = cli.threads {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build_global()?;
    }
    commands::execute(cli, &INTERRUPT)
}

fn print(outcome: &Outcome, json: bool) {
    use std::io::Write;
    let text = if json {
        outcome.json.to_string()
    } else {
        outcome.text.trim_end().to_owned()
    };
    // A closed pipe (`kdscore show … | head`) is no error of ours.
    let _ = writeln!(std::io::stdout(), "{text}");
}
