//! The manual explains each reason that a condition may show, and none that has gone.

use std::collections::BTreeSet;
use std::path::Path;

use modelrelay_operator::controllers::provider;
use modelrelay_operator::spec::worker_pool::reasons::Reason;

const MANUAL: &str = "docs/kubernetes/operations.md";

#[test]
fn manual_explains_every_provider_reason() {
    let reasons = provider::reasons::ALL.iter().map(|reason| reason.name);
    assert_eq!(explained("Provider"), reasons.map(str::to_owned).collect());
}

#[test]
fn manual_explains_every_worker_pool_reason() {
    let reasons = Reason::ALL.iter().map(|reason| reason.as_str());
    assert_eq!(explained("WorkerPool"), reasons.map(str::to_owned).collect());
}

/// The first column of the table between the marks of `kind`.
fn explained(kind: &str) -> BTreeSet<String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(MANUAL);
    let manual = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{MANUAL}: {error}"));
    let (_, rest) = manual.split_once(&format!("<!-- reasons: {kind} -->")).expect("the mark before the table");
    let (table, _) = rest.split_once("<!-- end of reasons -->").expect("the mark after the table");
    let cells = table.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` |"));
    cells.map(|(reason, _)| reason.to_owned()).collect()
}
