//! What `deploy/` has for machines without Kubernetes, with the programs that it is written for.

mod booted;
mod machine;
mod proxies;
mod units;

use std::path::Path;

/// A file of `deploy/`.
fn deployed(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// With each of these put in the place of what must be there.
fn replaced(mut text: String, all: &[(&str, String)]) -> String {
    for (what, by) in all {
        assert!(text.contains(what), "there is no {what:?} in\n{text}");
        text = text.replace(what, by);
    }
    text
}
