//! How this program starts itself again: by its own file, followed by a word where several programs share that file.

use std::sync::OnceLock;

static SELECTOR: OnceLock<&'static str> = OnceLock::new();

/// Sets the word that selects this program in a file of several. The first call applies.
pub fn set_selector(word: &'static str) {
    let _ = SELECTOR.set(word);
}

/// The word that comes first on a command line of this program's own file, if the file needs one.
pub fn selector() -> Option<&'static str> {
    SELECTOR.get().copied()
}
