//! The names that workers have listed, which distinguish a misspelt model from one whose worker is disconnected.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use modelrelay_protocol::names::{Naming, ollama_key};

/// The maximum number of names. Beyond it every name is treated as listed, so that a worker with invented names cannot
/// evict others.
const LIMIT: usize = 10_000;

/// The maximum number of names per key. Ollama itself lists one, but workers may declare another spelling.
const MAX_SPELLINGS: usize = 8;

/// Every name that a worker has listed since the relay started.
#[derive(Debug, Default)]
pub(super) struct Listed {
    names: HashSet<Arc<str>>,
    /// From a key to its names, for backends that accept other spellings of their names.
    spellings: HashMap<String, Vec<Arc<str>>>,
}

impl Listed {
    /// Adds the names that a worker lists, and how its backend matches them.
    pub(super) fn add(&mut self, names: &[Arc<str>], naming: Naming) {
        for name in names {
            if self.names.len() < LIMIT && !self.names.contains(name) {
                self.names.insert(Arc::clone(name));
            }
            if naming == Naming::Ollama && self.spellings.len() < LIMIT {
                let same = self.spellings.entry(ollama_key(name)).or_default();
                if same.len() < MAX_SPELLINGS && !same.contains(name) {
                    same.push(Arc::clone(name));
                }
            }
        }
    }

    /// True if a worker has listed the name, as far as that is known.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.names.len() >= LIMIT || self.names.contains(name)
    }

    /// Returns the listed names that backends resolve `name` to. Empty if `name` is a listed one itself.
    pub(super) fn spelled(&self, name: &str) -> &[Arc<str>] {
        if self.spellings.is_empty() || self.names.contains(name) {
            return &[];
        }
        self.spellings.get(&ollama_key(name)).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_names_are_listed_beyond_limit() {
        let mut listed = Listed::default();
        listed.add(&["m".into()], Naming::Exact);
        assert!(listed.contains("m") && !listed.contains("n"));
        let many: Vec<Arc<str>> = (0..LIMIT).map(|number| number.to_string().into()).collect();
        listed.add(&many, Naming::Exact);
        assert!(listed.contains("m") && listed.contains("n"));
        assert_eq!(listed.names.len(), LIMIT);
    }

    #[test]
    fn other_spelling_matches_listed_names() {
        let mut listed = Listed::default();
        listed.add(&["Qwen".into()], Naming::Exact);
        assert!(listed.spelled("qwen:latest").is_empty());
        listed.add(&["llama3.2:latest".into(), "Gemma:2B".into(), "gemma:2b".into()], Naming::Ollama);
        let meant = |name| listed.spelled(name).iter().map(|name| &**name).collect::<Vec<_>>();
        assert_eq!(meant("Llama3.2"), ["llama3.2:latest"]);
        assert_eq!(meant("library/GEMMA:2b"), ["Gemma:2B", "gemma:2b"]);
        for name in ["llama3.2:latest", "gemma", "qwen"] {
            assert!(meant(name).is_empty(), "{name}");
        }
    }
}
