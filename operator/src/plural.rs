//! Singular and plural forms for messages with numbers.

use std::fmt::Display;

/// Returns the singular or the plural form: `one_or(1, "relay", "relays")`.
pub(crate) fn one_or<N: Copy + PartialEq + From<u8>>(
    number: N,
    one: &'static str,
    other: &'static str,
) -> &'static str {
    if number == N::from(1) { one } else { other }
}

/// Returns the number with its form: `counted(1, "Pod waits", "Pods wait")` is `1 Pod waits`.
pub(crate) fn counted<N: Copy + Display + PartialEq + From<u8>>(
    number: N,
    one: &'static str,
    other: &'static str,
) -> String {
    format!("{number} {}", one_or(number, one, other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_is_singular() {
        let waiting = |number: i32| counted(number, "Pod waits", "Pods wait");
        assert_eq!([0, 1, 2].map(waiting), ["0 Pods wait", "1 Pod waits", "2 Pods wait"]);
    }
}
