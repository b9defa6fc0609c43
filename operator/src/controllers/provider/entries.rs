//! The entries of other Providers in the configuration of a relay.

use kube::Client;

use super::cluster_view::ClusterView;
use super::fetch;
use crate::manifests::config::shared::{AppliedConfig, MAX_ENTRY_BYTES, SharedEntry};
use crate::spec::provider::validate;
use crate::spec::sharing;

/// The entries of the Providers that refer to a relay.
pub(super) struct Entries {
    pub(super) entries: Vec<SharedEntry>,
    /// True if the secrets of one could not be read. Its previous entry is kept.
    pub(super) is_incomplete: bool,
}

/// Returns the entries. A Provider with an invalid spec, or that cannot be parsed, keeps its previous entry. One
/// without secrets gets none: it requests a pass of the relay's owner as soon as it has written them.
pub(super) async fn entries(client: &Client, view: &ClusterView, applied: Option<&AppliedConfig>) -> Entries {
    let mut found = Entries { entries: Vec::new(), is_incomplete: false };
    for (sharer, pools) in &view.sharers {
        let (key, name) = (sharing::key(sharer), sharing::name_at_relay(sharer));
        let secrets = fetch::sharer_secrets(client, &key).await;
        if let Err(error) = &secrets {
            tracing::warn!(namespace = key.0, provider = key.1, %error, "failed to read the worker secrets of a Provider that shares a relay");
            found.is_incomplete = true;
        }
        let newest = match (validate(sharer, pools), secrets) {
            (Ok(valid), Ok(Some(secrets))) if secrets.is_acceptable() => Some(SharedEntry::of(&valid, &name, &secrets)),
            _ => None,
        };
        let newest = newest.filter(|entry| entry.bytes() <= MAX_ENTRY_BYTES);
        found.entries.extend(newest.or_else(|| applied?.entry(&name).cloned()));
    }
    // An operator that has just started never parsed these.
    let is_missing = |name: &&String| !found.entries.iter().any(|entry| entry.name == **name);
    let kept = view.unreadable.iter().filter(is_missing).filter_map(|name| applied?.entry(name).cloned());
    let kept: Vec<SharedEntry> = kept.collect();
    found.entries.extend(kept);
    found
}
