//! How this program starts itself again: with its own file, and a selector if several programs share that file.

use std::sync::OnceLock;

static SELECTOR: OnceLock<&'static str> = OnceLock::new();

/// Sets the selector of this program in a file of several. Only the first call has an effect.
pub fn set_selector(word: &'static str) {
    let _ = SELECTOR.set(word);
}

/// The first argument on a command line of this program's own file, if the file needs one.
pub fn selector() -> Option<&'static str> {
    SELECTOR.get().copied()
}
