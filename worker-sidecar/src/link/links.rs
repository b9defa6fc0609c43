//! The live links of a worker.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::{Link, LinkId};

/// The live links.
#[derive(Debug)]
pub struct Links {
    map: Mutex<BTreeMap<LinkId, Arc<Link>>>,
    changed: watch::Sender<()>,
    /// Held while a link is registered, by dials that must know of each other.
    registering: tokio::sync::Mutex<()>,
}

impl Default for Links {
    fn default() -> Self {
        Self { map: Mutex::default(), changed: watch::channel(()).0, registering: tokio::sync::Mutex::default() }
    }
}

impl Links {
    /// Returns all links.
    pub fn all(&self) -> Vec<Arc<Link>> {
        self.lock().values().map(Arc::clone).collect()
    }

    /// Returns the link with this id.
    pub fn find(&self, id: LinkId) -> Option<Arc<Link>> {
        self.lock().get(&id).map(Arc::clone)
    }

    /// Waits until no other link is being registered.
    pub async fn register_turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.registering.lock().await
    }

    /// Returns the ids of the relays that need no other link: not those where a link only finishes its requests, nor
    /// that of `older`, which is about to be replaced.
    pub fn connected_relay_ids(&self, older: Option<&Link>) -> Vec<String> {
        let links = self.lock();
        let stays = |link: &&Arc<Link>| !link.has_successor() && older.is_none_or(|older| older.id != link.id);
        links.values().filter(stays).filter_map(|link| link.relay_id.clone()).collect()
    }

    /// Returns the number of requests that are not complete.
    pub fn unanswered(&self) -> usize {
        self.all().iter().map(|link| link.unanswered()).sum()
    }

    /// Waits until no link leads to that relay.
    pub async fn wait_without(&self, relay_id: &str) {
        let mut changed = self.changed.subscribe();
        let leads_there = || self.lock().values().any(|link| link.relay_id.as_deref() == Some(relay_id));
        let _ = changed.wait_for(|()| !leads_there()).await;
    }

    /// Adds a link.
    pub fn insert(&self, link: &Arc<Link>) {
        self.lock().insert(link.id, Arc::clone(link));
        self.changed.send_replace(());
    }

    /// Removes a link.
    pub fn remove(&self, id: LinkId) {
        self.lock().remove(&id);
        self.changed.send_replace(());
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<LinkId, Arc<Link>>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use modelrelay_protocol::message::RegisterAck;
    use modelrelay_protocol::secret::Secret;
    use modelrelay_protocol::version::{Capabilities, Capability};

    use super::*;
    use crate::settings::Credential;

    fn link(relay_id: &str) -> Arc<Link> {
        let core1 = Capabilities::new([Capability::Core1]);
        let ack = RegisterAck { relay_id: Some(relay_id.to_owned()), ..RegisterAck::default() };
        Link::new("test".into(), &ack, &core1, Credential::Secret(Secret::new("secret")))
    }

    #[test]
    fn relay_with_only_finishing_link_needs_another() {
        let links = Links::default();
        let (one, two) = (link("one"), link("two"));
        links.insert(&one);
        links.insert(&two);
        assert_eq!(links.connected_relay_ids(None), ["one", "two"]);
        assert_eq!(links.connected_relay_ids(Some(&one)), ["two"]);
        one.succeed();
        assert_eq!(links.connected_relay_ids(None), ["two"]);
        let newer = link("one");
        links.insert(&newer);
        assert_eq!(links.connected_relay_ids(None), ["two", "one"]);
    }
}
