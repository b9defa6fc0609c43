//! The text of a core's state, for its fingerprint.

use std::collections::BTreeMap;

use modelrelay_explorer::canonical::{Canonical, Rule};

use super::super::Play;
use crate::dispatch::Dispatch;

/// The fields that a state leaves out, or whose exact values do not matter.
const FIELDS: &[(&str, Rule)] = &[
    // Follow from the requests, workers and lanes, and their order.
    ("ids", Rule::Skip),
    ("shares", Rule::Skip),
    ("promotions", Rule::Skip),
    ("pinned_firsts", Rule::Skip),
    ("dues", Rule::Skip),
    ("ranks", Rule::Skip),
    ("available", Rule::Skip),
    // Numbers of keys. These are listed with what they have attained.
    ("flow", Rule::Skip),
    ("flows", Rule::Skip),
    // The lanes are listed with the time that their requests have left.
    ("queue", Rule::Skip),
    ("place", Rule::Skip),
    ("cold_start", Rule::Skip),
    // Only reported, and in estimates.
    ("order", Rule::Skip),
    ("reported_load", Rule::Skip),
    // Numbers of one counter, which are compared.
    ("turn", Rule::RankAs("turn")),
    ("sent", Rule::RankAs("turn")),
    ("granted_at", Rule::RankAs("turn")),
    ("void_before", Rule::RankAs("turn")),
    ("voided", Rule::RankAs("turn")),
    // Of a cache: the same for single models. Elsewhere it has no numbers.
    ("models", Rule::RankAs("turn")),
    ("announcements", Rule::RankAs("announcement")),
    ("announced", Rule::RankAs("announcement")),
    ("announcement", Rule::RankAs("announcement")),
    // The pace of reports is 50 ms; a class is in use for a minute.
    ("reported_at", Rule::Age(50)),
    ("last_arrivals", Rule::Age(60_001)),
];

/// Keys, which are only compared, and times.
const TYPES: &[(&str, Rule)] = &[
    ("RequestKey", Rule::Rank),
    ("WorkerKey", Rule::Rank),
    ("ModelId", Rule::Rank),
    ("Moment", Rule::Age(i64::MAX / 1_000_000)),
];

/// Returns the canonical text of a relay, with what its environment knows.
pub(super) fn text(play: &Play, known: &str) -> String {
    let now = play.reference.now;
    let nanos = i64::try_from(now.as_nanos()).unwrap();
    let accounts = play.ledger.workers.iter().map(|(key, account)| {
        let age = account.reported_at.map(|at| (now - at).min(super::super::ledger::PACE));
        (key, &account.believed, account.counted_down, age)
    });
    let accounts: Vec<_> = accounts.collect();
    let text = format!("{} {accounts:?} {known}", core(&play.core));
    let rules = Canonical { fields: FIELDS, types: TYPES, scopes: &[] };
    rules.text(&text, play.start + now, nanos)
}

/// Returns the state as a text. A new field has to be listed here.
fn core(core: &Dispatch) -> String {
    let Dispatch {
        settings,
        phase,
        clock,
        // Of the current event.
        out: _,
        requests,
        pinned,
        workers,
        models,
        queue,
        running,
        marked,
        // Only for estimates.
        drain_rate: _,
        homes,
        instances,
        voided,
        turn,
        unsettled,
    } = core;
    let requests: BTreeMap<_, _> = requests.iter().collect();
    let workers: BTreeMap<_, _> = workers.iter().collect();
    let flows = queue.flows.canonical();
    let lanes: Vec<_> = models.iter().map(|group| (&group.name, group.queue.canonical(clock.now))).collect();
    format!(
        "Core {{ enabled: {:?}, phase: {phase:?}, now: {:?}, requests: {requests:?}, pinned: {pinned:?}, \
         workers: {workers:?}, groups: {models:?}, whole: {queue:?}, waiting: {lanes:?}, attained: {flows:?}, \
         running: {running:?}, marked: {marked:?}, homes: {:?}, instances: {instances:?}, voided: {voided}, \
         turn: {turn}, unsettled: {unsettled:?} }}",
        settings.enabled,
        clock.now,
        homes.canonical(),
    )
}
