//! The benchmark's program: reads the command line, does what it says.

use std::process::ExitCode;

fn main() -> ExitCode {
    modelrelay_bench::cli::main()
}
