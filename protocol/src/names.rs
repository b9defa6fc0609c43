//! Names that come from peers: of models, workers and slots.
//!
//! They are shown in logs, terminals, pages and metrics, so none may contain characters that change how the surrounding
//! text is displayed.

use serde::{Deserialize, Serialize};

use crate::limits::MAX_MODEL_CHARS;

/// The rule by which a worker's backend finds a model by its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Naming {
    /// Ollama's: [`ollama_key`].
    Ollama,
    /// The name is the listed one, character by character. An unknown rule of a newer worker is read as this one.
    #[default]
    #[serde(other)]
    Exact,
}

impl Naming {
    /// True for the rule that messages leave out.
    pub fn is_exact(&self) -> bool {
        *self == Self::Exact
    }
}

/// Returns the canonical spelling of all names that Ollama resolves to the same model: `tiny`, `Tiny:latest` and
/// `registry.ollama.ai/library/tiny` all give `tiny:latest`. Source: `ParseName` in Ollama's `types/model/name.go`.
pub fn ollama_key(name: &str) -> String {
    let key = name.to_ascii_lowercase();
    let key = key.strip_prefix("registry.ollama.ai/").unwrap_or(&key);
    let key = key.strip_prefix("library/").unwrap_or(key);
    // A colon before the last slash belongs to a registry's port.
    match key.rsplit_once(':') {
        Some((_, tag)) if !tag.contains('/') => key.to_owned(),
        Some(_) | None => format!("{key}:latest"),
    }
}

/// True if a character is invisible but changes how others are displayed: controls, direction marks, invisible
/// characters and line separators (Unicode's `Cc`, `Zl`, `Zp`, and those of `Cf` that have no shape).
pub fn is_unprintable(char: char) -> bool {
    char.is_control()
        || matches!(
            char,
            '\u{ad}'
                | '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

/// Returns the text without unprintable characters, cut to `longest` characters.
pub fn printable(text: &str, longest: usize) -> String {
    text.chars().filter(|char| !is_unprintable(*char)).take(longest).collect()
}

/// Returns the text with a replacement character for each unprintable one.
pub fn marked(text: &str) -> String {
    text.chars().map(|char| if is_unprintable(char) { '\u{fffd}' } else { char }).collect()
}

/// True if a model may have this name: 1 to 256 printable characters, without a space at either end.
pub fn is_model_name(name: &str) -> bool {
    name.trim() == name && (1..=MAX_MODEL_CHARS).contains(&name.chars().count()) && !name.contains(is_unprintable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_unprintable_and_letters_are_not() {
        for steering in ['\u{1b}', '\u{7}', '\n', '\u{202e}', '\u{2066}', '\u{200b}', '\u{feff}', '\u{9b}'] {
            assert!(is_unprintable(steering) && !is_model_name(&format!("m{steering}m")), "{steering:?}");
        }
        assert!(is_model_name("Qwen/Qwen3-8B:q4_K_M") && is_model_name("模型 ü") && is_model_name(&"x".repeat(256)));
        assert!(!is_model_name("") && !is_model_name(" m") && !is_model_name(&"x".repeat(257)));
    }

    #[test]
    fn names_of_one_ollama_model_share_key() {
        for name in
            ["TINY", "library/tiny", "registry.ollama.ai/library/tiny", "Registry.Ollama.AI/library/Tiny:LATEST"]
        {
            assert_eq!(ollama_key(name), "tiny:latest", "{name}");
        }
        assert_eq!(ollama_key("host:5000/Me/tiny"), "host:5000/me/tiny:latest");
        assert_eq!(ollama_key("tiny:q8"), "tiny:q8");
    }

    #[test]
    fn unknown_naming_rule_is_exact() {
        let rule = |text: &str| serde_json::from_str::<Naming>(text).unwrap();
        assert_eq!((rule("\"ollama\""), rule("\"fuzzy\"")), (Naming::Ollama, Naming::Exact));
    }

    #[test]
    fn control_characters_are_removed_or_marked() {
        assert_eq!(printable("a\u{1b}[31mb", 5), "a[31m");
        assert_eq!(marked("a\u{202e}b"), "a\u{fffd}b");
    }
}
