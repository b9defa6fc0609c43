//! Names that come from peers: of models, workers and slots.
//!
//! They are shown in logs, terminals, pages and metrics, so that none may have characters which change how the text around them is
//! shown.

use crate::limits::MAX_MODEL_CHARS;

/// Whether a character is not shown but changes how others are: controls, marks of the writing direction, invisible ones, and separators
/// of lines (Unicode's `Cc`, `Zl`, `Zp`, and what of `Cf` has no shape).
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

/// The text without such characters, and no longer than so many characters.
pub fn printable(text: &str, longest: usize) -> String {
    text.chars().filter(|char| !is_unprintable(*char)).take(longest).collect()
}

/// The text with a sign in the place of each such character.
pub fn marked(text: &str) -> String {
    text.chars().map(|char| if is_unprintable(char) { '\u{fffd}' } else { char }).collect()
}

/// Whether a model may have this name: 1 to 256 printable characters, without a space at either end.
pub fn is_model_name(name: &str) -> bool {
    name.trim() == name && (1..=MAX_MODEL_CHARS).contains(&name.chars().count()) && !name.contains(is_unprintable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_steer_are_told_from_letters() {
        for steering in ['\u{1b}', '\u{7}', '\n', '\u{202e}', '\u{2066}', '\u{200b}', '\u{feff}', '\u{9b}'] {
            assert!(is_unprintable(steering) && !is_model_name(&format!("m{steering}m")), "{steering:?}");
        }
        assert!(is_model_name("Qwen/Qwen3-8B:q4_K_M") && is_model_name("模型 ü") && is_model_name(&"x".repeat(256)));
        assert!(!is_model_name("") && !is_model_name(" m") && !is_model_name(&"x".repeat(257)));
    }

    #[test]
    fn texts_are_cleaned_or_marked() {
        assert_eq!(printable("a\u{1b}[31mb", 5), "a[31m");
        assert_eq!(marked("a\u{202e}b"), "a\u{fffd}b");
    }
}
