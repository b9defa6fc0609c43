//! Homes of relays that share workers: what each learns from the reports of the workers.

use std::collections::BTreeMap;

use modelrelay_protocol::limits::MAX_HOMES_PER_MESSAGE;

use super::harness::{Provider, settings, turn, worker};
use super::slots::{empty, idle};
use crate::dispatch::{Conversation, Event, Placement, Settings, WorkerKey};

const LONG: u64 = 1000;

const WORKERS: [u64; 2] = [1, 2];

/// Two relays, and two workers with four slots that are linked to both.
struct Site {
    relays: [Provider; 2],
    /// The last body of each conversation, as each worker remembers it.
    known: BTreeMap<(u64, u64), u64>,
    next_request: u64,
}

impl Site {
    fn new() -> Self {
        Self { relays: [relay(), relay()], known: BTreeMap::new(), next_request: 1 }
    }

    /// Sends a turn through a relay, completes it, and has its worker report it to the other relay. Returns the worker.
    fn turn(&mut self, at: usize, conversation: u64, bytes: u64) -> u64 {
        let key = self.next_request;
        self.next_request += 1;
        let to = turn(&mut self.relays[at], key, conversation, bytes);
        self.relays[at].complete(key);
        self.known.insert((to, conversation), bytes);
        report(&mut self.relays[1 - at], to, &[(conversation, bytes)], 0);
        to
    }

    /// Replaces a relay by a new one, to which each worker reports all that it remembers.
    fn restart(&mut self, at: usize) {
        self.relays[at] = relay();
        for worker in WORKERS {
            let of_it = self.known.range((worker, 0)..=(worker, u64::MAX));
            let homes: Vec<_> = of_it.map(|((_, conversation), bytes)| (*conversation, *bytes)).collect();
            report(&mut self.relays[at], worker, &homes, 0);
        }
    }
}

fn by_cache() -> Provider {
    Provider::with(Settings { placement: Placement::Cache, max_queue_bytes: u64::MAX, ..settings() })
}

fn relay() -> Provider {
    let mut p = by_cache();
    for worker in WORKERS {
        p.join(worker, &["m"], 4);
    }
    p
}

fn report(p: &mut Provider, worker: u64, homes: &[(u64, u64)], backlog: u64) {
    let homes = homes.iter().map(|(conversation, bytes)| (Conversation(*conversation), *bytes)).collect();
    p.handle(Event::HomesReported { worker: WorkerKey(worker), homes, backlog });
}

/// Returns conversations in an order in which workers that take turns would get others than in the usual order.
fn in_other_order(conversations: std::ops::Range<u64>) -> impl Iterator<Item = u64> {
    let (even, odd) = (conversations.clone().step_by(2), conversations.skip(1).step_by(2));
    even.chain(odd)
}

#[test]
fn reported_home_and_backlog_count() {
    let mut p = relay();
    report(&mut p, 2, &[(7, LONG)], LONG);
    assert_eq!(p.dispatch.worker(WorkerKey(2)).map(|worker| worker.backlog), Some(LONG));
    assert_eq!(turn(&mut p, 1, 8, 10), 1, "the other worker has a backlog");
    assert_eq!(turn(&mut p, 2, 7, LONG), 2, "its prompt is there");
}

#[test]
fn relays_with_shared_workers_find_same_homes() {
    let mut site = Site::new();
    let first: BTreeMap<_, _> = (0..8).map(|it| (it, site.turn(0, it, LONG))).collect();
    assert!(WORKERS.iter().all(|worker| first.values().any(|home| home == worker)), "{first:?}");
    for (number, bytes) in [(1, LONG + 10), (0, LONG + 20), (1, LONG + 30)] {
        for conversation in in_other_order(0..8) {
            assert_eq!(site.turn(number, conversation, bytes), first[&conversation], "{conversation} at {number}");
        }
    }
}

#[test]
fn conversation_moved_by_one_relay_moves_everywhere() {
    let mut site = Site::new();
    assert_eq!([site.turn(0, 7, LONG), site.turn(1, 7, LONG + 10)], [1, 1]);
    // Only the second relay knows yet of the backlog there.
    report(&mut site.relays[1], 1, &[], 4 * LONG);
    assert_eq!(site.turn(1, 7, LONG + 20), 2);
    assert_eq!(site.turn(0, 7, LONG + 30), 2);
    report(&mut site.relays[1], 1, &[], 0);
    assert_eq!(site.turn(1, 7, LONG + 40), 2);
}

#[test]
fn restarted_relay_learns_homes() {
    let mut site = Site::new();
    let first: BTreeMap<_, _> = (0..8).map(|it| (it, site.turn(0, it, LONG))).collect();
    site.restart(0);
    assert_eq!(site.relays[0].dispatch.homes_len(), 8);
    for conversation in in_other_order(0..8) {
        assert_eq!(site.turn(0, conversation, LONG + 10), first[&conversation], "{conversation}");
    }
}

/// Both workers remember a conversation that has moved.
#[test]
fn restarted_relay_learns_newer_home() {
    let mut site = Site::new();
    assert_eq!(site.turn(0, 7, LONG), 1);
    report(&mut site.relays[0], 1, &[], 4 * LONG);
    assert_eq!(site.turn(0, 7, LONG + 10), 2);
    site.restart(0);
    assert_eq!(site.turn(0, 7, LONG + 20), 2);
    site.relays[0].lose(1, &[]);
    site.relays[0].join(3, &["m"], 4);
    report(&mut site.relays[0], 3, &[(7, LONG)], 0);
    assert_eq!(site.turn(0, 7, LONG + 30), 2, "worker 3 remembers an earlier turn");
}

#[test]
fn remembered_home_replaces_only_shorter_one() {
    let mut p = relay();
    report(&mut p, 2, &[(7, LONG)], 0);
    report(&mut p, 1, &[(7, LONG - 1)], 0);
    assert_eq!(turn(&mut p, 1, 7, LONG), 2, "worker 1 had an earlier turn");
    p.complete(1);
    p.lose(1, &[]);
    p.join(3, &["m"], 4);
    report(&mut p, 3, &[(7, LONG + 1)], 0);
    assert_eq!(turn(&mut p, 2, 7, LONG + 2), 3, "worker 3 had a later turn");
}

/// Each report after the first is on requests that have just come, and a conversation may begin again or be shortened.
#[test]
fn report_after_first_replaces_longer_home() {
    let mut p = relay();
    report(&mut p, 2, &[(7, LONG)], 0);
    report(&mut p, 1, &[], 0);
    report(&mut p, 1, &[(7, LONG - 1)], 0);
    assert_eq!(turn(&mut p, 1, 7, LONG), 1);
}

#[test]
fn report_after_full_one_keeps_longer_home() {
    let mut p = relay();
    report(&mut p, 2, &[(7, LONG)], 0);
    report(&mut p, 1, &[(8, LONG); MAX_HOMES_PER_MESSAGE], 0);
    report(&mut p, 1, &[(7, LONG - 1)], 0);
    assert_eq!(turn(&mut p, 1, 7, LONG), 2, "worker 1 remembers more than one report holds");
}

#[test]
fn report_replaces_home_at_lost_worker() {
    let mut p = relay();
    report(&mut p, 2, &[(7, 2 * LONG)], 0);
    p.lose(2, &[]);
    report(&mut p, 1, &[(7, LONG)], 0);
    p.join(3, &["m"], 4);
    p.submit(1, "m");
    assert_eq!(turn(&mut p, 2, 7, LONG), 1);
}

#[test]
fn report_of_lost_worker_is_ignored() {
    let mut p = by_cache();
    for (key, instance) in [(1, "a"), (2, "b")] {
        let mut new = worker(key, &["m"], 4, false);
        new.instance = Some(instance.into());
        p.handle(Event::WorkerJoined(new));
    }
    p.lose(2, &[]);
    report(&mut p, 2, &[(7, LONG)], LONG);
    report(&mut p, 9, &[(8, LONG)], LONG);
    assert_eq!(p.dispatch.homes_len(), 0);
    let mut again = worker(3, &["m"], 4, false);
    again.instance = Some("b".into());
    p.handle(Event::WorkerJoined(again));
    assert_eq!(p.dispatch.worker(WorkerKey(3)).map(|worker| worker.backlog), Some(0));
    report(&mut p, 2, &[(7, LONG)], LONG);
    assert_eq!(p.dispatch.homes_len(), 0, "its process has a new connection");
}

#[test]
fn reported_homes_stay_within_limit() {
    let mut p = relay();
    let most = settings().max_homes;
    for part in 0..20 {
        let homes: Vec<_> = (0..1000).map(|number| (part * 1000 + number, LONG)).collect();
        report(&mut p, 1 + part % 2, &homes, 0);
        assert!(p.dispatch.homes_len() <= most, "{}", p.dispatch.homes_len());
    }
    assert!(p.dispatch.homes_len() >= most / 2);
}

/// A worker may report any number.
#[test]
fn largest_reported_numbers_are_accepted() {
    let mut p = relay();
    for worker in WORKERS {
        report(&mut p, worker, &[(worker, u64::MAX)], u64::MAX);
    }
    assert_eq!([turn(&mut p, 1, 1, LONG), turn(&mut p, 2, 2, LONG), turn(&mut p, 3, 3, LONG)], [1, 2, 1]);
    report(&mut p, 2, &[], 0);
    assert_eq!(turn(&mut p, 4, 1, LONG), 2, "the home has the largest backlog");
}

/// Two multiplexers that advertise `m`.
fn two_multiplexers() -> Provider {
    let mut p = by_cache();
    for worker in WORKERS {
        p.join_slots(worker, &["m", "n"], vec![empty(&["m", "n"])]);
    }
    p
}

/// Opens `m` at both. Without a home, worker 1 is the first.
fn open_m(p: &mut Provider) {
    for worker in WORKERS {
        p.slots(worker, vec![idle(&["m", "n"], 0)]);
        p.gates(worker, &[("m", 4)]);
    }
}

#[test]
fn home_reported_before_first_gate_is_kept() {
    let mut p = two_multiplexers();
    report(&mut p, 2, &[(7, LONG)], 0);
    open_m(&mut p);
    assert_eq!(turn(&mut p, 1, 7, LONG), 2);
}

#[test]
fn home_reported_before_swap_is_void() {
    for (conversation, to) in [(7, 1), (8, 1), (9, 2)] {
        let mut p = two_multiplexers();
        open_m(&mut p);
        report(&mut p, 2, &[(7, LONG)], 0);
        p.gates(2, &[("n", 4)]);
        report(&mut p, 2, &[(8, LONG)], 0);
        p.gates(2, &[("m", 4)]);
        report(&mut p, 2, &[(9, LONG)], 0);
        assert_eq!(turn(&mut p, 1, conversation, LONG), to, "{conversation}");
    }
}
