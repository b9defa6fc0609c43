//! Protocol versions and capabilities.
//!
//! The version names the seed messages, which never change. Every later addition is a capability: it is used only if
//! both sides named it, so any pair of old and new peers works.

use std::collections::BTreeSet;

/// The version that our own worker registers with.
pub const VERSION: &str = "1";

/// The version of the published ModelRelay, which rejects `"1"`.
pub const VERSION_PUBLISHED: &str = "2026-04-bridge-v1";

/// True if a relay accepts (and echoes) this `protocol_version`.
pub fn is_known_version(version: &str) -> bool {
    version == VERSION || version == VERSION_PUBLISHED
}

/// An optional part of the protocol, which both sides must name before either uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Capability {
    /// Binary bodies, credits, grants and drain, together.
    Core1,
    /// A multiplexer's slots; implies [`Capability::Core1`].
    Slots1,
    /// Keys of conversations, and reports on those of other relays; implies [`Capability::Core1`].
    Homes1,
}

impl Capability {
    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Core1 => "core1",
            Self::Slots1 => "slots1",
            Self::Homes1 => "homes1",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        match name {
            "core1" => Some(Self::Core1),
            "slots1" => Some(Self::Slots1),
            "homes1" => Some(Self::Homes1),
            _ => None,
        }
    }
}

/// A set of capabilities, closed under "implies".
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capabilities(BTreeSet<Capability>);

impl Capabilities {
    /// Creates a set of exactly these and those that they imply.
    pub fn new(of: impl IntoIterator<Item = Capability>) -> Self {
        let mut set: BTreeSet<_> = of.into_iter().collect();
        if set.contains(&Capability::Slots1) || set.contains(&Capability::Homes1) {
            set.insert(Capability::Core1);
        }
        Self(set)
    }

    /// Reads names from the wire. Unknown names may come from a newer peer and are ignored.
    pub fn from_names<S: AsRef<str>>(names: &[S]) -> Self {
        Self::new(names.iter().filter_map(|name| Capability::parse(name.as_ref())))
    }

    /// The names for the wire, sorted.
    pub fn names(&self) -> Vec<String> {
        self.0.iter().map(|capability| capability.as_str().to_owned()).collect()
    }

    /// The capabilities that both sides have.
    pub fn intersection(&self, other: &Self) -> Self {
        Self(self.0.intersection(&other.0).copied().collect())
    }

    /// True if the set holds `capability`.
    pub fn has(&self, capability: Capability) -> bool {
        self.0.contains(&capability)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_capabilities_imply_core1_and_unknown_ones_are_ignored() {
        let set = Capabilities::from_names(&["slots1", "warp9"]);
        assert_eq!(set.names(), ["core1", "slots1"]);
        assert_eq!(Capabilities::from_names(&["homes1"]).names(), ["core1", "homes1"]);
        assert_eq!(Capabilities::from_names(&["core1"]).names(), ["core1"]);
    }

    #[test]
    fn intersection_has_capabilities_of_both_sides() {
        let ours = Capabilities::new([Capability::Core1]);
        let theirs = Capabilities::from_names(&["slots1"]);
        assert_eq!(ours.intersection(&theirs).names(), ["core1"]);
        assert!(theirs.has(Capability::Core1) && !ours.has(Capability::Slots1));
        assert!(!ours.intersection(&Capabilities::default()).has(Capability::Core1));
    }

    #[test]
    fn both_published_versions_are_known_and_no_other() {
        assert!(is_known_version("1") && is_known_version("2026-04-bridge-v1"));
        assert!(!is_known_version("2") && !is_known_version(""));
    }
}
