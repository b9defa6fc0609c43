//! The explorer on worlds whose states are known.

use std::time::{Duration, Instant};

use super::canonical::{Canonical, Rule};
use super::{End, Limits, World, explore, fingerprint};

const LIMITS: Limits = Limits { states: 1_000_000, depth: 1_000, time: Duration::from_secs(60) };

/// Two counters up to a limit, that may not both be at `forbidden`.
#[derive(Clone, Debug)]
struct Counters {
    values: [u32; 2],
    forbidden: u32,
    is_inspected: bool,
}

impl World for Counters {
    type Action = usize;

    fn actions(&self) -> Vec<usize> {
        (0..2).filter(|index| self.values[*index] < 9).collect()
    }

    fn act(&mut self, action: &usize) {
        self.values[*action] += 1;
        assert!(self.is_inspected || self.values != [self.forbidden; 2], "both are there");
    }

    fn fingerprint(&self) -> u128 {
        fingerprint(format!("{:?}", self.values).as_bytes())
    }

    fn inspect(self) {
        assert!(self.values != [self.forbidden; 2], "both were seen there");
    }
}

fn counters(forbidden: u32) -> Counters {
    Counters { values: [0, 0], forbidden, is_inspected: false }
}

#[test]
fn every_state_is_counted_once() {
    let explored = explore(&counters(10), LIMITS).expect_no_violation();
    assert_eq!((explored.states, explored.transitions, explored.depth), (100, 180, 18));
    assert_eq!(explored.end, End::Complete);
    assert!(explored.to_string().starts_with("100 states, 180 transitions, depth 18, "), "{explored}");
}

#[test]
fn violation_has_shortest_trace() {
    let violation = explore(&counters(2), LIMITS).violation.expect("a violation");
    assert_eq!(violation.trace.len(), 4);
    assert!(violation.message.starts_with("both are there (") && violation.to_string().contains("   4. 1"));
    let inspected = Counters { is_inspected: true, ..counters(2) };
    let violation = explore(&inspected, LIMITS).violation.expect("a violation");
    assert_eq!((violation.trace.len(), &violation.message[..19]), (4, "both were seen ther"));
}

#[test]
fn limits_end_exploration() {
    let end = |limits| explore(&counters(10), limits).end;
    assert_eq!(end(Limits { states: 50, ..LIMITS }), End::States);
    assert_eq!(end(Limits { depth: 5, ..LIMITS }), End::Depth);
    assert_eq!(end(Limits { time: Duration::ZERO, ..LIMITS }), End::Time);
}

/// A counter whose parity decides what is next, and whose fingerprint hides it.
#[derive(Clone, Debug)]
struct Hidden(u32);

impl World for Hidden {
    type Action = u32;

    fn actions(&self) -> Vec<u32> {
        if self.0 < 40 { vec![1, 2 + self.0 % 2] } else { Vec::new() }
    }

    fn act(&mut self, action: &u32) {
        self.0 += action;
    }

    fn fingerprint(&self) -> u128 {
        u128::from(self.0 / 2)
    }
}

#[test]
fn merged_states_with_different_futures_are_reported() {
    let violation = explore(&Hidden(0), LIMITS).violation.expect("a violation");
    assert!(violation.message.contains("different futures"), "{violation}");
}

#[derive(Debug)]
#[expect(dead_code, reason = "only its text is used")]
struct Key(u64);

#[derive(Debug)]
#[expect(dead_code, reason = "only its text is used")]
struct Moment(i64);

#[derive(Debug)]
#[expect(dead_code, reason = "only its text is used")]
struct Sample {
    name: &'static str,
    keys: Vec<Key>,
    since: Option<Instant>,
    until: Moment,
    served: Vec<u64>,
    counter: Vec<(u64, Key)>,
}

#[derive(Debug)]
#[expect(dead_code, reason = "only its text is used")]
struct Stamps {
    sent: u64,
    granted: Vec<u64>,
}

#[test]
fn fields_of_one_counter_share_ranks() {
    let fields = &[("sent", Rule::RankAs("turn")), ("granted", Rule::RankAs("turn"))];
    let rules = Canonical { fields, types: &[], scopes: &[] };
    let stamps = Stamps { sent: 7, granted: vec![0, 3, 9] };
    let text = rules.text(&format!("{stamps:?}"), Instant::now(), 0);
    assert_eq!(text, "Stamps { sent: #2, granted: [0, #1, #3] }");
}

#[cfg(unix)]
#[test]
fn shifted_times_and_keys_are_equal() {
    let rules = Canonical {
        fields: &[("counter", Rule::Skip), ("since", Rule::Age(2_000)), ("served", Rule::Rank)],
        types: &[("Key", Rule::Rank), ("Moment", Rule::Age(0))],
        scopes: &[],
    };
    let now = Instant::now() + Duration::from_secs(100);
    let text = |shift: u64, age: u64| {
        let sample = Sample {
            name: "a: 7, \"Key(9)",
            keys: vec![Key(shift + 5), Key(0), Key(shift + 3), Key(shift + 5)],
            since: now.checked_sub(Duration::from_secs(age)),
            until: Moment(3_000 + i64::try_from(shift).unwrap()),
            served: vec![shift + 9, 0, shift + 1],
            counter: vec![(shift, Key(1))],
        };
        rules.text(&format!("{sample:?}"), now, 1_000 + i64::try_from(shift).unwrap())
    };
    assert_eq!(
        text(1, 1),
        "Sample { name: \"a: 7, \\\"Key(9)\", keys: [Key(#2), Key(0), Key(#1), Key(#2)], since: Some(@-1000000000), \
         until: Moment(@2000), served: [#2, 0, #1], counter: }"
    );
    assert_eq!(text(1, 1), text(7, 1));
    assert_eq!(text(1, 3), text(7, 90), "both are older than the field can tell");
    assert_ne!(text(1, 1), text(1, 3));
}
