//! Numbers in sentences.

use std::fmt::Display;

/// The number and what there is of it: `1 Pod waits`, `2 Pods wait`.
pub(super) fn counted<N: Display + PartialEq + From<u8> + Copy>(number: N, one: &str, more: &str) -> String {
    let words = if number == N::from(1) { one } else { more };
    format!("{number} {words}")
}

/// Of a number among others: `1 of 2 Pods is`, `2 of 2 Pods are`.
pub(super) fn is_or_are<N: PartialEq + From<u8> + Copy>(number: N) -> &'static str {
    if number == N::from(1) { "is" } else { "are" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular_and_none_is_not() {
        let waiting = |number: i32| counted(number, "Pod waits", "Pods wait");
        assert_eq!([0, 1, 2].map(waiting), ["0 Pods wait", "1 Pod waits", "2 Pods wait"]);
    }
}
