//! The state of a limit of tokens, and the headers by which clients learn it. Names and formats are OpenAI's.

use std::fmt;
use std::time::Duration;

/// A limit of tokens and its state at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit {
    /// The most tokens.
    pub limit: u64,
    /// The number of tokens that are free at present.
    pub remaining: u64,
    /// The time until all tokens of the limit are free.
    pub reset: Duration,
}

impl RateLimit {
    /// The headers of a response.
    pub fn headers(&self) -> [(&'static str, String); 3] {
        [
            ("x-ratelimit-limit-tokens", self.limit.to_string()),
            ("x-ratelimit-remaining-tokens", self.remaining.to_string()),
            ("x-ratelimit-reset-tokens", Span(self.reset).to_string()),
        ]
    }
}

/// A duration as OpenAI writes it, rounded up: `90ms`, `7s`, `6m0s`, `23h59m59s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.as_nanos().div_ceil(1_000_000);
        if (1..1000).contains(&millis) {
            return write!(f, "{millis}ms");
        }
        let seconds = millis.div_ceil(1000);
        match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
            (0, 0, seconds) => write!(f, "{seconds}s"),
            (0, minutes, seconds) => write!(f, "{minutes}m{seconds}s"),
            (hours, minutes, seconds) => write!(f, "{hours}h{minutes}m{seconds}s"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_as_openai_does() {
        let text = |millis| Span(Duration::from_millis(millis)).to_string();
        let cases = [(0, "0s"), (1, "1ms"), (999, "999ms"), (1000, "1s"), (1001, "2s"), (59_001, "1m0s")];
        for (millis, expected) in cases.into_iter().chain([(360_000, "6m0s"), (86_399_500, "24h0m0s")]) {
            assert_eq!(text(millis), expected);
        }
        assert_eq!(Span(Duration::from_nanos(1)).to_string(), "1ms");
    }
}
