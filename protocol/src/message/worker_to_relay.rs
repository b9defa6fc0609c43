//! Messages of the worker.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::limits::MAX_CONTROL_BYTES;
use crate::location::Location;
use crate::model_details::DetailsByModel;
use crate::names::Naming;

use super::{ConversationKey, Credit, MessageError, ModelGrant, Parsed, TokenCounts, read, type_of};

/// A message from worker to relay.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum WorkerToRelay {
    /// The first message of a link.
    Register(Register),
    /// Replaces the list of models.
    ModelsUpdate(ModelsUpdate),
    /// A part of a streamed response, from peers that know only the seed messages.
    ResponseChunk(ResponseChunk),
    /// The head of a response (`core1`).
    ResponseStart(ResponseStart),
    /// The end of a response.
    ResponseComplete(ResponseComplete),
    /// The reply to a heartbeat.
    Pong(Pong),
    /// Reports a failed request, or a line for the log.
    Error(WorkerError),
    /// Credit for a request body (`core1`).
    Credit(Credit),
    /// The capacity of the worker that this relay may use (`core1`).
    Grant(Grant),
    /// Announces a drain: the worker accepts no new requests (`core1`).
    Drain(Drain),
    /// The state of the slots (`slots1`).
    Slots(Slots),
    /// The result of an admin's command (`slots1`).
    CommandResult(CommandResult),
    /// Conversations that other relays have sent to this worker (`homes1`).
    Homes(Homes),
}

impl WorkerToRelay {
    /// Parses a text message. One without a body is at most [`MAX_CONTROL_BYTES`] long: a list of empty names needs ten
    /// times as much memory once parsed.
    pub fn parse(text: &str) -> Result<Parsed<Self>, MessageError> {
        let kind = type_of(text)?;
        if text.len() > MAX_CONTROL_BYTES && !matches!(kind.as_ref(), "response_chunk" | "response_complete") {
            return Err(MessageError::too_long());
        }
        let message = match kind.as_ref() {
            "register" => Self::Register(read(text)?),
            "models_update" => Self::ModelsUpdate(read(text)?),
            "response_chunk" => Self::ResponseChunk(read(text)?),
            "response_start" => Self::ResponseStart(read(text)?),
            "response_complete" => Self::ResponseComplete(read(text)?),
            "pong" => Self::Pong(read(text)?),
            "error" => Self::Error(read(text)?),
            "credit" => Self::Credit(read(text)?),
            "grant" => Self::Grant(read(text)?),
            "drain" => Self::Drain(read(text)?),
            "slots" => Self::Slots(read(text)?),
            "command_result" => Self::CommandResult(read(text)?),
            "homes" => Self::Homes(read(text)?),
            _ => return Ok(Parsed::Unknown(kind.into_owned())),
        };
        Ok(Parsed::Known(message))
    }
}

/// The first message of a link.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Register {
    /// Human-readable name.
    #[serde(default)]
    pub worker_name: String,
    /// Exact model names.
    #[serde(default)]
    pub models: Vec<String>,
    /// The number of requests that may run at once.
    #[serde(default)]
    pub max_concurrent: u32,
    /// `"1"`, the published version, or absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol_version: Option<String>,
    /// The number of requests that run already.
    #[serde(default)]
    pub current_load: u32,
    /// 128 random bits per process, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    /// The WorkerPool that the worker belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The zone and cluster of the worker; absent without both. A relay ignores invalid ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<Box<Location>>,
    /// The worker program's version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// `relay_id` of each live link.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub have: Vec<String>,
    /// `relay_id` of each live link that this one replaces: that relay sends no more requests over the older link and
    /// lets it finish, instead of closing it as a leftover of a lost one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub succeeds: Vec<String>,
    /// The capabilities that the worker supports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub capabilities: Vec<String>,
    /// The worker's bounds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<WorkerLimits>,
    /// The state of the slots (`slots1`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<Vec<Slot>>,
    /// Limits and capabilities of the models, by name. Absent if none are known.
    #[serde(default, skip_serializing_if = "DetailsByModel::is_empty")]
    pub model_details: DetailsByModel,
    /// How the backend matches model names: `"ollama"`, or absent if only exactly.
    #[serde(default, skip_serializing_if = "Naming::is_exact")]
    pub naming: Naming,
    /// Models whose requests the backend fails with server errors. Absent if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failing: Vec<String>,
}

/// The worker's bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerLimits {
    /// Bytes of each request body that the relay may send before the worker returns credit.
    pub stream_window_bytes: u64,
}

/// Replaces the list of models.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelsUpdate {
    /// All models, not only the changes.
    #[serde(default)]
    pub models: Vec<String>,
    /// The number of running requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_load: Option<u32>,
    /// Limits and capabilities of the models, in place of the previous ones (`core1`).
    #[serde(default, skip_serializing_if = "DetailsByModel::is_empty")]
    pub model_details: DetailsByModel,
    /// How the backend matches model names, as in `register` (`core1`).
    #[serde(default, skip_serializing_if = "Naming::is_exact")]
    pub naming: Naming,
    /// Models whose requests the backend fails with server errors, in place of the previous ones (`core1`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failing: Vec<String>,
}

/// A part of a streamed response, ready to be written.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseChunk {
    /// The request.
    pub request_id: String,
    /// The part, as text.
    pub chunk: String,
}

/// The head of a response.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseStart {
    /// The request.
    pub request_id: String,
    /// 200–599, forwarded to the client.
    pub status_code: u16,
    /// In order, with repeats.
    #[serde(default)]
    pub headers: Vec<(String, String)>,
    /// Length of the body, if the backend states it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_length: Option<u64>,
}

/// The end of a response. `core1` peers send only token counts and the response's id here.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ResponseComplete {
    /// The request.
    pub request_id: String,
    /// The backend's status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status_code: Option<u16>,
    /// The backend's headers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers: Option<BTreeMap<String, String>>,
    /// The whole body, if the response was not streamed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// Token counts, if the backend reports them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_counts: Option<TokenCounts>,
    /// The id of a Responses response, which later requests may name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_id: Option<String>,
    /// Details for the relay's traces, if its `request` wants them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub details: Option<Box<ResponseDetails>>,
}

/// Details of a response, as the backend reports them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseDetails {
    /// The kind of backend, such as `vllm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// The model that generated the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The id of the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Why each generated text ended, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub finish_reasons: Vec<String>,
}

impl ResponseDetails {
    /// True if nothing is known.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The reply to a heartbeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pong {
    /// The number of running requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_load: Option<u32>,
    /// The ping's timestamp.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timestamp_unix_ms: Option<u64>,
}

/// Reports a failed request, or, without a `request_id`, a line for the log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerError {
    /// The request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// See the constants; an unknown code fails the request with 502.
    #[serde(default)]
    pub code: String,
    /// Human-readable message.
    #[serde(default)]
    pub message: String,
    /// Time after which a retry may succeed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
}

impl WorkerError {
    /// More requests than slots: requeued, no attempt spent.
    pub const AT_CAPACITY: &str = "at_capacity";
    /// The worker is draining: requeued, no attempt spent.
    pub const DRAINING: &str = "draining";
    /// A swap ended the request before anything was sent.
    pub const SEVERED_BY_SWAP: &str = "severed_by_swap";
    /// The backend refused the connection.
    pub const BACKEND_UNREACHABLE: &str = "backend_unreachable";
    /// The backend broke the connection.
    pub const BACKEND_RESET: &str = "backend_reset";
    /// The model does not fit.
    pub const INSUFFICIENT_MEMORY: &str = "insufficient_memory";
    /// The backend does not start.
    pub const BACKEND_UNAVAILABLE: &str = "backend_unavailable";
    /// The slot's memory could not be freed.
    pub const SLOT_QUARANTINED: &str = "slot_quarantined";
    /// The response is larger than the limit.
    pub const RESPONSE_TOO_LARGE: &str = "response_too_large";
    /// The path is not on the worker's allow-list.
    pub const BAD_PATH: &str = "bad_path";
    /// The length of the request body's pieces is wrong.
    pub const BAD_BODY: &str = "bad_body";
}

/// The capacity of the worker that this relay may use. Absolute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The number of requests of this relay that may run at once.
    pub slots: u32,
    /// The number of requests that run for others.
    #[serde(default)]
    pub others: u32,
    /// The number of requests that the worker can run at once.
    #[serde(default)]
    pub capacity: u32,
    /// The number of relays that the worker is linked to.
    #[serde(default)]
    pub links: u32,
    /// One entry per resident model with an open gate (`slots1`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models: Option<Vec<ModelGrant>>,
}

/// Announces a drain: the worker accepts no new requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drain {
    /// The reason, for the log.
    #[serde(default)]
    pub reason: String,
    /// How long running requests may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
}

/// The state of the slots.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Slots {
    /// All slots.
    #[serde(default)]
    pub slots: Vec<Slot>,
}

/// One slot: a unit that holds one model at a time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Slot {
    /// The slot's name.
    pub id: String,
    /// The slot's state.
    #[serde(default)]
    pub state: SlotState,
    /// The resident model.
    #[serde(default)]
    pub resident: Option<String>,
    /// Counter of loads.
    #[serde(default)]
    pub generation: u64,
    /// The model that the slot is going to load.
    #[serde(default)]
    pub target: Option<String>,
    /// Time until the target is ready.
    #[serde(default)]
    pub eta_ms: Option<u64>,
    /// Time in this state.
    #[serde(default)]
    pub since_ms: u64,
    /// Time without a request. 0 means busy, so a slot that has just had its last request reports 1.
    #[serde(default)]
    pub idle_ms: u64,
    /// Number of non-resident models with waiters or demand.
    #[serde(default)]
    pub wanted: u32,
    /// The models that the slot can hold.
    #[serde(default)]
    pub models: Vec<SlotModel>,
}

/// The state of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlotState {
    /// No model is resident.
    Empty,
    /// The resident serves requests.
    Ready,
    /// Waits for running requests before a swap.
    Draining,
    /// Ends the requests that did not finish.
    Severing,
    /// Unloads a model.
    Evicting,
    /// Loads a model.
    Loading,
    /// Loads the former resident again.
    RollingBack,
    /// No model is resident after a recent failure.
    Backoff,
    /// The worker is ending.
    Stopping,
    /// The memory is not provably free. An unknown state is read as this one: no requests are sent there.
    #[default]
    #[serde(other)]
    Quarantined,
}

/// One model of a slot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlotModel {
    /// The model's name.
    pub id: String,
    /// Aliases of the model: requests that use one of them go through the gate of `id` and share its capacity. They are
    /// registered models like any other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// The model's status.
    #[serde(default)]
    pub status: SlotModelStatus,
    /// The number of requests that may run at once.
    #[serde(default)]
    pub capacity: u32,
    /// Duration of loading the model.
    #[serde(default)]
    pub swap_cost_ms: u64,
    /// True if the model is never evicted.
    #[serde(default)]
    pub pinned: bool,
    /// True if the model is not resident and requests wait for it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub wanted: bool,
    /// The code of the failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// The human-readable failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Time until the worker may try again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_ms: Option<u64>,
}

/// The status of a model in a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlotModelStatus {
    /// The model serves requests.
    Resident,
    /// The model sleeps and wakes quickly.
    Sleeping,
    /// The model could not be loaded.
    Failed,
    /// The model is not loaded. An unknown status is read as this one.
    #[default]
    #[serde(other)]
    Unloaded,
}

/// The result of an admin's command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandResult {
    /// The command's id.
    pub op_id: String,
    /// True if the command succeeded.
    pub ok: bool,
    /// The error, if it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Conversations that other relays have sent to this worker, and the prompts that wait there for computation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Homes {
    /// New and changed conversations, the oldest first: each one's key, and the bytes of its last request's body.
    #[serde(default)]
    pub homes: Vec<(ConversationKey, u64)>,
    /// Bytes of other relays' requests of whose responses no byte has come, less those that a former request of the
    /// same conversation had. Absolute.
    #[serde(default)]
    pub backlog: u64,
}
