//! Reads and plans everything for a Provider that another one's relay serves.

use k8s_openapi::jiff::Timestamp;

use super::advance;
use super::cluster_view::ClusterView;
use super::fetch::{self, FetchedSecrets, fetch};
use super::outcome::ProviderFailure;
use crate::context::Context;
use crate::crd::Provider;
use crate::manifests::config::shared::{AppliedConfig, MAX_ENTRY_BYTES, SharedEntry};
use crate::spec::provider::{ValidatedProvider, validate};
use crate::spec::rotation::{Plan, RelaySide, WorkerSide};
use crate::spec::sharing;

/// The values to write, and the configuration that relays mount.
pub(super) struct PreparedSharer {
    pub(super) valid: ValidatedProvider,
    pub(super) plan: Plan,
    entry: SharedEntry,
    applied: Option<AppliedConfig>,
}

impl PreparedSharer {
    /// Returns the hash of the relay's configuration, if it contains exactly this entry.
    pub(super) fn config_hash(&self) -> Option<String> {
        let applied = self.applied.as_ref()?;
        (applied.entry(&self.entry.name) == Some(&self.entry)).then(|| applied.hash.clone())
    }
}

/// Reads and plans everything for a Provider that another one's relay serves. While relays of its own still use its
/// Secret, the plan leaves the worker secrets as they are.
pub(super) async fn prepare(
    ctx: &Context,
    provider: &Provider,
    view: &ClusterView,
) -> Result<PreparedSharer, ProviderFailure> {
    let valid = validate(provider, &view.pools).map_err(|error| ProviderFailure::from(&error))?;
    let fetched = fetch(&ctx.client, provider).await.map_err(|error| ProviderFailure::from(&error))?;
    let applied = fetch::applied_config_of(&ctx.client, &sharing::relay_key(provider)).await;
    let applied = applied.map_err(|error| ProviderFailure::from(&error))?;
    let name = sharing::name_at_relay(provider);
    let now = Timestamp::now();
    let confirmed = is_confirmed(&fetched, applied.as_ref(), &name, view, now);
    let plan = match (&view.own, &fetched.relay) {
        (Some(_), Some(secrets)) => unchanged(secrets, fetched.worker.as_ref(), now),
        _ => advance::plan_worker_secret(provider, &fetched, confirmed, now)?,
    };
    let secrets =
        RelaySide { current: plan.current.clone(), previous: plan.previous.clone(), acted_on: plan.acted_on.clone() };
    let entry = SharedEntry::of(&valid, &name, &secrets);
    match entry.bytes() {
        bytes if bytes > MAX_ENTRY_BYTES => Err(ProviderFailure::too_large(bytes)),
        _ => Ok(PreparedSharer { valid, plan, entry, applied }),
    }
}

fn unchanged(secrets: &RelaySide, worker: Option<&WorkerSide>, now: Timestamp) -> Plan {
    Plan {
        current: secrets.current.clone(),
        previous: secrets.previous.clone(),
        worker: worker.map_or_else(|| secrets.current.clone(), |worker| worker.value.clone()),
        worker_changed_at: worker.and_then(|worker| worker.changed_at).unwrap_or(now),
        acted_on: secrets.acted_on.clone(),
        events: Vec::new(),
        wake_at: None,
    }
}

/// True if every relay admits workers by exactly the secrets that this Provider has published.
fn is_confirmed(
    fetched: &FetchedSecrets,
    applied: Option<&AppliedConfig>,
    name: &str,
    view: &ClusterView,
    now: Timestamp,
) -> bool {
    let (Some(applied), Some(secrets)) = (applied, &fetched.relay) else { return false };
    applied.has_secrets(name, secrets) && view.is_confirmed(&applied.hash, now)
}
