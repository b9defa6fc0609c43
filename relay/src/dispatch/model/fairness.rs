//! The owners of requests, and what their tokens cost.

use std::sync::Arc;
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

/// The class of a request. A higher class goes first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Class {
    /// A person waits for the response.
    Interactive,
    /// The class of requests without an owner.
    #[default]
    Normal,
    /// The response may come late.
    Batch,
}

impl Class {
    /// All classes, the highest first.
    pub(crate) const ALL: [Self; 3] = [Self::Interactive, Self::Normal, Self::Batch];

    /// The values that [`Class::parse`] accepts.
    pub const ALLOWED: &'static str = "interactive, normal or batch";

    /// Parses the name of a class.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|class| class.as_str() == name)
    }

    /// The name of the class.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Interactive => "interactive",
            Self::Normal => "normal",
            Self::Batch => "batch",
        }
    }
}

/// The weight of a key, in hundredths: of two busy keys, one with twice the weight attains twice the service.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Weight(u16);

/// The largest weight, in hundredths.
const MOST: u16 = 10_000;

impl Weight {
    /// Returns a weight from 0.01 to 100; `None` beyond these limits.
    pub fn from_hundredths(hundredths: u16) -> Option<Self> {
        (1..=MOST).contains(&hundredths).then_some(Self(hundredths))
    }

    /// The weight in hundredths.
    pub fn hundredths(self) -> u16 {
        self.0
    }

    /// Returns the service that a number of tokens means for a key of this weight.
    pub(crate) fn service(self, tokens: u64) -> Service {
        tokens.saturating_mul(u64::from(MOST)) / u64::from(self.0)
    }
}

impl Default for Weight {
    /// The weight 1.
    fn default() -> Self {
        Self(100)
    }
}

/// The API key that a request came with, and its class.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Owner {
    /// The key's id; `None` for requests without a key, which share one flow of the weight 1.
    pub key: Option<Arc<str>>,
    /// The key's weight. The last request that states one determines it.
    pub weight: Weight,
    /// The request's class.
    pub class: Class,
}

/// The tokens that a request has used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TokenUsage {
    /// The tokens of the prompt.
    pub input: u64,
    /// The generated tokens.
    pub output: u64,
}

/// Attained service: tokens divided by a weight. A token counts 10,000 at the weight 0.01 and 1 at the weight 100.
pub(crate) type Service = u64;

/// An output token takes about as long as two input tokens.
const OUTPUT_COST: u64 = 2;

/// No request costs more, whatever its worker reports: otherwise one wrong report would stop a key for good.
const MOST_COST: u64 = 1 << 24;

/// A token has about this number of bytes.
const TOKEN_BYTES: u64 = 4;

impl TokenUsage {
    /// Returns the cost, in input tokens.
    pub(crate) fn cost(self) -> u64 {
        self.input.saturating_add(self.output.saturating_mul(OUTPUT_COST)).min(MOST_COST)
    }
}

/// Returns the cost that a request is charged before its usage is known, in input tokens.
pub(crate) fn estimate(bytes: u64) -> u64 {
    (bytes / TOKEN_BYTES).min(MOST_COST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_is_limited_to_10_000_hundredths() {
        assert_eq!([0, 10_001].map(Weight::from_hundredths), [None, None]);
        assert_eq!(Weight::from_hundredths(100), Some(Weight::default()));
    }

    #[test]
    fn service_is_cost_divided_by_weight() {
        let service = |hundredths| Weight::from_hundredths(hundredths).unwrap().service(7);
        assert_eq!([1, 50, 100, 10_000].map(service), [70_000, 1_400, 700, 7]);
        assert_eq!(Weight::default().service(u64::MAX), u64::MAX / 100, "no overflow");
    }

    #[test]
    fn output_token_costs_two_input_tokens() {
        assert_eq!(TokenUsage { input: 100, output: 20 }.cost(), 140);
        assert_eq!(estimate(403), 100);
        assert_eq!(TokenUsage { input: u64::MAX, output: u64::MAX }.cost(), MOST_COST);
    }
}
