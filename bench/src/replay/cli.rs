//! The command line of the replay.

use std::process::ExitCode;

use clap::Parser;

use super::cases::Case;
use super::policy::Policy;
use super::report::{broken_rules, rows, table};
use crate::page;

/// Replays requests against the relay's dispatch core and against other routers' rules, in simulated time. Prints a
/// table of the means over all seeds. Exits with 1 if `cache` breaks a rule: its mean TTFT may exceed that of
/// `least-load` by 2 % in each case, and two relays must get 90 % of the oracle's hits.
#[derive(Debug, Parser)]
#[command(name = "replay-placement", version, max_term_width = 110)]
struct Cli {
    /// The number of seeds, which shift arrivals and draw the agents' turns.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Only this case; can be repeated.
    #[arg(long, value_name = "NAME", value_parser = Case::ALL.map(|case| case.name))]
    case: Vec<String>,
    /// Only this policy; can be repeated.
    #[arg(long, value_name = "NAME", value_parser = Policy::ALL.map(Policy::name))]
    policy: Vec<String>,
    /// Print JSON instead of a Markdown table.
    #[arg(long)]
    json: bool,
    /// Write the table into this page, between the marks `replay: begin` and `replay: end`, instead of printing it.
    #[arg(long, value_name = "PAGE", conflicts_with_all = ["json", "case", "policy"])]
    write: Option<String>,
}

/// Parses the command line and runs the replay.
#[expect(clippy::print_stdout, reason = "the table is this program's output")]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let chosen = |names: &[String], name: &str| names.is_empty() || names.iter().any(|chosen| chosen == name);
    let cases: Vec<_> = Case::ALL.into_iter().filter(|case| chosen(&cli.case, case.name)).collect();
    let policies: Vec<_> = Policy::ALL.into_iter().filter(|policy| chosen(&cli.policy, policy.name())).collect();
    let rows = rows(&cases, &policies, cli.seeds);
    if cli.json {
        println!("{}", serde_json::to_string_pretty(&rows).expect("figures are valid JSON"));
    } else if let Some(path) = cli.write {
        if let Err(error) = page::write(&path, &[("replay", table(&rows))]) {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    } else {
        print!("{}", table(&rows));
    }
    let broken = broken_rules(&rows);
    for rule in &broken {
        eprintln!("{rule}");
    }
    if broken.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
