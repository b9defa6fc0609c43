//! Snapshot tests of built objects: a change to what the operator applies shows up in review as a change of a file.
//!
//! `UPDATE_SNAPSHOTS=1 cargo test -p modelrelay-operator` rewrites them.

use std::path::PathBuf;

/// Compares `yaml` to `snapshots/<name>.yaml`.
pub(crate) fn check(name: &str, yaml: &str) {
    let path: PathBuf =
        [env!("CARGO_MANIFEST_DIR"), "src", "manifests", "snapshots", &format!("{name}.yaml")].iter().collect();
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some_and(|value| value == "1") {
        std::fs::write(&path, yaml).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        return;
    }
    let known = std::fs::read_to_string(&path).unwrap_or_else(|error| {
        panic!("{}: {error}; UPDATE_SNAPSHOTS=1 writes it", path.display());
    });
    if let Some((line, (was, is))) = difference(&known, yaml) {
        panic!("{name}.yaml, line {line}:\n  was {was}\n  is  {is}\nUPDATE_SNAPSHOTS=1 rewrites the file");
    }
}

/// Returns the first line in which two texts differ.
fn difference<'a>(known: &'a str, now: &'a str) -> Option<(usize, (&'a str, &'a str))> {
    let mut known = known.lines();
    let mut now = now.lines();
    for line in 1.. {
        match (known.next(), now.next()) {
            (None, None) => return None,
            (was, is) if was == is => {}
            (was, is) => return Some((line, (was.unwrap_or("(the end)"), is.unwrap_or("(the end)")))),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_differing_line_is_shown() {
        assert_eq!(difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(difference("a\nb\n", "a\nc\n"), Some((2, ("b", "c"))));
        assert_eq!(difference("a\n", "a\nb\n"), Some((2, ("(the end)", "b"))));
    }
}
