//! The files of `deploy/` for machines without Kubernetes, with the programs that they are written for.

mod booted;
mod machine;
mod proxies;
mod units;

use std::path::Path;

/// Returns a file of `deploy/`.
fn deployed(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Replaces each of these strings, which must occur.
fn replaced(mut text: String, all: &[(&str, String)]) -> String {
    for (what, by) in all {
        assert!(text.contains(what), "no {what:?} in\n{text}");
        text = text.replace(what, by);
    }
    text
}
