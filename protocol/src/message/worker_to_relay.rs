//! What the worker says.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::limits::MAX_CONTROL_BYTES;
use crate::model_details::DetailsByModel;
use crate::names::Naming;

use super::{Credit, MessageError, ModelGrant, Parsed, TokenCounts, read, type_of};

/// A message from worker to relay.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum WorkerToRelay {
    /// The first message of a link.
    Register(Register),
    /// The models changed.
    ModelsUpdate(ModelsUpdate),
    /// A part of a streamed answer, from peers that know only the seeds.
    ResponseChunk(ResponseChunk),
    /// The head of an answer (`core1`).
    ResponseStart(ResponseStart),
    /// The end of an answer.
    ResponseComplete(ResponseComplete),
    /// Heartbeat's answer.
    Pong(Pong),
    /// A request failed, or something is worth a line in the log.
    Error(WorkerError),
    /// More of a request body may be sent (`core1`).
    Credit(Credit),
    /// How much of the worker this relay may use (`core1`).
    Grant(Grant),
    /// No new requests, please (`core1`).
    Drain(Drain),
    /// What the slots hold (`slots1`).
    Slots(Slots),
    /// An admin's order was carried out, or not (`slots1`).
    CommandResult(CommandResult),
}

impl WorkerToRelay {
    /// Reads a text message. One that holds no body is no longer than [`MAX_CONTROL_BYTES`]: a list of empty names takes ten times
    /// as much memory once it is read.
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
            _ => return Ok(Parsed::Unknown(kind.into_owned())),
        };
        Ok(Parsed::Known(message))
    }
}

/// The first message of a link.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Register {
    /// For people.
    #[serde(default)]
    pub worker_name: String,
    /// Exact model names.
    #[serde(default)]
    pub models: Vec<String>,
    /// Requests at once.
    #[serde(default)]
    pub max_concurrent: u32,
    /// `"1"`, the published one, or absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol_version: Option<String>,
    /// Requests that run already.
    #[serde(default)]
    pub current_load: u32,
    /// 128 random bits per process, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    /// The WorkerPool that the worker belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The worker program's version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// `relay_id` of each live link.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub have: Vec<String>,
    /// `relay_id` of each live link whose place this one is to take: that relay sends nothing more over the older link and
    /// lets it finish, instead of cutting it off as the ghost of a lost one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub succeeds: Vec<String>,
    /// What the worker can do.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub capabilities: Vec<String>,
    /// The worker's bounds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<WorkerLimits>,
    /// What the slots hold (`slots1`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<Vec<Slot>>,
    /// Limits and capabilities of the models, by name. Absent where none are known.
    #[serde(default, skip_serializing_if = "DetailsByModel::is_empty")]
    pub model_details: DetailsByModel,
    /// How the backend matches model names: `"ollama"`, or absent if only exactly.
    #[serde(default, skip_serializing_if = "Naming::is_exact")]
    pub naming: Naming,
    /// Models whose requests the backend fails with server errors. Absent where there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failing: Vec<String>,
}

/// Bounds that the worker tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerLimits {
    /// What the relay may send of each request body before it is given more.
    pub stream_window_bytes: u64,
}

/// The models changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelsUpdate {
    /// All of them, anew.
    #[serde(default)]
    pub models: Vec<String>,
    /// Requests that run.
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

/// A part of a streamed answer, ready to be written.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseChunk {
    /// Of which request.
    pub request_id: String,
    /// The bytes, as far as they are text.
    pub chunk: String,
}

/// The head of an answer.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseStart {
    /// Of which request.
    pub request_id: String,
    /// 200–599: the client's.
    pub status_code: u16,
    /// In order, repeats kept.
    #[serde(default)]
    pub headers: Vec<(String, String)>,
    /// Where the backend said how long its body is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_length: Option<u64>,
}

/// The end of an answer. `core1` peers say nothing here but tokens and the response's id.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ResponseComplete {
    /// Of which request.
    pub request_id: String,
    /// The backend's status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status_code: Option<u16>,
    /// The backend's headers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers: Option<BTreeMap<String, String>>,
    /// The whole body, where the answer was not streamed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// Where the backend counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_counts: Option<TokenCounts>,
    /// The id of a Responses answer, which later requests may name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_id: Option<String>,
}

/// Heartbeat's answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pong {
    /// Requests that run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_load: Option<u32>,
    /// The ping's timestamp.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timestamp_unix_ms: Option<u64>,
}

/// A request failed, or, without a `request_id`, something is worth a line in the log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerError {
    /// Which request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// See the constants; an unknown code fails the request with 502.
    #[serde(default)]
    pub code: String,
    /// For people.
    #[serde(default)]
    pub message: String,
    /// When it may be worth another try.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
}

impl WorkerError {
    /// More requests than slots: back into the queue, no attempt spent.
    pub const AT_CAPACITY: &str = "at_capacity";
    /// The worker is draining: back into the queue, no attempt spent.
    pub const DRAINING: &str = "draining";
    /// A swap ended it before anything was sent.
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
    /// The answer is larger than the limit.
    pub const RESPONSE_TOO_LARGE: &str = "response_too_large";
    /// The path is not on the worker's list.
    pub const BAD_PATH: &str = "bad_path";
    /// The request body's pieces do not add up.
    pub const BAD_BODY: &str = "bad_body";
}

/// How much of the worker this relay may use. Absolute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Requests of this relay that may run at once.
    pub slots: u32,
    /// Requests that run for others.
    #[serde(default)]
    pub others: u32,
    /// All that the worker takes.
    #[serde(default)]
    pub capacity: u32,
    /// Relays that the worker is linked to.
    #[serde(default)]
    pub links: u32,
    /// Per resident model with an open gate (`slots1`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models: Option<Vec<ModelGrant>>,
}

/// No new requests, please.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drain {
    /// Why, for the log.
    #[serde(default)]
    pub reason: String,
    /// How long running requests may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
}

/// What the slots hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Slots {
    /// All of them.
    #[serde(default)]
    pub slots: Vec<Slot>,
}

/// One slot: a unit that holds one model at a time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Slot {
    /// Its name.
    pub id: String,
    /// What it is doing.
    #[serde(default)]
    pub state: SlotState,
    /// The model that it holds.
    #[serde(default)]
    pub resident: Option<String>,
    /// Counts loads.
    #[serde(default)]
    pub generation: u64,
    /// The model that it is going to hold.
    #[serde(default)]
    pub target: Option<String>,
    /// Until the target is ready.
    #[serde(default)]
    pub eta_ms: Option<u64>,
    /// In this state.
    #[serde(default)]
    pub since_ms: u64,
    /// Without a request. 0 is at work, so a slot that had its last request just now says 1.
    #[serde(default)]
    pub idle_ms: u64,
    /// Non-resident models with waiters or demand.
    #[serde(default)]
    pub wanted: u32,
    /// The models it can hold.
    #[serde(default)]
    pub models: Vec<SlotModel>,
}

/// What a slot is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlotState {
    /// Nothing resident.
    Empty,
    /// The resident serves.
    Ready,
    /// Waiting for running requests before a swap.
    Draining,
    /// Ending those that did not finish.
    Severing,
    /// Unloading.
    Evicting,
    /// Loading.
    Loading,
    /// Loading the former resident again.
    RollingBack,
    /// Nothing resident, recent failure.
    Backoff,
    /// The worker is ending.
    Stopping,
    /// Memory not provably free. Also what an unknown state is read as: nothing is sent there.
    #[default]
    #[serde(other)]
    Quarantined,
}

/// One model of a slot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlotModel {
    /// Its name.
    pub id: String,
    /// Further names of it: what is asked for by one of them goes through the gate of `id`, and counts there. They are among
    /// the registered models like any other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// How near it is.
    #[serde(default)]
    pub status: SlotModelStatus,
    /// Requests at once.
    #[serde(default)]
    pub capacity: u32,
    /// What loading it costs.
    #[serde(default)]
    pub swap_cost_ms: u64,
    /// Never evicted.
    #[serde(default)]
    pub pinned: bool,
    /// It is not resident, and somebody waits for it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub wanted: bool,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Why it failed, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Until it may be tried again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_ms: Option<u64>,
}

/// How near a model is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlotModelStatus {
    /// It serves.
    Resident,
    /// It is asleep and quickly woken.
    Sleeping,
    /// It could not be loaded.
    Failed,
    /// It is not loaded. Also what an unknown status is read as.
    #[default]
    #[serde(other)]
    Unloaded,
}

/// An admin's order was carried out, or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandResult {
    /// Which order.
    pub op_id: String,
    /// Whether it was.
    pub ok: bool,
    /// Why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
