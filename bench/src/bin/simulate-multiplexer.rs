//! Prints the tables that compare policies, or writes them into the page that explains the worker's policy:
//!
//! ```text
//! cargo run --release -p modelrelay-bench --bin simulate-multiplexer -- --write docs/multiplexer/policy.md
//! ```

use std::process::ExitCode;

use modelrelay_bench::page;
use modelrelay_bench::simulation::report;

#[expect(clippy::print_stdout, reason = "the tables are this program's output")]
fn main() -> ExitCode {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let written = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            println!("{}\n{}\n{}", report::policies(), report::lingers(), report::keys());
            Ok(())
        }
        ["--write", path] => {
            let (policies, lingers) = (("policies", report::policies()), ("lingers", report::lingers()));
            page::write(path, &[policies, lingers, ("keys", report::keys())])
        }
        _ => Err("usage: simulate-multiplexer [--write PAGE]".to_owned()),
    };
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
