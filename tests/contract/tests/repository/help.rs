//! Help that nobody reads to its end.

use std::process::{Command, Stdio};

use modelrelay_harness::process::path_of;

#[test]
fn help_into_a_pipe_that_is_closed_already_is_no_failure() {
    for program in ["modelrelay-relay", "modelrelay-worker"] {
        for flag in ["--help", "--version"] {
            let (reader, writer) = std::io::pipe().expect("a pipe");
            drop(reader);
            let mut command = Command::new(path_of(program));
            let ended = command.arg(flag).stdin(Stdio::null()).stdout(writer).output().expect("it runs");
            let said = String::from_utf8_lossy(&ended.stderr);
            assert!(ended.status.success() && said.is_empty(), "{program} {flag}: {}: {said}", ended.status);
        }
    }
}
