//! Changes are reported, and only changes.

use std::sync::Arc;

use modelrelay_protocol::message::SlotState;

use super::harness::{OLD, Stage, config};
use crate::Model;
use crate::effect::{Effect, LeaseEnd};
use crate::error::SlotError;
use crate::event::{Arrival, Event, RequestClass, RequestKey};

#[test]
fn snapshot_is_sent_only_when_changed() {
    let mut s = Stage::serving("a", &["a", "b"]);
    let before = s.changes;
    s.handle(Event::Tick);
    assert_eq!(s.changes, before);
    s.arrive(1, "b");
    assert_eq!(s.changes, before + 1);
}

#[test]
fn empty_slot_without_work_is_idle() {
    let mut s = Stage::new(&["a"]);
    s.pass(3.0);
    assert_eq!(s.slot().idle_ms, 3_000);
    s.arrive(1, "a");
    s.fits();
    s.pass(3.0);
    assert_eq!((s.state(), s.slot().idle_ms), (SlotState::Loading, 0));
}

#[test]
fn slot_serves_while_any_lease_is_held() {
    let mut s = Stage::serving("a", &["a"]);
    assert!(!s.machine.is_serving());
    s.arrive(1, "a");
    assert!(s.machine.is_serving());
}

#[test]
fn snapshot_is_sent_when_reload_changes_aliases() {
    let mut s = Stage::serving("a", &["a", "b"]);
    let before = s.changes;
    let mut renamed = config(&["a", "b"]);
    s.handle(Event::ConfigChanged(Box::new(renamed.clone())));
    assert_eq!(s.changes, before);
    renamed.models[0].aliases = vec![Arc::from("alpha")];
    s.handle(Event::ConfigChanged(Box::new(renamed)));
    assert_eq!(s.changes, before + 1);
}

#[test]
fn unknown_model_error_lists_known_models() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    s.handle(Event::ConfigChanged(Box::new(config(&["a", "b"]))));
    let arrival = Arrival {
        relay: OLD,
        request: RequestKey(1),
        model: Model::from("d"),
        at: s.at(s.now),
        class: RequestClass::Normal,
    };
    let effects = s.machine.handle(Event::Arrived(arrival), s.at(s.now));
    let error =
        effects.into_iter().find_map(|effect| if let Effect::Fail { error, .. } = effect { Some(error) } else { None });
    let known = vec![Model::from("a"), Model::from("b")];
    assert_eq!(error, Some(SlotError::UnknownModel { model: "d".into(), known }));
}

#[test]
fn ended_lease_reports_error_unless_relay_is_lost() {
    assert_eq!(LeaseEnd::Swap.error(), Some(SlotError::Severed));
    assert_eq!(LeaseEnd::BackendLost.error(), Some(SlotError::BackendLost));
    assert_eq!(LeaseEnd::Shutdown.error(), Some(SlotError::Draining));
    assert_eq!(LeaseEnd::RelayLost.error(), None);
}
