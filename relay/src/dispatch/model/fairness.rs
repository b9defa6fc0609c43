//! How waiting requests share the workers, and what their tokens cost.

use std::time::Duration;

/// How waiting requests share the workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fairness {
    /// In order of arrival, whatever owners the requests have.
    Fifo,
    /// By class, then by the service that each key has attained, then by arrival.
    Shared {
        /// A request that has waited this long competes with higher classes.
        promote_after: Duration,
    },
}

impl Default for Fairness {
    fn default() -> Self {
        Self::Shared { promote_after: Duration::from_secs(15) }
    }
}

/// The tokens that a request has used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TokenUsage {
    /// The tokens of the prompt.
    pub input: u64,
    /// The generated tokens.
    pub output: u64,
}

/// An output token takes about as long as two input tokens.
const OUTPUT_COST: u64 = 2;

/// No request costs more, whatever its worker reports: otherwise one wrong report would stop a key for good.
const MOST_COST: u64 = 1 << 24;

/// A token has about this number of bytes of text, in every estimate.
pub const TOKEN_BYTES: u64 = 4;

impl TokenUsage {
    /// Returns the usage of a request with a body of this size whose backend reports none, but has generated `output`.
    pub fn estimated(bytes: u64, output: u64) -> Self {
        Self { input: estimate(bytes), output }
    }

    /// Returns the cost, in input tokens.
    pub(crate) fn cost(self) -> u64 {
        self.input.saturating_add(self.output.saturating_mul(OUTPUT_COST)).min(MOST_COST)
    }
}

/// A longer body is rarely text: pictures and sound are encoded in many more bytes than a model sees of them.
const MOST_ESTIMATE: u64 = 1 << 16;

/// Returns the cost that a request is charged before its usage is known, in input tokens.
pub(crate) fn estimate(bytes: u64) -> u64 {
    (bytes / TOKEN_BYTES).min(MOST_ESTIMATE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_token_costs_two_input_tokens() {
        assert_eq!(TokenUsage { input: 100, output: 20 }.cost(), 140);
        assert_eq!([403, 1 << 30].map(estimate), [100, 1 << 16]);
        assert_eq!(TokenUsage { input: u64::MAX, output: u64::MAX }.cost(), MOST_COST);
    }
}
