//! The benchmark's program: parses the command line and runs its command.

use std::process::ExitCode;

fn main() -> ExitCode {
    modelrelay_bench::cli::main()
}
