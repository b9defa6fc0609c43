//! Which names workers have listed, so that a misspelt model is told from one whose worker is away.

use std::collections::HashSet;
use std::sync::Arc;

/// Names that are kept. When there are more, every name counts as listed: a worker that makes up names must not have others
/// forgotten.
const LIMIT: usize = 10_000;

/// Every name that a worker has listed since the relay started.
#[derive(Debug, Default)]
pub(super) struct Listed(HashSet<Arc<str>>);

impl Listed {
    /// A worker lists these names.
    pub(super) fn add(&mut self, names: &[Arc<str>]) {
        for name in names {
            if self.0.len() < LIMIT && !self.0.contains(name) {
                self.0.insert(Arc::clone(name));
            }
        }
    }

    /// Whether a worker has listed the name, as far as that is known.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.0.len() >= LIMIT || self.0.contains(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_beyond_the_limit_all_count_as_listed() {
        let mut listed = Listed::default();
        listed.add(&["m".into()]);
        assert!(listed.contains("m") && !listed.contains("n"));
        let many: Vec<Arc<str>> = (0..LIMIT).map(|number| number.to_string().into()).collect();
        listed.add(&many);
        assert!(listed.contains("m") && listed.contains("n"));
        assert_eq!(listed.0.len(), LIMIT);
    }
}
