//! The examples of docs/rows.md, typed as they stand there.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// What is typed, and what `show` must say below its facts.
struct Example<'a> {
    title: &'a str,
    typed: &'a str,
    shown: &'a str,
}

fn examples(page: &str) -> Vec<Example<'_>> {
    let sections = page.split("\n## ").skip(1);
    let example = |section| {
        let block = |kind: &str| {
            let (_, rest) = str::split_once(section, kind).unwrap();
            rest.split_once("\n```").unwrap().0
        };
        Example {
            title: section.lines().next().unwrap(),
            typed: block("```sh\n"),
            shown: block("```text\n"),
        }
    };
    sections.map(example).collect()
}

/// Types an example in a folder that looks like the root of the repository.
fn answer(example: &Example) -> String {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    symlink(Path::new(ROOT).join("tests"), at("tests")).unwrap();
    fs::create_dir(at("bin")).unwrap();
    symlink(assert_cmd::cargo::cargo_bin("kdscore"), at("bin/kdscore")).unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let ran = Command::new("sh")
        .args(["-ec", example.typed])
        .current_dir(folder.path())
        .env("PATH", format!("{}:{path}", at("bin").display()))
        .output()
        .unwrap();
    let told = String::from_utf8(ran.stderr).unwrap();
    assert!(ran.status.success(), "{}: {told}", example.title);
    String::from_utf8(ran.stdout).unwrap()
}

#[test]
fn every_example_works_as_written() {
    let page = fs::read_to_string(Path::new(ROOT).join("docs/rows.md")).unwrap();
    let examples = examples(&page);
    assert!(examples.len() >= 16, "{}", examples.len());
    for example in examples {
        assert_eq!(example.typed.lines().count(), 3, "{}", example.title);
        let answer = answer(&example);
        let shown = answer.rsplit_once("\n\n").map_or("", |(_, shown)| shown);
        assert_eq!(shown.trim_end(), example.shown, "{}", example.title);
    }
}

#[test]
fn every_family_of_the_readme_has_an_example() {
    let page = fs::read_to_string(Path::new(ROOT).join("docs/rows.md")).unwrap();
    let readme = fs::read_to_string(Path::new(ROOT).join("README.md")).unwrap();
    let rows = readme.lines().skip_while(|l| !l.starts_with("| rows |"));
    let rows = rows.skip(2).take_while(|l| l.starts_with('|'));
    let names = rows.map(|l| l.split('|').nth(1).unwrap());
    let keys: Vec<&str> = names
        .flat_map(|n| n.split('`').skip(1).step_by(2))
        .collect();
    assert!(keys.len() >= 20, "{keys:?}");
    for key in keys {
        assert!(page.contains(key), "no example of {key}");
    }
}
