//! SIGINT and SIGTERM: the shard is given up, exit 1, and the message says how to go on.

use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::program::{fixture, golden_corpus, kdscore, run, write_corpus};

#[test]
fn a_signal_ends_the_run_politely() {
    for signal in [Signal::INT, Signal::TERM] {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        let sequences: Vec<_> = golden_corpus().into_iter().cycle().take(2000).collect();
        write_corpus(&at.join("corpus"), &sequences, 2048);
        let mut command = kdscore(at);
        command.args([
            "score",
            "--corpus",
            "corpus",
            "--out",
            "out",
            "--shard-tokens",
            "400",
        ]);
        command.arg("--teacher").arg(fixture("teacher"));
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !at.join("out/shard-000000.manifest.json").exists() {
            assert!(
                Instant::now() < deadline,
                "no shard was committed in a minute"
            );
            std::thread::sleep(Duration::from_millis(2));
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{signal:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("the same command goes on"), "{text}");
        let status = run(at, &["status", "out"]);
        assert_eq!(status.status.code(), Some(1), "work is left");
    }
}
