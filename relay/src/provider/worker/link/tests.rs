use std::net::IpAddr;

use super::*;
use crate::dispatch::WorkerKey;
use crate::net::budget::Budget;

fn link() -> Arc<WorkerLink> {
    let info = WorkerInfo {
        key: WorkerKey(1),
        id: "w".into(),
        provider: "p".into(),
        name: "box".into(),
        version: None,
        instance: None,
        pool: None,
        location: modelrelay_protocol::location::Location::default(),
        address: IpAddr::from([127, 0, 0, 1]),
        core1: true,
        slots1: false,
        homes1: false,
        credential: crate::settings::worker_credential::Credential::Secret([0; 32]),
        request_window: 10,
        round_trip: Duration::from_millis(1),
        max_unread_bytes: 1 << 20,
        connected_at: SystemTime::now(),
    };
    WorkerLink::new(info, vec![], None)
}

fn record() -> Arc<RequestRecord> {
    RequestRecord::sample(RequestKey(1), b"0123456789abcdef", Budget::new(1 << 20))
}

#[test]
fn released_link_writes_no_reassigned_requests() {
    let unwritten = link();
    unwritten.send(&record(), 1, Class::Normal);
    assert_eq!(unwritten.release_all().len(), 1);
    assert!(matches!(unwritten.next_output(), Output::Nothing));

    let half_written = link();
    half_written.send(&record(), 1, Class::Normal);
    assert!(matches!(half_written.next_output(), Output::Frame(Frame::Text(_))));
    half_written.release_all();
    assert!(matches!(half_written.next_output(), Output::Nothing));
}

#[test]
fn idle_drained_worker_is_closed_by_closing_drain() {
    let link = link();
    let close = Close { code: 1000, reason: "x" };
    link.begin_drain("drain", None, None);
    link.handle_drained();
    assert!(matches!(link.next_output(), Output::Frame(_)) && matches!(link.next_output(), Output::Nothing));
    link.begin_drain("provider_deleted", None, Some(close));
    assert!(matches!(link.next_output(), Output::Frame(_)));
    assert!(matches!(link.next_output(), Output::Close(closing) if closing == close));
}

#[test]
fn requested_drain_time_applies_only_to_own_drain() {
    let (usual, requested) = (Duration::from_secs(30), Duration::from_secs(600));
    let lasts = |link: &WorkerLink| Some(link.drain_deadline(usual)? - link.draining_since()?);
    let own = link();
    own.allow_drain(requested);
    own.begin_drain("drain", None, None);
    assert_eq!(lasts(&own), Some(requested));
    let ordered = link();
    ordered.begin_drain("secret_removed", None, None);
    ordered.allow_drain(requested);
    assert_eq!(lasts(&ordered), Some(usual));
}
