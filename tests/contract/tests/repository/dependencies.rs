//! The list of libraries: each is used, and each that is not self-explanatory has its reason in Cargo.toml.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Libraries whose purpose every Rust programmer knows.
const OBVIOUS: [&str; 16] = [
    "bytes",
    "clap",
    "futures-util",
    "http",
    "http-body",
    "http-body-util",
    "hyper",
    "rustls",
    "serde",
    "serde_json",
    "tempfile",
    "thiserror",
    "tokio-rustls",
    "tracing",
    "tracing-subscriber",
    "url",
];

#[test]
fn every_workspace_dependency_is_used_by_members() {
    let members = members();
    let taken: BTreeSet<&str> = members.values().flat_map(|member| member.shared.iter().map(String::as_str)).collect();
    let names = entries().into_iter().map(|(name, _)| name);
    let unused: Vec<String> = names.filter(|name| !taken.contains(name.as_str())).collect();
    assert!(unused.is_empty(), "no member uses them: {unused:?}");
}

#[test]
fn every_member_dependency_is_in_its_sources() {
    let mut unused = Vec::new();
    for (folder, member) in members() {
        let sources = sources(&root().join(&folder));
        for name in member.shared.iter().chain(&member.own) {
            let path = name.replace('-', "_");
            let is_used = ["::", " as ", ";"].iter().any(|after| sources.contains(&format!("{path}{after}")));
            if !is_used {
                unused.push(format!("{folder}: {name}"));
            }
        }
    }
    assert!(unused.is_empty(), "no source names them: {unused:?}");
}

#[test]
fn every_non_obvious_dependency_has_its_reason() {
    let silent: Vec<String> = entries()
        .into_iter()
        .filter(|(name, reason)| !reason && !OBVIOUS.contains(&name.as_str()) && !name.starts_with("modelrelay-"))
        .map(|(name, _)| name)
        .collect();
    assert!(silent.is_empty(), "Cargo.toml does not state the purpose of: {silent:?}");
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the dependencies of the workspace, and whether each has a comment: on its line, on the one before, or at the
/// head of its paragraph.
fn entries() -> Vec<(String, bool)> {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).expect("Cargo.toml");
    let (_, rest) = manifest.split_once("[workspace.dependencies]\n").expect("the table");
    let (table, _) = rest.split_once("\n[").expect("a table after it");
    let mut entries = Vec::new();
    for paragraph in table.split("\n\n") {
        let mut is_explained = false;
        for line in paragraph.lines() {
            match line.split_once(" = ") {
                Some((name, rest)) if !line.starts_with('#') => {
                    entries.push((name.to_owned(), is_explained || rest.contains('#')));
                    is_explained = paragraph.starts_with('#');
                }
                Some(_) | None => is_explained = true,
            }
        }
    }
    assert!(entries.len() > 40, "{entries:?}");
    entries
}

/// The dependencies of one member.
#[derive(Default)]
struct Member {
    /// Those from the workspace's list.
    shared: Vec<String>,
    /// Those with their own version.
    own: Vec<String>,
}

fn members() -> BTreeMap<String, Member> {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).expect("Cargo.toml");
    let line = manifest.lines().find(|line| line.starts_with("members = [")).expect("the members");
    let folders = line.split('"').skip(1).step_by(2);
    folders.map(|folder| (folder.to_owned(), member(&root().join(folder)))).collect()
}

fn member(folder: &Path) -> Member {
    let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).expect("a manifest");
    let mut member = Member::default();
    let mut is_dependencies = false;
    for line in manifest.lines() {
        if line.starts_with('[') {
            is_dependencies = line.ends_with("dependencies]");
        } else if is_dependencies && let Some((name, rest)) = line.split_once(['.', ' ']) {
            match rest.contains("workspace = true") {
                true => member.shared.push(name.to_owned()),
                false if !name.starts_with('#') => member.own.push(name.to_owned()),
                false => {}
            }
        }
    }
    member
}

/// Returns all Rust files of a member, concatenated.
fn sources(folder: &Path) -> String {
    let mut all = String::new();
    for entry in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
        if entry.is_dir() {
            all += &sources(&entry);
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            all += &std::fs::read_to_string(&entry).expect("a source");
        }
    }
    all
}
