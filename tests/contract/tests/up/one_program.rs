//! Relay and worker inside the program `modelrelay`.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

use modelrelay_harness::process::path_of;

#[test]
fn subcommands_select_relay_and_worker() {
    for (words, start) in [
        (&["relay", "--version"][..], "modelrelay-relay "),
        (&["worker", "--version"], "modelrelay-worker "),
        (&["--version"], "modelrelay "),
        (&["worker", "--help"], "Connects an inference backend to"),
        (&["help", "worker", "demo"], "Serve a built-in demo backend"),
    ] {
        let (code, printed) = run(path_of("modelrelay"), words);
        assert!(code == Some(0) && printed.starts_with(start), "{words:?}: {printed}");
    }
    let usage = run(path_of("modelrelay"), &["relay", "--help"]).1;
    assert!(usage.contains("Usage: modelrelay relay [OPTIONS]"), "{usage}");
}

#[test]
fn worker_supervises_commands_with_same_file() {
    let ended = run(path_of("modelrelay"), &["worker", "supervise", "--", "sh", "-c", "echo out; exit 3"]);
    assert_eq!(ended, (Some(3), "out\n".to_owned()));
}

#[test]
fn installed_copy_is_worker() {
    let folder = tempfile::tempdir().expect("a folder");
    let installed = run(path_of("modelrelay"), &["worker", "install", folder.path().to_str().expect("a path of text")]);
    assert_eq!(installed.0, Some(0), "{}", installed.1);
    let copy = folder.path().join("modelrelay-worker");
    assert!(run(&copy, &["--version"]).1.starts_with("modelrelay-worker "));
    assert_eq!(run(&copy, &["supervise", "--", "sh", "-c", "exit 4"]).0, Some(4));
}

/// Returns the code and the standard output of a program whose standard input stays open.
fn run(program: impl AsRef<OsStr>, words: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(program);
    let mut child = command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    let input = child.stdin.take();
    let ended = child.wait_with_output().expect("it ends");
    drop(input);
    (ended.status.code(), String::from_utf8_lossy(&ended.stdout).into_owned())
}
