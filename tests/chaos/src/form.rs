//! The short form that CI runs, and the longer one of `make chaos`.

/// Turns every count of faults up.
const FACTOR: &str = "MODELRELAY_CHAOS_FACTOR";

/// `count` in the short form, so many times that in a longer one.
///
/// # Panics
/// When the variable is no number.
#[must_use]
pub fn times(count: usize) -> usize {
    count * std::env::var(FACTOR).map_or(1, |factor| factor.parse().expect("a number in the factor"))
}
