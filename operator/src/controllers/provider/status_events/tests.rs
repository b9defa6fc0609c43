use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::*;
use crate::resources::conditions::{Wanted, merge};

fn conditions(wanted: &[Wanted]) -> Vec<Condition> {
    merge(&[], wanted, Some(1), &Time(Timestamp::UNIX_EPOCH))
}

fn events_between(before: &[Wanted], after: &[Wanted]) -> Vec<(bool, String)> {
    let told = changes(&conditions(before), &conditions(after));
    told.into_iter().map(|told| (told.is_warning, told.reason)).collect()
}

#[test]
fn only_changes_cause_events() {
    let ready = [Wanted::new(READY, true, reasons::SERVING, "")];
    assert_eq!(events_between(&[], &ready), [(false, "Ready".to_owned())]);
    assert_eq!(events_between(&ready, &ready), []);
}

#[test]
fn disabled_provider_causes_no_warning() {
    let ready = [Wanted::new(READY, true, reasons::SERVING, "")];
    let off = [Wanted::new(READY, false, reasons::DISABLED, "")];
    let lost = [Wanted::new(READY, false, reasons::NO_RELAY_READY, "")];
    assert_eq!(events_between(&ready, &off), [(false, "NotReady".to_owned())]);
    assert_eq!(events_between(&ready, &lost), [(true, "NotReady".to_owned())]);
    assert_eq!(events_between(&[], &lost), []);
}

#[test]
fn stall_is_reported_once_per_reason() {
    let taken = [Wanted::new(STALLED, true, reasons::NAME_TAKEN, "")];
    let invalid = [Wanted::new(STALLED, true, reasons::INVALID_SPEC, "")];
    assert_eq!(events_between(&[], &taken), [(true, "NameTaken".to_owned())]);
    assert_eq!(events_between(&taken, &taken), []);
    assert_eq!(events_between(&taken, &invalid), [(true, "InvalidSpec".to_owned())]);
}

#[test]
fn applied_and_refused_configurations_are_reported() {
    let waiting = [Wanted::new(PROGRAMMED, false, reasons::WAITING_FOR_RELAYS, "")];
    let applied = [Wanted::new(PROGRAMMED, true, reasons::CONFIGURATION_APPLIED, "")];
    let refused = [Wanted::new(PROGRAMMED, false, reasons::CONFIGURATION_REFUSED, "")];
    assert_eq!(events_between(&waiting, &applied), [(false, "ConfigurationApplied".to_owned())]);
    assert_eq!(events_between(&waiting, &refused), [(true, "ConfigurationRefused".to_owned())]);
    assert_eq!(events_between(&applied, &waiting), []);
}
