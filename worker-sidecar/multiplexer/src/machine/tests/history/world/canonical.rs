//! The text of a world's state, for its fingerprint.

use modelrelay_explorer::canonical::Rule;

use super::World;

/// The fields that a state leaves out, or whose exact values do not matter.
pub(crate) const RULES: [(&str, Rule); 19] = [
    // Constant, because no history of a small world changes the configuration.
    ("config", Rule::Skip),
    // Larger than every key in use.
    ("next_op", Rule::Skip),
    ("served", Rule::Skip),
    // The world's time, or earlier; the machine sets it before it reads it.
    ("now", Rule::Skip),
    // Only read by the automatic linger, which small worlds do without.
    ("gaps", Rule::Skip),
    ("concurrency", Rule::Skip),
    // Only reported.
    ("swap", Rule::Skip),
    ("draining_since", Rule::Age(0)),
    // Only compared: whether two are equal, and which one is older.
    ("generation", Rule::Rank),
    ("last_served", Rule::RankInScope),
    // The longest turn of a resident is 5 s, and an eviction or a load that takes longer is not measured.
    ("since", Rule::Age(6_000)),
    ("residency", Rule::Age(6_000)),
    // A request at a relay may wait for as long as another one runs. The longest bound of the policy is 27 s, and of
    // two models past their bounds, no more than one waits at a relay.
    ("stated", Rule::Age(30_000)),
    // The default is loaded again after 4 s; there is no idle_ttl, and no linger.
    ("idle_since", Rule::Age(5_000)),
    ("quiet_since", Rule::Age(5_000)),
    // Deadlines, which matter until they have passed.
    ("next_probe", Rule::Age(0)),
    ("until", Rule::Age(0)),
    ("deadline", Rule::Age(0)),
    ("failing", Rule::Age(0)),
];

/// Keys, which are only compared.
pub(crate) const TYPES: [(&str, Rule); 4] =
    [("RequestKey", Rule::Rank), ("RelayKey", Rule::Rank), ("OpId", Rule::Rank), ("OrderId", Rule::Rank)];

impl World {
    /// Returns the state as a text. A new field has to be listed here.
    pub(crate) fn text(&self) -> String {
        let Self {
            machine: _,
            start: _,
            now: _,
            transitions: _,
            relays,
            next_key: _,
            waiting,
            senders,
            classes,
            last_classes,
            places,
            owed,
            turns: _,
            running,
            // Keys are not used again: a request that has ended is out of the world.
            ended: _,
            grants,
            granted: _,
            open,
            call,
            old_calls,
            probe,
            occupied,
            confirmed,
            committed,
            orders,
            stopped,
            requested_again: _,
            visits: _,
            generation,
            residency,
            // Of the last event.
            quanta: _,
            costs: _,
            bug: _,
        } = self;
        let is_alive = |request| waiting.contains_key(request) || running.contains_key(request);
        let senders: Vec<_> = senders.iter().filter(|(request, _)| is_alive(*request)).collect();
        let classes: Vec<_> = classes.iter().filter(|(request, _)| is_alive(*request)).collect();
        format!(
            "{:?} {relays:?} {waiting:?} {senders:?} {classes:?} {last_classes:?} {places:?} {owed:?} {running:?} \
             {grants:?} {open:?} {call:?} {old_calls:?} {probe:?} {occupied:?} {confirmed:?} {committed} {orders:?} \
             {stopped} World {{ generation: {generation}, residency: {residency:?} }}",
            self.normal_machine()
        )
    }

    /// Returns the machine without what has no effect any more.
    fn normal_machine(&self) -> crate::machine::Machine {
        let mut machine = self.machine.clone();
        let now = self.instant();
        for entry in machine.models.values_mut() {
            if entry.failure.as_ref().is_some_and(|failure| failure.until <= now) {
                entry.failure = None;
            }
            // A backlog that is younger than the last turn has had no turn, and no request becomes older than it is.
            // Relays report their requests as a third of a second old.
            let absent = entry.left_at.map(|left_at| now.saturating_duration_since(left_at));
            if absent.is_some_and(|absent| absent >= std::time::Duration::from_secs(1) + entry.waiting(now).oldest) {
                entry.left_at = None;
            }
        }
        machine
    }
}
