//! The list of a backend, cleaned: which models are advertised, and which entries are left out.

use std::collections::BTreeSet;

use modelrelay_protocol::limits::{MAX_ADVERTISED_MODELS, MAX_ADVERTISED_NAME_BYTES};
use modelrelay_protocol::names::{is_model_name, marked};

/// A cleaned list.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Cleaned {
    /// The models, each once, in the backend's order.
    pub(super) models: Vec<String>,
    /// A line for the log for each kind of entry that is left out.
    pub(super) warnings: Vec<String>,
}

/// Cleans the names that a backend lists. `odd` is the number of entries without a name.
pub(super) fn clean(listed: &[String], odd: usize) -> Cleaned {
    let mut seen = BTreeSet::new();
    let (mut models, mut bytes) = (Vec::new(), 0);
    let (mut unusable, mut excess) = (OmittedEntries::default(), OmittedEntries::default());
    for name in listed.iter().map(|name| name.trim()) {
        if !seen.insert(name) {
            continue;
        }
        bytes += name.len();
        if !is_model_name(name) {
            unusable.add(name);
        } else if models.len() < MAX_ADVERTISED_MODELS && bytes <= MAX_ADVERTISED_NAME_BYTES {
            models.push(name.to_owned());
        } else {
            excess.add(name);
        }
    }
    let nameless = (odd > 0).then(|| format!("ignoring {odd} model(s) that the backend lists without an id"));
    let unusable = unusable.warning("with a name that is empty, too long or unprintable");
    let excess = excess.warning(&format!("above the limit of {MAX_ADVERTISED_MODELS} models"));
    Cleaned { models, warnings: [nameless, unusable, excess].into_iter().flatten().collect() }
}

/// Entries that are left out.
#[derive(Default)]
struct OmittedEntries<'a> {
    count: usize,
    first: &'a str,
}

impl<'a> OmittedEntries<'a> {
    fn add(&mut self, name: &'a str) {
        if self.count == 0 {
            self.first = name;
        }
        self.count += 1;
    }

    fn warning(&self, why: &str) -> Option<String> {
        let first: String = marked(self.first).chars().take(64).collect();
        let text = format!("ignoring {} model(s) that the backend lists {why}, first {first:?}", self.count);
        (self.count > 0).then_some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(of: &[&str]) -> Vec<String> {
        of.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn names_are_trimmed_and_kept_once() {
        assert_eq!(clean(&names(&[" a ", "a", "b"]), 0), Cleaned { models: names(&["a", "b"]), warnings: vec![] });
    }

    #[test]
    fn unusable_entries_are_counted_and_named() {
        let cleaned = clean(&names(&["a", "b\u{1b}", "", "c"]), 2);
        assert_eq!(cleaned.models, ["a", "c"]);
        let [nameless, unusable] = &cleaned.warnings[..] else { panic!("{:?}", cleaned.warnings) };
        assert!(nameless.contains("2 model(s) that the backend lists without an id"), "{nameless}");
        assert!(unusable.contains("2 model(s)") && unusable.ends_with("first \"b\u{fffd}\""), "{unusable}");
    }

    #[test]
    fn models_above_limit_are_counted_and_named() {
        let many: Vec<String> = (0..MAX_ADVERTISED_MODELS + 3).map(|number| format!("m{number}")).collect();
        let cleaned = clean(&many, 0);
        assert_eq!(cleaned.models.len(), MAX_ADVERTISED_MODELS);
        let warning = &cleaned.warnings[0];
        assert!(warning.contains("3 model(s)") && warning.ends_with("first \"m4096\""), "{warning}");
    }

    #[test]
    fn long_names_reach_limit_sooner() {
        let many: Vec<String> = (0..MAX_ADVERTISED_MODELS).map(|number| format!("{number:0>256}")).collect();
        let cleaned = clean(&many, 0);
        assert_eq!(cleaned.models.len(), MAX_ADVERTISED_NAME_BYTES / 256);
        assert_eq!(cleaned.warnings.len(), 1);
    }
}
