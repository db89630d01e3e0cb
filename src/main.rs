//! Parse, run one command, print its result or one error, exit.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use kdscore::cli::Cli;
use kdscore::commands::{self, Interrupt, Outcome, Status};
use kdscore::progress;
use mimalloc::MiMalloc;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Tokenising allocates a few strings a token; with the system's allocator that took half its time.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

static INTERRUPT: Interrupt = Interrupt::new();

fn main() -> ExitCode {
    let cli = Cli::parse();
    let json = cli.json;
    match run(cli) {
        Ok(outcome) => match (print(&outcome, json), outcome.status) {
            (Err(error), _) => {
                eprintln!("error: stdout: {error}: the result could not be delivered");
                ExitCode::from(2)
            }
            (Ok(()), Status::Done) => ExitCode::SUCCESS,
            (Ok(()), Status::Unfinished) => ExitCode::from(1),
        },
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
            if count == 0 {
                progress::note("stopping at the next safe point; once more stops at once");
            } else {
                // Asked twice: stop now. Nothing is half-committed at any moment.
                std::process::exit(1);
            }
        }
    });
    if cli.quiet {
        progress::be_quiet();
    }
    if let Some(threads) = cli.threads {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads.into())
            .build_global()?;
    }
    commands::execute(cli, &INTERRUPT)
}

/// A closed pipe (`kdscore show … | head`) is no error.
fn print(outcome: &Outcome, json: bool) -> io::Result<()> {
    let text = if json {
        outcome.json.to_string()
    } else {
        outcome.text.trim_end().to_owned()
    };
    let mut stdout = io::stdout();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}
