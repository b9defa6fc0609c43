use std::time::Duration;

use super::*;

const A: u8 = 1;
const B: u8 = 2;
const OLD: u8 = 3;

/// A table with links to relays A and B, and one to an old relay, which gets no reports.
struct Rig {
    table: HomeTable<u8>,
    now: Instant,
}

impl Rig {
    fn new() -> Self {
        let mut table = HomeTable::default();
        table.attach(A, true);
        table.attach(B, true);
        table.attach(OLD, false);
        table.handle_loads(loads(&[("gpu0", 1, "m"), ("gpu1", 1, "n")]));
        Self { table, now: Instant::now() }
    }

    /// Sends a request for `m`, and returns the bytes that wait for their computation.
    fn request(&mut self, link: u8, key: u64, bytes: u64) -> u64 {
        self.request_for(link, key, "m", bytes)
    }

    fn request_for(&mut self, link: u8, key: u64, model: &str, bytes: u64) -> u64 {
        self.table.handle_request(link, Some((ConversationKey(key), model.into())), bytes)
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
    }

    /// Returns the keys, bytes and backlog of the next report, if one is sent now.
    fn report(&mut self, link: u8) -> Option<(Vec<(u64, u64)>, u64)> {
        let report = self.table.next_report(link, self.now).0?;
        Some((report.homes.iter().map(|(key, bytes)| (key.0, *bytes)).collect(), report.backlog))
    }

    /// Returns the keys of each report until nothing is left.
    fn report_all(&mut self, link: u8) -> Vec<Vec<u64>> {
        let reports = std::iter::from_fn(|| {
            let report = self.report(link)?;
            self.wait(HOMES_INTERVAL);
            Some(report.0.into_iter().map(|(key, _)| key).collect())
        });
        reports.collect()
    }
}

fn loads(all: &[(&str, u64, &str)]) -> ModelLoads {
    all.iter().map(|(slot, number, model)| ((*slot).to_owned(), *number, Some(Arc::from(*model)))).collect()
}

#[test]
fn request_is_reported_to_other_links_only() {
    let mut rig = Rig::new();
    rig.request(A, 1, 100);
    assert_eq!(rig.report(A), None);
    assert_eq!(rig.report(OLD), None);
    assert_eq!(rig.report(B), Some((vec![(1, 100)], 100)));
    rig.wait(HOMES_INTERVAL);
    assert_eq!(rig.report(B), None, "nothing has changed since");
}

#[test]
fn requests_within_interval_share_one_report() {
    let mut rig = Rig::new();
    rig.request(A, 1, 100);
    assert!(rig.report(B).is_some());
    rig.wait(HOMES_INTERVAL / 2);
    rig.request(A, 2, 50);
    rig.request(A, 1, 130);
    let due = Some(rig.now + HOMES_INTERVAL / 2);
    assert_eq!(rig.table.next_report(B, rig.now), (None, due));
    rig.wait(HOMES_INTERVAL / 2);
    assert_eq!(rig.report(B), Some((vec![(2, 50), (1, 130)], 180)));
}

#[test]
fn backlog_excludes_bytes_of_former_request() {
    let mut rig = Rig::new();
    assert_eq!(rig.request(A, 1, 1000), 1000);
    assert_eq!(rig.request(B, 1, 1200), 200);
    assert_eq!(rig.request(B, 1, 900), 0, "the prompt was cut");
    assert_eq!(rig.table.handle_request(OLD, None, 70), 70);
    assert_eq!(rig.report(A), Some((vec![(1, 900)], 270)));
    assert_eq!(rig.report(B), Some((vec![], 1070)), "its own request was the last");
}

#[test]
fn first_byte_reduces_reported_backlog() {
    let mut rig = Rig::new();
    let awaited = rig.request(A, 1, 100);
    assert_eq!(rig.report(B), Some((vec![(1, 100)], 100)));
    rig.table.handle_first_byte(A, awaited);
    rig.wait(HOMES_INTERVAL);
    assert_eq!(rig.report(B), Some((vec![], 0)));
}

#[test]
fn lost_link_leaves_no_backlog() {
    let mut rig = Rig::new();
    let awaited = rig.request(A, 1, 100);
    assert_eq!(rig.report(B), Some((vec![(1, 100)], 100)));
    rig.table.detach(A);
    rig.table.handle_first_byte(A, awaited);
    rig.wait(HOMES_INTERVAL);
    assert_eq!(rig.report(B), Some((vec![], 0)));
}

#[test]
fn new_link_gets_newest_conversations_in_parts() {
    let mut rig = Rig::new();
    let number = MAX_FOR_NEW_LINK as u64 + 10;
    for key in 1..=number {
        rig.request(A, key, 1);
    }
    rig.table.detach(A);
    // The restarted relay, whose conversations these are.
    let again = 4;
    rig.table.attach(again, true);
    let reports = rig.report_all(again);
    assert_eq!(reports.iter().map(Vec::len).collect::<Vec<_>>(), [MAX_HOMES_PER_MESSAGE; 4]);
    assert!(reports.concat().into_iter().eq(11..=number));
}

#[test]
fn oldest_conversation_is_dropped_from_full_table() {
    let mut rig = Rig::new();
    let number = MAX_CONVERSATIONS as u64;
    for key in 1..=number {
        rig.request(A, key, 1);
    }
    rig.request(A, 1, 2);
    rig.request(A, number + 1, 1);
    assert_eq!((rig.table.conversations.len(), rig.table.order.len()), (MAX_CONVERSATIONS, MAX_CONVERSATIONS));
    assert_eq!(rig.request(A, 1, 2), 0, "it was requested again");
    assert_eq!(rig.request(A, 2, 1), 1, "it was the oldest");
}

#[test]
fn swapped_out_model_loses_its_conversations() {
    let mut rig = Rig::new();
    rig.request_for(A, 1, "m", 10);
    rig.request_for(A, 2, "n", 20);
    rig.table.handle_loads(loads(&[("gpu0", 2, "o"), ("gpu1", 1, "n")]));
    assert_eq!(rig.report(B), Some((vec![(2, 20)], 30)));
    assert_eq!(rig.request_for(A, 1, "m", 10), 10);
}

#[test]
fn reloaded_model_loses_its_conversations() {
    let mut rig = Rig::new();
    rig.request_for(A, 1, "m", 10);
    rig.table.handle_loads(loads(&[("gpu0", 3, "m"), ("gpu1", 1, "n")]));
    rig.request_for(A, 3, "m", 10);
    assert_eq!(rig.report_all(B), [[3]]);
}

#[test]
fn restart_of_single_backend_removes_all_conversations() {
    let mut rig = Rig::new();
    let single = |number| ModelLoads::from([(String::new(), number, None)]);
    rig.table.handle_loads(single(1));
    rig.request_for(A, 1, "m", 10);
    rig.request_for(A, 2, "n", 20);
    rig.table.handle_loads(single(2));
    assert_eq!(rig.report(B), Some((vec![], 30)), "only the backlog");
}
