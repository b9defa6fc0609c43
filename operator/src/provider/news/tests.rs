use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::*;
use crate::conditions::{Wanted, merge};

fn conditions(wanted: &[Wanted]) -> Vec<Condition> {
    merge(&[], wanted, Some(1), &Time(Timestamp::UNIX_EPOCH))
}

fn told(before: &[Wanted], after: &[Wanted]) -> Vec<(bool, String)> {
    let told = changes(&conditions(before), &conditions(after));
    told.into_iter().map(|told| (told.is_warning, told.reason)).collect()
}

#[test]
fn only_changes_are_told() {
    let ready = [Wanted::new(READY, true, reasons::SERVING, "")];
    assert_eq!(told(&[], &ready), [(false, "Ready".to_owned())]);
    assert_eq!(told(&ready, &ready), []);
}

#[test]
fn a_provider_that_is_switched_off_is_no_warning_and_one_that_fails_is() {
    let ready = [Wanted::new(READY, true, reasons::SERVING, "")];
    let off = [Wanted::new(READY, false, reasons::DISABLED, "")];
    let lost = [Wanted::new(READY, false, reasons::NO_RELAY_READY, "")];
    assert_eq!(told(&ready, &off), [(false, "NotReady".to_owned())]);
    assert_eq!(told(&ready, &lost), [(true, "NotReady".to_owned())]);
    assert_eq!(told(&[], &lost), []);
}

#[test]
fn what_stalls_is_told_by_its_reason_and_again_when_the_reason_changes() {
    let taken = [Wanted::new(STALLED, true, reasons::NAME_TAKEN, "")];
    let invalid = [Wanted::new(STALLED, true, reasons::INVALID_SPEC, "")];
    assert_eq!(told(&[], &taken), [(true, "NameTaken".to_owned())]);
    assert_eq!(told(&taken, &taken), []);
    assert_eq!(told(&taken, &invalid), [(true, "InvalidSpec".to_owned())]);
}

#[test]
fn configurations_are_told_when_they_are_applied_and_when_they_are_refused() {
    let waiting = [Wanted::new(PROGRAMMED, false, reasons::WAITING_FOR_RELAYS, "")];
    let applied = [Wanted::new(PROGRAMMED, true, reasons::CONFIGURATION_APPLIED, "")];
    let refused = [Wanted::new(PROGRAMMED, false, reasons::CONFIGURATION_REFUSED, "")];
    assert_eq!(told(&waiting, &applied), [(false, "ConfigurationApplied".to_owned())]);
    assert_eq!(told(&waiting, &refused), [(true, "ConfigurationRefused".to_owned())]);
    assert_eq!(told(&applied, &waiting), []);
}
