//! SIGKILL at random moments, and the same command again: the finished set is byte for byte the
//! one of a run that was never disturbed, `log/` aside.
//!
//! Half of the kills are aimed at commits: the killer watches the folder and strikes a moment
//! after a shard's first file appears.

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use super::program::{fixture, golden_corpus, kdscore, succeed, tree, write_corpus};

const KILLS_ANYWHERE: usize = 55;
const KILLS_IN_COMMITS: usize = 55;
/// Kills after which a run is let through and compared.
const KILLS_A_ROUND: usize = 11;

const ARGS: [&str; 7] = [
    "score",
    "--corpus",
    "corpus",
    "--shard-tokens",
    "150",
    "--token-budget",
    "192",
];

fn start(at: &Path, out: &str) -> Child {
    let mut command = kdscore(at);
    command
        .args(ARGS)
        .args(["--head-chunk", "96", "--threads", "1", "--out", out]);
    command.arg("--teacher").arg(fixture("teacher"));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

fn mix(seed: u64) -> u64 {
    let z = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 13
}

/// Files and folders of the set, its log aside: changes while a shard is committed.
fn entries(out: &Path) -> usize {
    let Ok(list) = std::fs::read_dir(out) else {
        return 0;
    };
    let count = |path: std::path::PathBuf| match path.file_name().is_some_and(|n| n == "log") {
        true => 0,
        false => 1 + entries(&path),
    };
    list.filter_map(|e| e.ok()).map(|e| count(e.path())).sum()
}

/// Kills the child and says whether it was still running.
fn kill(mut child: Child) -> bool {
    let running = child.try_wait().unwrap().is_none();
    child.kill().unwrap();
    child.wait().unwrap();
    running
}

#[test]
fn a_run_killed_again_and_again_ends_like_one_that_never_was() {
    eprintln!(
        "waits for {} kills of the real program",
        KILLS_ANYWHERE + KILLS_IN_COMMITS
    );
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let sequences: Vec<_> = golden_corpus().into_iter().cycle().take(60).collect();
    write_corpus(&at.join("corpus"), &sequences, 2048);
    let started = Instant::now();
    assert!(start(at, "undisturbed").wait().unwrap().success());
    let whole_run = started.elapsed();
    let expected = tree(&at.join("undisturbed"));
    let (mut anywhere, mut in_commits, mut round) = (0, 0, 0);
    while anywhere < KILLS_ANYWHERE || in_commits < KILLS_IN_COMMITS {
        round += 1;
        assert!(
            round < 60,
            "too few kills met a running program: {anywhere} and {in_commits}"
        );
        let out = format!("out-{round}");
        let mut seed = round as u64 * 1000;
        for _ in 0..KILLS_A_ROUND {
            seed += 1;
            let child = start(at, &out);
            if in_commits < KILLS_IN_COMMITS && seed.is_multiple_of(2) {
                in_commits += usize::from(kill_in_commit(child, &at.join(&out), mix(seed)));
            } else {
                let part = whole_run.as_micros() as u64 / 4;
                std::thread::sleep(Duration::from_micros(mix(seed) % part));
                anywhere += usize::from(kill(child));
            }
        }
        assert!(start(at, &out).wait().unwrap().success());
        succeed(at, &["verify", &out, "--clean"]);
        assert_same(&expected, &tree(&at.join(&out)), &out);
        std::fs::remove_dir_all(at.join(&out)).unwrap();
    }
}

/// Waits for a shard's files to appear, then kills within the time a commit takes.
fn kill_in_commit(mut child: Child, out: &Path, noise: u64) -> bool {
    let before = entries(out);
    let deadline = Instant::now() + Duration::from_secs(20);
    while entries(out) == before {
        if child.try_wait().unwrap().is_some() || Instant::now() > deadline {
            kill(child);
            return false;
        }
        std::hint::spin_loop();
    }
    std::thread::sleep(Duration::from_micros(noise % 1500));
    kill(child)
}

fn assert_same(
    expected: &std::collections::BTreeMap<String, Vec<u8>>,
    found: &std::collections::BTreeMap<String, Vec<u8>>,
    out: &str,
) {
    let names = |tree: &std::collections::BTreeMap<String, Vec<u8>>| {
        tree.keys().cloned().collect::<Vec<_>>()
    };
    assert_eq!(names(found), names(expected), "{out}: files");
    for (name, bytes) in expected {
        assert!(found[name] == *bytes, "{out}: {name} differs");
    }
}

/// Two processes on one set may waste work, never damage it.
#[test]
fn two_processes_make_one_set() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let sequences: Vec<_> = golden_corpus().into_iter().cycle().take(40).collect();
    write_corpus(&at.join("corpus"), &sequences, 2048);
    assert!(start(at, "alone").wait().unwrap().success());
    let mut pair = [start(at, "out"), start(at, "out")];
    for child in &mut pair {
        assert!(child.wait().unwrap().success());
    }
    succeed(at, &["verify", "out", "--clean"]);
    assert_same(&tree(&at.join("alone")), &tree(&at.join("out")), "out");
}
