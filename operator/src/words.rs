//! English for messages that count.

/// The form for one or for any other number: `one_or(1, "relay", "relays")`.
pub(crate) fn one_or<N: Copy + PartialEq + From<u8>>(
    number: N,
    one: &'static str,
    other: &'static str,
) -> &'static str {
    if number == N::from(1) { one } else { other }
}
