//! The reports on conversations, to each relay about those of the others.

use std::sync::Arc;
use std::time::Instant;

use modelrelay_protocol::limits::HOMES_INTERVAL;
use modelrelay_protocol::message::WorkerToRelay;

use super::Worker;
use crate::link::Link;

/// Sends reports while something changes. Never returns.
pub(super) async fn report_homes(worker: Arc<Worker>) {
    loop {
        worker.conversations.changed().await;
        while let Some(next) = report_to_all(&worker, Instant::now()) {
            tokio::time::sleep_until(next.into()).await;
        }
    }
}

/// Sends the reports that are due, and returns when the next one may be due.
fn report_to_all(worker: &Worker, now: Instant) -> Option<Instant> {
    worker.conversations.handle_loads(worker.serving.loads());
    let links = worker.links.all();
    links.iter().filter(|link| link.homes1).filter_map(|link| report_to(worker, link, now)).min()
}

fn report_to(worker: &Worker, link: &Link, now: Instant) -> Option<Instant> {
    if link.is_congested() {
        return Some(now + HOMES_INTERVAL);
    }
    let (report, due) = worker.conversations.next_report(link.id, now);
    if let Some(report) = report {
        link.push(&WorkerToRelay::Homes(report));
    }
    due
}
