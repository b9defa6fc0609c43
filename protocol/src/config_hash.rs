//! The hash of a relay's configuration, as `/admin/state` reports it.
//!
//! It covers `relay.yaml` and the secret files that it names, and nothing else. The author of a configuration computes
//! its hash in advance and detects by it when every relay has loaded the configuration. Both sides therefore use this
//! code.

use sha2::{Digest, Sha256};

/// SHA-256 in hex over `parts`, each preceded by its length as a big-endian u64, so that no two lists of parts collide.
pub fn content_hash<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        let part = part.as_ref();
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the hash of a configuration: the bytes of `relay.yaml`, then the name (as written there) and content of each
/// secret file that it names. `secrets` come in the order of first mention. Later mentions of a name are ignored, and
/// so are the newlines at a secret's end.
pub fn config_hash<'a>(relay_yaml: &'a [u8], secrets: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let mut named: Vec<(&str, &str)> = Vec::new();
    for (name, secret) in secrets {
        if named.iter().all(|(before, _)| *before != name) {
            named.push((name, secret_of_file(secret)));
        }
    }
    let secrets = named.iter().flat_map(|(name, secret)| [name.as_bytes(), secret.as_bytes()]);
    content_hash(std::iter::once(relay_yaml).chain(secrets))
}

/// Returns the secret that a file holds: its text without the newlines at the end, which editors and `echo` add.
pub fn secret_of_file(text: &str) -> &str {
    text.trim_end_matches(['\n', '\r'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_of_no_parts_equals_empty_input() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(content_hash::<&[u8]>([]), empty);
    }

    #[test]
    fn hash_depends_on_part_boundaries() {
        assert_ne!(content_hash(["ab", "c"]), content_hash(["a", "bc"]));
        assert_ne!(content_hash(["a", ""]), content_hash(["a"]));
    }

    #[test]
    fn config_hash_covers_file_and_named_secrets() {
        // printf '%b' '\0\0\0\0\0\0\0\x02{}\0\0\0\0\0\0\0\x01k\0\0\0\0\0\0\0\x01v' | sha256sum
        let known = "11c971715c06856cf1b50f490efdb5d1a90074067cf7b6de9ce83cfcfa29ab5e";
        assert_eq!(config_hash(b"{}", [("k", "v")]), known);
        assert_eq!(config_hash(b"{}", [("k", "v")]), content_hash(["{}", "k", "v"]));
        assert_ne!(config_hash(b"{}", [("k", "v")]), config_hash(b"{}", [("v", "k")]));
    }

    #[test]
    fn hash_ignores_final_newlines_and_repeated_secrets() {
        let once = config_hash(b"{}", [("a", "1"), ("b", "2")]);
        assert_eq!(config_hash(b"{}", [("a", "1\n"), ("b", "2\r\n"), ("a", "1")]), once);
    }
}
