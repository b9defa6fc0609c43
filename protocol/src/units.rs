//! Human-readable durations and sizes: `1h30m`, `500ms`, `256Mi`.
//!
//! One parser for the relay's file, the worker's file and the custom resources, so that a value that one of them
//! accepts means the same everywhere. The grammar is that of the resource schemas: durations match
//! `^([0-9]+(ms|s|m|h))+$`, sizes match `^[1-9][0-9]{0,14}(Ki|Mi|Gi|Ti)?$` or are integers. Both have an upper bound
//! here: a deadline is an instant plus a duration, and that sum must not overflow.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};

/// The longest accepted duration: ten years of hours, far below the range of an `Instant`.
pub const MAX_DURATION: Duration = Duration::from_secs(10 * 8760 * 3600);

/// The shortest accepted duration where zero is not allowed.
pub const MIN_DURATION: Duration = Duration::from_millis(1);

/// The largest accepted size: gauges and offsets are signed 64-bit numbers.
pub const MAX_SIZE: u64 = i64::MAX as u64;

/// The number of characters of a rejected value that an error repeats; the rest of a long value is no help.
const SHOWN_CHARS: usize = 64;

/// A rejected duration or size; its message shows the value and the allowed ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitError {
    value: String,
    allowed: &'static str,
}

impl UnitError {
    fn new(value: &str, allowed: &'static str) -> Self {
        Self { value: value.chars().take(SHOWN_CHARS).collect(), allowed }
    }

    /// The rejected value, shortened.
    pub fn value(&self) -> &str {
        &self.value
    }

    /// The allowed values.
    pub fn allowed(&self) -> &'static str {
        self.allowed
    }
}

impl fmt::Display for UnitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not allowed: {}", self.value, self.allowed)
    }
}

impl std::error::Error for UnitError {}

const DURATION_ALLOWED: &str = "a duration from 1ms to 87600h such as 500ms, 30s or 1h30m";
const DURATION_OR_ZERO_ALLOWED: &str = "a duration from 0s to 87600h such as 0s, 30s or 1h30m";
const SIZE_ALLOWED: &str = "a size in bytes such as 1048576, 512Ki, 256Mi, 2Gi or 1Ti";

/// Parses a duration of at least 1 ms.
pub fn parse_duration(text: &str) -> Result<Duration, UnitError> {
    scan_duration(text)
        .filter(|duration| (MIN_DURATION..=MAX_DURATION).contains(duration))
        .ok_or_else(|| UnitError::new(text, DURATION_ALLOWED))
}

/// Parses a duration that may be zero, for the few settings where zero means "at once".
pub fn parse_duration_or_zero(text: &str) -> Result<Duration, UnitError> {
    scan_duration(text)
        .filter(|duration| *duration <= MAX_DURATION)
        .ok_or_else(|| UnitError::new(text, DURATION_OR_ZERO_ALLOWED))
}

/// Parses a size in bytes, with or without a binary suffix.
pub fn parse_size(text: &str) -> Result<u64, UnitError> {
    scan_size(text).filter(|size| *size <= MAX_SIZE).ok_or_else(|| UnitError::new(text, SIZE_ALLOWED))
}

/// Writes a duration so that [`parse_duration_or_zero`] reads the same milliseconds again.
pub fn format_duration(duration: Duration) -> String {
    let mut rest = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let mut text = String::new();
    for (unit, millis) in [("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)] {
        if rest >= millis {
            text.push_str(&format!("{}{unit}", rest / millis));
            rest %= millis;
        }
    }
    if text.is_empty() { "0s".to_owned() } else { text }
}

/// Writes a size with the largest binary suffix that loses nothing.
pub fn format_size(bytes: u64) -> String {
    let whole = |shift: u32| bytes != 0 && bytes.trailing_zeros() >= shift;
    match () {
        () if whole(40) => format!("{}Ti", bytes >> 40),
        () if whole(30) => format!("{}Gi", bytes >> 30),
        () if whole(20) => format!("{}Mi", bytes >> 20),
        () if whole(10) => format!("{}Ki", bytes >> 10),
        () => bytes.to_string(),
    }
}

/// A duration of at least 1 ms in a file: `timeout: 30s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HumanDuration(pub Duration);

/// A duration in a file that may be zero: `drainTimeout: 0s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HumanDurationOrZero(pub Duration);

/// A size in a file: `maxBytes: 256Mi`, or the plain number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

impl FromStr for HumanDuration {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        parse_duration(text).map(Self)
    }
}

impl FromStr for HumanDurationOrZero {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        parse_duration_or_zero(text).map(Self)
    }
}

impl FromStr for ByteSize {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        parse_size(text).map(Self)
    }
}

impl fmt::Display for HumanDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format_duration(self.0))
    }
}

impl fmt::Display for HumanDurationOrZero {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format_duration(self.0))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format_size(self.0))
    }
}

impl Serialize for HumanDuration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for HumanDurationOrZero {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for HumanDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // A bare number has no unit, and guessing one has caused outages: it is rejected with the same message.
        deserializer
            .deserialize_any(ScalarVisitor { allowed: DURATION_ALLOWED, from_text: parse_duration, from_integer: None })
            .map(Self)
    }
}

impl<'de> Deserialize<'de> for HumanDurationOrZero {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_any(ScalarVisitor {
                allowed: DURATION_OR_ZERO_ALLOWED,
                from_text: parse_duration_or_zero,
                from_integer: None,
            })
            .map(Self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_any(ScalarVisitor {
                allowed: SIZE_ALLOWED,
                from_text: parse_size,
                from_integer: Some(size_from_integer),
            })
            .map(Self)
    }
}

fn size_from_integer(value: u64) -> Option<u64> {
    (1..=MAX_SIZE).contains(&value).then_some(value)
}

/// Adds up `<number><unit>` pairs; `None` for anything else, for an empty text and on overflow.
fn scan_duration(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut millis: u64 = 0;
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let number: u64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        // `ms` before `m`: the longer unit wins.
        let (factor, after) = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)]
            .into_iter()
            .find_map(|(unit, factor)| rest.strip_prefix(unit).map(|after| (factor, after)))?;
        millis = millis.checked_add(number.checked_mul(factor)?)?;
        rest = after;
    }
    (!text.is_empty()).then_some(Duration::from_millis(millis))
}

fn scan_size(text: &str) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    if !(1..=15).contains(&digits) || text.starts_with('0') {
        return None;
    }
    let shift = match &text[digits..] {
        "" => 0,
        "Ki" => 10,
        "Mi" => 20,
        "Gi" => 30,
        "Ti" => 40,
        _ => return None,
    };
    text[..digits].parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Reads one scalar of a file; every error repeats the value and the allowed ones.
struct ScalarVisitor<T> {
    allowed: &'static str,
    from_text: fn(&str) -> Result<T, UnitError>,
    from_integer: Option<fn(u64) -> Option<T>>,
}

impl<T> Visitor<'_> for ScalarVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.allowed)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.from_text)(text).map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<T, E> {
        self.from_integer
            .and_then(|from_integer| from_integer(value))
            .ok_or_else(|| E::custom(UnitError::new(&value.to_string(), self.allowed)))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<T, E> {
        match u64::try_from(value) {
            Ok(value) => self.visit_u64(value),
            Err(_) => Err(E::custom(UnitError::new(&value.to_string(), self.allowed))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_add_up_their_units() {
        let cases = [
            ("500ms", 500),
            ("30s", 30_000),
            ("1h30m", 5_400_000),
            ("1m1m", 120_000),
            ("2s5ms", 2_005),
            ("007s", 7_000),
        ];
        for (text, millis) in cases {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn text_outside_duration_grammar_is_rejected() {
        for text in [
            "",
            "30",
            "30x",
            "s",
            "-1s",
            "+1s",
            "1.5s",
            " 1s",
            "1s ",
            "1S",
            "1d",
            "99999999999999999999h",
            "18446744073709551615h",
            "87601h",
        ] {
            let error = parse_duration(text).expect_err(text);
            assert_eq!(error.value(), text);
            assert!(error.allowed().contains("30s"), "{}", error.allowed());
        }
        assert_eq!(parse_duration("87600h"), Ok(Duration::from_secs(87_600 * 3_600)), "ten years");
    }

    #[test]
    fn only_some_durations_may_be_zero() {
        assert!(parse_duration("0s").is_err());
        assert!(parse_duration("0h0ms").is_err());
        assert_eq!(parse_duration_or_zero("0s"), Ok(Duration::ZERO));
        assert!(parse_duration_or_zero("").is_err());
    }

    #[test]
    fn sizes_are_binary_multiples() {
        let cases = [
            ("1", 1),
            ("1Ki", 1024),
            ("256Mi", 256 << 20),
            ("2Gi", 2 << 30),
            ("1Ti", 1 << 40),
            ("999999999999999", 999_999_999_999_999),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn text_outside_size_grammar_is_rejected() {
        for text in
            ["", "0", "01", "1kb", "1K", "1Pi", "Mi", "1 Mi", "-1", "1.5Gi", "1000000000000000", "999999999999999Ti"]
        {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn formatted_durations_and_sizes_parse_back() {
        for millis in [0, 1, 999, 1_000, 61_001, 5_400_000, 86_400_000] {
            let duration = Duration::from_millis(millis);
            assert_eq!(parse_duration_or_zero(&format_duration(duration)), Ok(duration));
        }
        for bytes in [1, 1023, 1024, 1536, 256 << 20, 3 << 40] {
            assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
        }
        let sizes = [0, 1023, 1024, 1536, 256 << 20, 3 << 30, 3 << 40];
        assert_eq!(sizes.map(format_size), ["0", "1023", "1Ki", "1536", "256Mi", "3Gi", "3Ti"]);
    }

    #[test]
    fn files_accept_integer_sizes_but_not_durations() {
        assert_eq!(serde_json::from_str::<ByteSize>("268435456").expect("an integer"), ByteSize(268_435_456));
        assert_eq!(serde_json::from_str::<ByteSize>("\"256Mi\"").expect("a string"), ByteSize(268_435_456));
        for text in ["0", "-5", "1.5", "true", "null", "\"\"", "18446744073709551615"] {
            assert!(serde_json::from_str::<ByteSize>(text).is_err(), "{text}");
        }
        let error = serde_json::from_str::<HumanDuration>("30").expect_err("no unit").to_string();
        assert!(error.starts_with("\"30\" is not allowed: a duration from 1ms"), "{error}");
    }

    #[test]
    fn long_value_is_truncated_in_error() {
        let error = parse_size(&"9".repeat(10_000)).expect_err("too long");
        assert_eq!(error.value().len(), SHOWN_CHARS);
    }
}
