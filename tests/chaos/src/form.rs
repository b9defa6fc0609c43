//! The short form that CI runs, and the longer one of `make chaos`.

/// Multiplies every number of faults.
const FACTOR: &str = "MODELRELAY_CHAOS_FACTOR";

/// Returns `count` in the short form, multiplied by the factor in a longer one.
///
/// # Panics
/// If the variable is not a number.
#[must_use]
pub fn times(count: usize) -> usize {
    count * std::env::var(FACTOR).map_or(1, |factor| factor.parse().expect("a number in the factor"))
}
