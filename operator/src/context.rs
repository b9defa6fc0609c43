//! What every part of the operator shares.

use std::sync::Arc;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

use crate::defaults::Defaults;
use crate::metrics::Metrics;
use crate::relay_state::RelayStates;

/// Shared by controllers, webhook and servers.
pub struct Context {
    /// The API server.
    pub client: Client,
    /// What resources leave out.
    pub defaults: Defaults,
    /// Where the operator runs.
    pub place: Place,
    /// What is counted.
    pub metrics: Metrics,
    /// What the relays last reported.
    pub relays: RelayStates,
    events: Recorder,
}

/// Where the operator runs, as far as a NetworkPolicy can say it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its namespace.
    pub namespace: String,
    /// Whether it shares its node's network: then it comes from a node's address, which no selector names.
    pub host_network: bool,
}

/// Which part of the cluster a set of controllers looks after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Span {
    /// Every namespace.
    Cluster,
    /// One.
    Namespace(String),
}

impl Place {
    /// As a Pod with a network of its own.
    pub fn in_namespace(namespace: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), host_network: false }
    }
}

impl Span {
    /// The API of a namespaced kind.
    pub fn api<K>(&self, client: &Client) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + DeserializeOwned,
    {
        match self {
            Self::Cluster => Api::all(client.clone()),
            Self::Namespace(namespace) => Api::namespaced(client.clone(), namespace),
        }
    }
}

impl Context {
    /// `instance` is the Pod's name, said in Events.
    pub fn new(client: Client, defaults: Defaults, place: Place, instance: String) -> Arc<Self> {
        let reporter = Reporter { controller: "modelrelay-operator".to_owned(), instance: Some(instance) };
        let events = Recorder::new(client.clone(), reporter);
        Arc::new(Self { client, defaults, place, metrics: Metrics::new(), relays: RelayStates::default(), events })
    }

    /// Tells whoever asks `kubectl describe` what happened. A lost Event is not worth a retry, but a line.
    pub async fn tell(&self, about: &ObjectReference, type_: EventType, reason: &str, action: &str, note: String) {
        const MAX_NOTE_CHARS: usize = 1000;
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note.chars().take(MAX_NOTE_CHARS).collect()),
            action: action.to_owned(),
            secondary: None,
        };
        if let Err(error) = self.events.publish(&event, about).await {
            tracing::debug!(%error, reason, "an event could not be written");
        }
    }
}
