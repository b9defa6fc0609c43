//! Prints the tables that compare policies, or writes them into the page that explains ours:
//!
//! ```text
//! cargo run --release -p modelrelay-bench --bin simulate-multiplexer -- --write docs/multiplexer/policy.md
//! ```

use std::process::ExitCode;

use modelrelay_bench::simulation::report;

#[expect(clippy::print_stdout, reason = "the tables are what this program is asked for")]
fn main() -> ExitCode {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let written = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            println!("{}\n{}", report::policies(), report::lingers());
            Ok(())
        }
        ["--write", path] => write(path),
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

fn write(path: &str) -> Result<(), String> {
    let mut page = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    for (name, table) in [("policies", report::policies()), ("lingers", report::lingers())] {
        page = put(&page, name, &table).ok_or_else(|| format!("{path}: the marks of table {name} are missing"))?;
    }
    std::fs::write(path, page).map_err(|error| format!("{path}: {error}"))
}

/// Puts a table between its two marks.
fn put(page: &str, name: &str, table: &str) -> Option<String> {
    let (begin, end) = (format!("<!-- {name}: begin -->\n"), format!("<!-- {name}: end -->\n"));
    let (before, rest) = page.split_once(&begin)?;
    let (_, after) = rest.split_once(&end)?;
    Some(format!("{before}{begin}{table}{end}{after}"))
}
