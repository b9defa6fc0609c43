//! The state that every part of the operator shares.

use std::borrow::Cow;
use std::sync::Arc;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

use crate::relays::state::RelayStates;
use crate::resources::namespaces::Namespaces;
use crate::settings::defaults::{Defaults, RelayDefaults, WorkerDefaults};
use crate::telemetry::metrics::Metrics;

/// Shared by controllers, webhook and servers.
pub struct Context {
    /// The client for the API server.
    pub client: Client,
    /// The defaults for fields that resources omit.
    pub defaults: Defaults,
    /// The operator's location.
    pub place: OperatorLocation,
    /// The operator's metrics.
    pub metrics: Metrics,
    /// The states that the relays last reported.
    pub relays: RelayStates,
    /// The namespaces in which the cluster assigns the ids of Pods.
    pub namespaces: Arc<Namespaces>,
    events: Recorder,
}

/// The operator's location, as far as a NetworkPolicy can express it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorLocation {
    /// The operator's namespace.
    pub namespace: String,
    /// True if the operator uses its node's network. Its connections then come from a node's address, which no selector
    /// matches.
    pub host_network: bool,
}

/// The part of the cluster that a set of controllers manages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Span {
    /// Every namespace.
    Cluster,
    /// One namespace.
    Namespace(String),
}

impl OperatorLocation {
    /// Returns the location of a Pod with its own network.
    pub fn in_namespace(namespace: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), host_network: false }
    }
}

impl Span {
    /// Returns the API of a namespaced kind.
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
    /// Creates the context. `instance` is the Pod's name, which appears in Events.
    pub fn new(client: Client, defaults: Defaults, place: OperatorLocation, instance: String) -> Arc<Self> {
        let reporter = Reporter { controller: "modelrelay-operator".to_owned(), instance: Some(instance) };
        let events = Recorder::new(client.clone(), reporter);
        let namespaces = Arc::new(Namespaces::new(client.clone()));
        let (metrics, relays) = (Metrics::new(), RelayStates::default());
        Arc::new(Self { client, defaults, place, metrics, relays, namespaces, events })
    }

    /// Returns the defaults for relays in this namespace.
    pub async fn relay_defaults(&self, namespace: &str) -> Cow<'_, RelayDefaults> {
        let defaults = &self.defaults.relay;
        if defaults.omit_ids || !self.namespaces.assigns_ids(namespace).await {
            return Cow::Borrowed(defaults);
        }
        Cow::Owned(RelayDefaults { omit_ids: true, ..defaults.clone() })
    }

    /// Returns the defaults for workers in this namespace, as far as it is known.
    pub fn worker_defaults(&self, namespace: &str) -> Cow<'_, WorkerDefaults> {
        self.defaults.worker.for_namespace(self.namespaces.assigned_ids(namespace))
    }

    /// Publishes an Event, which `kubectl describe` shows. A lost Event is logged and not retried.
    pub async fn publish(&self, about: &ObjectReference, type_: EventType, reason: &str, action: &str, note: String) {
        const MAX_NOTE_CHARS: usize = 1000;
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note.chars().take(MAX_NOTE_CHARS).collect()),
            action: action.to_owned(),
            secondary: None,
        };
        if let Err(error) = self.events.publish(&event, about).await {
            tracing::debug!(%error, reason, "failed to publish an event");
        }
    }
}
