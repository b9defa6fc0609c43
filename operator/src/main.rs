//! The operator's program.

use std::process::ExitCode;

fn main() -> ExitCode {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    for (_, text) in modelrelay_operator::crd::generate() {
        if writeln!(out, "---\n{text}").is_err() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
