//! Events that users care about: changes, never states.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Resource;
use kube::runtime::events::EventType;

use super::rotation::{MAX_PREVIOUS, News};
use crate::conditions::{PROGRAMMED, READY, RECONCILING, STALLED};
use crate::context::Context;
use crate::crd::{Provider, ProviderStatus};

use super::reasons;

#[cfg(test)]
mod tests;

/// One Event.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    is_warning: bool,
    reason: String,
    action: &'static str,
    note: String,
}

/// Publishes the changes between two statuses, and the result of a rotation step.
pub(super) async fn tell(
    ctx: &Context,
    provider: &Provider,
    before: &ProviderStatus,
    after: &ProviderStatus,
    rotation: &[News],
) {
    let about = provider.object_ref(&());
    let rotated = rotation.iter().map(|news| told_of_rotation(*news, after));
    for told in changes(&before.conditions, &after.conditions).into_iter().chain(rotated) {
        let type_ = if told.is_warning { EventType::Warning } else { EventType::Normal };
        ctx.tell(&about, type_, &told.reason, told.action, told.note).await;
    }
}

fn changes(before: &[Condition], after: &[Condition]) -> Vec<Told> {
    let mut told = Vec::new();
    for condition in after {
        let old = before.iter().find(|old| old.type_ == condition.type_);
        let was = old.map_or("", |old| old.status.as_str());
        let new_reason = old.is_none_or(|old| old.reason != condition.reason);
        let event = |is_warning, reason: &str, action| Told {
            is_warning,
            reason: reason.to_owned(),
            action,
            note: condition.message.clone(),
        };
        match (condition.type_.as_str(), condition.status.as_str()) {
            (READY, "True") if was != "True" => told.push(event(false, "Ready", "Serve")),
            (READY, "False") if was == "True" => {
                let is_wish = [reasons::DISABLED, reasons::SCALED_TO_ZERO].contains(&condition.reason.as_str());
                told.push(event(!is_wish, "NotReady", "Serve"));
            }
            (PROGRAMMED, "True") if was != "True" && condition.reason == reasons::CONFIGURATION_APPLIED => {
                told.push(event(false, reasons::CONFIGURATION_APPLIED, "Configure"));
            }
            (PROGRAMMED, "False") if new_reason && condition.reason == reasons::CONFIGURATION_REFUSED => {
                told.push(event(true, reasons::CONFIGURATION_REFUSED, "Configure"));
            }
            (STALLED, "True") if was != "True" || new_reason => told.push(event(true, &condition.reason, "Reconcile")),
            (RECONCILING, "True")
                if new_reason
                    && [reasons::SECRET_NOT_FOUND, reasons::SECRET_INVALID, reasons::FORBIDDEN]
                        .contains(&condition.reason.as_str()) =>
            {
                told.push(event(true, &condition.reason, "Reconcile"));
            }
            _ => {}
        }
    }
    told
}

fn told_of_rotation(news: News, after: &ProviderStatus) -> Told {
    let secret = after.worker_secret.as_ref();
    let name = secret.map_or("", |secret| secret.name.as_str());
    let (reason, note) = match news {
        News::Started => (
            "SecretRotationStarted",
            "distributing a new worker secret to the relays; workers still use the old one".to_owned(),
        ),
        News::Published => {
            let until = secret.and_then(|secret| secret.previous_until.as_ref());
            let until = until.map(|until| until.0.to_string()).unwrap_or_default();
            ("SecretRotated", format!("Secret {name} has the new value; relays accept the old one until {until}"))
        }
        News::Ended => {
            ("OldSecretEnded", "relays no longer accept the worker secret from before the last rotation".to_owned())
        }
        News::Crowded => {
            let note = format!(
                "more than {MAX_PREVIOUS} old worker secrets: the oldest one expired before its 24 hours had passed"
            );
            ("OldSecretEnded", note)
        }
        News::Revoked => {
            ("SecretRevoked", format!("Secret {name} has a new value; relays no longer accept any old one"))
        }
    };
    let is_warning = news == News::Crowded;
    Told { is_warning, reason: reason.to_owned(), action: "RotateSecret", note }
}
