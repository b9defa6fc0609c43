//! Zones and clusters: labels of workers and relays for placement and display.

use serde::{Deserialize, Serialize};

use crate::limits::MAX_LABEL_BYTES;

/// The allowed values of a label, for error messages.
pub const ALLOWED_LABEL: &str =
    "1 to 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends, such as eu-west-1a";

/// The labels of a worker or relay.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Location {
    /// The part of the network whose members are near each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// The cluster, or site, which may have several zones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
}

impl Location {
    /// True without any label.
    pub fn is_unknown(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the labels that are valid.
    #[must_use]
    pub fn valid(self) -> Self {
        let valid = |label: Option<String>| label.filter(|label| is_label(label));
        Self { zone: valid(self.zone), cluster: valid(self.cluster) }
    }
}

/// True if a zone or cluster may have this name: a label value of Kubernetes that is not empty.
pub fn is_label(name: &str) -> bool {
    let ends = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = name.as_bytes();
    bytes.len() <= MAX_LABEL_BYTES
        && ends(bytes.first())
        && ends(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_is_that_of_kubernetes() {
        for name in ["a", "eu-west-1a", "Home.2_x", &"z".repeat(MAX_LABEL_BYTES)] {
            assert!(is_label(name), "{name}");
        }
        for name in ["", "-a", "a.", "a b", "zürich", "a/b", &"z".repeat(MAX_LABEL_BYTES + 1)] {
            assert!(!is_label(name), "{name}");
        }
    }

    #[test]
    fn invalid_labels_are_left_out() {
        let location = Location { zone: Some("a\nb".into()), cluster: Some("home".into()) };
        assert_eq!(location.valid(), Location { zone: None, cluster: Some("home".into()) });
    }
}
