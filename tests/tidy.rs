//! Holds the code to the map in `src/lib.rs` and to the house's rules. The import table is read
//! out of that map, so it can't drift from what is checked.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const FUNCTION_LINES_MAX: usize = 70;
const FILE_LINES_MAX: usize = 700;
/// Tests hold tables of cases.
const TEST_LINES_MAX: usize = 1000;
/// Lines above an `unsafe` in which its reason may stand.
const SAFETY_LINES: usize = 8;

/// What a module may import.
#[derive(Debug)]
enum MayImport {
    Everything,
    AnythingBut(BTreeSet<String>),
    Only(BTreeSet<String>),
}

struct Source {
    /// Relative to the repository.
    path: String,
    text: String,
}

impl Source {
    /// The crate's module a file belongs to: `src/corpus/rows/mod.rs` is of `corpus`.
    fn module(&self) -> &str {
        let below = self.path.strip_prefix("src/").unwrap_or(&self.path);
        let first = below.split('/').next().unwrap_or(below);
        first.strip_suffix(".rs").unwrap_or(first)
    }

    /// Numbered lines without comments and without the unit tests at the end.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text
            .lines()
            .take_while(|line| line.trim() != "#[cfg(test)]")
            .enumerate()
            .filter(|(_, line)| !line.trim_start().starts_with("//"))
            .map(|(at, line)| (at + 1, line))
    }

    /// The places where the code has one of `words`.
    fn places_of(&self, words: &[&str]) -> Vec<String> {
        self.code()
            .filter(|(_, line)| words.iter().any(|word| line.contains(word)))
            .map(|(at, line)| format!("{}:{at}: {}", self.path, line.trim()))
            .collect()
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn rust_files(folder: &str) -> Vec<Source> {
    let mut paths = Vec::new();
    collect(&root().join(folder), &mut paths);
    paths.sort();
    let sources = paths.into_iter().map(|path| Source {
        text: std::fs::read_to_string(&path).unwrap(),
        path: path.strip_prefix(root()).unwrap().display().to_string(),
    });
    sources.collect()
}

fn collect(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

fn source() -> Vec<Source> {
    rust_files("src")
}

/// Fails with every place named.
fn expect_none(places: Vec<String>, rule: &str) {
    assert!(places.is_empty(), "{rule}:\n{}", places.join("\n"));
}

fn names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|w| !w.is_empty()).map(str::to_owned).collect()
}

/// The table of `src/lib.rs`: module to what it may import.
fn import_table() -> BTreeMap<String, MayImport> {
    let lib = std::fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let rows = lib.lines().filter_map(|line| line.strip_prefix("//! | [`"));
    let table: BTreeMap<String, MayImport> = rows
        .map(|row| {
            let (module, rest) = row.split_once("`]").unwrap();
            let rule = rest
                .trim_end_matches('|')
                .rsplit('|')
                .next()
                .unwrap()
                .trim();
            let rule = match (rule, rule.strip_prefix("anything but ")) {
                ("everything", _) => MayImport::Everything,
                ("nothing", _) => MayImport::Only(BTreeSet::new()),
                (_, Some(but)) => MayImport::AnythingBut(names(but)),
                _ => MayImport::Only(names(rule)),
            };
            (module.to_owned(), rule)
        })
        .collect();
    assert!(table.len() > 10, "the table in src/lib.rs was not found");
    table
}

/// Modules named right behind `start` (`crate::` or `kdscore::`), in braces too.
fn imported(line: &str, start: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in line.match_indices(start) {
        let before = line[..at].chars().next_back();
        if before.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let rest = &line[at + start.len()..];
        match rest.strip_prefix('{') {
            Some(list) => {
                let list = list.split('}').next().unwrap_or(list);
                let items = list
                    .split(',')
                    .filter_map(|item| item.trim().split("::").next());
                found.extend(items.map(str::to_owned));
            }
            None => {
                let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                found.push(rest[..end.unwrap_or(rest.len())].to_owned());
            }
        }
    }
    found.retain(|name| name.starts_with(|c: char| c.is_ascii_lowercase()));
    found
}

#[test]
fn modules_import_what_the_map_allows() {
    let table = import_table();
    let mut places = Vec::new();
    for file in source() {
        let module = file.module();
        if matches!(module, "lib" | "main") {
            continue;
        }
        let Some(rule) = table.get(module) else {
            places.push(format!("{}: {module} is not in the table", file.path));
            continue;
        };
        for (at, line) in file.code() {
            for name in imported(line, "crate::") {
                let allowed = match rule {
                    MayImport::Everything => true,
                    MayImport::AnythingBut(but) => !but.contains(&name),
                    MayImport::Only(only) => only.contains(&name),
                };
                if name != module && !allowed {
                    places.push(format!(
                        "{}:{at}: {module} may not import {name}",
                        file.path
                    ));
                }
            }
        }
    }
    expect_none(places, "imports against the table in src/lib.rs");
}

#[test]
fn the_map_and_the_modules_are_the_same() {
    let table: BTreeSet<String> = import_table().into_keys().collect();
    let lib = std::fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let modules = lib.lines().filter_map(|line| line.strip_prefix("pub mod "));
    let modules: BTreeSet<String> = modules
        .map(|m| m.trim_end_matches(';').to_owned())
        .collect();
    assert_eq!(table, modules);
    let code = lib
        .lines()
        .filter(|l| !l.starts_with("//!") && !l.is_empty());
    let other: Vec<_> = code.filter(|l| !l.starts_with("pub mod ")).collect();
    assert!(
        other.is_empty(),
        "src/lib.rs holds only mod lines: {other:?}"
    );
}

#[test]
fn only_the_store_changes_files() {
    let words = [
        "fs::write",
        "fs::create_dir",
        "fs::remove_",
        "fs::rename",
        "fs::copy",
        "fs::hard_link",
        "fs::set_permissions",
        "File::create",
        "File::options",
        "OpenOptions",
        "set_len(",
    ];
    let files = source().into_iter().filter(|f| f.module() != "store");
    expect_none(
        files.flat_map(|f| f.places_of(&words)).collect(),
        "only store creates, renames or removes files",
    );
}

#[test]
fn pure_modules_open_nothing() {
    let pure = ["score", "batch", "cost", "products", "canonical", "cli"];
    let files = source().into_iter().filter(|f| pure.contains(&f.module()));
    expect_none(
        files
            .flat_map(|f| f.places_of(&["std::fs", "File::open"]))
            .collect(),
        "these modules open no file",
    );
}

#[test]
fn only_main_and_progress_print_and_only_main_exits() {
    let prints = ["println!(", "eprintln!(", "print!(", "eprint!(", "dbg!("];
    let printing = source()
        .into_iter()
        .filter(|f| !matches!(f.module(), "main" | "progress"));
    expect_none(
        printing.flat_map(|f| f.places_of(&prints)).collect(),
        "only main and progress print",
    );
    let exiting = source().into_iter().filter(|f| f.module() != "main");
    expect_none(
        exiting
            .flat_map(|f| f.places_of(&["process::exit", "process::abort"]))
            .collect(),
        "only main ends the process",
    );
}

#[test]
fn nothing_is_left_to_do() {
    // In halves, or this file would be the first to be found.
    let halves = [
        ("to", "do!("),
        ("unimple", "mented!("),
        ("FIX", "ME"),
        ("X", "XX"),
    ];
    let words = halves.map(|(first, second)| first.to_owned() + second);
    let words = words.each_ref().map(String::as_str);
    // Such words stand in comments most of all, which the other rules leave out.
    let mut places = Vec::new();
    for file in source() {
        let lines = file.text.lines().zip(1..);
        let marked = lines.filter(|(line, _)| words.iter().any(|word| line.contains(word)));
        places.extend(marked.map(|(line, at)| format!("{}:{at}: {}", file.path, line.trim())));
    }
    expect_none(places, "unfinished code");
}

#[test]
fn unsafe_code_is_where_it_belongs_and_says_why() {
    let allowed = |f: &Source| {
        f.module() == "backend"
            || ["src/mapped.rs", "src/store/bytes.rs"].contains(&f.path.as_str())
    };
    let is_unsafe = [
        "unsafe {",
        "unsafe fn",
        "unsafe impl",
        "unsafe trait",
        "unsafe extern",
    ];
    let mut places = Vec::new();
    for file in source() {
        let lines: Vec<&str> = file.text.lines().collect();
        for (at, line) in file
            .code()
            .filter(|(_, l)| is_unsafe.iter().any(|w| l.contains(w)))
        {
            let above = &lines[at.saturating_sub(1 + SAFETY_LINES)..at - 1];
            let says_why = above
                .iter()
                .any(|l| l.contains("SAFETY") || l.contains("# Safety"));
            if !allowed(&file) || !says_why {
                places.push(format!("{}:{at}: {}", file.path, line.trim()));
            }
        }
    }
    expect_none(
        places,
        "unsafe outside its layer, or without a SAFETY comment above",
    );
}

#[test]
fn only_the_cuda_backend_knows_cuda() {
    let files = source().into_iter();
    let files = files.filter(|f| !f.path.starts_with("src/backend/cuda"));
    let places: Vec<String> = files.flat_map(|f| f.places_of(&["cudarc"])).collect();
    expect_none(places, "only backend/cuda names cudarc");
}

#[test]
fn functions_and_files_stay_readable() {
    let mut places = Vec::new();
    let tests = rust_files("tests").into_iter().chain(rust_files("benches"));
    for file in source().into_iter().chain(tests) {
        let lines: Vec<&str> = file.text.lines().collect();
        let lines_max = match file.path.starts_with("src/") {
            true => FILE_LINES_MAX,
            false => TEST_LINES_MAX,
        };
        if lines.len() > lines_max {
            places.push(format!("{}: {} lines", file.path, lines.len()));
        }
        if !file.text.starts_with("//!") {
            places.push(format!("{}: no line that says what it is for", file.path));
        }
        for (at, length) in function_lengths(&lines) {
            if length > FUNCTION_LINES_MAX {
                places.push(format!(
                    "{}:{}: a function of {length} lines",
                    file.path,
                    at + 1
                ));
            }
        }
    }
    expect_none(places, "too long, or unexplained");
}

/// Where each function starts, and its lines. Formatted code closes it at its own indent.
fn function_lengths(lines: &[&str]) -> Vec<(usize, usize)> {
    let starts = lines
        .iter()
        .enumerate()
        .filter(|(_, line)| is_function(line));
    starts
        .filter_map(|(at, line)| {
            let indent = &line[..line.len() - line.trim_start().len()];
            let close = format!("{indent}}}");
            let semicolon = lines[at..].iter().position(|l| l.ends_with(';'));
            let length = lines[at..].iter().position(|l| *l == close)?;
            // A trait's method without a body ends before any brace opens.
            let opens = lines[at..].iter().position(|l| l.ends_with('{'));
            (opens <= semicolon || semicolon.is_none()).then_some((at, length + 1))
        })
        .collect()
}

fn is_function(line: &str) -> bool {
    let mut words = line.split_whitespace().peekable();
    while let Some(word) = words.next_if(|w| {
        w.starts_with("pub") || ["const", "unsafe", "async", "extern", "\"C\""].contains(w)
    }) {
        let _ = word;
    }
    words.next() == Some("fn")
}

#[test]
fn the_rules_themselves_work() {
    assert_eq!(
        imported("use crate::store::{Job, x};", "crate::"),
        ["store"]
    );
    assert_eq!(
        imported("use crate::{canonical, corpus::Row};", "crate::"),
        ["canonical", "corpus"]
    );
    assert_eq!(
        imported("let x = crate::model::f() + $crate::y;", "crate::"),
        ["model"]
    );
    let lines = [
        "    pub(super) fn f() {",
        "        1",
        "    }",
        "fn g(&self);",
        "fn h() {",
        "}",
    ];
    assert_eq!(function_lengths(&lines), [(0, 3), (4, 2)]);
}
