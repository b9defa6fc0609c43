//! Conditions as kstatus reads them: Ready (it works), Reconciling (an operation is in progress) and Stalled (a user
//! has to change something).

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// The resource works.
pub const READY: &str = "Ready";
/// Every relay Pod runs the configuration of this generation. Providers only.
pub const PROGRAMMED: &str = "Programmed";
/// An operation is in progress.
pub const RECONCILING: &str = "Reconciling";
/// There is no progress until a user changes something.
pub const STALLED: &str = "Stalled";

/// The longest message, in characters; the API server's own limit is 32,768.
const MAX_MESSAGE_CHARS: usize = 1024;

/// A condition to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its type.
    pub type_: &'static str,
    /// True, False or Unknown.
    pub status: Status,
    /// One CamelCase word that programs and the manual's index know.
    pub reason: &'static str,
    /// Human-readable: the problem and the change that fixes it.
    pub message: String,
}

/// The status of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The condition holds.
    True,
    /// The condition does not hold.
    False,
    /// Not known yet.
    Unknown,
}

impl Status {
    fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

impl From<bool> for Status {
    fn from(so: bool) -> Self {
        if so { Self::True } else { Self::False }
    }
}

impl Wanted {
    /// Creates a condition.
    pub fn new(
        type_: &'static str,
        status: impl Into<Status>,
        reason: &'static str,
        message: impl Into<String>,
    ) -> Self {
        Self { type_, status: status.into(), reason, message: message.into() }
    }
}

/// Returns the conditions to write. A transition time changes only with the status, so that an unchanged state is an
/// unchanged object. Conditions that `wanted` does not name are removed.
pub fn merge(previous: &[Condition], wanted: &[Wanted], generation: Option<i64>, now: &Time) -> Vec<Condition> {
    let merged = wanted.iter().map(|wanted| {
        let before = previous.iter().find(|condition| condition.type_ == wanted.type_);
        let unchanged = before.filter(|condition| condition.status == wanted.status.as_str());
        Condition {
            type_: wanted.type_.to_owned(),
            status: wanted.status.as_str().to_owned(),
            reason: wanted.reason.to_owned(),
            message: wanted.message.chars().take(MAX_MESSAGE_CHARS).collect(),
            last_transition_time: unchanged
                .map_or_else(|| now.clone(), |condition| condition.last_transition_time.clone()),
            observed_generation: generation,
        }
    });
    merged.collect()
}

/// True if the condition exists and is true.
pub fn is_true(conditions: &[Condition], type_: &str) -> bool {
    conditions.iter().any(|condition| condition.type_ == type_ && condition.status == "True")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Time {
        Time(k8s_openapi::jiff::Timestamp::from_second(seconds).unwrap())
    }

    #[test]
    fn transition_time_changes_only_with_status() {
        let first = merge(&[], &[Wanted::new(READY, false, "Progressing", "a")], Some(1), &at(1));
        let same = merge(&first, &[Wanted::new(READY, false, "NoWorkers", "b")], Some(2), &at(2));
        assert_eq!((same[0].reason.as_str(), &same[0].last_transition_time), ("NoWorkers", &at(1)));
        let flipped = merge(&same, &[Wanted::new(READY, true, "Serving", "c")], Some(2), &at(3));
        assert_eq!(flipped[0].last_transition_time, at(3));
    }

    #[test]
    fn same_input_gives_same_conditions() {
        let wanted = [Wanted::new(READY, true, "Serving", ""), Wanted::new(STALLED, false, "Serving", "")];
        let first = merge(&[], &wanted, Some(1), &at(1));
        assert_eq!(merge(&first, &wanted, Some(1), &at(2)), first);
    }

    #[test]
    fn unwanted_condition_is_removed() {
        let first = merge(&[], &[Wanted::new(PROGRAMMED, true, "x", "")], Some(1), &at(1));
        assert_eq!(merge(&first, &[Wanted::new(READY, true, "x", "")], Some(1), &at(1)).len(), 1);
    }

    #[test]
    fn long_message_is_cut_at_character_boundary() {
        let merged = merge(&[], &[Wanted::new(READY, false, "x", "ä".repeat(5000))], None, &at(1));
        assert_eq!(merged[0].message.chars().count(), MAX_MESSAGE_CHARS);
    }
}
