//! Scores every teacher of a folder through the real code and compares with goldens:
//!
//! ```text
//! scripts/golden_check TEACHERS_DIR [GOLDENS_DIR]
//! ```
//!
//! One line per teacher, the worst over the config files that are there; exit status 1 when one
//! fails. `tests/support/golden.rs` says how the folders are laid out.

#[path = "../tests/support/golden.rs"]
#[allow(dead_code)]
mod golden;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use golden::{Distance, Golden, Sequences};

fn main() -> ExitCode {
    let folders: Vec<PathBuf> = std::env::args().skip(1).map(PathBuf::from).collect();
    let goldens = match folders.as_slice() {
        [teachers] => Goldens::Beside(teachers),
        [_, goldens] => Goldens::Apart(goldens),
        _ => {
            eprintln!("expected TEACHERS_DIR [GOLDENS_DIR]");
            return ExitCode::from(2);
        }
    };
    match run(&folders[0], goldens) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Where the goldens are.
#[derive(Clone, Copy)]
enum Goldens<'a> {
    /// In a folder of their own, one a teacher.
    Apart(&'a Path),
    /// In each teacher's folder, as in tests/fixtures/teachers.
    Beside(&'a Path),
}

impl Goldens<'_> {
    fn corpus(self) -> PathBuf {
        let (Goldens::Apart(root) | Goldens::Beside(root)) = self;
        root.join("corpus.json")
    }

    fn of(self, name: &str) -> PathBuf {
        match self {
            Goldens::Apart(root) => root.join(name),
            Goldens::Beside(root) => root.join(name).join("golden"),
        }
    }
}

/// How many teachers fail.
fn run(teachers: &Path, goldens: Goldens) -> Result<usize> {
    let corpus = Sequences::read(&goldens.corpus())?;
    let mut folders: Vec<PathBuf> = std::fs::read_dir(teachers)
        .with_context(|| teachers.display().to_string())?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    folders.retain(|folder| folder.join("config.json").is_file());
    folders.sort();
    println!(
        "{:28} {:>8} {:>5} {:>9} {:>9}  {:11} result",
        "teacher", "configs", "rows", "mean", "max", "ids"
    );
    let mut failed = 0;
    for folder in &folders {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let (line, passes) = match teacher(folder, &goldens.of(&name), &corpus) {
            Ok(lines) => lines,
            Err(error) => (format!("{error:#}"), false),
        };
        failed += usize::from(!passes);
        let result = if passes { "pass" } else { "fail" };
        println!("{name:28} {line} {result}");
    }
    println!(
        "{} of {} teachers pass",
        folders.len() - failed,
        folders.len()
    );
    Ok(failed)
}

/// The line of a teacher, and whether it passes under every config.
fn teacher(folder: &Path, golden: &Path, corpus: &Sequences) -> Result<(String, bool)> {
    let golden = Golden::read(golden)?;
    let configs = golden::configs(folder);
    let mut worst = Distance::default();
    let mut passes = true;
    for name in &configs {
        let config = std::fs::read(folder.join(name))?;
        let found = golden::check(folder, &config, corpus, &golden)
            .with_context(|| format!("under {name}"))?;
        passes &= found.passes();
        worst.rows = found.rows;
        worst.mean = worst.mean.max(found.mean);
        worst.max = worst.max.max(found.max);
        worst.ids_wrong = worst.ids_wrong.max(found.ids_wrong);
    }
    let ids = match worst.ids_wrong {
        0 => "equal".to_owned(),
        n => format!("{n} differ"),
    };
    let line = format!(
        "{:>8} {:>5} {:>9.1e} {:>9.1e}  {ids:11}",
        configs.len(),
        worst.rows,
        worst.mean,
        worst.max
    );
    Ok((line, passes))
}
