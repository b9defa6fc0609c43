//! Events that users care about: changes, never states.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Resource;
use kube::runtime::events::EventType;

use crate::context::Context;
use crate::crd::{Provider, ProviderStatus};
use crate::resources::conditions::{PROGRAMMED, READY, RECONCILING, STALLED};
use crate::spec::rotation::{MAX_PREVIOUS, RotationEvent};

use super::reasons;

#[cfg(test)]
mod tests;

/// One Event.
#[derive(Debug, PartialEq, Eq)]
struct StatusEvent {
    is_warning: bool,
    reason: String,
    action: &'static str,
    note: String,
}

/// Publishes the changes between two statuses, and the result of a rotation step.
pub(super) async fn publish(
    ctx: &Context,
    provider: &Provider,
    before: &ProviderStatus,
    after: &ProviderStatus,
    rotation: &[RotationEvent],
) {
    let about = provider.object_ref(&());
    let rotated = rotation.iter().map(|event| rotation_event(*event, after));
    for event in changes(&before.conditions, &after.conditions).into_iter().chain(rotated) {
        let type_ = if event.is_warning { EventType::Warning } else { EventType::Normal };
        ctx.publish(&about, type_, &event.reason, event.action, event.note).await;
    }
}

fn changes(before: &[Condition], after: &[Condition]) -> Vec<StatusEvent> {
    let mut events = Vec::new();
    for condition in after {
        let old = before.iter().find(|old| old.type_ == condition.type_);
        let was = old.map_or("", |old| old.status.as_str());
        let new_reason = old.is_none_or(|old| old.reason != condition.reason);
        let event = |is_warning, reason: &str, action| StatusEvent {
            is_warning,
            reason: reason.to_owned(),
            action,
            note: condition.message.clone(),
        };
        match (condition.type_.as_str(), condition.status.as_str()) {
            (READY, "True") if was != "True" => events.push(event(false, "Ready", "Serve")),
            (READY, "False") if was == "True" => {
                let is_wish = [reasons::DISABLED, reasons::SCALED_TO_ZERO].contains(&condition.reason.as_str());
                events.push(event(!is_wish, "NotReady", "Serve"));
            }
            (PROGRAMMED, "True") if was != "True" && condition.reason == reasons::CONFIGURATION_APPLIED => {
                events.push(event(false, reasons::CONFIGURATION_APPLIED, "Configure"));
            }
            (PROGRAMMED, "False") if new_reason && condition.reason == reasons::CONFIGURATION_REFUSED => {
                events.push(event(true, reasons::CONFIGURATION_REFUSED, "Configure"));
            }
            (STALLED, "True") if was != "True" || new_reason => {
                events.push(event(true, &condition.reason, "Reconcile"));
            }
            (RECONCILING, "True")
                if new_reason
                    && [reasons::SECRET_NOT_FOUND, reasons::SECRET_INVALID, reasons::FORBIDDEN]
                        .contains(&condition.reason.as_str()) =>
            {
                events.push(event(true, &condition.reason, "Reconcile"));
            }
            _ => {}
        }
    }
    events
}

fn rotation_event(event: RotationEvent, after: &ProviderStatus) -> StatusEvent {
    let secret = after.worker_secret.as_ref();
    let name = secret.map_or("", |secret| secret.name.as_str());
    let (reason, note) = match event {
        RotationEvent::Started => (
            "SecretRotationStarted",
            "distributing a new worker secret to the relays; workers still use the old one".to_owned(),
        ),
        RotationEvent::Published => {
            let until = secret.and_then(|secret| secret.previous_until.as_ref());
            let until = until.map(|until| until.0.to_string()).unwrap_or_default();
            ("SecretRotated", format!("Secret {name} has the new value; relays accept the old one until {until}"))
        }
        RotationEvent::Ended => {
            ("OldSecretEnded", "relays no longer accept the worker secret from before the last rotation".to_owned())
        }
        RotationEvent::Crowded => {
            let note = format!(
                "more than {MAX_PREVIOUS} old worker secrets: the oldest one expired before its 24 hours had passed"
            );
            ("OldSecretEnded", note)
        }
        RotationEvent::Revoked => {
            ("SecretRevoked", format!("Secret {name} has a new value; relays no longer accept any old one"))
        }
    };
    let is_warning = event == RotationEvent::Crowded;
    StatusEvent { is_warning, reason: reason.to_owned(), action: "RotateSecret", note }
}
