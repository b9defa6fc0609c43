//! What the relay says.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{CancelReason, Credit, MessageError, Parsed, is_false, read, type_of};

/// A message from relay to worker.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RelayToWorker {
    /// Confirms a registration.
    RegisterAck(RegisterAck),
    /// Dispatches a request.
    Request(Request),
    /// Ends a request.
    Cancel(Cancel),
    /// Heartbeat.
    Ping(Ping),
    /// Begins a drain, or confirms one.
    GracefulShutdown(GracefulShutdown),
    /// Asks for the models anew.
    ModelsRefresh(ModelsRefresh),
    /// How many relays there are (`core1`).
    Relays(Relays),
    /// More of a response body may be sent (`core1`).
    Credit(Credit),
    /// What waits for this worker (`core1`).
    Demand(Demand),
    /// An admin's order to a multiplexer (`slots1`).
    Command(Command),
}

impl RelayToWorker {
    /// Reads a text message.
    pub fn parse(text: &str) -> Result<Parsed<Self>, MessageError> {
        let kind = type_of(text)?;
        let message = match kind.as_ref() {
            "register_ack" => Self::RegisterAck(read(text)?),
            "request" => Self::Request(read(text)?),
            "cancel" => Self::Cancel(read(text)?),
            "ping" => Self::Ping(read(text)?),
            "graceful_shutdown" => Self::GracefulShutdown(read(text)?),
            "models_refresh" => Self::ModelsRefresh(read(text)?),
            "relays" => Self::Relays(read(text)?),
            "credit" => Self::Credit(read(text)?),
            "demand" => Self::Demand(read(text)?),
            "command" => Self::Command(read(text)?),
            _ => return Ok(Parsed::Unknown(kind.into_owned())),
        };
        Ok(Parsed::Known(message))
    }
}

/// Confirms a registration: what the relay accepted, and what may be used on this link.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RegisterAck {
    /// The worker's id at this relay.
    pub worker_id: String,
    /// The models that were accepted.
    #[serde(default)]
    pub models: Vec<String>,
    /// What was changed, for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// The version, echoed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol_version: Option<String>,
    /// Random per relay process (`core1`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay_id: Option<String>,
    /// How many relays a worker should reach (`core1`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay_count: Option<u32>,
    /// What both sides have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub capabilities: Vec<String>,
    /// The relay's bounds (`core1`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<RelayLimits>,
    /// The worker has a live link to this relay already; this one will be closed.
    #[serde(default, skip_serializing_if = "is_false")]
    pub duplicate: bool,
}

/// Bounds that the relay tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RelayLimits {
    /// A request body at most.
    pub max_request_bytes: u64,
    /// What the worker may send of each answer before it is given more.
    pub stream_window_bytes: u64,
    /// Between heartbeats.
    pub heartbeat_ms: u64,
    /// How long a request may wait for a model that nobody serves yet.
    #[serde(default)]
    pub cold_timeout_ms: u64,
}

/// Dispatches a request.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// New for each attempt.
    pub request_id: String,
    /// The model.
    #[serde(default)]
    pub model: String,
    /// Path and query.
    pub endpoint_path: String,
    /// Whether the client asked for a stream.
    #[serde(default)]
    pub is_streaming: bool,
    /// The body, for peers that know only the seeds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// Headers for the backend; repeats joined with `, `.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// The stream of this request's pieces (`core1`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<u32>,
    /// Absent: POST.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Bytes of the body that follows in pieces (`core1`: always there).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_length: Option<u64>,
    /// A window for the answer that differs from the link's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
}

/// Ends a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cancel {
    /// Which.
    pub request_id: String,
    /// Why.
    pub reason: CancelReason,
    /// More, for the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// Heartbeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ping {
    /// The relay's clock, echoed by the worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timestamp_unix_ms: Option<u64>,
}

/// Begins a drain, or is the barrier that confirms the worker's own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GracefulShutdown {
    /// See the constants; any other, or none: finish, close, dial again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How long running requests may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_timeout_secs: Option<u64>,
}

impl GracefulShutdown {
    /// The relay's barrier after a worker's `drain`: no `request` follows.
    pub const DRAIN: &str = "drain";
    /// An admin's order to the whole worker: finish and stay away.
    pub const WORKER_DRAIN: &str = "worker_drain";
    /// The worker's newer link took this one's place.
    pub const SUCCEEDED: &str = "succeeded";
    /// The relay is ending.
    pub const RELAY_SHUTDOWN: &str = "relay_shutdown";
}

/// Asks for the models anew.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelsRefresh {
    /// Why, for the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// How many relays a worker should reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relays {
    /// Replicas.
    pub relay_count: u32,
}

/// The relay's queued requests that this worker could be sent: complete, the state after all `request`s before it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Demand {
    /// One entry a model that has waiting requests; a model not listed has none.
    #[serde(default)]
    pub models: Vec<ModelDemand>,
}

/// What waits for one model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelDemand {
    /// The model.
    pub id: String,
    /// Requests.
    pub waiting: u32,
    /// Age of the oldest.
    #[serde(default)]
    pub oldest_ms: u64,
    /// Sum of their ages.
    #[serde(default)]
    pub sum_ms: u64,
}

/// An admin's order to a multiplexer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// Names the answer.
    pub op_id: String,
    /// What to do; an unknown command is answered with an error.
    pub command: String,
    /// With which model.
    pub model: String,
    /// In which slot, where it matters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<String>,
    /// `drain` (the default) or `now`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
}

/// Slots of one resident model that this relay may use (`slots1`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelGrant {
    /// The model.
    pub id: String,
    /// Requests of this relay that may run at once.
    pub slots: u32,
    /// Requests that run for others.
    #[serde(default)]
    pub others: u32,
    /// All that the model takes.
    #[serde(default)]
    pub capacity: u32,
}
