//! docs/security.md lists the tests behind its claims: each of them must exist.

use std::path::{Path, PathBuf};

/// Returns the file of a test `area::name`, `suite/area::name` or, for a cluster, `cluster/suite::name`, as far as it
/// can be determined.
fn places(tests: &Path, area: &str) -> PathBuf {
    match area.split_once('/') {
        None => tests.join("contract/tests/relay").join(format!("{area}.rs")),
        Some(("cluster", suite)) => tests.join("cluster/tests").join(suite),
        Some((suite, area)) => tests.join("contract/tests").join(suite).join(format!("{area}.rs")),
    }
}

fn text_of(place: &Path) -> String {
    if place.is_file() {
        return std::fs::read_to_string(place).unwrap();
    }
    let files = std::fs::read_dir(place).unwrap_or_else(|error| panic!("{}: {error}", place.display()));
    files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap()).collect()
}

#[test]
fn every_test_named_on_page_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/security.md")).unwrap();
    let named: Vec<_> = page.split('`').skip(1).step_by(2).filter_map(|code| code.split_once("::")).collect();
    assert!(named.len() > 30, "the page names only {} tests", named.len());
    for (area, name) in named.into_iter().filter(|(_, name)| *name != "…") {
        let place = places(&root.join("tests"), area);
        let text = text_of(&place);
        let known = name == "*" || text.contains(&format!("fn {name}("));
        assert!(known, "docs/security.md names {area}::{name}, which is not in {}", place.display());
    }
}
