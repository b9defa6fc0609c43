//! Messages of the relay.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    CancelReason, ConversationKey, Credit, MessageError, Parsed, RequestClass, class, conversation, is_false, is_zero,
    read, type_of,
};

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
    /// Requests the list of models again.
    ModelsRefresh(ModelsRefresh),
    /// The number of relays (`core1`).
    Relays(Relays),
    /// Credit for a response body (`core1`).
    Credit(Credit),
    /// The requests that wait for this worker (`core1`).
    Demand(Demand),
    /// An admin's command to a multiplexer (`slots1`).
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

/// Confirms a registration: the accepted models, and the capabilities of this link.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RegisterAck {
    /// The worker's id at this relay.
    pub worker_id: String,
    /// The accepted models.
    #[serde(default)]
    pub models: Vec<String>,
    /// Human-readable notes on what was changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// The version, echoed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol_version: Option<String>,
    /// Random per relay process (`core1`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay_id: Option<String>,
    /// The number of relays that a worker should connect to (`core1`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay_count: Option<u32>,
    /// The capabilities that both sides support.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub capabilities: Vec<String>,
    /// The relay's bounds (`core1`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<RelayLimits>,
    /// Request headers for backends besides the usual ones, in lower case (`core1`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub request_headers: Vec<String>,
    /// The worker already has a live link to this relay; this one will be closed.
    #[serde(default, skip_serializing_if = "is_false")]
    pub duplicate: bool,
}

/// The relay's bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RelayLimits {
    /// Longest request body.
    pub max_request_bytes: u64,
    /// Bytes of each response that the worker may send before it receives more credit.
    pub stream_window_bytes: u64,
    /// Interval of heartbeats.
    pub heartbeat_ms: u64,
    /// How long a request may wait for a model that no worker serves yet.
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
    /// True if the client requested a stream.
    #[serde(default)]
    pub is_streaming: bool,
    /// The body, for peers that know only the seed messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// Headers for the backend; repeats joined with `, `.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// The stream of this request's pieces (`core1`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<u32>,
    /// POST if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Length of the body that follows in pieces (always present with `core1`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_length: Option<u64>,
    /// A window for the response that differs from the link's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
    /// True if the relay traces the request: the worker then adds `details` to `response_complete` (`core1`).
    #[serde(default, skip_serializing_if = "is_false")]
    pub wants_details: bool,
    /// The key of its conversation, if it has one (`homes1`). Ignored if it is not 16 hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "conversation::if_valid")]
    pub conversation: Option<ConversationKey>,
    /// `interactive`, `normal` (the default) or `batch` (`slots1`).
    #[serde(default, skip_serializing_if = "RequestClass::is_normal", deserialize_with = "class::or_normal")]
    pub class: RequestClass,
}

/// Ends a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cancel {
    /// The request.
    pub request_id: String,
    /// The reason.
    pub reason: CancelReason,
    /// A detail for the log.
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
    /// See the constants. For any other reason, or none, the worker finishes, closes the link and connects again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How long running requests may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_timeout_secs: Option<u64>,
}

impl GracefulShutdown {
    /// The relay's barrier after a worker's `drain`: no `request` follows.
    pub const DRAIN: &str = "drain";
    /// An admin's drain of the whole worker: finish and stay disconnected.
    pub const WORKER_DRAIN: &str = "worker_drain";
    /// The worker's newer link replaced this one.
    pub const SUCCEEDED: &str = "succeeded";
    /// The relay is ending.
    pub const RELAY_SHUTDOWN: &str = "relay_shutdown";
}

/// Requests the list of models again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelsRefresh {
    /// The reason, for the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The number of relays that a worker should connect to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relays {
    /// The number of replicas.
    pub relay_count: u32,
}

/// The relay's queued requests that this worker could serve: the complete state after all `request`s before it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Demand {
    /// One entry per model with waiting requests; a model not listed has none.
    #[serde(default)]
    pub models: Vec<ModelDemand>,
}

/// The waiting requests of one model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelDemand {
    /// The model.
    pub id: String,
    /// The number of requests.
    pub waiting: u32,
    /// Age of the oldest request.
    #[serde(default)]
    pub oldest_ms: u64,
    /// Sum of their ages.
    #[serde(default)]
    pub sum_ms: u64,
    /// The highest class of these requests: `interactive`, `normal` (the default) or `batch` (`slots1`).
    #[serde(default, skip_serializing_if = "RequestClass::is_normal", deserialize_with = "class::or_normal")]
    pub class: RequestClass,
    /// The place of the model in the relay's fair order among those of this message, from 0; models may share a place
    /// (`slots1`).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rank: u32,
}

/// An admin's command to a multiplexer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// Identifies the reply.
    pub op_id: String,
    /// The command; the worker replies to an unknown one with an error.
    pub command: String,
    /// The model of the command.
    pub model: String,
    /// The slot, if it matters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<String>,
    /// `drain` (the default) or `now`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
}

/// The slots of one resident model that this relay may use (`slots1`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelGrant {
    /// The model.
    pub id: String,
    /// The number of requests of this relay that may run at once.
    pub slots: u32,
    /// The number of requests that run for others.
    #[serde(default)]
    pub others: u32,
    /// The number of requests that the model can run at once.
    #[serde(default)]
    pub capacity: u32,
}
