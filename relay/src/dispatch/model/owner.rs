//! The owner of a request: the API key that it came with, with what decides its share of the workers.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use modelrelay_protocol::message::RequestClass;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

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

/// The class of a request. A higher class goes first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// A person waits for the response.
    Interactive,
    /// The class of requests without a key, and the default of keys.
    #[default]
    Normal,
    /// The response may come late.
    Batch,
}

/// The weight of a key, in hundredths: of two busy keys of one class, one with twice the weight gets twice the service.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Weight(u16);

/// Attained service: tokens divided by a weight. A token counts 10,000 at the weight 0.01 and 1 at the weight 100.
pub(crate) type Service = u64;

/// The largest weight, in hundredths.
const MOST: u16 = 10_000;

/// A number this close to whole hundredths is meant as such: 0.07 × 100 is not exactly 7.
const ROUNDING: f64 = 1e-6;

/// A text or number is not allowed; the message is the end of the sentence "must …".
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ShareError {
    /// It is not a class.
    #[error("be interactive, normal or batch")]
    Class,
    /// It is not a weight.
    #[error("be a number from 0.01 to 100 with at most two decimals")]
    Weight,
}

impl Class {
    /// All classes, the highest first.
    pub(crate) const ALL: [Self; 3] = [Self::Interactive, Self::Normal, Self::Batch];
}

impl From<Class> for RequestClass {
    fn from(class: Class) -> Self {
        match class {
            Class::Interactive => Self::Interactive,
            Class::Normal => Self::Normal,
            Class::Batch => Self::Batch,
        }
    }
}

impl FromStr for Class {
    type Err = ShareError;

    fn from_str(text: &str) -> Result<Self, ShareError> {
        match text {
            "interactive" => Ok(Self::Interactive),
            "normal" => Ok(Self::Normal),
            "batch" => Ok(Self::Batch),
            _ => Err(ShareError::Class),
        }
    }
}

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

impl TryFrom<f64> for Weight {
    type Error = ShareError;

    fn try_from(number: f64) -> Result<Self, ShareError> {
        let hundredths = number * 100.0;
        let is_exact = (hundredths - hundredths.round()).abs() < ROUNDING;
        if !is_exact || !(1.0..=f64::from(MOST)).contains(&hundredths.round()) {
            return Err(ShareError::Weight);
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range was checked")]
        let hundredths = hundredths.round() as u16;
        Self::from_hundredths(hundredths).ok_or(ShareError::Weight)
    }
}

impl FromStr for Weight {
    type Err = ShareError;

    fn from_str(text: &str) -> Result<Self, ShareError> {
        text.parse::<f64>().map_err(|_| ShareError::Weight)?.try_into()
    }
}

/// As a decimal number: 1, 2.5.
impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (f64::from(self.0) / 100.0).fmt(f)
    }
}

/// A whole weight has no decimals in JSON.
impl Serialize for Weight {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_multiple_of(100) {
            serializer.serialize_u16(self.0 / 100)
        } else {
            serializer.serialize_f64(f64::from(self.0) / 100.0)
        }
    }
}

impl<'de> Deserialize<'de> for Weight {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::try_from(f64::deserialize(deserializer)?)
            .map_err(|error| D::Error::custom(format!("weight must {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_has_at_most_two_decimals() {
        for (text, hundredths) in [("0.01", 1), ("0.07", 7), ("0.29", 29), ("1", 100), ("2.50", 250), ("100", 10_000)] {
            assert_eq!(text.parse().map(Weight::hundredths), Ok(hundredths), "{text}");
        }
        for text in ["0", "-1", "0.009", "0.005", "100.01", "1.005", "1e9", "NaN", "inf", "", "much"] {
            assert_eq!(text.parse::<Weight>(), Err(ShareError::Weight), "{text}");
        }
    }

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
    fn every_weight_survives_json() {
        for hundredths in 1..=MOST {
            let weight = Weight::from_hundredths(hundredths).expect("a weight");
            let json = serde_json::to_string(&weight).expect("JSON");
            assert_eq!((serde_json::from_str(&json).ok(), json), (Some(weight), weight.to_string()));
        }
    }

    #[test]
    fn class_has_one_name_everywhere() {
        for class in [Class::Interactive, Class::Normal, Class::Batch] {
            let json = serde_json::to_value(class).expect("JSON");
            assert_eq!(json.as_str().expect("a text").parse(), Ok(class));
        }
        assert_eq!("Batch".parse::<Class>(), Err(ShareError::Class));
    }
}
