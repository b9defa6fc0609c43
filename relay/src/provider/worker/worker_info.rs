//! The fixed properties of a connected worker.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use modelrelay_protocol::location::Location;

use crate::dispatch::WorkerKey;
use crate::settings::worker_credential::Credential;

/// The properties of a worker that do not change while it is connected.
pub struct WorkerInfo {
    /// Its connection, for the core.
    pub key: WorkerKey,
    /// Its public id, also in the admin API.
    pub id: Arc<str>,
    /// Its provider.
    pub provider: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// Its program's version.
    pub version: Option<String>,
    /// The id of its process.
    pub instance: Option<Arc<str>>,
    /// Its WorkerPool.
    pub pool: Option<String>,
    /// Its zone and cluster.
    pub location: Location,
    /// The address from which it connected.
    pub address: IpAddr,
    /// True if it supports frames, credits, grants and drain.
    pub core1: bool,
    /// True if it has a multiplexer.
    pub slots1: bool,
    /// True if it accepts keys of conversations, and reports those of other relays.
    pub homes1: bool,
    /// The credential that admitted it.
    pub credential: Credential,
    /// The bytes of a request body that may be sent before it returns credit.
    pub request_window: u64,
    /// The time from its authentication to its registration: hardly longer than a round trip.
    pub round_trip: Duration,
    /// The maximum of unread bytes of a response.
    pub max_unread_bytes: u64,
    /// The time when it joined.
    pub connected_at: SystemTime,
}
