//! Checks that the generated files in the repository match the types; `make generate` updates them.

use std::path::Path;

use modelrelay_operator::crd;

#[test]
fn crds_match_types() {
    for (name, text) in crd::generate() {
        same(&format!("charts/modelrelay/files/crds/{name}"), &text);
    }
}

#[test]
fn reference_matches_types() {
    same("docs/reference/resources.md", &crd::reference::markdown());
}

fn same(path: &str, wanted: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    let there = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(there == wanted, "{path} is not what the types say: run `make generate` and commit it");
}
