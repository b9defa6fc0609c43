//! The replay's program: parses the command line and runs all cases.

use std::process::ExitCode;

fn main() -> ExitCode {
    modelrelay_bench::replay::cli::main()
}
