//! The API key of a slot's servers. It may be rotated while a model is resident. That is no reason to load anything
//! again, so all users share one cell.

use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use modelrelay_protocol::secret::Secret;

/// A bearer token, or none.
#[derive(Clone, Default)]
pub struct Key(Arc<ArcSwapOption<Secret>>);

impl Key {
    /// Creates a key with this value.
    pub fn new(secret: Option<Secret>) -> Self {
        Self(Arc::new(ArcSwapOption::from_pointee(secret)))
    }

    /// Replaces the value for all clones.
    pub fn set(&self, secret: Option<Secret>) {
        self.0.store(secret.map(Arc::new));
    }

    /// Returns the current value.
    pub fn now(&self) -> Option<Secret> {
        self.0.load().as_deref().cloned()
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.now() == other.now()
    }
}

impl Eq for Key {}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_compare_by_current_secret() {
        let (one, same) = (Key::new(Some(Secret::new("a"))), Key::new(Some(Secret::new("a"))));
        assert!(one == same && one != Key::default());
        same.set(None);
        assert!(one != same && same == Key::default());
    }
}
