//! The zone and cluster of this relay, and the distance of its workers.

use modelrelay_protocol::location::Location;

use crate::dispatch::Distance;
use crate::settings::cli::{Args, OptionalText};

/// Returns the labels of this relay.
pub(super) fn own(args: &Args) -> Location {
    let label = |text: &Option<OptionalText>| text.as_ref().and_then(|text| text.0.clone());
    Location { zone: label(&args.zone), cluster: label(&args.cluster) }
}

/// Returns how far a worker is from a relay. To a relay without labels, all workers are equally near.
pub fn distance(relay: &Location, worker: &Location) -> Distance {
    let is_same = |one: &Option<String>, other: &Option<String>| one.is_some() && one == other;
    if relay.is_unknown() || is_same(&relay.zone, &worker.zone) {
        Distance::Zone
    } else if is_same(&relay.cluster, &worker.cluster) {
        Distance::Cluster
    } else {
        Distance::Elsewhere
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(zone: &str, cluster: &str) -> Location {
        let label = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        Location { zone: label(zone), cluster: label(cluster) }
    }

    #[test]
    fn distance_is_that_of_first_equal_label() {
        let distance =
            |relay: [&str; 2], worker: [&str; 2]| distance(&at(relay[0], relay[1]), &at(worker[0], worker[1]));
        for (relay, worker, expected) in [
            (["", ""], ["", ""], Distance::Zone),
            (["", ""], ["a", "one"], Distance::Zone),
            (["a", "one"], ["a", "one"], Distance::Zone),
            // Two clusters in one zone of a cloud are near each other.
            (["a", "one"], ["a", "two"], Distance::Zone),
            (["a", "one"], ["b", "one"], Distance::Cluster),
            (["a", "one"], ["", "one"], Distance::Cluster),
            (["", "one"], ["a", "one"], Distance::Cluster),
            (["a", "one"], ["b", "two"], Distance::Elsewhere),
            (["a", ""], ["", "one"], Distance::Elsewhere),
            (["a", "one"], ["", ""], Distance::Elsewhere),
        ] {
            assert_eq!(distance(relay, worker), expected, "{relay:?} {worker:?}");
        }
    }
}
