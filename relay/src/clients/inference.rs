//! Requests for a backend: reading, routing, submitting and responding.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Method, Request};
use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::paths::{self, Endpoint};

use super::answer::{Answer, respond};
use super::auth::{self, Caller};
use super::backend_headers::{OwnCredentials, backend_headers};
use super::ticket::Ticket;
use super::{browser, intake, models, parse, rewrite, spelling, text_header};
use crate::dispatch::{Allowed, WorkerKey};
use crate::http::body::discard;
use crate::http::respond::Client;
use crate::net::budget::Holder;
use crate::provider::Provider;
use crate::provider::affinity::Origin;
use crate::provider::conversation::{self, Prompt, PromptSpans, ShownIn};
use crate::provider::request::{RequestRecord, RequestTrace, is_free, needs_core1};
use crate::provider::response::ResponsePipe;
use crate::provider::routing::Route;
use crate::state::Relay;
use crate::system::blocking;
use crate::telemetry::metrics::{ClientKind, Outcome};

/// The size of a body from which it is parsed outside of the async threads; parsing this much takes half a millisecond.
pub(super) const LONG_READ_BYTES: usize = 512 << 10;

/// The time after a relay's start in which its workers reconnect: a worker pauses at most ten seconds between two
/// attempts.
const STARTING: Duration = Duration::from_secs(15);

/// How long a request waits during that time for a worker that lists its model, while other workers are connected.
const PATIENCE_WHILE_STARTING: Duration = Duration::from_secs(1);

/// The `Retry-After` of such a request.
const RETRY_WHILE_STARTING: Duration = Duration::from_secs(5);

/// `POST` to a route whose body names the model.
pub async fn by_model(State(relay): State<Arc<Relay>>, request: Request<Body>) -> Response {
    serve(&relay, request, None).await
}

/// `GET /v1/responses/{id}` and `POST /v1/responses/{id}/cancel`. Only the worker that made the response knows it.
pub async fn by_response_id(
    State(relay): State<Arc<Relay>>,
    Path(id): Path<String>,
    request: Request<Body>,
) -> Response {
    serve(&relay, request, Some(&id)).await
}

async fn serve(relay: &Arc<Relay>, request: Request<Body>, response_id: Option<&str>) -> Response {
    count_retry(relay, request.headers());
    let client = Client::of(&request);
    let (parts, mut body) = request.into_parts();
    let (method, path) = (&parts.method, parts.uri.path());
    let begin = |traces| RequestTrace::begin(traces, method, path, &parts.headers, &client.request_id);
    let trace = relay.shared.traces.as_ref().map(begin).map(Arc::new);
    let admitted = admit(relay, &parts).await;
    let prepared = match &admitted {
        Ok(caller) => prepare(relay, caller, (&client, trace.as_ref()), &parts, (&mut body, response_id)).await,
        Err(error) => Err(error.clone()),
    };
    let response = match prepared {
        Ok(ticket) => answer(&client, ticket).await,
        Err(error) => {
            if let Ok(caller) = &admitted {
                caller.count_refused(relay);
            }
            discard(&parts.headers, body);
            let endpoint = paths::endpoint(method.as_str(), path).unwrap_or(Endpoint::Other);
            let outcome = Outcome::of_error(error.kind());
            relay.shared.metrics.unrouted_request_finished(endpoint, outcome, error.status());
            if let Some(trace) = &trace {
                trace.refuse(&error);
            }
            client.refuse(method, &parts.uri, &error)
        }
    };
    browser::share(&relay.shared.config.load(), &parts.headers, response)
}

async fn prepare(
    relay: &Arc<Relay>,
    caller: &Caller,
    (client, trace): (&Client, Option<&Arc<RequestTrace>>),
    parts: &Parts,
    (body, response_id): (&mut Body, Option<&str>),
) -> Result<Ticket, ApiError> {
    let received_at = Instant::now();
    let owner = caller.owner(&parts.headers)?;
    let endpoint = paths::endpoint(parts.method.as_str(), parts.uri.path());
    let is_free = response_id.is_some() || endpoint.is_some_and(is_free);
    let mut lease = caller.lease(relay, is_free)?;
    if response_id.is_some() && endpoint.is_none() {
        return Err(ApiError::new(ErrorKind::NotFound, "invalid response id"));
    }
    let endpoint = endpoint.unwrap_or(Endpoint::Other);
    let mut body = read_body(relay, endpoint, caller.holder(relay, parts), (&parts.headers, body)).await?;
    auth::charge(lease.as_mut().filter(|_| !is_free), endpoint, body.len())?;
    let read_at = Instant::now();
    let Routing { route, allowed, pin, conversation, is_streaming } = match response_id {
        Some(id) => route_by_response_id(relay, caller, parts, id).await?,
        None => route_by_model(relay, caller, (parts, trace), (endpoint, &mut body)).await?,
    };
    let body_bytes = body.len() as u64;
    let is_limited = is_streaming && lease.as_ref().is_some_and(|lease| lease.key().limits_tokens());
    let hides_usage = is_limited && rewrite::request_usage(relay, (caller, parts), &mut body).await;
    let method = if parts.method == Method::GET { "GET" } else { "POST" };
    let config = relay.shared.config.load();
    let record = Arc::new(RequestRecord {
        key: relay.shared.next_request_key(),
        id: client.request_id.clone(),
        model: route.model,
        api_key: caller.key_id(),
        provider: Arc::clone(&route.provider.name),
        endpoint,
        method,
        path_and_query: parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
        headers: headers_of(relay, parts),
        is_streaming,
        is_stored: response_id.is_some(),
        needs_core1: needs_core1(method, &body),
        body,
        body_bytes,
        hides_usage,
        conversation: conversation.key,
        pseudonym: conversation.pseudonym,
        received_at,
        arrived: SystemTime::now(),
        trace: trace.cloned(),
        response: ResponsePipe::new(Arc::clone(&relay.shared.budget), config.max_stream_bytes, config.max_unread_bytes),
        progress: Mutex::default(),
    });
    let known = relay.providers.knows(&route.provider, &record.model);
    let ticket = Ticket::new(Arc::clone(&route.provider), Arc::clone(&record), known, read_at, lease);
    route.provider.submit(&record, pin, allowed, caller.queue_share(), owner);
    Ok(ticket)
}

/// Where a request goes.
struct Routing {
    route: Route,
    /// The ids of the models that may serve it; `None` for all.
    allowed: Option<Allowed>,
    /// The only worker that may serve it.
    pin: Option<WorkerKey>,
    conversation: FoundConversation,
    is_streaming: bool,
}

/// The conversation of a request.
#[derive(Default)]
struct FoundConversation {
    /// Its key, if several workers can be chosen.
    key: Option<u64>,
    /// Its pseudonym in the request journal, if that is written.
    pseudonym: Option<Box<str>>,
}

/// Routes a request by the model that its body names; an alias in the body is replaced.
async fn route_by_model(
    relay: &Relay,
    caller: &Caller,
    (parts, trace): (&Parts, Option<&Arc<RequestTrace>>),
    (endpoint, body): (Endpoint, &mut Bytes),
) -> Result<Routing, ApiError> {
    let content_type = content_type(&parts.headers)?;
    let named = named_provider(&parts.headers);
    let default = relay.providers.default_model(named.as_deref());
    let routed = read_route(content_type, body, default.as_ref().map(|(_, model)| model)).await?;
    let of_default = default.as_ref().filter(|_| routed.names_no_model()).map(|(provider, _)| &**provider);
    let route = find_route(relay, caller, of_default.or(named.as_deref()), &routed.model).await?;
    let allowed = caller.check_model(&route.provider, &[&routed.model, &route.model])?;
    let (pin, conversation) = match &routed.previous_response_id {
        Some(id) => {
            let pin = pin_to(relay, &route, id, caller.key_id().as_deref()).await?;
            (Some(pin), FoundConversation::default())
        }
        None => {
            let shown_in = trace.filter(|trace| relay.shared.config.load().trace_conversations && trace.is_recording());
            let shown_in = (shown_in, relay.shared.request_journal.is_on());
            let prompt = (&parts.headers, &*body, &routed);
            (None, conversation_of(&route, endpoint, prompt, caller.key_id(), shown_in).await.unwrap_or_default())
        }
    };
    if routed.needs_rewrite(&route.model) {
        *body = rewrite::rename(relay, caller.holder(relay, parts), body, &routed, &route.model)?;
    }
    Ok(Routing { route, allowed, pin, conversation, is_streaming: routed.stream })
}

/// Routes a request to the worker that made a response.
async fn route_by_response_id(relay: &Relay, caller: &Caller, parts: &Parts, id: &str) -> Result<Routing, ApiError> {
    let (route, pin) = worker_of_response(relay, id, named_provider(&parts.headers).as_deref(), caller).await?;
    let allowed = caller.check_model(&route.provider, &[&route.model])?;
    let is_streaming = parts.uri.query().is_some_and(|query| query.split('&').any(|pair| pair == "stream=true"));
    Ok(Routing { route, allowed, pin: Some(pin), conversation: FoundConversation::default(), is_streaming })
}

/// Returns the request's route. If no worker listed the model, this is an error at once, unless a fallback model is
/// configured or the relay has just started and workers may still reconnect.
async fn find_route(relay: &Relay, caller: &Caller, named: Option<&str>, model: &str) -> Result<Route, ApiError> {
    let is_starting = relay.shared.started_at.elapsed() < STARTING && relay.providers.may_get_models(named);
    let deadline = tokio::time::Instant::now() + if is_starting { PATIENCE_WHILE_STARTING } else { Duration::ZERO };
    loop {
        let listed = relay.shared.models_listed.notified();
        let error = match relay.providers.route(named, model) {
            Err(error) if *error.kind() == ErrorKind::ModelNotFound => error,
            routed => return routed,
        };
        if is_starting && tokio::time::timeout_at(deadline, listed).await.is_ok() {
            continue;
        }
        let fallback = relay.providers.fallback(named);
        // The key must allow the fallback model, not the unknown name.
        if let Some(route) = fallback.filter(|route| caller.allows_model(&route.provider, &[&route.model])) {
            return Ok(route);
        }
        let error = caller.hide_unknown_model(model, error);
        if *error.kind() == ErrorKind::ModelForbidden {
            return Err(error);
        }
        let names = models::allowed_names(relay, caller);
        let near = spelling::nearest(model, names.iter().map(|named| &*named.name));
        let error = if near.is_empty() { error } else { error.with_more(&format!("; similar: {}", near.join(", "))) };
        return Err(if is_starting { error.with_retry_after(RETRY_WHILE_STARTING) } else { error });
    }
}

async fn admit(relay: &Relay, parts: &Parts) -> Result<Caller, ApiError> {
    browser::admit(&relay.shared.config.load(), &parts.method, &parts.headers)?;
    if relay.refuses_new(&parts.extensions) {
        return Err(ApiError::new(ErrorKind::Draining, "the relay is shutting down; try again"));
    }
    Caller::authenticate(relay, &parts.headers, &parts.extensions).await
}

async fn read_body(
    relay: &Relay,
    endpoint: Endpoint,
    holder: Holder,
    (headers, body): (&HeaderMap, &mut Body),
) -> Result<Bytes, ApiError> {
    let limit = relay.shared.config.load().max_request_bytes;
    let body = intake::read(headers, body, relay.shared.budget.open_for(holder), limit).await?;
    relay.shared.metrics.request_body_received(endpoint, body.len() as u64);
    Ok(body)
}

/// Reads the routing fields of the body. A large body takes milliseconds, during which its thread would forward no
/// tokens.
async fn read_route(
    content_type: Option<&str>,
    body: &Bytes,
    default: Option<&Arc<str>>,
) -> Result<parse::Routed, ApiError> {
    if body.len() < LONG_READ_BYTES {
        return parse::parse(content_type, body, default.map(|model| &**model));
    }
    let (content_type, body, default) = (content_type.map(str::to_owned), body.clone(), default.cloned());
    let reading = blocking::run(move || parse::parse(content_type.as_deref(), &body, default.as_deref()));
    reading.await.unwrap_or_else(|_| Err(ApiError::new(ErrorKind::Internal, "cannot read the request body")))
}

/// Returns a request's conversation, if it has one that matters: several workers can be chosen, or its pseudonym is
/// shown in this trace or, if the last parameter is true, in the journal.
async fn conversation_of(
    route: &Route,
    endpoint: Endpoint,
    (headers, body, routed): (&HeaderMap, &Bytes, &parse::Routed),
    api_key: Option<Arc<str>>,
    (trace, is_journaled): (Option<&Arc<RequestTrace>>, bool),
) -> Option<FoundConversation> {
    if !conversation::may_have_key(endpoint, body) {
        return None;
    }
    let has_choice = route.provider.sole_worker_for(&route.model).is_none();
    if !has_choice && trace.is_none() && !is_journaled {
        return None;
    }
    let (key, model) = (route.provider.conversation_key(), Arc::clone(&route.model));
    let isolation = route.provider.config().placement.cache_isolation;
    let compute = move |headers: &HeaderMap, body: &[u8], spans: &PromptSpans| {
        let prompt = Prompt { endpoint, headers, body, spans, model: &model, api_key: api_key.as_deref(), isolation };
        conversation::of_request(&key, &prompt)
    };
    let conversation = if body.len() < LONG_READ_BYTES {
        compute(headers, body, &routed.prompt)?
    } else {
        let (headers, body, spans) = (headers.clone(), body.clone(), routed.prompt.clone());
        blocking::run(move || compute(&headers, &body, &spans)).await.ok().flatten()?
    };
    if let Some(trace) = trace {
        trace.set_conversation(key.pseudonym(ShownIn::Traces, conversation));
    }
    let pseudonym = is_journaled.then(|| key.pseudonym(ShownIn::Journal, conversation).into());
    Some(FoundConversation { key: has_choice.then_some(conversation), pseudonym })
}

async fn answer(client: &Client, ticket: Ticket) -> Response {
    let keepalive = ticket.keepalive();
    let response = Arc::clone(&ticket.record().response);
    let mut head = std::pin::pin!(poll_fn(|cx| response.poll_head(cx)));
    if let Some(after) = keepalive {
        tokio::select! {
            biased;
            head = &mut head => respond(client, ticket, head),
            () = tokio::time::sleep(after) => Answer::awaiting_head(client, ticket, after),
        }
    } else {
        let head = head.await;
        respond(client, ticket, head)
    }
}

/// The worker that must continue a response: the one that made it for this key, or, if the id is unknown, the only
/// worker.
async fn pin_to(relay: &Relay, route: &Route, id: &str, key: Option<&str>) -> Result<WorkerKey, ApiError> {
    match relay.shared.affinity.origin(&route.provider.name, id, Instant::now()) {
        Some(origin) if origin.is_open_to(key) => wait_for_origin(&route.provider, &origin).await,
        Some(_) => Err(response_not_found()),
        None => route.provider.sole_worker_for(&route.model).ok_or_else(response_not_found),
    }
}

/// Returns the worker that made a response for this caller, with its model; if the id is unknown, the only worker. One
/// id may stand for responses of several providers; then the first one made among those that the caller may read is
/// used.
async fn worker_of_response(
    relay: &Relay,
    id: &str,
    named: Option<&str>,
    caller: &Caller,
) -> Result<(Route, WorkerKey), ApiError> {
    let mut origins = relay.shared.affinity.origins(id, Instant::now());
    origins.retain(|origin| named.is_none_or(|named| *origin.provider == *named));
    if origins.is_empty() {
        return sole_worker(relay, named, caller);
    }
    let key = caller.key_id();
    let origin = origins.into_iter().find(|origin| origin.is_open_to(key.as_deref())).ok_or_else(response_not_found)?;
    let provider = relay.providers.named(&origin.provider).ok_or_else(response_not_found)?;
    let worker = wait_for_origin(&provider, &origin).await?;
    Ok((Route { provider, model: origin.model }, worker))
}

/// Waits for a worker between two connections, as long as a request waits for a model that no worker has.
async fn wait_for_origin(provider: &Arc<Provider>, origin: &Origin) -> Result<WorkerKey, ApiError> {
    let deadline = tokio::time::Instant::now() + provider.config().absent_timeout();
    loop {
        let joined = provider.joined();
        if let Some(worker) = provider.worker_of_instance(&origin.instance) {
            return Ok(worker);
        }
        if tokio::time::timeout_at(deadline, joined).await.is_err() {
            return Err(response_not_found());
        }
    }
}

/// Returns the only connected worker, for an id that the relay does not know, with a model for the request: one that
/// the worker serves now, because such an id does not justify a swap, and that the caller may use.
fn sole_worker(relay: &Relay, named: Option<&str>, caller: &Caller) -> Result<(Route, WorkerKey), ApiError> {
    let providers = match named {
        Some(name) => relay.providers.named(name).into_iter().collect(),
        None => relay.providers.all(),
    };
    let mut workers = providers.iter().filter(|provider| provider.worker_count() > 0);
    let (Some(provider), None) = (workers.next(), workers.next()) else { return Err(response_not_found()) };
    let worker = provider.sole_worker().ok_or_else(response_not_found)?;
    let state = provider.snapshot();
    let core = state.workers.iter().map(|state| &state.core).find(|core| core.key == worker);
    let core = core.ok_or_else(response_not_found)?;
    let mut open = core.open.iter();
    let first = open.clone().next();
    let allowed = open.find(|model| caller.allows_model(provider, &[model]));
    let model = allowed.or(first).ok_or_else(response_not_found)?;
    Ok((Route { provider: Arc::clone(provider), model: Arc::clone(model) }, worker))
}

fn response_not_found() -> ApiError {
    ApiError::new(ErrorKind::PreviousResponseNotFound, "no connected worker has this response")
}

fn headers_of(relay: &Relay, parts: &Parts) -> BTreeMap<String, String> {
    let config = relay.shared.config.load();
    let admin_token = relay.admin_token.current();
    let own = OwnCredentials {
        admin_token: admin_token.as_deref(),
        client_audience: relay.client_tokens.identities.audience(),
    };
    backend_headers(&parts.headers, &own, &config.request_headers)
}

/// The provider that a request names. A name that is not text is a name, too, of a provider that does not exist.
fn named_provider(headers: &HeaderMap) -> Option<Cow<'_, str>> {
    headers.get("x-modelrelay-provider").map(|value| String::from_utf8_lossy(value.as_bytes()))
}

/// The type of a body. Two types are rejected: parsers pick different ones, and would find different models in a form.
fn content_type(headers: &HeaderMap) -> Result<Option<&str>, ApiError> {
    if headers.get_all("content-type").iter().nth(1).is_some() {
        return Err(ApiError::new(ErrorKind::InvalidJson, "the request has more than one Content-Type"));
    }
    Ok(text_header(headers, "content-type"))
}

fn count_retry(relay: &Relay, headers: &HeaderMap) {
    let retried = text_header(headers, "x-stainless-retry-count").is_some_and(|count| count != "0");
    if retried {
        let agent = text_header(headers, "user-agent").unwrap_or("");
        let client = if agent.contains("Anthropic") {
            ClientKind::Anthropic
        } else if agent.contains("OpenAI") {
            ClientKind::OpenAi
        } else {
            ClientKind::Other
        };
        relay.shared.metrics.client_retried(client);
    }
}
