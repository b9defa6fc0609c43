//! Orders to multiplexers: load, unload, pin and unpin a model. The worker alone decides which models are loaded, and
//! may reject an order.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use modelrelay_protocol::message::Command;
use serde_json::{Map, Value, json};

use super::{accepted, find, no_worker};
use crate::http::body::read_small;
use crate::http::problem::{problem, problem_in};
use crate::login::actor::AuditDetail;
use crate::provider::Provider;
use crate::provider::operations::OperationProgress;
use crate::provider::worker::link::WorkerLink;
use crate::state::Relay;

/// The largest body of an order, which is small.
const MAX_BODY_BYTES: usize = 64 << 10;

/// The `Retry-After` if a thousand orders are pending: a swap takes seconds to minutes.
const TRY_AGAIN_SECS: &str = "10";

const COMMANDS: [&str; 4] = ["load", "unload", "pin", "unpin"];

const MODES: [&str; 2] = ["drain", "now"];

/// A field of an order that cannot be executed, and the reason.
struct InvalidField(&'static str, String);

/// `POST /admin/workers/{id}/command`
pub(super) async fn command(State(relay): State<Arc<Relay>>, Path(id): Path<String>, body: Body) -> Response {
    let Some((provider, link)) = find(&relay, &id) else { return no_worker() };
    if !link.info.slots1 {
        let name = &link.info.name;
        let message = format!("worker {name} has no multiplexer and cannot load or unload models");
        return problem(StatusCode::CONFLICT, "no_multiplexer", message);
    }
    let fields = match read(body).await {
        Ok(fields) => fields,
        Err(why) => return problem(StatusCode::BAD_REQUEST, "invalid_json", why),
    };
    let order = match Order::new(&fields, &provider, &link) {
        Ok(order) => order,
        Err(InvalidField(field, why)) => {
            return problem_in(StatusCode::BAD_REQUEST, "invalid_command", why, Some(field));
        }
    };
    let Some(op_id) = relay.shared.operations.begin(link.info.key, Instant::now()) else {
        let message = "too many pending commands; try again later";
        let again = [(http::header::RETRY_AFTER, TRY_AGAIN_SECS)];
        return (again, problem(StatusCode::TOO_MANY_REQUESTS, "too_many_operations", message)).into_response();
    };
    let detail = order.in_words(&op_id);
    provider.command(&link, order.named(&op_id));
    let mut response = accepted(json!({ "op_id": &*op_id }));
    response.extensions_mut().insert(AuditDetail { subject: None, detail: Some(detail) });
    response
}

/// `GET /admin/ops/{id}`
pub(super) async fn operation(State(relay): State<Arc<Relay>>, Path(id): Path<String>) -> Response {
    let Some(progress) = relay.shared.operations.progress(&id, Instant::now()) else {
        return problem(StatusCode::NOT_FOUND, "not_found", "no operation has this id");
    };
    let body = match progress {
        OperationProgress::Running => json!({ "done": false, "ok": false }),
        OperationProgress::Done => json!({ "done": true, "ok": true }),
        OperationProgress::Failed(error) => json!({ "done": true, "ok": false, "error": error }),
    };
    Json(body).into_response()
}

async fn read(body: Body) -> Result<Map<String, Value>, String> {
    let body = read_small(body, MAX_BODY_BYTES).await;
    let body = body.ok_or_else(|| "the body cannot be read or exceeds 64 KiB".to_owned())?;
    match serde_json::from_slice(&body) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err("the body is not a JSON object".to_owned()),
        Err(error) => Err(format!("the body is not valid JSON: {error}")),
    }
}

/// An order that the worker can execute.
struct Order {
    command: String,
    model: String,
    slot: Option<String>,
    mode: String,
}

impl Order {
    fn new(fields: &Map<String, Value>, provider: &Provider, link: &WorkerLink) -> Result<Self, InvalidField> {
        let command = one_of(fields, "command", &COMMANDS)?
            .ok_or_else(|| InvalidField("command", must_be("command", &COMMANDS)))?;
        let model = text(fields, "model")?.filter(|model| !model.is_empty());
        let model = model.ok_or_else(|| InvalidField("model", "model must name a model of the worker".to_owned()))?;
        if !provider.worker_has_model(link, model) {
            let shown: String = model.chars().take(256).collect();
            return Err(InvalidField("model", format!("model {shown} is not advertised by worker {}", link.info.name)));
        }
        let slot = text(fields, "slot")?;
        if let Some(slot) = slot.filter(|slot| !link.slots().0.iter().any(|known| known.id == **slot)) {
            let shown: String = slot.chars().take(128).collect();
            return Err(InvalidField("slot", format!("worker {} has no slot {shown}", link.info.name)));
        }
        let mode = one_of(fields, "mode", &MODES)?.unwrap_or("drain");
        Ok(Self {
            command: command.to_owned(),
            model: model.to_owned(),
            slot: slot.map(str::to_owned),
            mode: mode.to_owned(),
        })
    }

    /// The description for the audit log. It contains only names that the relay knows.
    fn in_words(&self, op_id: &str) -> String {
        let Self { command, model, slot, mode } = self;
        let slot = slot.as_ref().map(|slot| format!(" slot={slot}")).unwrap_or_default();
        format!("{command} model={model}{slot} mode={mode} op_id={op_id}")
    }

    fn named(self, op_id: &str) -> Command {
        let Self { command, model, slot, mode } = self;
        Command { op_id: op_id.to_owned(), command, model, slot, mode: Some(mode) }
    }
}

/// A field that is a string, absent or null.
fn text<'a>(fields: &'a Map<String, Value>, field: &'static str) -> Result<Option<&'a str>, InvalidField> {
    match fields.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(InvalidField(field, format!("{field} must be a string"))),
    }
}

fn one_of<'a>(
    fields: &'a Map<String, Value>,
    field: &'static str,
    known: &[&str],
) -> Result<Option<&'a str>, InvalidField> {
    match text(fields, field)? {
        Some(text) if !known.contains(&text) => Err(InvalidField(field, must_be(field, known))),
        other => Ok(other),
    }
}

fn must_be(field: &str, known: &[&str]) -> String {
    format!("{field} must be one of {}", known.join(", "))
}
