//! What the tests of small worlds have in common: complete explorations, longer ones by hand, and bugs that must be
//! found.

use std::fmt;
use std::time::Duration;

use crate::{End, Exploration, Limits, World, explore};

/// Beyond these, an exploration is not complete.
const LIMITS: Limits = Limits { states: 5_000_000, depth: u32::MAX, time: Duration::from_secs(300) };

/// Explores worlds completely, each with its name, and prints the number of steps taken in all of them.
///
/// # Panics
///
/// If an assertion fails, with the shortest trace, or if a world is too large.
pub fn explore_completely<W: World>(worlds: impl IntoIterator<Item = (&'static str, W)>) {
    let mut transitions = 0;
    for (name, world) in worlds {
        let explored = run(name, &world, LIMITS);
        assert_eq!(explored.end, End::Complete, "{name}");
        transitions += explored.transitions;
    }
    print_line(&format!("{transitions} transitions"));
}

/// Explores each world for at most the minutes in `MODELRELAY_EXPLORE_MINUTES`. Without that variable, explores none.
///
/// # Panics
///
/// If an assertion fails, with the shortest trace, or if the variable is not a number.
pub fn explore_by_hand<W: World>(worlds: impl IntoIterator<Item = (&'static str, W)>) {
    let Ok(minutes) = std::env::var("MODELRELAY_EXPLORE_MINUTES") else { return };
    let minutes = minutes.parse::<u64>().expect("a number of minutes");
    for (name, world) in worlds {
        run(name, &world, Limits { time: Duration::from_secs(60 * minutes), ..LIMITS });
    }
}

/// Returns the message of the violation that a world with a bug has, and the length of the shortest trace.
///
/// # Panics
///
/// If there is none.
pub fn find_bug<W: World>(bug: &impl fmt::Debug, world: &W) -> (String, usize) {
    let violation = explore(world, LIMITS).violation.expect("the bug is found");
    print_line(&format!("{bug:?}: {violation}"));
    (violation.message, violation.trace.len())
}

/// Explores until a limit, and fails with a trace.
fn run<W: World>(name: &str, world: &W, limits: Limits) -> Exploration<W::Action> {
    let explored = explore(world, limits).expect_no_violation();
    print_line(&format!("{name}: {explored}"));
    explored
}

#[expect(clippy::print_stdout, reason = "the numbers are the result of these tests")]
fn print_line(line: &str) {
    println!("{line}");
}
