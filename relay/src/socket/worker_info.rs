//! What is known of a worker and does not change while it is connected.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::Credential;
use crate::dispatch::WorkerKey;

/// What is known of a worker, apart from its state.
pub struct WorkerInfo {
    /// Its connection, for the core.
    pub key: WorkerKey,
    /// Its id for people and the admin API.
    pub id: Arc<str>,
    /// Its provider.
    pub provider: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// Its program's version.
    pub version: Option<String>,
    /// Its process.
    pub instance: Option<Arc<str>>,
    /// Its WorkerPool.
    pub pool: Option<String>,
    /// Where it dialled from.
    pub address: IpAddr,
    /// Whether it speaks frames, credits, grants and drain.
    pub core1: bool,
    /// Whether it has a multiplexer.
    pub slots1: bool,
    /// What admitted it.
    pub credential: Credential,
    /// What it may be sent of a request body before it gives credit.
    pub request_window: u64,
    /// How long its registration took to come, once it was let in: hardly longer than a round trip.
    pub round_trip: Duration,
    /// An answer's unread bytes at most.
    pub max_unread_bytes: u64,
    /// When it joined.
    pub connected_at: SystemTime,
}
