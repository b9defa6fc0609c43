//! The program's guarantees about seeds.

use std::process::{Command, Output, Stdio};

use modelrelay_simulation::world::Report;

fn telling(seed: u64) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_modelrelay-simulation"));
    command.arg(format!("--seed={seed}"));
    command
}

fn story_of_seed(seed: u64) -> String {
    story_of(telling(seed).output().expect("the program can be started"))
}

fn story_of(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stdout).expect("the output is UTF-8")
}

fn assert_same(once: &str, again: &str) {
    let difference = once.lines().zip(again.lines()).find(|(a, b)| a != b);
    assert_eq!(difference, None, "{}", once.lines().last().unwrap_or_default());
}

#[test]
fn same_seed_reproduces_run_and_other_differs() {
    let stories: Vec<_> = (1..=20).map(|seed| (story_of_seed(seed), story_of_seed(seed))).collect();
    stories.iter().for_each(|(once, again)| assert_same(once, again));
    assert!(stories.windows(2).all(|two| two[0].0 != two[1].0));
    assert!(stories[0].0.contains("request dispatched"), "the programs' logs are a part of it");
}

#[test]
fn seed_reproduces_run_in_parallel() {
    let start = |_| telling(1).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let running: Vec<_> = (0..8).map(start).collect();
    let stories: Vec<_> = running.into_iter().map(|one| story_of(one.wait_with_output().expect("it ends"))).collect();
    let alone = story_of_seed(1);
    stories.iter().for_each(|story| assert_same(&alone, story));
}

#[test]
fn many_seeds_run_in_parallel_and_are_counted() {
    let program = env!("CARGO_BIN_EXE_modelrelay-simulation");
    let output = Command::new(program).args(["--first=1", "--seeds=10", "--jobs=4"]).output().expect("it starts");
    let printed = String::from_utf8_lossy(&output.stdout);
    let last = printed.lines().last().unwrap_or_default();
    let seeds: usize = last.split(' ').nth(1).and_then(|word| word.parse().ok()).expect("a number of seeds");
    assert!(output.status.success() && last.contains(" 0 failed"), "{printed}");
    assert!(seeds > 10, "seeds that failed before must be among them: {printed}");
}

#[test]
fn report_survives_transfer_to_counting_process() {
    let report = Report::of_failure(7, "why".to_owned());
    let read: Report =
        serde_json::from_str(&serde_json::to_string(&report).expect("it can be written")).expect("and read");
    assert_eq!((read.seed, read.wrong), (7, vec!["why".to_owned()]));
}
